"""The state of an optimizer, apart from where its tensors lie: by parameter, in names that no sharding changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxshard.errors import ConfigError
from fxshard.runtime.parameters import local_of
from fxshard.sharding.sharded_module import plain_module
from fxshard.state.local_shards import LocalShard, copied, hold, is_sharded, value_text
from fxshard.state.names import named_parameters, require_optimizer
from fxshard.state.pytree import Leaf, LeafMark, Path, put_back, take_out

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
"""Keys of an optimizer's state_dict; any other key of it is kept as it is."""


@dataclass(eq=False)
class ParameterNames:
    """The parameters of an optimizer: torch's ids for them, which count through its groups, and their FQNs.

    Attributes:
        parameters: id -> parameter.
        fqns: id -> FQN in the model.
        groups: the ids of each param group.
    """

    parameters: dict[int, nn.Parameter]
    fqns: dict[int, str]
    groups: list[list[int]]
    ids: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        """Turn the names around."""
        self.ids = {fqn: i for i, fqn in self.fqns.items()}


def names_of(model: nn.Module, optim: Optimizer) -> ParameterNames:
    """Name the parameters of `optim`.

    Raises:
        ConfigError: it is no optimizer, or one of them is not in `model`.
    """
    require_optimizer(optim)
    known = {id(parameter): fqn for fqn, parameter in named_parameters(plain_module(model))}
    parameters: dict[int, nn.Parameter] = {}
    numbers: dict[int, int] = {}
    groups: list[list[int]] = []
    unknown = []
    for g, group in enumerate(optim.param_groups):
        groups.append([])
        for i, parameter in enumerate(group[PARAMS]):
            number = numbers.setdefault(id(parameter), len(numbers))
            parameters[number] = parameter
            groups[-1].append(number)
            if id(parameter) not in known:
                unknown.append(f"param_groups[{g}]['params'][{i}] of shape {list(parameter.shape)}")
    if unknown:
        raise ConfigError(
            f"the optimizer has parameters that are not in the model: {', '.join(unknown)}. Give both as they are "
            "trained together; if the model was compiled or sharded after the optimizer was made, make it anew."
        )
    return ParameterNames(parameters, {n: known[id(p)] for n, p in parameters.items()}, groups)


@dataclass(eq=False)
class ParameterState:
    """What an optimizer keeps for one parameter.

    Attributes:
        skeleton: its state, with places for the tensors.
        leaves: the tensors.
        held: how this rank holds each.
        is_shared: whether other ranks have rows of the parameter.
    """

    skeleton: Any
    leaves: list[Leaf]
    held: list[LocalShard]
    is_shared: bool

    @property
    def text(self) -> str:
        """What all ranks must have alike: of what ranks share the values as well, if it is not sharded."""
        texts = [held.valued if self.is_shared else held.text for held in self.held]
        return simple(self.skeleton, texts)


def parameter_states(states: Mapping[Tensor, Any]) -> list[ParameterState]:
    """Take apart what an optimizer keeps for parameters.

    Optimizers that work on the local rows of sharded parameters keep plain tensors of their shape, which are rows as
    well. One may have that shape by chance, so a path leads to rows only if it does for every sharded parameter, and
    never if it ends in the name that torch's optimizers have for a counter.
    """
    taken = {parameter: take_out(state) for parameter, state in states.items()}
    others: set[Path] = set()
    for parameter, (_, leaves) in taken.items():
        if isinstance(parameter, DTensor) and is_sharded(parameter):
            plain = [leaf for leaf in leaves if leaf.path not in others and not isinstance(leaf.tensor, DTensor)]
            others |= {
                path for path, x in plain if is_step(path) or not x.dim() or x.shape != local_of(parameter).shape
            }
    found = []
    for parameter, (skeleton, leaves) in taken.items():
        rows_of = parameter if isinstance(parameter, DTensor) and is_sharded(parameter) else None
        held = [hold(tensor, None if path in others else rows_of) for path, tensor in leaves]
        found.append(ParameterState(skeleton, leaves, held, isinstance(parameter, DTensor)))
    return found


def is_step(path: Path) -> bool:
    """Whether keys lead to what torch's optimizers count steps in; every rank has all of it."""
    return path[-1:] == ("step",)


def simple(value: Any, texts: Sequence[str] = ()) -> str:
    """Values in words that are equal where the values are; of what is neither plain nor a tensor the kind.

    Args:
        value: anything.
        texts: what stands for the tensors, if `value` is a skeleton.
    """
    if isinstance(value, Tensor):
        return type(value).__name__ if isinstance(value, DTensor) else value_text(value)
    if isinstance(value, LeafMark):
        return texts[value.number] if texts else "tensor"
    if isinstance(value, Mapping):
        return "{" + ", ".join([f"{key}: {simple(each, texts)}" for key, each in value.items()]) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join([simple(each, texts) for each in value])}]"
    if isinstance(value, int | float | str | torch.dtype | None):
        return str(value)
    return type(value).__name__


