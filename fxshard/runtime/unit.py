"""A unit at run time: its settings, its plan, its epoch, and the flats that it owns."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard import torch_private
from fxshard.errors import ConfigError, UnsupportedGraph
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.launches import Launch, on_group
from fxshard.ir.plan import Offload, ShardPlan, UnitPlan, input_name, lay_out, prefetch_words
from fxshard.ir.text import dtype_text
from fxshard.runtime import comm_group, gloo, mesh_axes, parameters, unsharded_cache
from fxshard.runtime.accumulation import Accumulation, ReplicaSums
from fxshard.runtime.eager import AfterForward
from fxshard.runtime.flat_shard import FlatShard, Home, InputShard, Member
from fxshard.runtime.parameters import ParameterRef
from fxshard.runtime.rank_check import Agreement, telling_others
from fxshard.runtime.step_hooks import ModelContext
from fxshard.unit_settings import IN_GRAPHS, ReductionSettings, UnitSettings

_VERSION = attrgetter("parameter._version")


@dataclass
class UnitGroups:
    """Process groups of one unit that are not the mesh's."""

    subgroup: dist.ProcessGroup | None = None  # of this rank, if fewer ranks share the parameters until backward
    reduce: dist.ProcessGroup | None = None  # for reductions alone, once it was made


class UnitStep:
    """What runs one unit, and what of it waits."""

    def __init__(self, unit: Unit) -> None:
        self.frames = weakref.WeakKeyDictionary[Any, None]()  # the captured graphs that read it, in their order
        self.stages = weakref.WeakSet[Any]()  # of a pipeline, that have it and are in a step
        self.accumulation, self.replica_sums = Accumulation(unit), ReplicaSums(unit)  # gradients that wait
        self.after_forward = AfterForward(unit)  # parameters that may be read between forward and backward
        self.agreements: dict[tuple[str, str], Agreement] = {}  # compared before collectives outside of graphs


