"""What torch keeps private of its FSDP2, for `fxshard.adopt`: read its state off a model, and take it away.

Names differ between torch 2.11 (one group of parameters per call), 2.13 and 2.15 (several); only this file knows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state as composable_state
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from fxshard import torch_private
from fxshard.unit_settings import BackwardSettings, UnitSettings

ShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", None)  # from torch 2.13 on

Record = TypeVar("Record", UnitSettings, BackwardSettings)

# The package has a function of the module's name.
_contract = sys.modules["torch.distributed._composable.contract"]

HAS_MESH_DIMS = hasattr(fsdp, "DataParallelMeshDims")
"""Whether FSDP2 takes `dp_mesh_dims`: torch 2.13 and later."""


@dataclass(frozen=True)
class Fsdp2Parameter:
    """One sharded parameter."""

    key: Any  # torch's own record of it, which nothing else refers to for long
    parameter: nn.Parameter  # the DTensor that is registered
    places: list[tuple[nn.Module, str]]  # the modules that register it, with the name there; several where it is tied
    keeps_dtype: bool  # whether it is gathered in its own dtype, whatever its unit's policy says
    dim: int  # along which it is cut
    mesh: DeviceMesh  # the ranks that share it

    @property
    def within(self) -> tuple[DeviceMesh, Any] | None:
        """The mesh that it was on before, and `dp_mesh_dims`, if that names axes of it."""
        info = self.key.mesh_info
        return (info.spmd_mesh, info.dp_mesh_dims) if getattr(info, "is_spmd_mesh", False) else None

    @property
    def before(self) -> DTensorSpec | None:
        """How it lay before it was sharded, if it was a DTensor then."""
        return getattr(self.key, "_unsharded_dtensor_spec", None) or getattr(self.key, "_tp_spec", None)  # torch 2.11

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what its rows are gathered to."""
        return tuple(self.key._orig_size)


