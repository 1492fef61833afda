"""What of a saved state does not fit the model or the optimizer that is to load it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxshard.errors import CheckpointError, ConfigError
from fxshard.state import subclasses
from fxshard.state.local_shards import LocalShard
from fxshard.state.names import PARAMS, ParameterNames
from fxshard.state.optimizer_state import OptimizerState, state_fact
from fxshard.state.pytree import KeyPath, name_of
from fxshard.state.serializable import same_bits
from fxshard.state.user_hooks import is_extra

_MOST = 10  # problems that a message lists


@dataclass(frozen=True, kw_only=True)
class Announced:
    """A tensor that is coming."""

    path: KeyPath  # FQN, and for optimizers the keys below it
    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    where: str = ""  # the files that hold it, in words

    @classmethod
    def of(cls, path: KeyPath, tensor: Tensor) -> Announced:
        """Announce a tensor."""
        return cls(path=path, shape=tuple(tensor.shape), dtype=tensor.dtype)

    @property
    def name(self) -> str:
        """What messages call it."""
        fqn, *rest = self.path
        return f"{state_fact(fqn)}: {name_of(tuple(rest))}" if rest else str(fqn)

    def wrong(self, shape: Iterable[int], dtype: torch.dtype, of: str = "") -> Iterator[str]:
        """Say so unless it has this shape and dtype; `of` adds whose they are."""
        if (self.shape, self.dtype) != (tuple(shape), dtype):
            yield f"{self.name} is {self.dtype}{list(self.shape)}{self.where}, expected {dtype}{list(shape)}{of}"


def refuse(
    problems: Iterable[str], what: str = "the state", kind: type[ConfigError | CheckpointError] = ConfigError
) -> None:
    """Raise an error of a kind with all `problems` of `what`, if there are any."""
    if not (found := list(problems)):
        return
    more = f" (and {len(found) - _MOST} more)" if len(found) > _MOST else ""
    raise kind(f"{what} does not fit, and nothing was loaded. {'; '.join(found[:_MOST])}{more}.")


def model_misfits(names: Collection[str], announced: Mapping[str, Announced], own: Mapping[str, Any]) -> Iterator[str]:
    """Compare what is coming, the `names` and those of them that are tensors, with the state of a model."""
    if missing := [name for name in own if name not in names]:
        yield f"it lacks {', '.join(missing)}"
    if extra := [name for name in names if name not in own]:
        listed = (f"{name}{announced[name].where if name in announced else ''}" for name in extra)
        yield f"it has {', '.join(listed)}, which the model does not have"
    for name, value in own.items():
        each = announced.get(name)
        if is_extra(name) or name not in names:
            continue
        if (each is not None) != isinstance(value, Tensor):
            yield f"{name} is {'a tensor' if each else 'no tensor'}, expected {'one' if each is None else 'none'}"
        elif each is not None:
            yield from each.wrong(value.shape, value.dtype)


def tied_otherwise(given: Mapping[str, Tensor], own: Mapping[str, Any]) -> Iterator[str]:
    """Find names of one parameter for which several values are given."""
    first: dict[int, str] = {}
    for name in (name for name in own if name in given):
        other = first.setdefault(id(own[name]), name)
        if given[other] is not given[name] and not same_bits(given[other], given[name]):
            yield f"{other} and {name} are one parameter (tied), and it has different values for them"


def group_misfits(coming: OptimizerState, names: ParameterNames) -> Iterator[str]:
    """Compare the groups that are coming with those of an optimizer."""
    given = [list(group[PARAMS]) for group in coming.groups]
    everything = {fqn for fqns in given for fqn in fqns}
    if missing := [fqn for fqn in names.parameters if fqn not in everything]:
        yield f"its param_groups lack {', '.join(missing)}"
    if extra := [fqn for fqns in given for fqn in fqns if fqn not in names.parameters]:
        yield f"its param_groups have {', '.join(extra)}, which the optimizer does not have"
    if not missing and not extra and [set(fqns) for fqns in given] != [set(fqns) for fqns in names.groups]:
        yield f"its param_groups hold {given}, those of the optimizer {names.groups}"


def unknown_state(keys: Collection[Any]) -> Iterator[str]:
    """Refuse state under `keys`, which name no parameter."""
    if keys:
        yield f"it has state of {', '.join(map(str, keys))}, which no param_group names"


def state_misfits(
    coming: OptimizerState,
    announced: Iterable[Announced],
    names: ParameterNames,
    present: Mapping[str, Any],
    held: Mapping[KeyPath, Tensor | LocalShard],
    is_strict: bool = False,
) -> Iterator[str]:
    """Compare the state of parameters that is coming with what an optimizer has, or would make.

    The tensors of `coming`, `announced`, are taken out of it. `present` maps FQN -> the state that is there now, and
    `held` are its tensors. `is_strict`: the optimizer makes the same for all parameters of a group, each tensor shaped
    as its parameter.
    """
    for each in announced:
        if (now := held.get(each.path)) is not None:
            yield from each.wrong(now.shape, now.dtype)
        elif is_strict and each.shape:
            parameter = names.parameters[each.path[0]]
            dtype = parameter.dtype if each.dtype.is_floating_point else each.dtype
            yield from each.wrong(parameter.shape, dtype, " as its parameter")
    for fqns in names.groups:
        states = {fqn: coming.states[fqn] for fqn in fqns if fqn in coming.states}
        of_group = {key for state in states.values() if isinstance(state, dict) for key in state}
        for fqn, state in states.items():
            yield from _other_keys(fqn, state, present.get(fqn), of_group if is_strict else state)


def _other_keys(fqn: str, coming: Any, present: Any, otherwise: Iterable[Any]) -> Iterator[str]:
    now = present or otherwise
    if isinstance(coming, dict) and set(now) != set(coming):
        yield f"state of {fqn} has {sorted(map(str, coming))}, expected {sorted(map(str, now))}"
    elif present and (there := subclasses.kinds_in(coming)) != (here := subclasses.kinds_in(present)):
        yield f"state of {fqn} is kept in {there or 'plain tensors'}, expected {here or 'plain tensors'}"
