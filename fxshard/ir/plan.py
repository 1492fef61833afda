"""The plan: which parameter lies where in which shard, and what a captured graph may assume about it.

[Note: layout of a unit]
A *unit* is the set of parameters that are gathered and reduced together. Parameters of one storage dtype, one dtype
while they are gathered, one of their gradients and one `requires_grad` share a *shard*: one contiguous 1-D tensor per
rank. A parameter of shape `[rows, ...]` is cut into `world_size` chunks of `ceil(rows / world_size)` rows, as
`torch.chunk` and `DTensor(Shard(0))` cut it. This rank's chunk, zero-padded, is the parameter's *slot* in the shard.
Slots follow each other in registration order, so an all_gather of the shard fills `[world_size, shard_numel]`, and slot
`i` is a block of its columns. Where one rank holds the shard alone, a parameter is a view of it, and copied only if it
would not begin at a multiple of 16 bytes. A scalar cannot be cut: its slot holds the whole value on every rank
(replicated), and its gradient is reduced into every rank's slot.

Where a tensor subclass says what is gathered ([Note: extensions] in `runtime/extensions.py`), its shard is never
gathered. Another one *encodes* it: the bytes of this rank's all-gather inputs, a slot for each.

On a mesh of two axes the second one shards as described, and the first one replicates: the ranks along it hold the same
shard. `world_size` and `group` are those of the axis that shards.

The layout is that of FSDP2's all_gather and reduce_scatter buffers; bitwise parity depends on it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from fxshard.ir.meshes import MeshAxis
from fxshard.unit_settings import ReductionSettings

ParameterKey = tuple[str, int, int]
"""(unit key, shard, slot): a parameter of a captured graph."""

BY = " by "
"""In the name of a process group behind whose collectives is an object of the user's: `0 by my_module.MyAllGather`."""