@dataclass(frozen=True, eq=False)
class Fsdp2Unit:
    """What one call of torch's `fully_shard` has left on a model."""

    state: FSDPState

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules given to the call."""
        return tuple(self.state._modules)

    @property
    def groups(self) -> list[Any]:
        """Its groups of parameters: none or one, but where parameters have meshes of their own."""
        found = getattr(self.state, "_fsdp_param_groups", None)
        if found is None:  # torch 2.11
            found = [self.state._fsdp_param_group] if self.state._fsdp_param_group is not None else []
        return list(found)

    @property
    def meshes(self) -> list[DeviceMesh]:
        """The ranks that share parameters: several meshes where parameters have meshes of their own."""
        return [cast(DeviceMesh, group.mesh_info.mesh) for group in self.groups]

    @property
    def settings(self) -> UnitSettings:
        """Its settings; prefetch lists have the first module of each unit."""
        state, groups = self.state, self.groups
        first = groups[0] if groups else None  # a setter sets all groups
        policy = getattr(first, "offload_policy", None)
        return replace(
            _public(UnitSettings, first),
            mp_policy=state._mp_policy,
            reshard_after_forward=self._reshard_after_forward(),
            offload=policy if isinstance(policy, CPUOffloadPolicy) else None,
            forward_prefetch=tuple(other._modules[0] for other in state._states_to_forward_prefetch),
            backward_prefetch=tuple(other._modules[0] for other in state._states_to_backward_prefetch),
            all_gather_comm=_unless_torchs(getattr(first, "_all_gather_comm", None)),
            reduce_scatter_comm=_unless_torchs(getattr(first, "_reduce_scatter_comm", None)),
            uses_reduce_group=any(getattr(each.mesh_info, "reduce_scatter_process_group", None) for each in groups),
            all_reduce_hook=getattr(first, "_all_reduce_hook", None),
        )

    @property
    def of_model(self) -> BackwardSettings:
        """The settings of the model; FSDP2 reads those of the outermost unit."""
        return _public(BackwardSettings, self.state._state_ctx)

    def _reshard_after_forward(self) -> bool | int | None:
        if self.state._auto_reshard_after_forward or not self.groups:
            return None
        for group in self.groups:
            if group._use_post_forward_mesh:
                return int(group.post_forward_mesh_info.shard_mesh_size)
        return bool(self.groups[0]._reshard_after_forward)

    def parameters(self) -> list[Fsdp2Parameter]:
        """Return its parameters in registration order, as they stand in their modules now."""
        found = []
        for group in self.groups:
            for each in group.fsdp_params:
                info = each._module_info
                others = zip(info.shared_modules, info.shared_param_names, strict=True)
                places = [(info.module, info.param_name), *others]
                policy = self.state._mp_policy
                own = getattr(each, "mp_policy", policy)  # from torch 2.15 on
                keeps_dtype = own.param_dtype != policy.param_dtype
                parameter, dim = info.module._parameters[info.param_name], each.fsdp_placement.dim
                found.append(Fsdp2Parameter(each, parameter, places, keeps_dtype, dim, group.mesh_info.mesh))
        return found

    def obstacles(self) -> list[str]:
        """Say what of its settings and its moment fxshard cannot take over, in FSDP2's words."""
        groups, params = self.groups, [each for group in self.groups for each in group.fsdp_params]
        if not all(_has_our_axes(group.mesh_info) for group in groups):
            return ["a mesh that is not (shard) or (replicate, shard)"]
        return [what for what, found in self._checks(groups, params).items() if found]

    def _checks(self, groups: list[Any], params: list[Any]) -> dict[str, bool]:
        def is_set(name: str) -> bool:
            return any(getattr(group, name, None) is not None for group in groups)

        settings = self.settings
        return {
            "reduced gradients that wait for an all_reduce": is_set("_partial_reduce_output"),
            "set_all_reduce_hook with a stream": is_set("_all_reduce_hook_stream"),
            "set_all_reduce_hook of offloaded parameters": is_set("_all_reduce_hook")
            and settings.offload is not None
            and any(mesh.device_type != "cpu" for mesh in self.meshes),
            "set_custom_all_gather or set_custom_reduce_scatter with an object that has no allocate": any(
                comm is not None and not (callable(comm) and hasattr(comm, "allocate"))
                for comm in (settings.all_gather_comm, settings.reduce_scatter_comm)
            ),
            "an extension (fsdp_pre_all_gather on a tensor subclass)": any(
                hasattr(each.sharded_param._local_tensor, "fsdp_pre_all_gather") for each in params
            ),
            "gradients added up without gradient sync": any(_has_unreduced_gradient(each) for each in params),
            "a forward or backward that has not ended": self.state._training_state.name != "IDLE",
        }

    def reshard(self) -> None:
        """Free what is gathered, so that the sharded parameters are registered."""
        for group in self.groups:
            group.reshard()

    def remove(self) -> None:
        """Take FSDP2 off its modules: hooks, registered forward methods, classes and marks. Parameters stay."""
        self.state._pre_forward_hook_handle.remove()
        self.state._post_forward_hook_handle.remove()
        for group in self.groups:
            for each in group.fsdp_params:
                each._post_load_hook_handle.remove()
                vars(each).clear()  # it is in a cycle, and would keep the rows until the next garbage collection
            for handles in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for handle in handles.values():
                    handle.remove()
                handles.clear()
            group.fsdp_params.clear()
        for module in self.modules:
            cls = type(module)
            module.__class__ = cls.__mro__[cls._orig_cls_mro_index]  # type: ignore[attr-defined]
            composable_state._module_state_mapping.pop(module, None)
            states = module.__dict__.get(_contract.STATE_KEY, {})
            for call in [call for call, state in states.items() if state is self.state]:
                del states[call]
            module.__dict__.get(_contract.REGISTRY_KEY, {}).pop("fully_shard", None)


def _public(kind: type[Record], source: object) -> Record:
    named = [each for each in fields(kind) if each.metadata]
    found: dict[str, Any] = {each.name: getattr(source, each.metadata["fsdp2"], each.default) for each in named}
    return kind(**found)


def _unless_torchs(comm: Any) -> Any:
    return None if type(comm).__module__.startswith("torch.") else comm


def is_our_kind(mesh_info: Any) -> bool:
    """Whether a mesh for single parameters has an axis that shards, and at most one before it, which replicates."""
    return not getattr(mesh_info, "is_spmd_mesh", False) and _has_our_axes(mesh_info)


def _has_our_axes(mesh_info: Any) -> bool:
    if type(mesh_info) is HSDPMeshInfo:
        return mesh_info.mesh.ndim == 2 and (mesh_info.replicate_mesh_dim, mesh_info.shard_mesh_dim) == (0, 1)
    return type(mesh_info) is FSDPMeshInfo and mesh_info.mesh.ndim == 1


def placement_on(mesh: DeviceMesh) -> Callable[[int], Any]:
    """Return what makes, of a dimension, what `shard_placement_fn` returns for a parameter on a mesh of its own."""
    info = FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, 1, 0)  # one for all: FSDP2 insists
    return lambda dim: ShardPlacementResult(Shard(dim), info)


def _has_unreduced_gradient(param: Any) -> bool:
    unsharded = getattr(param, "_unsharded_param", None)  # made by the first gather
    return param.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


def units_of(model: nn.Module) -> list[Fsdp2Unit]:
    """Return what torch's `fully_shard` has left on `model` and the modules inside, in `named_modules` order."""
    found: dict[int, Fsdp2Unit] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule) and (state := _get_module_fsdp_state(module)) is not None:
            found.setdefault(id(state), Fsdp2Unit(state))
    return list(found.values())


