"""What a load must know before it writes: that tensors can be written, and that user code takes what is its own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

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


@contextlib.contextmanager
def extra_states(model: nn.Module, state: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """Yield what sets the extra state of modules, by the user's code; it is taken back if the block raises."""
    wanted = {name: value for name, value in state.items() if is_extra(name)}
    owners = model.named_modules(remove_duplicate=False) if wanted else ()
    modules = {fqn_of(model, f"{name}.{_EXTRA_STATE}".removeprefix(".")): module for name, module in owners}
    former: list[tuple[nn.Module, Any]] = []

    def set_all() -> None:
        for name, value in wanted.items():
            try:
                module = modules[name]
                former.append((module, copy.deepcopy(module.get_extra_state())))
                module.set_extra_state(value)
            except Exception as error:
                raise ConfigError(
                    f"{name} was not taken by its module ({type(error).__name__}: {error}), and nothing was loaded. "
                    "Load into the class that saved it."
                ) from error

    try:
        yield set_all
    except BaseException:  # on any rank
        for module, before in reversed(former):
            with contextlib.suppress(Exception):  # what went wrong is under way already
                module.set_extra_state(before)
        raise


@contextlib.contextmanager
def handover(optim: Optimizer | None, whole: Mapping[str, Any] | None) -> Iterator[Callable[[], None]]:
    """Yield what hands an optimizer that adds to its state_dict all that was saved, `None` if nothing is added.

    Only the optimizer itself knows what its additions belong to, so it sees all that was saved. The tensors and options
    that it shows stay as they are; the load writes these next. If the block raises, the former is handed over again.
    """
    former: dict[str, Any] = {}
    copies: list[tuple[Tensor, Tensor]] = []

    def hand_over() -> None:
        if whole is None or optim is None:
            return
        try:
            skeleton, leaves = take_out(subclasses.flatten(optim.state_dict(), "state_dict()"))
            clones = {path: tensor.detach().clone() for path, tensor in leaves.items()}
            copies.extend((leaves[path], clone) for path, clone in clones.items())
            former.update(subclasses.unflatten(put_back(skeleton, clones), "state_dict()"))
            _hand_over(optim, dict(whole))
        except Exception as error:
            added = sorted(whole.keys() - {STATE, GROUPS})
            raise ConfigError(
                f"{type(optim).__name__}.load_state_dict does not take what was saved, with {added or 'nothing'} "
                f"beside state and groups ({type(error).__name__}: {error}), and nothing was loaded. Load into the "
                "class that saved it."
            ) from error

    try:
        yield hand_over
    except BaseException:  # on any rank
        if former and optim is not None:
            _take_back(optim, former, copies)
        raise


@torch.no_grad()
def _take_back(optim: Optimizer, former: dict[str, Any], copies: Iterable[tuple[Tensor, Tensor]]) -> None:
    with contextlib.suppress(Exception):  # what went wrong is under way already
        _hand_over(optim, former)
    for tensor, before in copies:
        with contextlib.suppress(Exception):
            tensor.copy_(before)


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
    # load_state_dict of a wrapped optimizer puts others there; the wrapper would show what `step` no longer reads.
    shown = {id(group) for group in optim.param_groups}
    optimizers = [optim]
    for each in optimizers:
        inner = [value for value in vars(each).values() if isinstance(value, Optimizer)]
        optimizers += [value for value in inner if all(value is not known for known in optimizers)]
        if vars(each).get(STATE) is optim.state:
            yield vars(each), STATE
        if any(id(group) in shown for group in vars(each).get(GROUPS, ())):
            yield vars(each), GROUPS
