"""A unit at run time: its flat shards, and the DTensor parameters that are views of them.

[Note: the alias]
`Unit` owns the memory: per shard one contiguous leaf tensor, the *flat*. A parameter that the user sees is a
`DTensor(Shard(0))` whose local tensor is a view of the flat, so an optimizer step through the DTensor is at once
visible to the next gather, without a copy. Users may break the alias: `load_state_dict(assign=True)`, `module.weight =
...`, `.to(dtype)`, `requires_grad_()`. `Unit.check` compares per parameter what the alias rests on, and re-attaches or
repacks where it does not hold; it runs at every call, so it compares column by column, in loops that run in C.
The DTensor always holds the truth: its values are copied into the flat, never back.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, eq, is_
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxshard import torch_private
from fxshard.errors import ConfigError, UnsupportedGraph
from fxshard.ir.launches import Launch
from fxshard.ir.plan import ParameterSpec, ShardPlan, Slot, UnitPlan, lay_out, prefetch_words
from fxshard.runtime import parameters, rank_check
from fxshard.runtime.accumulation import Accumulation
from fxshard.runtime.gradients import GradientSink
from fxshard.runtime.parameters import ParameterRef, adopt_attributes, local_of
from fxshard.runtime.step_hooks import Microbatches
from fxshard.runtime.unsharded_cache import UnshardedCache

if TYPE_CHECKING:
    from fxshard.runtime.eager import AfterForward
    from fxshard.runtime.prefetch_cache import PrefetchCache

_PARAMETER, _VERSION = attrgetter("parameter"), attrgetter("parameter._version")
_VIEW, _POINTER, _WRAPPER_STORAGE = attrgetter("view"), attrgetter("pointer"), attrgetter("wrapper_storage")
_LOCAL, _TRAINABLE, _REGISTERED = attrgetter("_local_tensor"), attrgetter("requires_grad"), attrgetter("_parameters")


class Home(NamedTuple):
    """Where a flat belongs."""

    unit: Unit
    shard: int


def home_of(flat: Tensor) -> Home | None:
    """The unit and shard index of a flat, `None` for any other tensor."""
    return getattr(flat, "_fxshard_home", None)


@dataclass(eq=False)
class Member:
    """One parameter of a unit.

    Attributes:
        fqn: name from the outermost sharded module.
        owners: every module that registers the parameter, with the name there (several when tied).
        parameter: the DTensor parameter that is registered.
        original: the parameter that it replaced; the same reference for parameters that were tied.
        view: its local tensor, a view of the flat.
        pointer: address of `view`.
        wrapper_storage: the storage object that torch made for the DTensor itself; `p.data = ...` replaces it.
    """

    fqn: str
    owners: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    original: weakref.ref[nn.Parameter]
    view: Tensor = field(init=False)
    pointer: int = field(init=False)
    wrapper_storage: torch.UntypedStorage = field(init=False)

    def attach(self, view: Tensor) -> None:
        """Make `view` the parameter's local tensor; the parameter stays the object that optimizers hold.

        A DTensor takes its storage offset from the local tensor it is built with, and Dynamo wants the two to agree
        when it traces an optimizer step. So the parameter is built anew and swapped in, where torch can swap: it
        cannot where something holds a weak reference, and hooks would be left behind.
        """
        old = self.parameter
        has_hooks = bool(old._backward_hooks or getattr(old, "_post_accumulate_grad_hooks", None))
        if old.storage_offset() == view.storage_offset() or has_hooks or weakref.getweakrefs(old):
            cast(DTensor, old)._local_tensor = view
        else:
            grad, old.grad = old.grad, None
            attributes = dict(old.__dict__)
            rebuilt = DTensor(view, cast(DTensor, old)._spec, requires_grad=False)
            torch.utils.swap_tensors(old, nn.Parameter(rebuilt, requires_grad=old.requires_grad))
            old.grad = grad
            adopt_attributes(old, attributes)
        self.remember()

    def registered(self) -> Iterator[nn.Parameter | None]:
        """The parameters that stand in its places now: others than ours where somebody has put them back since."""
        return (module._parameters.get(name) for module, name in self.owners)

    def remember(self) -> None:
        """Take what the parameter looks like now as what it must look like at the next check."""
        self.view = local_of(self.parameter)
        self.pointer = self.view.data_ptr()
        self.wrapper_storage = self.parameter.untyped_storage()

    @property
    def spec(self) -> ParameterSpec:
        """What the layout needs to know."""
        p = self.parameter
        return ParameterSpec(fqn=self.fqn, shape=tuple(p.shape), dtype=p.dtype, trainable=p.requires_grad)


@dataclass(eq=False)
class FlatShard:
    """One flat of a unit, with the parameters that are views of it and the sink for its gradient."""

    plan: ShardPlan
    flat: Tensor
    members: list[Member]
    sink: GradientSink

    def __post_init__(self) -> None:
        """Spread out the owners, which never change."""
        places = [(module, name, member) for member in self.members for module, name in member.owners]
        self._owners, self._names, self._owned = zip(*places, strict=True)

    def is_attached(self) -> bool:
        """Whether nothing that the alias rests on has changed."""
        parameters, views = list(map(_PARAMETER, self.members)), list(map(_VIEW, self.members))
        registered = map(dict.get, map(_REGISTERED, self._owners), self._names)
        return (
            all(map(is_, map(_LOCAL, parameters), views))
            and all(map(eq, map(Tensor.data_ptr, views), map(_POINTER, self.members)))
            and all(map(is_, map(_TRAINABLE, parameters), repeat(self.plan.trainable)))
            and all(map(is_, map(Tensor.untyped_storage, parameters), map(_WRAPPER_STORAGE, self.members)))
            and all(map(is_, registered, map(_PARAMETER, self._owned)))
        )


class Unit:
    """Parameters that are gathered and reduced together; see [Note: the alias].

    Attributes:
        modules: the modules given to one `fully_shard` call.
        members: parameters in registration order.
        shards: their memory.
        is_root: no other sharded module contains this one.
        reshard_after_forward: as given; `None` means True for all but the root.
        forward_prefetch: units to launch in forward right after this one has been waited for; none listed: as the
            option has it; `None`: nothing.
        backward_prefetch: the same in backward.
        generation: raised by every repack and re-attachment, and by every step of an optimizer that has its parameters.
        from_one_line: whether `torch.compile` made it, not the user.
        ignored: parameters of the modules that stay unsharded on purpose.
        after_first_call: run once, when a compiled graph with this unit has run for the first time.
        frames: the captured graphs that read it, weakly.
        accumulation: its gradients of microbatches that were not reduced.
        resident: its parameters while they stay gathered between microbatches.
        after_forward: its parameters while they may be read between forward and backward, once they could be.
        reduce_group: for reductions alone, once it was made.
        reduces_apart: whether they use it, and not the mesh's.
        microbatches, prefetch_cache: the model's, set when the unit is named.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        members: list[Member],
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        """Take over `members`, whose parameters are full tensors or DTensors; `pack` comes next."""
        self.modules = tuple(modules)
        self.members = members
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.forward_prefetch: tuple[Unit, ...] | None = ()
        self.backward_prefetch: tuple[Unit, ...] | None = ()
        self.is_root = True
        self.fqn = ""
        self.shards: list[FlatShard] = []
        self.generation = 0
        self.from_one_line = False
        self.ignored: frozenset[nn.Parameter] = frozenset()
        self.after_first_call: Callable[[], None] | None = None
        self.frames: list[weakref.ref[Any]] = []
        self.accumulation, self.resident = Accumulation(), UnshardedCache()
        self.microbatches = Microbatches((self,))
        self.prefetch_cache: PrefetchCache | None = None
        self.after_forward: AfterForward | None = None
        self._outside: dict[tuple[str, str], Callable[[list[Any]], Any]] = {}
        self.reduce_group: dist.ProcessGroup | None = None
        self.reduces_apart = False
        self.plan: UnitPlan

    @property
    def world_size(self) -> int:
        """Ranks that share the unit."""
        return self.mesh.size()

    def epoch(self) -> int:
        """Changes whenever parameter values may have changed: repacked, stepped by an optimizer, or written in place.

        It changes on all ranks alike, for these are what all ranks do: what is gathered anew depends on it.
        """
        versions: Iterator[int] = map(_VERSION, self.members)
        return self.generation + sum(versions)

    def version(self) -> tuple[int, ...]:
        """Changes with the epoch, and with writes to this rank's rows by way of `to_local()`."""
        return (self.epoch(), *(shard.flat._version for shard in self.shards))

    def _advance(self, before: int) -> None:
        """Make the epoch one that never was: new parameters count their versions from 0 again."""
        self.generation += max(1, before + 1 - self.epoch())

    def require_version(self, version: tuple[int, ...]) -> None:
        """Raise if parameter values have changed since `version()` was that: the forward's backward is void."""
        if self.version() != version:
            raise UnsupportedGraph(
                f"parameters of unit {self.fqn or 'root'!r} were changed between forward and backward (by an optimizer "
                "step, load_state_dict, copy_): backward would combine new values with activations of the old ones. "
                "Run forward again after changing parameters."
            )

    def pack(self, locals_: Sequence[Tensor]) -> None:
        """Lay out all members anew and copy `locals_`, this rank's rows of each, into fresh flats."""
        before = self.epoch()
        with torch.no_grad(), torch.inference_mode(False):
            layout = lay_out([member.spec for member in self.members], self.world_size)
            by_fqn = {member.fqn: (member, local) for member, local in zip(self.members, locals_, strict=True)}
            self.shards = [self._pack_shard(i, plan, by_fqn) for i, plan in enumerate(layout)]
        self._advance(before)
        self.resident.drop()
        if self.prefetch_cache is not None:
            self.prefetch_cache.forget()  # it knows the old flats
        self.publish()

    def _pack_shard(self, index: int, plan: ShardPlan, sources: dict[str, tuple[Member, Tensor]]) -> FlatShard:
        members = [sources[slot.fqn][0] for slot in plan.slots]
        device = sources[plan.slots[0].fqn][1].device
        # A Parameter, because Dynamo never makes a Parameter's length symbolic.
        flat = nn.Parameter(torch.zeros(plan.numel, dtype=plan.dtype, device=device), requires_grad=plan.trainable)
        shard = FlatShard(plan, flat, members, GradientSink([m.parameter for m in members], plan))
        flat._fxshard_home = Home(self, index)  # type: ignore[attr-defined]
        if plan.trainable:
            flat.register_post_accumulate_grad_hook(shard.sink.hand_over)
        for slot, member in zip(plan.slots, members, strict=True):
            view = self._view(flat, slot)
            view.copy_(sources[slot.fqn][1])
            member.attach(view)
        return shard

    def _view(self, flat: Tensor, slot: Slot) -> Tensor:
        shape = slot.local_shape(self.mesh.get_local_rank(), self.world_size)
        numel = math.prod(shape)
        return flat.detach()[slot.offset : slot.offset + numel].view(shape)

    def publish(self) -> None:
        """Refresh the plan and what the modules' getters read; called whenever layout, name or policy changed."""
        given = self.reshard_after_forward
        self.plan = UnitPlan(
            fqn=self.fqn,
            shards=tuple(shard.plan for shard in self.shards),
            world_size=self.world_size,
            group=self.mesh.get_group().group_name,
            reduce_group=self.reduce_group.group_name if self.reduce_group and self.reduces_apart else "",
            param_dtype=self.mp_policy.param_dtype,
            reduce_dtype=self.mp_policy.reduce_dtype,
            reshard_after_forward=not self.is_root if given is None else given,
        )
        self.microbatches.forget_choice()
        self._outside.clear()
        if self.after_forward is not None:
            self.after_forward.reshard()
        # Dynamo guards on the key: another list is another graph.
        lists = prefetch_words(self.fqn, ">", _names(self.forward_prefetch))
        lists += prefetch_words(self.fqn, "<", _names(self.backward_prefetch))
        sharing_key = self.plan.sharing_key
        for index, shard in enumerate(self.shards):
            dtype, key = self.plan.unsharded_dtype(shard.plan), f"{index} of {sharing_key}{lists}"
            for i, (slot, member) in enumerate(zip(shard.plan.slots, shard.members, strict=True)):
                ref = ParameterRef(shard.flat, key, i, slot.shape, dtype)
                for module, name in member.owners:
                    parameters.publish(module, name, ref)

    def outside_graphs(
        self, kind: str, op: str, what: str, run: Callable[[list[Any]], Any]
    ) -> Callable[[list[Any]], Any]:
        """`run`, which launches one collective outside of graphs, preceded by the ranks' agreement on it.

        Args:
            kind: of run, one word: "resident".
            op: "all_gather" or "reduce_scatter".
            what: is gathered or reduced: "all parameters". With `kind`, it stands for `run` until the unit changes.
            run: takes one list.
        """
        if (kind, what) not in self._outside:
            group = self.plan.group if op == "all_gather" else self.plan.reducing_group
            text = f"{op} of {what} on group {group!r} for {self.fqn or 'root'}"
            launch = Launch(group, text, "outside of graphs", op, self.fqn or "root")
            self._outside[kind, what] = rank_check.guard(run, kind, (launch,))
        return self._outside[kind, what]

    def rename(self, fqn: str, member_fqns: Sequence[str]) -> None:
        """Name the unit and its members from a new outermost module."""
        self.fqn = fqn
        renamed = {member.fqn: new for member, new in zip(self.members, member_fqns, strict=True)}
        for member, new in zip(self.members, member_fqns, strict=True):
            member.fqn = new
        for shard in self.shards:
            shard.plan = shard.sink.plan = shard.plan.renamed(renamed)
        self.publish()

    def check(self) -> None:
        """Make the alias hold, or say why it cannot.

        Raises:
            ConfigError: a parameter is still on the meta device, was replaced by something that is not its shard, or
                lost its values to `p.data = ...`.
        """
        if not self._is_attached():
            self.reattach()
        for shard in self.shards:
            if torch_private.backward_id() is None:
                shard.sink.forget()
            if shard.flat.is_meta:
                names = ", ".join(member.fqn for member in shard.members)
                raise ConfigError(
                    f"parameters on the meta device: {names}. Before the first forward call "
                    "model.to_empty(device=...) and initialise them, or load_state_dict(..., assign=True)."
                )

    def _is_attached(self) -> bool:
        return all(shard.is_attached() for shard in self.shards)

    def reattach_if_possible(self) -> None:
        """`reattach`, unless some parameters are still to follow the others to a new device."""
        if not self._is_attached() and len({local_of(m.parameter).device for m in self.members}) == 1:
            self.reattach()

    def reattach(self) -> None:
        """Take over whatever the user put in place of our parameters, and view the flats again."""
        before = self.epoch()
        replaced = [self._adopt(member) for member in self.members]
        locals_ = [local_of(member.parameter) for member in self.members]
        if len({local.device for local in locals_}) > 1:
            devices = ", ".join(f"{m.fqn} on {x.device}" for m, x in zip(self.members, locals_, strict=True))
            raise ConfigError(f"parameters of one unit are on several devices: {devices}. Move the module as a whole.")
        if any(replaced) or self._layout_changed():
            # Fresh flats also for a replaced parameter: the displaced one, or a state_dict, still views the old flat,
            # and may come back (weights swapped in for an evaluation).
            self.pack(locals_)
            self._advance(before)
            return
        with torch.no_grad(), torch.inference_mode(False):
            for shard in self.shards:
                for slot, member in zip(shard.plan.slots, shard.members, strict=True):
                    view = self._view(shard.flat, slot)
                    view.copy_(local_of(member.parameter))
                    member.attach(view)
                shard.sink.parameters = [m.parameter for m in shard.members]
        self._advance(before)
        self.resident.drop()

    def _layout_changed(self) -> bool:
        plans = lay_out([member.spec for member in self.members], self.world_size)
        same_device = all(
            shard.flat.device == local_of(m.parameter).device for shard in self.shards for m in shard.members
        )
        return plans != tuple(shard.plan for shard in self.shards) or not same_device

    def _adopt(self, member: Member) -> bool:
        """Accept a replaced parameter object if it is a shard of the same kind; whether there was one."""
        found = {id(p): p for p in member.registered() if p is not None}
        new = [p for p in found.values() if p is not member.parameter] or list(found.values())
        if not new:
            raise ConfigError(
                f"{member.fqn} is sharded, but is gone from its module. Apply parametrizations and weight_norm, and "
                "delete parameters, before fully_shard."
            )
        if len(new) != 1:
            raise ConfigError(
                f"{member.fqn} is sharded, but {len(new)} different parameters now stand in its place (expected 1, the "
                "same one in every module that shares it). Assign the same parameter to all of them, or none."
            )
        require_shard(new[0], member, self.mesh)
        if local_of(new[0]) is member.view and new[0].untyped_storage() is not member.wrapper_storage:
            raise ConfigError(
                f"{member.fqn}.data was assigned: torch replaces only the wrapper of a DTensor, so the new values are "
                "lost. Write into it instead: with torch.no_grad(): parameter.copy_(values)."
            )
        replaced, member.parameter = new[0] is not member.parameter, new[0]
        for module, name in member.owners:
            module._parameters[name] = new[0]
        return replaced


