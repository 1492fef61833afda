"""What a load must know before it writes: that tensors can be written, and that user code takes what is its own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from fxshard.checkpoint.names import fqn_of
from fxshard.errors import ConfigError

_EXTRA_STATE = "_extra_state"  # last part of the key under which a module saves what get_extra_state() gives


def is_extra(name: str) -> bool:
    """Whether a key of a state_dict is that of an extra state."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def is_writable(tensor: Tensor) -> bool:
    """Whether torch copies into a tensor: not where an element stands for several, as in an expanded one."""
    return all(size < 2 or stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def require_writable(tensors: Mapping[str, Any]) -> None:
    """Raise unless all tensors can be copied into.

    Raises:
        ConfigError: elements of some share memory.
    """
    if shared := [name for name, each in tensors.items() if isinstance(each, Tensor) and not is_writable(each)]:
        raise ConfigError(
            f"{', '.join(shared)} cannot be loaded into, for elements share memory (expand). Nothing was loaded; "
            "register a clone instead."
        )


class ExtraStates:
    """Sets the extra state of modules, which is code of the user's; takes it back if the block around it raises."""

    def __init__(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Pick the extra states from a state by FQN; nothing is set yet."""
        self._wanted = {name: value for name, value in state.items() if is_extra(name)}
        self._modules = dict(_owners(model)) if self._wanted else {}
        self._former: list[tuple[nn.Module, Any]] = []

    def set(self) -> None:
        """Set all of them.

        Raises:
            ConfigError: a module does not take its own, named.
        """
        for name, value in self._wanted.items():
            try:
                module = self._modules[name]
                self._former.append((module, copy.deepcopy(module.get_extra_state())))
                module.set_extra_state(value)
            except Exception as error:
                raise ConfigError(
                    f"{name} was not taken by its module ({type(error).__name__}: {error}), and nothing was loaded. "
                    "Load into the class that saved it."
                ) from error

    def __enter__(self) -> Self:
        """Nothing is set yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Set again what was there before, if something went wrong on any rank."""
        for module, former in reversed(self._former) if error is not None else ():
            with contextlib.suppress(Exception):  # what went wrong is under way already
                module.set_extra_state(former)


class OptimizerRest:
    """Hands an optimizer what it adds to its state; takes it back if the block around it raises."""

    def __init__(self, optim: Optimizer | None, rest: Mapping[str, Any]) -> None:
        """`rest` is what is added to `state` and `param_groups`; nothing is handed over yet."""
        self._optim, self._rest = optim, rest
        self._former: dict[str, Any] = {}

    def set(self) -> None:
        """Hand it over, with the state that the optimizer has.

        Raises:
            ConfigError: the optimizer does not take it.
        """
        if not self._rest or self._optim is None:
            return
        try:
            self._former = copy.copy(self._optim.state_dict())
            _hand_over(self._optim, {**self._former, **self._rest})
        except Exception as error:
            name = type(self._optim).__name__
            raise ConfigError(
                f"{name}.load_state_dict does not take {sorted(self._rest)} ({type(error).__name__}: {error}), and "
                "nothing was loaded. Load into the class that saved it."
            ) from error

    def __enter__(self) -> Self:
        """Nothing is handed over yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hand over what was there before, if something went wrong on any rank."""
        if error is not None and self._former and self._optim is not None:
            with contextlib.suppress(Exception):  # what went wrong is under way already
                _hand_over(self._optim, self._former)


def _hand_over(optim: Optimizer, state: dict[str, Any]) -> None:
    """Load a state without a change to the tensors and options that are there: torch casts what it loads."""
    states, groups = dict(optim.state), [dict(group) for group in optim.param_groups]
    try:
        optim.load_state_dict(state)
    finally:
        optim.state.clear()
        optim.state.update(states)
        for group, former in zip(optim.param_groups, groups, strict=True):
            group.update(former)


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Key of the extra state of each module; a wrapped one comes after its wrapper, and has the same."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield fqn_of(model, f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE), module
