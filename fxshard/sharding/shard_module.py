"""The engine under `fully_shard`: which parameters make a unit, and what may be sharded at all."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from fxshard.errors import ConfigError
from fxshard.runtime import gloo, mesh_axes, process_groups
from fxshard.runtime.extensions import around, has_hooks, rows_of
from fxshard.runtime.flat_shard import Member, home_of
from fxshard.runtime.parameters import REFS, ParameterSettings, adopt_attributes, as_dtensor, local_of, shard_rows
from fxshard.runtime.step_hooks import ModelContext
from fxshard.runtime.tensor_parallel import WholeMesh, require_parallel_beside, require_whole_on, tensor_parallel
from fxshard.runtime.unit import Unit
from fxshard.sharding.fixed_places import PARAMETRIZED
from fxshard.sharding.mesh import resharding
from fxshard.sharding.no_sync import NO_SYNC
from fxshard.sharding.per_parameter import Chooser, like_its_unit
from fxshard.sharding.sharded_module import STATE, ModuleState, state_of, units_under
from fxshard.sharding.swapped_class import swap_class
from fxshard.unit_settings import UnitSettings

Taken = tuple[nn.Parameter, list[tuple[nn.Module, str]]]
"""A parameter that is to be sharded, and where it is registered."""


def managed_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules under `roots` outside of nested sharded modules, in `named_modules` order, each once."""
    found: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> None:
        if id(module) in found or (state_of(module) is not None and module not in roots):
            return
        found[id(module)] = module
        for child in module.children():
            visit(child)

    for root in roots:
        visit(root)
    return list(found.values())


def shard(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    told: UnitSettings,
    *,
    ignored: Iterable[nn.Parameter] = (),
    settings_of: Chooser = like_its_unit,
    within: WholeMesh | None = None,
) -> tuple[Unit, ...]:
    """Make one unit of the parameters under `modules` that no unit has taken, and swap the modules' classes.

    `settings_of` is asked once for each of them; there are as many units as meshes for which it asks. With `within`
    those that have no mesh of their own are DTensors on a mesh of which `mesh` has some axes. All checks come first: an
    error leaves the modules untouched.
    """
    skip = frozenset(ignored)
    paths = module_paths(modules)
    taken = {join(paths[id(places[0][0])], places[0][1]): (param, places) for param, places in _owners(modules, skip)}
    require_shardable({fqn: param for fqn, (param, _) in taken.items()}, mesh)
    _require_untaken(modules, taken)
    _require_untied(taken, [unit for module in modules for unit in units_under(module)])
    _require_whole_everywhere(modules, taken, skip)
    _require_dense_gradients(modules)
    settings = {fqn: settings_of(fqn, param) for fqn, (param, _) in taken.items()}
    parts = _by_mesh(taken, settings, mesh)
    for on, part in parts.items():
        given = {fqn: param for fqn, (param, _) in part.items()}
        if within is not None and on is mesh:
            require_whole_on(given, within)
        else:
            require_parallel_beside(given, on)
    reshards = {on: resharding(on, told.reshard_after_forward) for on in (mesh, *parts)}
    _move_buffers(modules, mesh)
    units: tuple[Unit, ...] = ()
    for on, part in parts.items():
        device_type, own = "cpu" if told.offload else on.device_type, replace(told, reshard_after_forward=reshards[on])
        members = _members(part, settings, on, device_type, within if on is mesh else None)
        units += (Unit(modules, members, on, own, subgroup_for(on, own)),)
    for member in (member for unit in units for member in unit.members):
        for module, name in member.owners:
            module._parameters[name] = member.parameter
    install(modules, units, told.mp_policy)
    ignore(modules, skip)
    return units


def _by_mesh(
    taken: dict[str, Taken], settings: dict[str, ParameterSettings], mesh: DeviceMesh
) -> dict[DeviceMesh, dict[str, Taken]]:
    parts: dict[DeviceMesh, dict[str, Taken]] = {}
    for fqn, each in taken.items():
        parts.setdefault(settings[fqn].mesh or mesh, {})[fqn] = each
    return parts


def ignore(modules: Sequence[nn.Module], parameters: frozenset[nn.Parameter]) -> None:
    """Tell all units under `modules` what stays whole on purpose: a graph may hold those of inner modules alone."""
    for unit in (unit for module in modules for unit in units_under(module)):
        unit.settings = replace(unit.settings, ignored=unit.settings.ignored | parameters)


def install(modules: Sequence[nn.Module], units: tuple[Unit, ...], mp_policy: MixedPrecisionPolicy) -> None:
    """Make sharded modules of `modules`, and name all units inside from there; the widest one as the modules."""
    units = tuple(sorted(units, key=lambda unit: -unit.mesh.size()))
    state = ModuleState(units, mp_policy)
    for module in modules:
        module.__dict__[STATE] = state
    owners = {id(owner): owner for unit in units for member in unit.members for owner, _ in member.owners}
    for owner in (*owners.values(), *_changeable(modules, units)):
        swap_class(owner, is_unit=False)
    for module in modules:
        swap_class(module, is_unit=True)
    _name_units(modules, state)


