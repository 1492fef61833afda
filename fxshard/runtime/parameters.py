"""DTensor parameters: how they are made of rows, and what they are made of.

[Note: one guard per parameter]
Dynamo guards on everything that a traced getter reads, and evaluates the guards at every call. So beside the
`ParameterRef`, which eager reads use, stands the same in one string: a string is one guard, where a tuple of four
fields is eight. It is an argument of the op that Dynamo records, and is taken apart after that: [Note: markers].

[Note: memory order]
A parameter that is cut along another dimension than the first lies in its flat with that dimension first, so its local
tensor is not contiguous. What an optimizer makes for it is alike. What comes from elsewhere is not: state of a file or
of FSDP2, and all that there is when `adopt` or `release` moves the parameter to other memory. Fused kernels walk
through the memory of parameter, gradient and state side by side, and on the CPU torch does not check that the orders
agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer

from fxshard.ir import ops
from fxshard.ir.plan import Slot
from fxshard.runtime import extensions, mesh_axes

REFS = "_fxshard_refs"
"""Key in a module's `__dict__`: name of each sharded parameter -> `ParameterRef`."""

TRACED = "_fxshard_traced"
"""Key in a module's `__dict__`: name -> `ParameterRef.text`, `traced_key(name, "flat")` -> its flat; for tracing."""


class ParameterSettings(NamedTuple):
    """How one parameter is sharded otherwise than its unit."""

    keeps_dtype: bool = False  # whether it is gathered in its own dtype, whatever the policy's `param_dtype`
    dim: int = 0  # along which it is cut; another one than 0 comes first in its flat
    mesh: DeviceMesh | None = None  # over which it is sharded, if not over that of the others


Layout = tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...], tuple[Placement, ...] | None]
"""Mesh, placements, shape and strides of a DTensor, and the placements of its gradient where they are others."""


class HookRef(NamedTuple):
    """What reading a parameter with hooks needs besides; see [Note: extensions] in `runtime/extensions.py`."""

    reader: Callable[..., Tensor]
    flat: Tensor  # of the all-gather inputs
    texts: tuple[str, ...]  # of the markers of these
    metadata: tuple[Tensor, ...]


class ParameterRef(NamedTuple):
    """All that reading a parameter needs."""

    flat: Tensor
    key: str
    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int = 0
    layout: Layout | None = None  # of the DTensor that it is when it is gathered, if it is tensor-parallel
    device: str = ""  # on which it is gathered, if the flat is on another one
    hooks: HookRef | None = None  # if a tensor subclass says what is gathered

    @property
    def text(self) -> str:
        """All but the flat."""
        return ops.marker_text(self.key, self.slot, self.shape, self.dtype, self.device)


def publish(module: nn.Module, name: str, ref: ParameterRef) -> None:
    """Let the module's getter of `name` find the parameter."""
    module.__dict__.setdefault(REFS, {})[name] = ref
    traced = module.__dict__.setdefault(TRACED, {})
    traced.update({name: ref.text, traced_key(name, "flat"): ref.flat})
    if ref.layout is not None:
        traced[traced_key(name, "layout")] = ref.layout
    if ref.hooks is not None:
        traced |= {traced_key(name, "reader"): ref.hooks.reader, traced_key(name, "inputs"): ref.hooks.flat}
        traced |= {traced_key(name, f"input{i}"): text for i, text in enumerate(ref.hooks.texts)}
        publish_metadata(module, name, ref.hooks.metadata)


def publish_metadata(module: nn.Module, name: str, metadata: Sequence[Tensor]) -> None:
    """Let the module's getter of `name` find what the first hook has given beside its inputs."""
    module.__dict__[TRACED].update({traced_key(name, f"metadata{i}"): tensor for i, tensor in enumerate(metadata)})


def traced_key(name: str, what: str) -> str:
    """Return where something of a parameter stands besides its text, such as its "flat": no parameter is called so."""
    return f"{name}.{what}"


def placed(local: Tensor, layout: Layout) -> Tensor:
    """The DTensor whose part on this rank is `local`; Dynamo traces this."""
    mesh, placements, shape, stride, of_grad = layout
    if of_grad is None:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride, grad_placements=of_grad
    )


def local_of(parameter: Tensor) -> Tensor:
    """The local tensor of a DTensor parameter; the rows, if that is a subclass with hooks."""
    return extensions.rows_of(cast(DTensor, parameter)._local_tensor)


