"""Values for the graphs of a shadow, on all ranks: the user's own where there are any."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fxshard.inspect.lockstep import PerRank, copied
from fxshard.inspect.shadow import Shadow
from fxshard.ir import fake
from fxshard.ir.plan import ShardPlan
from fxshard.modules import units_under
from fxshard.runtime.frame import Frame
from fxshard.runtime.unit import Home, home_of


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A frame and the inputs that Dynamo captured it with: fake tensors of the shadow."""

    frame: Frame
    inputs: tuple[Any, ...]


def originals_of(model: nn.Module, arguments: Any, shadow: Shadow) -> dict[int, Any]:
    """Identity of each module and tensor of the shadow -> what it is a copy of."""
    modules = [*model.modules(), *(m for unit in units_under(model) for m in unit.modules)]
    tensors = [*tree_leaves(arguments), *model.parameters(), *model.buffers()]
    tensors += [leaf for module in modules for leaf in tree_leaves(list(module.__dict__.values()))]
    found: dict[int, Any] = {}
    for original in [*modules, *(leaf for leaf in tensors if isinstance(leaf, Tensor))]:
        try:
            found[id(shadow.replica.of(original))] = original
        except KeyError:  # a sharded parameter: the shadow has the whole one
            continue
    return found


class InputValues:
    """The inputs of the graphs of one frame, on all ranks."""

    def __init__(self, captured: Captured, originals: dict[int, Any], given: set[int], num_ranks: int) -> None:
        self._captured, self._originals, self._given, self._num_ranks = captured, originals, given, num_ranks
        self._known: dict[int, PerRank] = {}

    def of(self, graph: fx.Graph, saved: Mapping[str, PerRank]) -> dict[str, PerRank]:
        """By name of the placeholder, copies; `saved` is what forward left for backward."""
        placeholders = graph.find_nodes(op="placeholder")
        return {n.name: copied(saved[n.name]) if n.name in saved else self._input(n) for n in placeholders}

    def _input(self, placeholder: fx.Node) -> PerRank:
        index = fake.input_index(placeholder)
        if index is None:
            return _synthetic(placeholder, self._num_ranks)
        if index not in self._known:
            self._known[index] = self._captured_input(index, placeholder)
        return tuple(copied(self._known[index]))

    def _captured_input(self, index: int, placeholder: fx.Node) -> PerRank:
        value = self._captured.inputs[index]
        home = home_of(value) if isinstance(value, Tensor) else None
        if home is not None:
            return tuple(self._flat(home, rank) for rank in range(self._num_ranks))
        original = self._originals.get(id(value), value)
        if not isinstance(original, Tensor) or fake.is_fake(original):
            return _synthetic(placeholder, self._num_ranks)
        original = original.detach()
        if id(self._originals.get(id(value))) in self._given and original.is_floating_point():
            # Factors below one: what is within bounds stays within them.
            return tuple(original * (1 - rank / (2 * self._num_ranks)) for rank in range(self._num_ranks))
        return (original,) * self._num_ranks

    def _flat(self, home: Home, rank: int) -> Tensor:
        shard = home.unit.shards[home.shard]
        parameters = []
        for member in shard.members:
            module, name = member.owners[0]
            parameters.append(self._originals[id(module)]._parameters[name].detach())
        flat = torch.zeros(shard.plan.numel, dtype=shard.plan.dtype, device=parameters[0].device)
        return _fill(flat, shard.plan, parameters, rank, self._num_ranks)


def _fill(flat: Tensor, plan: ShardPlan, parameters: Sequence[Tensor], rank: int, num_ranks: int) -> Tensor:
    """Write a rank's rows of each parameter into its slot."""
    for slot, parameter in zip(plan.slots, parameters, strict=True):
        if isinstance(parameter, DTensor):
            own = parameter.device_mesh.get_local_rank()
            rows = parameter.to_local().reshape(-1).roll(rank - own)
        else:
            rows = (parameter if slot.replicated else parameter[slice(*slot.rows_of(rank, num_ranks))]).reshape(-1)
        flat[slot.offset : slot.offset + rows.numel()] = rows
    return flat


def _synthetic(placeholder: fx.Node, num_ranks: int) -> PerRank:
    """Values that look like what the graph was traced with: random numbers, zeros for integers."""
    like = placeholder.meta.get("val")
    if isinstance(like, torch.SymInt):
        return (int(like),) * num_ranks
    if not isinstance(like, Tensor):
        return (like,) * num_ranks
    return tuple(_random(like, zlib.crc32(placeholder.name.encode()) + rank) for rank in range(num_ranks))


def _random(like: Tensor, seed: int) -> Tensor:
    shape = tuple(int(size) for size in like.shape)
    if not (like.is_floating_point() or like.is_complex()):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator, dtype=torch.complex64 if like.is_complex() else torch.float32)
    made = torch.empty_strided(shape, [int(step) for step in like.stride()], dtype=like.dtype, device=like.device)
    return made.copy_(drawn)


def constant(owner: fx.GraphModule, name: str) -> Any:
    """What a `get_attr` node reads from a captured module; a fake tensor may know its value, or gets a random one."""
    value: Any = owner
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, Tensor) and fake.is_fake(value):
        known = getattr(value, "constant", None)
        return known if known is not None else _random(value, zlib.crc32(name.encode()))
    return value