def _changeable(modules: Sequence[nn.Module], units: Sequence[Unit]) -> list[nn.Module]:
    """Return the modules that could be asked to change parameters: embeddings to resize, and parametrizations."""
    members = [(owner, member) for unit in units for member in unit.members for owner, _ in member.owners]
    found = []
    for module in managed_modules(modules):
        lists = cast(nn.ModuleDict, module.parametrizations).items() if is_parametrized(module) else ()
        computed = {name: [member for owner, member in members if owner is each] for name, each in lists}
        if any(computed.values()):
            module.__dict__[PARAMETRIZED] = {name: each for name, each in computed.items() if each}
        if any(computed.values()) or hasattr(type(module), "resize_token_embeddings"):
            found.append(module)
    return found


def _members(
    taken: dict[str, Taken],
    settings: dict[str, ParameterSettings],
    mesh: DeviceMesh,
    device_type: str,
    within: WholeMesh | None,
) -> list[Member]:
    rank, world_size = mesh_axes.shard_rank(mesh), mesh_axes.num_shards(mesh)
    members = []
    with torch.no_grad(), torch.inference_mode(False):
        for fqn, (param, places) in taken.items():
            full = _on_device(param, device_type)
            dim = settings[fqn].dim
            parallel = tensor_parallel(full, mesh, dim, within)
            rows = shard_rows(local_of(full) if parallel else rows_of(full), rank, world_size, dim)
            if has_hooks(full):
                rows = around(rows, full)
            dtensor = as_dtensor(full, rows, mesh, dim, parallel.spec if parallel else None)
            adopt_attributes(dtensor, param.__dict__)
            dtensor.grad_dtype = param.grad_dtype
            members.append(Member(fqn, places, dtensor, weakref.ref(param), settings[fqn], parallel))
    gloo.warn_of_two_threads(mesh)
    return members


def subgroup_for(mesh: DeviceMesh, told: UnitSettings) -> dist.ProcessGroup | None:
    """Return the ranks that share the parameters between forward and backward, if not all of the mesh's do."""
    return process_groups.subgroup_of(mesh, told.subgroup_size) if told.subgroup_size else None


def _owners(modules: Sequence[nn.Module], skip: frozenset[nn.Parameter]) -> list[Taken]:
    owners: dict[int, Taken] = {}
    for module in managed_modules(modules):
        refs = module.__dict__.get(REFS, {})
        for name, param in module._parameters.items():
            if param is not None and param not in skip and name not in refs:
                owners.setdefault(id(param), (param, []))[1].append((module, name))
    return list(owners.values())


def ignored_under(modules: Sequence[nn.Module]) -> frozenset[nn.Parameter]:
    """Return the parameters under `modules`, outside of nested sharded modules, that are whole."""
    found = (p for module in managed_modules(modules) for p in module._parameters.values() if p is not None)
    return frozenset(p for p in found if not isinstance(p, DTensor))


def _require_dense_gradients(modules: Sequence[nn.Module]) -> None:
    paths = module_paths(modules)
    sparse = [paths[id(m)] for m in managed_modules(modules) if getattr(m, "sparse", False) is True]
    if sparse:
        raise ConfigError(
            f"embeddings with sparse=True cannot be sharded: {', '.join(sparse)}. Build them with sparse=False."
        )


def _require_untaken(modules: Sequence[nn.Module], taken: dict[str, Any]) -> None:
    refs = [ref for module in managed_modules(modules) for ref in module.__dict__.get(REFS, {}).values()]
    if refs and not taken:
        home = home_of(refs[0].flat)
        outer = type(home.unit.modules[0]).__name__ if home else "an outer module"
        raise ConfigError(
            f"fully_shard({type(modules[0]).__name__}): its parameters are in the unit of {outer} already. Call "
            "fully_shard bottom-up: inner modules first, the outermost last."
        )


def _require_untied(taken: dict[str, Taken], nested: Sequence[Unit]) -> None:
    originals: dict[int, str] = {}
    # All weak references to one object are one object, also after its death, so their ids can be compared.
    found = [(m.original, m.fqn) for unit in nested for m in unit.members]
    found += [(weakref.ref(param), fqn) for fqn, (param, _) in taken.items()]
    for original, fqn in found:
        if id(original) in originals:
            raise ConfigError(
                f"{fqn} and {originals[id(original)]} are one parameter (tied), but would be in two units. Give both "
                "modules to one call: fully_shard([a, b]), or leave both to the root."
            )
        originals[id(original)] = fqn