def state_fact(fqn: str) -> str:
    """The name of the fact about the state of a parameter."""
    return f"state of {fqn}"


def unknown_keys(others: Mapping[Any, Any], kind: type) -> list[Any]:
    """Of the keys of state that belongs to no parameter those of a kind that names parameters."""
    return [key for key, value in others.items() if isinstance(key, kind) and isinstance(value, Mapping)]


def facts_of(
    optim: Optimizer, names: ParameterNames, states: Mapping[int, ParameterState], whole: Mapping[str, Any]
) -> dict[str, str]:
    """What ranks compare before they gather: name -> text, in an order that all ranks share."""
    facts = {"optimizer": type(optim).__qualname__}
    for g, group in enumerate(whole[GROUPS]):
        given = {key: value for key, value in group.items() if key != PARAMS}
        fqns = ", ".join(names.fqns[i] for i in names.groups[g])
        facts[f"param_groups[{g}]"] = f"{simple(given)} of {fqns}"
    facts["state of no parameter"] = simple(whole[STATE])
    facts["other keys"] = simple({key: value for key, value in whole.items() if key not in (STATE, GROUPS)})
    for i, fqn in names.fqns.items():
        facts[state_fact(fqn)] = states[i].text if i in states else ""
    return facts


def has_no_rows(parameter: Tensor) -> bool:
    """Whether other ranks have all rows of a parameter."""
    return isinstance(parameter, DTensor) and is_sharded(parameter) and not local_of(parameter).numel()


@dataclass(frozen=True, kw_only=True)
class Description:
    """A tensor of the state in words, to be sent to ranks that do not have it.

    Attributes:
        path: its keys below the parameter.
        shape: of the full tensor.
        dtype: of it.
        device: type of the device where it is.
        whole: its value on the CPU, if every rank has all of it; `None` if it is cut into rows.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    whole: Tensor | None = None


def described(state: ParameterState) -> tuple[Any, list[Description]]:
    """What a rank that lacks the state of a parameter, having no rows of it, must be told."""
    return state.skeleton, [
        Description(
            path=leaf.path,
            shape=held.shape,
            dtype=held.dtype,
            device=held.local.device.type,
            whole=None if held.mesh is not None else held.local.detach().cpu(),
        )
        for leaf, held in zip(state.leaves, state.held, strict=True)
    ]


def without_rows(skeleton: Any, descriptions: Iterable[Description], parameter: Tensor) -> ParameterState:
    """The state of a parameter on a rank that has no rows of it, as another rank describes it."""
    leaves, held = [], []
    for each in descriptions:
        local = each.whole
        if local is None:
            local = local_of(parameter).new_empty((0, *each.shape[1:]), dtype=each.dtype, device=each.device)
        mesh = cast(DTensor, parameter).device_mesh if each.whole is None else None
        leaves.append(Leaf(each.path, local))
        held.append(LocalShard(each.shape, each.dtype, local, mesh))
    return ParameterState(skeleton, leaves, held, is_shared=True)


def assemble(
    whole: Mapping[str, Any],
    states: Mapping[int, ParameterState],
    fulls: Sequence[Tensor],
    names: ParameterNames,
    keys: str,
) -> dict[str, Any]:
    """The state_dict of an unsharded optimizer.

    Args:
        whole: what this rank's own has beside the state of parameters.
        states: of the parameters, in the order of `fulls`.
        fulls: the full tensors of them all.
        names: of the parameters.
        keys: "id" or "fqn".
    """
    arriving = iter(fulls)
    state = {i: put_back(each.skeleton, [next(arriving) for _ in each.leaves]) for i, each in states.items()}
    by = (lambda i: i) if keys == "id" else names.fqns.__getitem__
    groups = [{**group, PARAMS: [by(i) for i in ids]} for group, ids in zip(whole[GROUPS], names.groups, strict=True)]
    return {**whole, STATE: {**{by(i): value for i, value in state.items()}, **whole[STATE]}, GROUPS: groups}


def split_state(
    optim: Optimizer, names: ParameterNames, *, to_cpu: bool = True
) -> tuple[dict[str, Any], dict[int, ParameterState]]:
    """An optimizer's state_dict as all but the state of parameters, copied, and that state, in the order of ids.

    Raises:
        ConfigError: there are sharded tensors in it that belong to no parameter.
    """
    everything = optim.state_dict()
    kept = everything[STATE]
    ids = [i for i in names.parameters if i in kept]
    found = parameter_states({names.parameters[i]: kept[i] for i in ids})
    states = dict(zip(ids, found, strict=True))
    others = {key: value for key, value in kept.items() if key not in names.parameters}
    skeleton, leaves = take_out({**everything, STATE: others})
    if sharded := [leaf.name for leaf in leaves if isinstance(leaf.tensor, DTensor)]:
        raise ConfigError(
            f"the optimizer's state_dict has sharded tensors that belong to no parameter: {', '.join(sharded)}. Keep "
            "them in the state of their parameter."
        )
    return put_back(skeleton, [copied(leaf.tensor, to_cpu=to_cpu) for leaf in leaves]), states
