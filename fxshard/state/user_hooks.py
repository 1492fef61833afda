"""What a load must know before it writes: that tensors can be written, and that user code takes what is its own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fxshard.errors import ConfigError
from fxshard.state import subclasses
from fxshard.state.names import GROUPS, STATE, fqn_of
from fxshard.state.pytree import put_back, take_out

_EXTRA_STATE = "_extra_state"  # last part of the key under which a module saves what get_extra_state() gives


def is_extra(name: str) -> bool:
    """Return whether a key of a state_dict is that of an extra state."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def is_writable(tensor: Tensor) -> bool:
    """Return whether torch copies into a tensor: not if elements share memory, nor outside of inference mode."""
    is_frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return not is_frozen and all(size < 2 or stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def require_writable(tensors: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for tensors whose elements share memory, or that were made in inference mode."""
    if shared := [name for name, each in tensors.items() if isinstance(each, Tensor) and not is_writable(each)]:
        raise ConfigError(
            f"{', '.join(shared)} cannot be loaded into, for elements share memory (expand), or they were made in "
            "inference mode. Nothing was loaded; register a clone instead."
        )


class ExtraStates:
    """Sets the extra state of modules, which is code of the user's; takes it back if the block around it raises."""

    def __init__(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Pick the extra states from a state by FQN; nothing is set yet."""
        self._wanted = {name: value for name, value in state.items() if is_extra(name)}
        self._modules = dict(_owners(model)) if self._wanted else {}
        self._former: list[tuple[nn.Module, Any]] = []

    def set(self) -> None:
        """Set all of them; raise `ConfigError` if a module does not take its own, named."""
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Set again what was there before, if something went wrong on any rank."""
        for module, former in reversed(self._former) if error is not None else ():
            with contextlib.suppress(Exception):  # what went wrong is under way already
                module.set_extra_state(former)


class Handover:
    """Hands an optimizer that adds to its state_dict all that was saved; takes it back if the block around it raises.

    Only the optimizer itself knows what its additions belong to: it sees them with the state and the groups that were
    saved with them. The tensors and options that it shows stay as they are; the load writes these next.
    """

    def __init__(self, optim: Optimizer | None, whole: Mapping[str, Any] | None) -> None:
        """Take a state_dict as `optim` gives it, `None` if nothing is added; nothing is handed over yet."""
        self._optim, self._whole = optim, whole
        self._former: dict[str, Any] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []

    def set(self) -> None:
        """Hand it over; raise `ConfigError` if the optimizer does not take it."""
        if self._whole is None or self._optim is None:
            return
        try:
            self._remember(self._optim)
            _hand_over(self._optim, dict(self._whole))
        except Exception as error:
            added = sorted(self._whole.keys() - {STATE, GROUPS})
            raise ConfigError(
                f"{type(self._optim).__name__}.load_state_dict does not take what was saved, with {added or 'nothing'} "
                f"beside state and groups ({type(error).__name__}: {error}), and nothing was loaded. Load into the "
                "class that saved it."
            ) from error

    def _remember(self, optim: Optimizer) -> None:
        skeleton, leaves = take_out(subclasses.flatten(optim.state_dict(), "state_dict()"))
        copies = {path: tensor.detach().clone() for path, tensor in leaves.items()}
        self._copies = [(leaves[path], copy) for path, copy in copies.items()]
        self._former = subclasses.unflatten(put_back(skeleton, copies), "state_dict()")

    def __enter__(self) -> Self:
        return self

    @torch.no_grad()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hand over what was there before, if something went wrong on any rank."""
        if error is None or not self._former or self._optim is None:
            return
        with contextlib.suppress(Exception):  # what went wrong is under way already
            _hand_over(self._optim, self._former)
        for tensor, former in self._copies:
            with contextlib.suppress(Exception):
                tensor.copy_(former)


def _hand_over(optim: Optimizer, state: dict[str, Any]) -> None:
    """Let an optimizer load a state_dict, without a change to the state and the groups that it shows."""
    holders = [(where, name, where[name]) for where, name in _holders(optim)]
    states, groups = dict(optim.state), [(group, dict(group)) for group in optim.param_groups]
    try:
        optim.load_state_dict(state)
    finally:
        for where, name, held in holders:
            where[name] = held
        optim.state.clear()
        optim.state.update(states)
        for group, former in groups:
            group.clear()
            group.update(former)


def _holders(optim: Optimizer) -> Iterator[tuple[dict[str, Any], str]]:
    """Find the attributes by which an optimizer, and those that it wraps, hold the state and groups that it shows."""
    # load_state_dict of a wrapped optimizer puts others there, and the wrapper would show what `step` no longer
    # reads.
    shown = {id(group) for group in optim.param_groups}
    optimizers = [optim]
    for each in optimizers:
        inner = [value for value in vars(each).values() if isinstance(value, Optimizer)]
        optimizers += [value for value in inner if all(value is not known for known in optimizers)]
        if vars(each).get(STATE) is optim.state:
            yield vars(each), STATE
        if any(id(group) in shown for group in vars(each).get(GROUPS, ())):
            yield vars(each), GROUPS


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the key of the extra state of each module; a wrapped one comes after its wrapper, and has the same."""
    for name, module in model.named_modules(remove_duplicate=False):
        yield fqn_of(model, f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE), module