def _names(units: Sequence[Unit] | None) -> list[str] | None:
    return None if units is None else [unit.fqn for unit in units]


def require_shard(new: object, member: Member, mesh: DeviceMesh) -> None:
    """Raise unless `new` can stand in place of a sharded parameter.

    Raises:
        ConfigError: it is a plain tensor, a DTensor of another shape, mesh or placement, or one that was computed.
    """
    old = member.parameter
    if isinstance(new, Tensor) and new.grad_fn is not None:
        raise ConfigError(
            f"{member.fqn} is sharded: in its place stands a tensor that was computed ({type(new.grad_fn).__name__}; "
            "torch.func.functional_call?), and no gradient would flow through it. Change the parameter itself, under "
            "torch.no_grad(), and back after backward (noise on weights); or use a model that is not sharded where "
            "gradients through an update are wanted (MAML)."
        )
    placement = Replicate() if not tuple(old.shape) else Shard(0)
    fits = isinstance(new, DTensor) and tuple(new.shape) == tuple(old.shape)
    if fits and isinstance(new, DTensor) and new.device_mesh == mesh and tuple(new.placements) == (placement,):
        return
    found = f"{type(new).__name__}{list(getattr(new, 'shape', []))}"
    raise ConfigError(
        f"{member.fqn} is sharded: it can only be replaced by a DTensor of shape {list(old.shape)} with placements "
        f"({placement},) on its mesh, got {found}. To change its values use parameter.copy_(dtensor) under "
        "torch.no_grad(), or load_state_dict; to replace it, do so before fully_shard."
    )
