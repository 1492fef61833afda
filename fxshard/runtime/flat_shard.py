"""One flat of a unit: its memory, and the DTensor parameters that are views of it.

[Note: the alias]
Per shard a unit owns one contiguous leaf tensor, the *flat*. A parameter that the user sees is a `DTensor(Shard(0))`
whose local tensor is a view of the flat, so an optimizer step through the DTensor is at once visible to the next
gather, without a copy. Users may break the alias: `load_state_dict(assign=True)`, `module.weight = ...`, `.to(dtype)`,
`requires_grad_()`. `Unit.check` compares per parameter what the alias rests on, and re-attaches or repacks where it
does not hold; it runs at every call, so it compares column by column, in loops that run in C. The DTensor always holds
the truth: its values are copied into the flat, never back.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, contains, eq, is_
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.ir import ops
from fxshard.ir.plan import ParameterSpec, ShardPlan
from fxshard.runtime import mesh_axes
from fxshard.runtime.extensions import Extension, around, has_hooks, rows_of
from fxshard.runtime.gradients import GradientSink
from fxshard.runtime.parameters import (
    HookRef,
    ParameterSettings,
    adopt_attributes,
    grad_dtype_of,
    local_of,
    publish_metadata,
    rows_first,
)
from fxshard.runtime.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from fxshard.runtime.unit import Unit

_PARAMETER, _VIEW, _POINTER = attrgetter("parameter"), attrgetter("view"), attrgetter("pointer")
_WRAPPER_STORAGE, _LOCAL = attrgetter("wrapper_storage"), attrgetter("_local_tensor")
_TRAINABLE, _REGISTERED = attrgetter("requires_grad"), attrgetter("_parameters")
_GRAD_DTYPE = attrgetter("grad_dtype")


class Home(NamedTuple):
    """Where a flat belongs."""

    unit: Unit
    shard: int


def home_of(flat: Tensor) -> Home | None:
    """The unit and shard index of a flat, `None` for any other tensor."""
    return getattr(flat, "_fxshard_home", None)


@dataclass(eq=False)
class Member:
    """One parameter of a unit."""

    fqn: str  # name from the outermost sharded module
    # every module that registers the parameter, with the name there (several when tied)
    owners: list[tuple[nn.Module, str]]
    parameter: nn.Parameter  # the DTensor parameter that is registered
    # the parameter that it replaced; the same reference for parameters that were tied
    original: weakref.ref[nn.Parameter]
    settings: ParameterSettings  # how it is sharded otherwise than its unit
    tensor_parallel: TensorParallel | None = None  # what it is besides, if it was a DTensor before
    extension: Extension | None = None  # what its tensor subclass says of its gathers, if that has hooks
    was_on_meta: bool = False  # whether it was sharded on the meta device, and has got values since
    view: Tensor = field(init=False)  # its local tensor, a view of the flat
    pointer: int = field(init=False)  # address of `view`
    # the storage object that torch made for the DTensor itself; `p.data = ...` replaces it
    wrapper_storage: torch.UntypedStorage = field(init=False)

    @property
    def local(self) -> Tensor:
        """This rank's rows, wherever they lie now."""
        return local_of(self.parameter)

    @property
    def spec(self) -> ParameterSpec:
        """What the layout needs to know."""
        p = self.parameter
        shape = self.tensor_parallel.shape if self.tensor_parallel else p.shape
        return ParameterSpec(
            fqn=self.fqn,
            shape=rows_first(shape, self.settings.dim),
            dtype=p.dtype,
            trainable=p.requires_grad,
            keeps_dtype=self.settings.keeps_dtype,
            grad_dtype=grad_dtype_of(p),
            input_bytes=self.extension.input_bytes if self.extension else (),
        )

    def extend(self, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
        """Let its tensor subclass say what is gathered of it; a ConfigError if it has hooks that cannot be used."""
        local = cast(DTensor, self.parameter)._local_tensor
        if hasattr(self, "view"):
            self.require_known_hooks()
        if self.extension is not None and not has_hooks(local):  # a state was assigned, which has plain tensors
            local = cast(DTensor, self.parameter)._local_tensor = around(rows_of(local), self.extension.local)
        if not has_hooks(local):
            return
        shape, dtype = self.parameter.shape, self.parameter.dtype
        if self.tensor_parallel or self.settings.dim or not shape:
            raise ConfigError(
                f"{self.fqn} is a {type(local).__name__} with fsdp_pre_all_gather, and is a scalar, is cut along "
                "another dimension than 0, or was a DTensor before fully_shard. That is not supported: make it a plain "
                "parameter, or leave out shard_placement_fn or parallelize_module for it."
            )
        on = mesh if mesh.ndim == 1 else mesh[cast("tuple[str, ...]", mesh.mesh_dim_names)[-1]]
        if policy.param_dtype is not None and not self.settings.keeps_dtype:
            dtype = policy.param_dtype
        self.extension = Extension(self.fqn, local, self.owners[0][0], on, policy, (shape, dtype))

    def require_known_hooks(self) -> None:
        """Raise a ConfigError if its tensor subclass has been changed since `fully_shard` looked at it."""
        local, known = cast(DTensor, self.parameter)._local_tensor, self.extension
        if has_hooks(local) and (known is None or type(local) is not type(known.local)):
            was = "a plain tensor" if known is None else f"a {type(known.local).__name__}"
            raise ConfigError(
                f"{self.fqn} was {was} at fully_shard, and is now a {type(local).__name__} with other hooks around its "
                "all_gather (fsdp_pre_all_gather). Make it the subclass before fully_shard."
            )

    def read_from(self, gathered: Tensor) -> Tensor:
        """Return what modules read, of what was gathered."""
        if dim := self.settings.dim:
            gathered = torch.ops.fxshard.whole(gathered, dim)
        return self.tensor_parallel.place(gathered) if self.tensor_parallel else gathered

    def attach(self, view: Tensor) -> None:
        """Make `view` the parameter's local tensor; the parameter stays the object that optimizers hold.

        A DTensor takes its storage offset from the local tensor it is built with, and Dynamo wants the two to agree
        when it traces an optimizer step. So the parameter is built anew and swapped in, where torch can swap: it
        cannot where something holds a weak reference, and hooks would be left behind.
        """
        old = self.parameter
        if self.extension is not None:
            view = self.extension.hold(view, cast(DTensor, old)._local_tensor)
        has_hooks = bool(old._backward_hooks or getattr(old, "_post_accumulate_grad_hooks", None))
        if old.storage_offset() == view.storage_offset() or has_hooks or weakref.getweakrefs(old):
            cast(DTensor, old)._local_tensor = view
        else:
            (grad, old.grad), grad_dtype = (old.grad, None), old.grad_dtype
            attributes = dict(old.__dict__)
            rebuilt = DTensor(view, cast(DTensor, old)._spec, requires_grad=False)
            torch.utils.swap_tensors(old, nn.Parameter(rebuilt, requires_grad=old.requires_grad))
            old.grad_dtype, old.grad = grad_dtype, grad
            adopt_attributes(old, attributes)
        self.view = cast(DTensor, self.parameter)._local_tensor
        self.pointer = self.view.data_ptr()
        self.wrapper_storage = self.parameter.untyped_storage()

    def registered(self) -> Iterator[nn.Parameter | None]:
        """The parameters that stand in its places now: others than ours where somebody has put them back since."""
        return (module._parameters.get(name) for module, name in self.owners)

    def adopt(self) -> bool:
        """Accept the parameter object that stands in its places now; whether it is another one."""
        found = {id(p): p for p in self.registered() if p is not None}
        new = [p for p in found.values() if p is not self.parameter] or list(found.values())
        if not new:
            raise ConfigError(
                f"{self.fqn} is sharded, but is gone from its module. Apply parametrizations and weight_norm, and "
                "delete parameters, before fully_shard."
            )
        if len(new) != 1:
            raise ConfigError(
                f"{self.fqn} is sharded, but {len(new)} different parameters now stand in its place (expected 1, the "
                "same one in every module that shares it). Assign the same parameter to all of them, or none."
            )
        self.require_shard(new[0])
        if getattr(new[0], "_local_tensor", None) is self.view and new[0].untyped_storage() is not self.wrapper_storage:
            raise ConfigError(
                f"{self.fqn}.data was assigned: torch replaces only the wrapper of a DTensor, so the new values are "
                "lost. Write into it instead: with torch.no_grad(): parameter.copy_(values)."
            )
        replaced, self.parameter = new[0] is not self.parameter, new[0]
        for module, name in self.owners:
            module._parameters[name] = new[0]
        return replaced

    def require_shard(self, new: object) -> None:
        """Raise a ConfigError unless `new` can stand in place of the parameter."""
        old = self.parameter
        if isinstance(new, Tensor) and new.grad_fn is not None:
            raise ConfigError(
                f"{self.fqn} is sharded: in its place stands a tensor that was computed ({type(new.grad_fn).__name__}; "
                "torch.func.functional_call?), and no gradient would flow through it. Change the parameter itself, "
                "under torch.no_grad(), and back after backward (noise on weights); or use a model that is not sharded "
                "where gradients through an update are wanted (MAML)."
            )
        mesh, placements = cast(DTensor, old).device_mesh, tuple(cast(DTensor, old).placements)
        fits = isinstance(new, DTensor) and tuple(new.shape) == tuple(old.shape)
        if fits and isinstance(new, DTensor) and new.device_mesh == mesh and tuple(new.placements) == placements:
            return
        found = f"{type(new).__name__}{list(getattr(new, 'shape', []))}"
        raise ConfigError(
            f"{self.fqn} is sharded: it can only be replaced by a DTensor of shape {list(old.shape)} with placements "
            f"{placements} on its mesh, got {found}. To change its values use parameter.copy_(dtensor) under "
            "torch.no_grad(), or load_state_dict; to replace it, do so before fully_shard. torch.func over parameters "
            "(gradients per sample, ensembles) needs a model that is not sharded."
        )


class FlatShard:
    """One flat, with the parameters that are views of it and the sink for its gradient; see [Note: the alias]."""

    def __init__(self, plan: ShardPlan, members: Sequence[Member], mesh: DeviceMesh, home: Home) -> None:
        """Make the flat, and views of it of the members, which are in the order of the plan's slots."""
        self.plan, self.members, self._mesh = plan, list(members), mesh
        places = [(module, name, member) for member in members for module, name in member.owners]
        self._owners, self._names, self._owned = zip(*places, strict=True)  # these never change
        # A Parameter, because Dynamo never makes a Parameter's length symbolic.
        device, offload = members[0].local.device, home.unit.settings.offload
        pinned = offload is not None and offload.pin_memory and mesh.device_type != "cpu" and device.type == "cpu"
        flat = torch.zeros(plan.numel, dtype=plan.dtype, device=device, pin_memory=pinned)
        self.flat = nn.Parameter(flat, requires_grad=plan.trainable)
        self.flat._fxshard_home = home  # type: ignore[attr-defined]
        self.flat.grad_dtype = plan.gradient_dtype
        self.sink = GradientSink([member.parameter for member in members], plan)
        self.sink.hook = home.unit.settings.all_reduce_hook
        if mesh_axes.num_replicas(mesh) > 1:
            self.sink.defers_all_reduce = home.unit.step.replica_sums.defers_all_reduce
            self.sink.take_apart = functools.partial(home.unit.step.replica_sums.take, home.shard)
        if plan.trainable:
            self.flat.register_post_accumulate_grad_hook(self.sink.hand_over)
        self.attach()

    def attach(self) -> None:
        """Copy the members' rows into the flat, and make the members views of it."""
        rank, world_size = mesh_axes.shard_rank(self._mesh), mesh_axes.num_shards(self._mesh)
        for slot, member in zip(self.plan.slots, self.members, strict=True):
            shape = slot.local_shape(rank, world_size)
            view = self.flat.detach()[slot.offset : slot.offset + math.prod(shape)].view(shape)
            if member.settings.dim:
                view = view.movedim(0, member.settings.dim)
            view.copy_(member.local)
            member.attach(view)
        self.sink.parameters = [member.parameter for member in self.members]

    def is_attached(self) -> bool:
        """Whether nothing that the alias rests on has changed; `requires_grad` counts with gradients on."""
        parameters, views = list(map(_PARAMETER, self.members)), list(map(_VIEW, self.members))
        registered = map(dict.get, map(_REGISTERED, self._owners), self._names)
        return (
            all(map(is_, map(_LOCAL, parameters), views))
            and all(map(eq, map(Tensor.data_ptr, views), map(_POINTER, self.members)))
            and (not torch.is_grad_enabled() or all(map(is_, map(_TRAINABLE, parameters), repeat(self.plan.trainable))))
            and all(map(contains, repeat((self.plan.gradient_dtype, None)), map(_GRAD_DTYPE, parameters)))
            and all(map(is_, map(Tensor.untyped_storage, parameters), map(_WRAPPER_STORAGE, self.members)))
            and all(map(is_, registered, map(_PARAMETER, self._owned)))
        )


# ---- the bytes that are gathered in place of parameters with hooks: [Note: extensions] in `extensions.py`


@dataclass(frozen=True, eq=False)
class Metadata:
    """What the first hooks of a shard gave beside the bytes; equal if the values are."""

    tensors: tuple[Tensor, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metadata) and all(map(torch.equal, self.tensors, other.tensors))

    __hash__ = None  # type: ignore[assignment]


class InputShard(FlatShard):
    """A flat without parameters: the all-gather inputs of those of another shard."""

    def __init__(self, plan: ShardPlan, encoded: FlatShard, home: Home) -> None:
        """Make room for the inputs of `encoded`."""
        self.plan, self.members, self._encoded = plan, [], encoded
        flat = torch.zeros(plan.numel, dtype=plan.dtype, device=encoded.flat.device)
        self.flat = nn.Parameter(flat, requires_grad=False)
        self.flat._fxshard_home = home  # type: ignore[attr-defined]
        self.sink = GradientSink([], plan)
        self.metadata = Metadata()  # of all of them, as they are now

    def attach(self) -> None:
        """Do nothing: no parameter is a view of it."""

    def is_attached(self) -> bool:
        """Whether nothing that the alias rests on has changed."""
        return True

    def encode(self) -> None:
        """Run the first hook of each parameter on its rows."""
        if self.flat.is_meta or torch_private.is_fake(self.flat):
            return
        for member, slots in self.inputs():
            extension = extension_of(member)
            parts = [self.plan.slots[i] for i in slots]
            # `.data` counts no write: code that saved the bytes finds those of the same rows.
            extension.encode([self.flat.data[part.offset : part.offset + part.numel] for part in parts])
            for module, name in member.owners:
                publish_metadata(module, name, extension.metadata)
        self.metadata = Metadata(tuple(t for member, _ in self.inputs() for t in extension_of(member).metadata))

    def refs(self, key: str) -> list[HookRef]:
        """What modules need to read each parameter; `key` is that of the markers of this shard."""
        refs = []
        for member, slots in self.inputs():
            extension = extension_of(member)
            texts = [ops.marker_text(key, i, self.plan.slots[i].shape, self.plan.dtype) for i in slots]
            refs.append(HookRef(extension.reader, self.flat, tuple(texts), tuple(extension.metadata)))
        return refs

    def inputs(self) -> Iterator[tuple[Member, range]]:
        """Each parameter that is encoded, and the slots of its inputs."""
        start = 0
        for member in self._encoded.members:
            end = start + len(extension_of(member).input_bytes)
            yield member, range(start, end)
            start = end

    def unshard(self, gathered: dict[tuple[int, int], Tensor], number: int) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Make whole parameters of gathered bytes; `number` is this shard's. Metadata may have changed until backward.

        Yields:
            (shard, slot) of the parameter, and the parameter.
        """
        encoded = self.plan.encodes
        assert encoded is not None
        for i, (member, slots) in enumerate(self.inputs()):
            extension = extension_of(member)
            yield (encoded, i), extension.unsharding([gathered[number, j] for j in slots], extension.metadata)


def extension_of(member: Member) -> Extension:
    """The extension of a parameter that has one."""
    assert member.extension is not None
    return member.extension