def like_local_of(parameter: Tensor, values: Tensor) -> Tensor:
    """A tensor subclass with hooks around `values`, if the local tensor of a DTensor parameter is one."""
    return extensions.around(values, cast(DTensor, parameter)._local_tensor)


def full_tensor_of(dtensor: DTensor) -> Tensor:
    """The whole of a DTensor, where its rows are; those of an offloaded one are gathered on the mesh's device."""
    rows, device_type = local_of(dtensor), dtensor.device_mesh.device_type
    if rows.device.type == device_type and rows is dtensor._local_tensor:
        return dtensor.full_tensor()
    return DTensor(rows.to(device_type), dtensor._spec, requires_grad=False).full_tensor().to(rows.device)


def adopt_attributes(parameter: nn.Parameter, attributes: Mapping[str, Any]) -> None:
    """Keep what users hang on parameters (`p.no_decay = True`) when the object behind them changes."""
    for name, value in attributes.items():
        parameter.__dict__.setdefault(name, value)


def grad_dtype_of(parameter: Tensor) -> torch.dtype | None:
    """What the user has said of the dtype of its gradients, `None` for its own."""
    return None if parameter.grad_dtype is parameter.dtype else parameter.grad_dtype


def rows_first(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return a shape with the dimension along which a parameter is cut before the others."""
    return tuple(shape) if dim == 0 else (shape[dim], *shape[:dim], *shape[dim + 1 :])


def shard_rows(parameter: Tensor, rank: int, world_size: int, dim: int = 0) -> Tensor:
    """The rows of a full parameter that `rank` keeps, or the columns along another `dim`."""
    if parameter.dim() == 0:
        return parameter.detach()
    slot = Slot(fqn="", shape=tuple(parameter.shape[dim:]), offset=0, numel=0)
    first, last = slot.rows_of(rank, world_size)
    return parameter.detach().narrow(dim, first, last - first)


def as_dtensor(full: Tensor, rows: Tensor, mesh: DeviceMesh, dim: int = 0, spec: Any = None) -> nn.Parameter:
    """The DTensor parameter whose local tensor is `rows` of `full`, cut along `dim`; or as `spec` says."""
    if spec is not None:
        return nn.Parameter(DTensor(rows, spec, requires_grad=False), requires_grad=full.requires_grad)
    placements = mesh_axes.placements(mesh, is_scalar=full.dim() == 0, dim=dim)
    shape = full.shape
    stride = torch.empty(shape, device="meta").stride()
    # `from_local` would move it to the mesh's device, and make a view of a subclass with hooks.
    is_elsewhere = rows.device.type not in (mesh.device_type, "meta") or extensions.has_hooks(rows)
    local = extensions.rows_of(rows).to("meta") if is_elsewhere else rows
    dtensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    if is_elsewhere:
        dtensor = DTensor(rows, dtensor._spec, requires_grad=False)
    return nn.Parameter(dtensor, requires_grad=full.requires_grad)


def without_offset(dtensor: DTensor) -> DTensor:
    """The same rows of the same memory, plain, in a DTensor that itself begins at offset 0.

    A DTensor has no memory of its own, only the storage offset of the local tensor that it was made with. From another
    one than 0 torch's stager of asynchronous checkpoints concludes that there is memory, and fails.
    """
    local = local_of(dtensor)
    if dtensor.storage_offset() == 0 and local is dtensor._local_tensor:
        return dtensor
    begins_at_0 = DTensor(local.new_empty(0), dtensor._spec, requires_grad=False)
    begins_at_0._local_tensor = local
    return begins_at_0


@torch.no_grad()
def lay_as_parameters(optimizer: Optimizer) -> None:
    """Give gradients and state the strides of their parameters; see [Note: memory order]."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)):
        like = local_of(parameter)
        if isinstance(parameter.grad, DTensor) and _lies_otherwise(parameter.grad, like):
            parameter.grad = _laid(parameter.grad, like)
        state = optimizer.state.get(parameter, {})
        for name, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and _lies_otherwise(value, like):
                state[name] = _laid(value, like)


def _lies_otherwise(value: Tensor, like: Tensor) -> bool:
    local = local_of(value) if isinstance(value, DTensor) else value
    return local.shape == like.shape and local.stride() != like.stride() and local.numel() > 0


def _laid(value: Tensor, like: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)
    return DTensor(_laid(local_of(value), like), value._spec, requires_grad=False)