class Unit:
    """Parameters that are gathered and reduced together; see [Note: the alias] in `runtime/flat_shard.py`."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        members: list[Member],
        mesh: DeviceMesh,
        settings: UnitSettings,
        subgroup: dist.ProcessGroup | None = None,
    ) -> None:
        """Take over `members`, whose parameters are DTensors, and copy their rows into flats."""
        self.modules, self.mesh = tuple(modules), mesh
        self.members = members  # parameters in registration order
        self.shards: list[FlatShard] = []  # their memory
        self.settings, self.groups = settings, UnitGroups(subgroup)  # `set` changes the settings
        self.is_root, self.fqn = True, ""  # no other sharded module contains this one
        self.generation = 0  # raised by every repack and re-attachment, and by each step of its optimizer
        self.step = UnitStep(self)
        self.model = ModelContext((self,))  # what it shares with the other units of its model, once they are named
        self.plan: UnitPlan
        self.pack()

    def set(self, **changes: Any) -> None:
        """Change settings."""
        self.settings = replace(self.settings, **changes)
        if IN_GRAPHS & changes.keys():
            self.publish()

    def set_sync(self, sync: bool) -> None:
        """Let backwards reduce gradients, or add them up; at once, for each microbatch may do it."""
        if sync != self.settings.sync:
            self.settings = self.settings.with_other_sync

    @property
    def world_size(self) -> int:
        """Ranks that share the unit: those of the axis that shards."""
        return mesh_axes.num_shards(self.mesh)

    @property
    def whole_mesh(self) -> DeviceMesh | None:
        """The mesh with the axes of tensor parallelism behind those of `mesh`, `None` where there is none such."""
        parallel = (member.tensor_parallel for member in self.members if member.tensor_parallel)
        return next((each.spec.mesh for each in parallel if each.within is None), None)

    @property
    def device(self) -> torch.device:
        """Where its parameters are gathered and its gradients reduced."""
        kind = self.mesh.device_type
        if self.settings.offload is None or kind == "cpu":
            return self.shards[0].flat.device
        return torch.device(kind, torch.get_device_module(kind).current_device())

    @property
    def is_fake(self) -> bool:
        """Whether there is no data behind it, and so no other rank."""
        return any(torch_private.is_fake(shard.flat) for shard in self.shards)

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.fqn or "root"

    def epoch(self) -> int:
        """Changes whenever parameter values may have changed: repacked, stepped by an optimizer, or written in place.

        It changes on all ranks alike, for these are what all ranks do: what is gathered anew depends on it.
        """
        versions: Iterator[int] = map(_VERSION, self.members)
        return self.generation + sum(versions)

    def version(self) -> tuple[Any, ...]:
        """Changes with the epoch, with writes to this rank's rows by way of `to_local()`, and with hooks' metadata."""
        return (self.epoch(), *(s.flat._version for s in self.shards), *(s.metadata for _, s in self._inputs()))

    def _advance(self, before: int) -> None:
        """Make the epoch one that never was: new parameters count their versions from 0 again."""
        self.generation += max(1, before + 1 - self.epoch())

    def require_version(self, version: tuple[Any, ...]) -> None:
        """Raise if parameter values have changed since `version()` was that: the forward's backward is void."""
        if self.version() != version:
            raise UnsupportedGraph(
                f"parameters of unit {self.label!r} were changed between forward and backward (by an optimizer step, "
                "load_state_dict, copy_, another requires_grad or scale of an fp8 weight): backward would combine "
                "new values with activations of the old ones. Run forward again after changing parameters."
            )

    def require_same_trainable(self) -> None:
        """Raise if parameters were frozen or thawed since the running call began: it reads them as they were then."""
        changed = [m.fqn for s in self.shards for m in s.members if m.parameter.requires_grad is not s.plan.trainable]
        if changed and torch.is_grad_enabled() and torch_private.backward_id() is None:
            raise ConfigError(
                f"requires_grad of {', '.join(changed)} was changed within a call of the model, which trains what "
                "it did when the call began. Freeze or thaw parameters before the call."
            )

    def pack(self) -> None:
        """Lay out all members anew, and copy this rank's rows of each into fresh flats."""
        before = self.epoch()
        for member in self.members:
            member.extend(self.mesh, self.settings.mp_policy)
        self._require_usable_hooks()
        by_fqn = {member.fqn: member for member in self.members}
        with torch.no_grad(), torch.inference_mode(False):
            self.shards = []
            for i, plan in enumerate(self._layout()):
                home = Home(self, i)
                if plan.encodes is not None:
                    self.shards.append(InputShard(plan, self.shards[plan.encodes], home))
                else:
                    self.shards.append(FlatShard(plan, [by_fqn[slot.fqn] for slot in plan.slots], self.mesh, home))
        self._advance(before)
        unsharded_cache.reshard_resident(self)
        self.model.prefetcher.forget()  # it knows the old flats
        self.publish()

    def _layout(self) -> tuple[ShardPlan, ...]:
        return lay_out([member.spec for member in self.members], self.world_size)

    def publish(self) -> None:
        """Refresh the plan and what the modules' getters read; called whenever layout, name or policy changed."""
        settings, outer, before = self.settings, mesh_axes.replicate_group(self.mesh), getattr(self, "plan", None)
        given, policy, offload = settings.reshard_after_forward, settings.mp_policy, settings.offload
        kind = self.mesh.device_type
        self.plan = UnitPlan(
            fqn=self.fqn,
            shards=tuple(shard.plan for shard in self.shards),
            world_size=self.world_size,
            group=mesh_axes.shard_group(self.mesh).group_name,
            **self._own_groups(),
            replicas=mesh_axes.num_replicas(self.mesh),
            replicate_group=outer.group_name if outer is not None else "",
            **{each.name: getattr(settings, each.name) for each in fields(ReductionSettings)},
            offload=Offload(device=kind, pinned=offload.pin_memory and kind != "cpu") if offload else None,
            param_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            reshard_after_forward=not self.is_root if given is None else bool(given),
            subgroup_size=settings.subgroup_size,
        )
        self.model.forget_choice(is_other=before not in (None, self.plan))
        self.step.agreements.clear()
        self.step.after_forward.end()
        # Dynamo guards on the key: another list is another graph, and a choice may be where a pass made its own.
        named = settings.with_lists(lambda units: None if units is None else tuple(unit.fqn for unit in units))
        lists = prefetch_words(self.fqn, ">", named.forward_prefetch)
        lists += prefetch_words(self.fqn, "<", named.backward_prefetch)
        sharing_key = self.plan.sharing_key + ("" if given is None else " as chosen")
        elsewhere = kind if offload and kind != "cpu" else ""
        hooks = {shard.plan.encodes: shard.refs(f"{i} of {sharing_key}{lists}") for i, shard in self._inputs()}
        for index, shard in enumerate(self.shards):
            dtype, key = self.plan.unsharded_dtype(shard.plan), f"{index} of {sharing_key}{lists}"
            for i, member in enumerate(shard.members):  # an `InputShard` has none
                layout = member.tensor_parallel.layout if member.tensor_parallel else None
                shape = shard.plan.slots[i].shape
                ref = ParameterRef(shard.flat, key, i, shape, dtype, member.settings.dim, layout, elsewhere)
                if index in hooks:
                    ref = ref._replace(hooks=hooks[index][i])
                for module, name in member.owners:
                    parameters.publish(module, name, ref)

    def _own_groups(self) -> dict[str, Any]:
        """Names of the groups of its collectives that are not the mesh's."""
        settings, shared = self.settings, mesh_axes.shard_group(self.mesh)
        reducing = self.groups.reduce if settings.uses_reduce_group else None
        gather, reduce = settings.all_gather_comm, settings.reduce_scatter_comm
        on = reducing or shared
        reduced = comm_group.name_of(on, reduce) or gloo.reducing(on, self.mesh.device_type)
        subgroup = self.groups.subgroup if settings.subgroup_size else None
        return {
            "gather_group": comm_group.name_of(shared, gather),
            "reduce_group": reduced or (reducing.group_name if reducing is not None else ""),
            "subgroup": subgroup.group_name if subgroup is not None else "",
            "subgroup_gather": comm_group.name_of(subgroup, gather),
        }

    def _inputs(self) -> list[tuple[int, InputShard]]:
        return [(i, shard) for i, shard in enumerate(self.shards) if isinstance(shard, InputShard)]

    def _require_usable_hooks(self) -> None:
        named = [member.fqn for member in self.members if member.extension is not None]
        if named and (self.settings.offload is not None or self.settings.subgroup_size):
            what = "offload_policy" if self.settings.offload is not None else "reshard_after_forward as a number"
            raise ConfigError(
                f"{', '.join(named)}: what a tensor subclass with fsdp_pre_all_gather gives cannot be gathered with "
                f"{what}. Leave it out, or make plain parameters of them."
            )

    def encode(self) -> None:
        """Run the hooks of tensor subclasses on what the parameters are now, unless bytes of them are still in use."""
        inputs = self._inputs()
        if not inputs or torch_private.backward_id() is not None:
            return
        if not any(found.unit is self and found.is_current for found in self.model.unsharded.values()):
            for _, shard in inputs:
                shard.encode()

    def unsharded_of(self, gathered: dict[SlotIndex, Tensor]) -> dict[SlotIndex, Tensor]:
        """Make all parameters of what was gathered outside of graphs."""
        return gathered | {slot: made for i, shard in self._inputs() for slot, made in shard.unshard(gathered, i)}

    def reshard(self) -> None:
        """Free what is gathered of it outside of graphs."""
        self.model.unsharded.drop_if(lambda gathered: gathered.unit is self)
        self.step.after_forward.end()

    @contextmanager
    def agreed(
        self, kind: str, wanted: str, what: str, slots: Collection[SlotIndex] | None = None
    ) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Around one collective outside of graphs, on which the ranks agree first; an all_reduce may follow it.

        Yields what makes a context for a later wait for it.

        Args:
            kind: of run, one word: "read", "reduced", "resident", "step", "waiting" or "averaged".
            wanted: "all_gather", "reduce_scatter" or "all_reduce".
            what: is gathered or reduced: "all parameters".
            slots: of the parameters that these are, `None` for all.
        """
        if wanted == "all_gather":
            self.model.prefetcher.settle(self.device)
        plan = self.plan
        groups = {"all_gather": plan.gathering_group, "reduce_scatter": plan.reducing_group}
        groups["all_reduce"] = plan.replicate_group
        averages = wanted == "reduce_scatter" and plan.replicas > 1 and not self.step.replica_sums.defers_all_reduce()
        sizes = self._sizes(slots)
        moved = f"of {what} in {sizes} per rank"
        launches = tuple(
            Launch(group, f"{op} {moved}{on_group(group)} for {self.label}", "outside of graphs", op, self.label)
            for op, group in groups.items()
            if op == wanted or (op == "all_reduce" and averages)
        )
        key = kind, f"{what} {sizes} {len(launches)}"
        agreement = self.step.agreements.setdefault(key, Agreement(kind))
        is_known = not self.model.goes_another_way(f"{kind} {self.label} {what}", f"{wanted} {sizes}")
        with (
            self.model.forgetting(),
            telling_others(lambda: plan.groups),
            agreement.before(launches, is_known=is_known),
        ):
            yield functools.partial(agreement.after, launches)

    def _sizes(self, slots: Collection[SlotIndex] | None) -> str:
        """What each rank sends of some parameters."""
        sent = []
        for i, shard in enumerate(self.plan.shards):
            numels = [slot.numel for j, slot in enumerate(shard.slots) if slots is None or (i, j) in slots]
            if numels:
                numel = sum(numels) if len(numels) < len(shard.slots) else shard.numel
                sent.append(f"{dtype_text(shard.dtype)}[{numel}]")
        return " and ".join(sent)

    def rename(self, fqn: str, member_fqns: Sequence[str]) -> None:
        """Name the unit and its members from a new outermost module."""
        self.fqn = fqn
        renamed = {member.fqn: new for member, new in zip(self.members, member_fqns, strict=True)}
        for member, new in zip(self.members, member_fqns, strict=True):
            if member.extension is not None:
                member.extension.fqn = new
                inputs = range(len(member.extension.input_bytes))
                renamed |= {input_name(member.fqn, i): input_name(new, i) for i in inputs}
        for member, new in zip(self.members, member_fqns, strict=True):
            member.fqn = new
        for shard in self.shards:
            shard.plan = shard.sink.plan = shard.plan.renamed(renamed)
        self.publish()

    def check(self) -> None:
        """Make the alias hold, or say why it cannot."""
        if not self._is_attached():
            self.reattach()
        if torch_private.backward_id() is None:
            self.step.replica_sums.forget()
        for shard in self.shards:
            if torch_private.backward_id() is None:
                shard.sink.forget()
            if shard.flat.is_meta:
                names = ", ".join(member.fqn for member in shard.members)
                raise ConfigError(
                    f"parameters on the meta device: {names}. Before the first forward call "
                    "model.to_empty(device=...) and initialise them, or load_state_dict(..., assign=True)."
                )
            if self.settings.offload is not None and shard.flat.device.type != "cpu":
                names = ", ".join(member.fqn for member in shard.members)
                raise ConfigError(
                    f"parameters are offloaded (offload_policy), but on {shard.flat.device}: {names}. Leave them on "
                    "the CPU: no model.cuda() or model.to(device) after fully_shard, and behind model.to_empty(...) "
                    'the offloaded module.to_empty(device="cpu").'
                )
        self.encode()

    def _is_attached(self) -> bool:
        return all(shard.is_attached() for shard in self.shards)

    def reattach_if_possible(self) -> None:
        """`reattach`, unless some parameters are still to follow the others to a new device."""
        if not self._is_attached() and len({member.local.device for member in self.members}) == 1:
            self.reattach()

    def reattach(self) -> None:
        """Take over whatever the user put in place of our parameters, and view the flats again."""
        before, are_on_meta = self.epoch(), any(shard.flat.is_meta for shard in self.shards)
        replaced = [member.adopt() for member in self.members]
        if len({member.local.device for member in self.members}) > 1:
            devices = ", ".join(f"{member.fqn} on {member.local.device}" for member in self.members)
            raise ConfigError(f"parameters of one unit are on several devices: {devices}. Move the module as a whole.")
        if any(replaced) or self._layout_changed():
            # Fresh flats also for a replaced parameter: the displaced one, or a state_dict, still views the old flat,
            # and may come back (weights swapped in for an evaluation).
            self.pack()
            self._advance(before)
            for member in self.members:
                member.was_on_meta |= are_on_meta
            return
        with torch.no_grad(), torch.inference_mode(False):
            for shard in self.shards:
                shard.attach()
        self._advance(before)
        unsharded_cache.reshard_resident(self)

    def _layout_changed(self) -> bool:
        moved = any(shard.flat.device != member.local.device for shard in self.shards for member in shard.members)
        return moved or self._layout() != tuple(shard.plan for shard in self.shards)