EXCHANGING = f"{BY}all_to_all"
"""Ends the name of a group whose reductions are an all_to_all and a sum."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where one parameter lies in its shard."""

    fqn: str  # relative to the outermost sharded module
    shape: tuple[int, ...]  # global shape
    offset: int  # first element in the shard
    numel: int  # elements in the shard, padding included; the same on every rank

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the whole parameter (scalars only)."""
        return not self.shape

    @property
    def full_numel(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    def rows_of(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return the first and last (exclusive) row that `rank` holds."""
        chunk = -(-self.shape[0] // world_size)
        return min(rank * chunk, self.shape[0]), min((rank + 1) * chunk, self.shape[0])

    def local_shape(self, rank: int, world_size: int) -> tuple[int, ...]:
        """Return the shape of the rows that `rank` holds, without padding."""
        if self.replicated:
            return ()
        first, last = self.rows_of(rank, world_size)
        return (last - first, *self.shape[1:])


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One flat 1-D tensor per rank: the slots of all parameters with the same dtypes and `requires_grad`."""

    dtype: torch.dtype
    trainable: bool
    slots: tuple[Slot, ...]
    keeps_dtype: bool = False  # whether it is gathered in `dtype`, whatever the unit's `param_dtype`
    encodes: int | None = None  # the shard that this one is gathered in place of, by index
    grad_dtype: torch.dtype | None = None  # of its gradients, if the user has set another than `dtype`

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype of its gradients, as parameters have them in `.grad`."""
        return self.grad_dtype or self.dtype

    @property
    def numel(self) -> int:
        """Elements on one rank."""
        return sum(slot.numel for slot in self.slots)

    def renamed(self, names: Mapping[str, str]) -> ShardPlan:
        """Return the same with other FQNs; `names` has the new one of each."""
        return replace(self, slots=tuple(replace(slot, fqn=names[slot.fqn]) for slot in self.slots))


@dataclass(frozen=True, kw_only=True)
class Offload:
    """That a unit's shards and their gradients are in the host's memory; [Note: offloaded shards]."""

    device: str  # type of the one on which parameters are gathered and gradients reduced
    pinned: bool  # whether the host's memory is page-locked, so that copies run beside compute


@dataclass(frozen=True, kw_only=True)
class UnitPlan(ReductionSettings):
    """Everything a pass may know about a unit. A prefetch list has keys of units; `()` leaves it to the pass."""

    fqn: str  # name of the unit's module, unique within one captured graph
    shards: tuple[ShardPlan, ...]  # the flats, in registration order of their first parameter
    world_size: int
    group: str  # name of the process group of the collectives
    param_dtype: torch.dtype | None = None  # of gathered floating-point parameters; `None`: storage dtype
    reduce_dtype: torch.dtype | None = None  # `None`: what FSDP2 of the same torch would take
    reshard_after_forward: bool = True  # whether backward gathers the parameters again
    forward_prefetch: tuple[str, ...] | None = ()  # to launch right after the wait for this one; `None`: nothing
    backward_prefetch: tuple[str, ...] | None = ()  # the same in backward
    gather_group: str = ""  # of gathers, if an object of the user's does them
    reduce_group: str = ""  # of reductions, if they have a process group of their own
    replicas: int = 1  # ranks that hold the same shard, along the mesh axis that replicates
    replicate_group: str = ""  # name of their process group; none for one replica
    all_reduces: bool = True  # whether graphs average over the replicas, and not the runtime after them
    subgroup_size: int = 0  # ranks that share its parameters between forward and backward; 0 for all of them
    subgroup: str = ""  # name of their process group
    subgroup_gather: str = ""  # of gathers from it, if an object does them
    subgroup_of: str | None = None  # key of a unit, if this is what a subgroup shares of it
    offload: Offload | None = None  # `None`: shards are on the device

    @property
    def gathering_group(self) -> str:
        """Name of the process group that gathers are launched on."""
        return self.gather_group or self.group

    @property
    def gathers_whole(self) -> bool:
        """Whether what is gathered is all of this unit and nothing else, for an object of the user's does it."""
        return BY in self.gathering_group

    @property
    def reduces_whole(self) -> bool:
        """The same for reductions."""
        return BY in self.reducing_group and not self.reducing_group.endswith(EXCHANGING)

    @property
    def reducing_group(self) -> str:
        """Name of the process group that reductions are launched on."""
        return self.reduce_group or self.group

    @property
    def groups(self) -> dict[str, int]:
        """Names of all its process groups -> how many ranks are in each."""
        found = dict.fromkeys((self.group, self.gathering_group, self.reducing_group), self.world_size)
        found |= {self.replicate_group: self.replicas} if self.replicas > 1 else {}
        return found | {name: self.subgroup_size for name in (self.subgroup, self.subgroup_gather) if name}

    @property
    def averages_replicas(self) -> bool:
        """Whether an all_reduce follows each reduction."""
        return self.replicas > 1 and self.all_reduces

    @property
    def num_ranks(self) -> int:
        """Ranks over which a gradient is averaged: those of both mesh axes."""
        return self.world_size * self.replicas

    def unsharded_dtype(self, shard: ShardPlan) -> torch.dtype:
        """Return the dtype of the shard's parameters while they are gathered."""
        casts = self.param_dtype is not None and shard.dtype.is_floating_point and not shard.keeps_dtype
        return cast(torch.dtype, self.param_dtype) if casts else shard.dtype

    @property
    def encoded(self) -> frozenset[int]:
        """The shards in place of which others are gathered, by index."""
        return frozenset(shard.encodes for shard in self.shards if shard.encodes is not None)

    @property
    def gathered(self) -> list[tuple[int, ShardPlan]]:
        """The shards that are gathered, with their indices."""
        return [(i, shard) for i, shard in enumerate(self.shards) if i not in self.encoded]

    def slot(self, index: tuple[int, int]) -> Slot:
        """Return the slot of a parameter: (shard, slot)."""
        shard, i = index
        return self.shards[shard].slots[i]

    def unsharded_dtype_of(self, index: tuple[int, int]) -> torch.dtype:
        """Return the dtype of a gathered parameter."""
        return self.unsharded_dtype(self.shards[index[0]])

    def unsharded_bytes_of(self, index: tuple[int, int]) -> int:
        """Return the bytes of a gathered parameter, padding included."""
        return self.slot(index).numel * self.world_size * self.unsharded_dtype_of(index).itemsize

    @property
    def regathers(self) -> bool:
        """Whether backward reads the shards again; for one rank always, for a parameter is a view of its shard."""
        return self.reshard_after_forward or self.world_size == 1

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the gathered unit, padding included."""
        return sum(s.numel * self.world_size * self.unsharded_dtype(s).itemsize for _, s in self.gathered)

    @property
    def shard_bytes(self) -> int:
        """Bytes of its shards on one rank, padding included."""
        return sum(shard.numel * shard.dtype.itemsize for shard in self.shards)

    @property
    def trained_bytes(self) -> int:
        """Those of `shard_bytes` that get gradients."""
        return sum(shard.numel * shard.dtype.itemsize for shard in self.shards if shard.trainable)

    @property
    def node_name(self) -> str:
        """The unit's name as part of a graph node's name."""
        return re.sub(r"[.']", "_", re.sub(r"[<>]", "", self.fqn)) or "root"

    @property
    def sharing_key(self) -> str:
        """Return what two units must have in common to run through one compiled graph, their layout included."""
        names = (str(d).removeprefix("torch.") for d in (self.param_dtype, self.reduce_dtype))
        groups = "+".join(self.groups)
        # A graph may read a part of a unit; the rest decides where that part lies.
        layout = [(str(s.dtype), s.keeps_dtype, s.trainable, [slot.shape for slot in s.slots]) for s in self.shards]
        layout += [s.encodes for s in self.shards if s.encodes is not None]  # type: ignore[misc]
        layout += [(i, str(s.grad_dtype)) for i, s in enumerate(self.shards) if s.grad_dtype]  # type: ignore[misc]
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:8]
        policy = "reshard" if self.reshard_after_forward else "keep"
        policy += f" to {self.subgroup_size}" if self.subgroup else ""
        policy += self.reduction_words
        if self.offload is not None:
            policy += f" {'pinned' if self.offload.pinned else 'host'} to {self.offload.device}"
        ranks = f"{self.replicas}x{self.world_size}" if self.replicas > 1 else f"{self.world_size}"
        return f"{ranks}@{groups} {'/'.join(names)} {policy} {digest}"


@dataclass(frozen=True, kw_only=True)
class FramePlan:
    """The units that one captured graph reads, by the key that their markers carry."""

    units: dict[str, UnitPlan]
    shard_inputs: dict[int, tuple[str, int]]  # graph input index -> (unit key, shard index)
    input_names: tuple[str, ...] = ()  # as the user's code calls the inputs; empty for flats
    model_axes: tuple[MeshAxis, ...] = ()  # of the meshes of DTensors in the user's code
    metadata: frozenset[int] = frozenset()  # the inputs with which gathered bytes become parameters, by index
    lent: Mapping[int, str] = field(default_factory=dict)  # inputs that an earlier graph has returned: index -> FQN
    is_part: bool = False  # whether the model has other units, which run in other graphs
    unset: frozenset[str] = frozenset()  # units whose `reshard_after_forward` the user did not choose

    def unit_of(self, module: str) -> str:
        """Return the key of the unit that a module (an FQN) belongs to: the one whose module is nearest around it."""
        around = [
            (len(fqn), key)
            for key, unit in self.units.items()
            if key not in self.in_subgroups
            for fqn in unit.fqn.split(",")
            if not fqn or module == fqn or module.startswith(f"{fqn}.")
        ]
        return max(around)[1] if around else ""

    @functools.cached_property
    def in_subgroups(self) -> dict[str, str]:
        """What subgroups share -> the key of the unit that it is of."""
        return {key: unit.subgroup_of for key, unit in self.units.items() if unit.subgroup_of is not None}

    @property
    def in_step(self) -> list[str]:
        """Units of which other ranks may run other graphs, which must launch the same: those that reduce the unused."""
        return [key for key, unit in self.units.items() if unit.reduces_unused]

    def owner_of(self, key: str) -> str:
        """Return the key of the unit itself where `key` is that of what a subgroup shares of it."""
        return self.in_subgroups.get(key, key)

    def with_subgroups(self) -> FramePlan:
        """Add, for each unit with a subgroup, what that shares between forward and backward: as a unit of its own."""
        keys = {key: subgroup_key(key, unit.subgroup_size) for key, unit in self.units.items() if unit.subgroup}
        units = {key: replace(unit, backward_prefetch=()) if key in keys else unit for key, unit in self.units.items()}
        for key, name in keys.items():
            listed = self.units[key].backward_prefetch
            ahead = None if listed is None else tuple(keys.get(other, other) for other in listed)
            units[name] = replace(_in_subgroup(self.units[key], key), backward_prefetch=ahead)
        return replace(self, units=units) if keys else self

    def is_encoded(self, unit: str, shard: int) -> bool:
        """Return whether another shard of the unit is gathered in place of that one."""
        return shard in self.units[unit].encoded

    def has_group(self, name: str) -> bool:
        """Return whether collectives of a unit run on the process group of that name; others are the model's own."""
        return any(name in unit.groups for unit in self.units.values())

    def parameter_name(self, unit: str, shard: int, slot: int) -> str:
        """Return what tags call a parameter."""
        return qualified(unit, self.units[unit].shards[shard].slots[slot].fqn)


def subgroup_key(unit: str, size: int) -> str:
    """Return the key of what a subgroup of so many ranks shares of a unit; its parameters keep their names."""
    name = unit.rstrip("'")
    return f"{name}/{size}{unit[len(name) :]}"


def is_in_subgroup(units: str) -> bool:
    """Return whether the name of a unit, or the last of several, is that of what a subgroup shares."""
    return re.search(r"/\d+'*$", units) is not None


def _in_subgroup(unit: UnitPlan, key: str) -> UnitPlan:
    """Return the plan of what a subgroup shares of a unit: its parameters as they were gathered, cut anew."""
    shards = []
    for shard in unit.shards:
        dtype = unit.unsharded_dtype(shard)
        specs = [ParameterSpec(fqn=s.fqn, shape=s.shape, dtype=dtype, trainable=shard.trainable) for s in shard.slots]
        slots = _slots(specs, unit.subgroup_size)
        shards.append(ShardPlan(dtype=dtype, trainable=shard.trainable, slots=slots))
    return UnitPlan(
        fqn=unit.fqn,
        shards=tuple(shards),
        world_size=unit.subgroup_size,
        group=unit.subgroup,
        gather_group=unit.subgroup_gather,
        subgroup_of=key,
    )


def qualified(unit: str, fqn: str) -> str:
    """Add the marks of its unit's key to an FQN: two models of one graph differ by them (`compile/capture.py`)."""
    return fqn + unit[len(unit.rstrip("'")) :]


def prefetch_words(fqn: str, sign: str, listed: Sequence[str] | None) -> str:
    """Put the prefetch list of unit `fqn` in words that are the same for all blocks which list, say, the next one."""
    if listed is None:
        return f" {sign}none"
    return f" {sign}{','.join(relative_name(other, fqn) for other in listed)}" if listed else ""


def relative_name(fqn: str, origin: str) -> str:
    """Name `fqn` as a sibling sees it: `blocks.4` from `blocks.3` is `blocks.+1`, as `blocks.5` is from `blocks.4`."""
    parts, own = fqn.split("."), origin.split(".")
    for i, (part, other) in enumerate(zip(parts, own, strict=False)):
        if part != other:
            if part.isdigit() and other.isdigit():
                parts[i] = f"{int(part) - int(other):+d}"
            break
        if part.isdigit():
            parts[i] = "+0"
    return ".".join(parts)


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """What the layout needs to know of a parameter."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    keeps_dtype: bool = False
    grad_dtype: torch.dtype | None = None  # if that is not `dtype`
    input_bytes: tuple[int, ...] = ()  # of its all-gather inputs on one rank, if a tensor subclass says what they are


def input_name(fqn: str, number: int) -> str:
    """Return what the slot of a parameter's all-gather input is called."""
    return f"{fqn}.input{number}"


def lay_out(parameters: Iterable[ParameterSpec], world_size: int) -> tuple[ShardPlan, ...]:
    """Assign each parameter, in registration order, a slot; see [Note: layout of a unit]."""
    groups: dict[tuple[torch.dtype, bool, bool, torch.dtype | None, bool], list[ParameterSpec]] = {}
    for p in parameters:
        groups.setdefault((p.dtype, p.trainable, p.keeps_dtype, p.grad_dtype, bool(p.input_bytes)), []).append(p)
    shards = [
        ShardPlan(dtype=dtype, trainable=trains, keeps_dtype=keeps, grad_dtype=grad, slots=_slots(members, world_size))
        for (dtype, trains, keeps, grad, _), members in groups.items()
    ]
    for i, ((*_, is_encoded), members) in enumerate(groups.items()):
        if is_encoded:
            inputs = [
                ParameterSpec(
                    fqn=input_name(p.fqn, n), shape=(nbytes * world_size,), dtype=torch.uint8, trainable=False
                )
                for p in members
                for n, nbytes in enumerate(p.input_bytes)
            ]
            shards.append(ShardPlan(dtype=torch.uint8, trainable=False, slots=_slots(inputs, world_size), encodes=i))
    return tuple(shards)


def _slots(parameters: Sequence[ParameterSpec], world_size: int) -> tuple[Slot, ...]:
    slots, offset = [], 0
    for p in parameters:
        numel = -(-p.shape[0] // world_size) * math.prod(p.shape[1:]) if p.shape else 1
        slots.append(Slot(fqn=p.fqn, shape=p.shape, offset=offset, numel=numel))
        offset += numel
    return tuple(slots)