def spec_of_rows(before: DTensorSpec, mesh: DeviceMesh, dim: int = 0) -> DTensorSpec:
    """Return how FSDP2 places a parameter that is a DTensor of that spec, when it cuts it along `dim` over `mesh`."""
    splits = before.num_shards_map[dim] if before.ndim else 1
    rows = _StridedShard(dim, split_factor=splits) if splits > 1 else Shard(dim) if before.ndim else Replicate()
    placements: tuple[Placement, ...] = (*(Replicate() for _ in range(mesh.ndim - 1)), rows, *before.placements)
    return DTensorSpec(_concatenated([mesh, before.mesh]), placements, tensor_meta=before.tensor_meta)


def _concatenated(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh with the axes of all; a mesh looks into a tensor of its ranks, which no mode may fake."""
    with torch_private.without_modes():
        return DeviceMesh._concatenate(list(meshes))


def spec_within(before: DTensorSpec, mesh: DeviceMesh, dim: int, dims: Any) -> DTensorSpec:
    """Do the same for a parameter that is whole on the axes of `mesh`, which `dims` (dp_mesh_dims) names.

    Several axes that shard become one, the last of `mesh`, as there.
    """
    names = before.mesh.mesh_dim_names or ()
    placements = list(before.placements)
    for axis in map(names.index, dims.shard_names):
        after = range(axis + 1, len(placements))
        splits = math.prod(before.mesh.size(i) for i in after if before.placements[i].is_shard(dim))
        rows = _StridedShard(dim, split_factor=splits) if splits > 1 else Shard(dim)
        placements[axis] = rows if before.ndim else Replicate()
    if len(dims.shard_names) == 1:
        return DTensorSpec(before.mesh, tuple(placements), tensor_meta=before.tensor_meta)
    outer = [Replicate() for _ in range(mesh.ndim - 1)]
    gathered: list[tuple[DeviceMesh, list[Placement]]] = []
    for name, placement in zip(names, placements, strict=True):
        if name == dims.shard_names[0]:
            gathered.append((mesh, [*outer, placement]))
        elif name not in (*dims.shard_names, *dims.replicate_names):
            gathered.append((before.mesh[name], [placement]))
    flattened = _concatenated([part for part, _ in gathered])
    return DTensorSpec(flattened, tuple(p for _, each in gathered for p in each), tensor_meta=before.tensor_meta)


def is_mesh_dims(value: object) -> bool:
    """Return whether a value is what `dp_mesh_dims` takes, which torch 2.11 does not have."""
    return isinstance(value, getattr(fsdp, "DataParallelMeshDims", ()))


def data_mesh(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """Return the axes of `mesh` that `dims` (dp_mesh_dims) names: (shard) or (replicate, shard), several as one."""

    def axis(names: tuple[str, ...]) -> DeviceMesh:
        return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))

    shard = axis(dims.shard_names)
    return _concatenated([axis(dims.replicate_names), shard]) if dims.replicate_names else shard


def group_along(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the group of the ranks that differ from this one along some axes of a mesh only; collective if new."""
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    names = tuple(cast("tuple[str, ...]", mesh.mesh_dim_names)[axis] for axis in axes)
    return (mesh if names == mesh.mesh_dim_names else mesh[names])._flatten().get_group()


def why_not_beside(mesh: DeviceMesh, other: DeviceMesh) -> str | None:
    """Say why no mesh has the axes of both, those of `mesh` first; `None` if one has."""
    if mesh.mesh_dim_names is None or other.mesh_dim_names is None:
        return "an axis has no name"
    if common := [name for name in mesh.mesh_dim_names if name in other.mesh_dim_names]:
        return f"both have the axis {', '.join(common)}"
    try:
        _concatenated([mesh, other])
    except RuntimeError as error:
        return str(error)
    return None


def outer_root(units: Sequence[Fsdp2Unit]) -> nn.Module | None:
    """Return the root that FSDP2 has run these units under, if it is none of them."""
    ours = {id(unit.state) for unit in units}
    for unit in units:
        for state in unit.state._state_ctx.all_states:
            if state._is_root and id(state) not in ours:
                return cast(nn.Module, state._modules[0])
    return None


def forward_methods(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name of each method that `register_fsdp_forward_method` has wrapped, and what it was before."""
    inner = {const for const in register_fsdp_forward_method.__code__.co_consts if hasattr(const, "co_name")}
    for name, method in list(module.__dict__.items()):
        function: Any = getattr(method, "__func__", None)
        if getattr(function, "__code__", None) in inner:
            yield name, function.__wrapped__


def unmark(model: nn.Module) -> None:
    """Remove the marks for Dynamo that FSDP2 leaves on every module that it manages."""
    for module in model.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(mark, None)