def _require_whole_everywhere(modules: Sequence[nn.Module], taken: dict[str, Any], skip: frozenset[Any]) -> None:
    """Raise if a parameter would be whole at one of its places and sharded at another: each would train a copy."""
    paths = module_paths(modules)
    registered = [(m, n, p) for root in modules for m in root.modules() for n, p in m._parameters.items()]
    outer = {id(param): fqn for fqn, (param, places) in taken.items()}
    places = {(id(module), name) for _, places in taken.values() for module, name in places}
    whole = [(join(paths[id(m)], n), p) for m, n, p in registered if p is not None and (id(m), n) not in places]
    # Weak references to one object are one object.
    inner = {id(m.original): m.fqn for module in modules for unit in units_under(module) for m in unit.members}
    mixed = [f"{outer[id(param)]} and {fqn}" for fqn, param in whole if id(param) in outer]
    mixed += [f"{inner[id(weakref.ref(p))]} and {n}" for n, p in whole if p in skip and id(weakref.ref(p)) in inner]
    if mixed:
        raise ConfigError(
            f"one parameter (tied), of which only one place is to be ignored: {', '.join(mixed)}. Pass it in "
            "ignored_params of every fully_shard that reaches it, or of none."
        )


def module_paths(roots: Sequence[nn.Module]) -> dict[int, str]:
    """Map module id -> its name from the roots; several roots are numbered."""
    paths: dict[int, str] = {}
    for i, root in enumerate(roots):
        prefix = f"{i}" if len(roots) > 1 else ""
        for path, module in root.named_modules():
            paths.setdefault(id(module), join(prefix, path))
    return paths


def join(*parts: str) -> str:
    """Join the parts of a dotted name that are not empty."""
    return ".".join(part for part in parts if part)


def _on_device(tensor: Tensor, device_type: str) -> Tensor:
    if tensor.device.type in (device_type, "meta"):
        return tensor
    return tensor.detach().to(device_type).requires_grad_(tensor.requires_grad)


def _move_buffers(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    for module in managed_modules(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _on_device(buffer, mesh.device_type)


def require_shardable(parameters: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """Raise a ConfigError with all parameters that are complex, sparse or quantised, or on several devices."""
    wrong = {
        "uninitialised (lazy)": [n for n, p in parameters.items() if isinstance(p, UninitializedParameter)],
        "complex": [n for n, p in parameters.items() if p.is_complex()],
        "sparse": [n for n, p in parameters.items() if p.layout != torch.strided],
    }
    for kind, names in wrong.items():
        if names:
            raise ConfigError(
                f"{kind} parameters cannot be sharded: {', '.join(names)}. Pass them in ignored_params, or make them "
                "real, dense and initialised first (a lazy module by one forward)."
            )
    _require_plain_gradients(parameters)
    devices = {n: p.device.type for n, p in parameters.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ConfigError(f"parameters of one unit are on several devices: {where}. Move the module to one device.")
    elsewhere = [f"{n} on {d}" for n, d in devices.items() if d not in (mesh.device_type, "meta", "cpu")]
    if elsewhere:
        raise ConfigError(f"the mesh is on {mesh.device_type!r}, but: {', '.join(elsewhere)}. Use one device type.")


def _require_plain_gradients(parameters: dict[str, nn.Parameter]) -> None:
    if hooked := [n for n, p in parameters.items() if p._backward_hooks or p._post_accumulate_grad_hooks]:
        raise ConfigError(
            f"parameters have gradient hooks from before they are sharded: {', '.join(hooked)}. A hook would be called "
            "with a shard in place of the whole gradient. Register it on the same parameter of model.parameters() "
            "after fully_shard: it gets the sharded gradient, a DTensor. Remove the one from before (handle.remove())."
        )


def _name_units(modules: Sequence[nn.Module], state: ModuleState) -> None:
    """Name all units under `modules` from there, and mark those inside as not the root."""
    paths = module_paths(modules)
    nested = {id(unit): unit for module in modules for unit in units_under(module)}
    for unit in nested.values():
        unit.is_root = unit in state.units
        fqns = [join(paths.get(id(owner), ""), name) for owner, name in (m.owners[0] for m in unit.members)]
        is_first = cast(ModuleState, state_of(unit.modules[0])).units[0] is unit
        mesh_suffix = "" if is_first else f"<{'_'.join(unit.mesh.mesh_dim_names or ('mesh',))}>"
        unit.rename(join(",".join(filter(None, (paths.get(id(m), "") for m in unit.modules))), mesh_suffix), fqns)
    model = ModelContext(tuple(nested.values()))
    for unit in nested.values():
        unit.model = model
        if unit.settings.forward_prefetch or unit.settings.backward_prefetch:
            unit.publish()  # the lists name other units, which have new names only now
        if any(module.__dict__.get(NO_SYNC) for module in unit.modules):
            unit.set_sync(False)
    state.nested = tuple(nested.values())
