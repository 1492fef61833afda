"""The state of an optimizer by FQN: one description for full states and checkpoints, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from torch.distributed.tensor import DTensor

from fxshard.errors import ConfigError
from fxshard.runtime.parameters import local_of
from fxshard.state import subclasses
from fxshard.state.local_shards import LocalShard, hold
from fxshard.state.names import GROUPS, PARAMS, STATE, ParameterNames
from fxshard.state.pytree import KeyPath, name_of
from fxshard.state.ranks import is_sharded
from fxshard.state.serializable import facts


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """What an optimizer keeps; a `LeafMark` stands for each tensor of `states` that is taken out."""

    states: dict[str, Any]  # FQN -> its state, with a dict of its parts for each tensor subclass
    others: dict[Any, Any]  # state that belongs to no parameter
    groups: list[dict[str, Any]]  # options, and the FQNs of each group
    rest: dict[str, Any]  # other keys of the state_dict

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], fqns: Mapping[Any, str]) -> OptimizerState:
        """Describe a state_dict; `fqns` maps what stands for a parameter in it -> FQN."""
        states = {key: each for key, each in state_dict[STATE].items() if key in fqns}
        return cls(
            states={fqns[key]: subclasses.flatten(each, state_fact(fqns[key])) for key, each in states.items()},
            others={key: each for key, each in state_dict[STATE].items() if key not in states},
            groups=[{**group, PARAMS: [fqns.get(key, key) for key in group[PARAMS]]} for group in state_dict[GROUPS]],
            rest={key: each for key, each in state_dict.items() if key not in (STATE, GROUPS)},
        )

    @property
    def beside(self) -> dict[str, Any]:
        """All but the state of parameters, as a state_dict."""
        return {STATE: self.others, GROUPS: self.groups, **self.rest}

    def with_beside(self, beside: Mapping[str, Any]) -> OptimizerState:
        """Return it with other values of what `beside` gave."""
        return replace(self, others=beside[STATE], groups=beside[GROUPS], rest={key: beside[key] for key in self.rest})

    def state_dict(self, names: ParameterNames, keys: Literal["id", "fqn"] = "id") -> dict[str, Any]:
        """Return it as an optimizer of these parameters would."""
        by: Mapping[str, Any] = names.ids if keys == "id" else {fqn: fqn for fqn in names.parameters}
        states = {by[fqn]: subclasses.unflatten(each, state_fact(fqn)) for fqn, each in self.states.items()}
        groups = [
            {**group, PARAMS: [by[fqn] for fqn in fqns]} for group, fqns in zip(self.groups, names.groups, strict=True)
        ]
        return {STATE: {**states, **self.others}, GROUPS: groups, **self.rest}

    def facts(self, texts: Mapping[KeyPath, str] | None = None) -> dict[str, str]:
        """Say in words what must be the same on all ranks; `texts` are those of tensors that were taken out."""
        beside = {GROUPS: self.groups, "state of no parameter": self.others, "state_dict()": self.rest}
        found = {name: text for what, value in beside.items() for name, text in facts(value, what)}
        for fqn, state in self.states.items():
            found[state_fact(fqn)] = ", ".join(f"{name} {text}".strip() for name, text in facts(state, texts=texts))
        return found


def shards_in(tensors: Mapping[KeyPath, Tensor], parameters: Mapping[str, Tensor]) -> dict[KeyPath, LocalShard]:
    """Describe how this rank holds the state of parameters.

    Optimizers that work on the local rows of sharded parameters keep plain tensors of their shape, which are rows as
    well. One may have that shape by chance, so a path leads to rows only if it does for every sharded parameter, and
    never if it ends in the name that torch's optimizers have for a counter.
    """
    cut = {fqn: p for fqn, p in parameters.items() if isinstance(p, DTensor) and is_sharded(p)}
    others: set[KeyPath] = set()
    for (fqn, *rest), tensor in tensors.items():
        path = tuple(rest)
        if fqn in cut and path not in others and not isinstance(tensor, DTensor):
            if is_step(path) or not tensor.dim() or tensor.shape != local_of(cut[fqn]).shape:
                others.add(path)
    return {path: hold(tensor, None if path[1:] in others else cut.get(path[0])) for path, tensor in tensors.items()}


def is_step(path: KeyPath) -> bool:
    """Return whether keys lead to what torch's optimizers count steps in; every rank has all of it."""
    return path[-1:] == ("step",)


def texts_of(shards: Mapping[KeyPath, LocalShard], parameters: Mapping[str, Tensor]) -> dict[KeyPath, str]:
    """Say in words what must be the same on all ranks of the state of parameters; values, of what they share."""
    shared = {fqn for fqn, parameter in parameters.items() if isinstance(parameter, DTensor)}
    return {path: shard.valued if path[0] in shared else shard.text for path, shard in shards.items()}


def state_fact(fqn: str) -> str:
    """Return the name of the fact about the state of a parameter."""
    return f"state of {fqn}"


def unknown_keys(others: Mapping[Any, Any], kind: type) -> list[Any]:
    """Return those keys of state that belongs to no parameter that are of a kind that names parameters."""
    return [key for key, value in others.items() if isinstance(key, kind) and isinstance(value, Mapping)]


def require_no_shards(leaves: Mapping[KeyPath, Tensor]) -> None:
    """Raise `ConfigError` if there are sharded tensors among those that belong to no parameter."""
    if sharded := [name_of(path) for path, tensor in leaves.items() if isinstance(tensor, DTensor)]:
        raise ConfigError(
            f"the optimizer's state_dict has sharded tensors that belong to no parameter: {', '.join(sharded)}. Keep "
            "them in the state of their parameter."
        )
