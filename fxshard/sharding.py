"""The engine under `fully_shard`: which parameters make a unit, and what becomes of the modules that own them.

[Note: swapped classes]
A module that owns a sharded parameter gets a subclass of its class with a property per parameter (`ParameterOwner`);
a module that was given to `fully_shard` also gets the FSDP methods and a call that opens a scope (`ShardedModule`).
`isinstance` keeps working, and Dynamo's type guards tell a sharded module from a plain one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from fxshard.errors import ConfigError
from fxshard.ir import fake
from fxshard.runtime import eager
from fxshard.runtime.unit import REFS, Member, ParameterRef, Unit, as_dtensor, require_shard, shard_rows

STATE = "_fxshard_state"
"""Key in the `__dict__` of a module that was given to `fully_shard`."""


@dataclass(eq=False)
class ModuleState:
    """What `fully_shard` leaves on a module.

    Attributes:
        units: the units made by that call (none, if all parameters were taken already).
        nested: those, and the units of all modules inside.
        mp_policy: casts of the module's inputs and outputs.
    """

    units: tuple[Unit, ...]
    mp_policy: MixedPrecisionPolicy
    nested: tuple[Unit, ...] = field(default=())


def state_of(module: nn.Module) -> ModuleState | None:
    """The state of a module that was given to `fully_shard`, else `None`."""
    return cast("ModuleState | None", module.__dict__.get(STATE))


def plain_module(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile`'s wrapper, or the module itself."""
    return cast(nn.Module, module.__dict__["_modules"].get("_orig_mod", module))


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` was applied."""
    return plain_module(module) is not module or module._compiled_call_impl is not None


def units_under(module: nn.Module) -> tuple[Unit, ...]:
    """All units of `module` and the modules inside it, each once, in `named_modules` order."""
    found: dict[int, Unit] = {}
    for child in module.modules():
        state = state_of(child)
        found.update({id(unit): unit for unit in (state.units if state else ())})
    return tuple(found.values())


class ParameterOwner(nn.Module):
    """Mixed into the class of every module that owns a sharded parameter; see [Note: swapped classes]."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse at once what could not stand in place of a shard; `module.weight = ...` comes through here."""
        _require_replaceable(self, name, param)
        super().register_parameter(name, param)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would need its own flats."""
        raise ConfigError(
            f"deepcopy of {type(self).__name__}, which is sharded, is not supported. Build a second model, shard it "
            "and load this one's state_dict() into it."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a pickle would hold one rank's rows only."""
        raise ConfigError(
            f"pickling {type(self).__name__}, which is sharded, is not supported. Save its state_dict() with "
            "torch.distributed.checkpoint.save instead."
        )


class ShardedModule(ParameterOwner):
    """A module that was given to `fully_shard`. Methods have FSDP2's names and meaning."""

    @fake.run_this_frame_eagerly
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Cast inputs, run the module, cast outputs, as the mixed-precision policy says."""
        if torch.compiler.is_compiling():
            policy = self.__dict__[STATE].mp_policy
            args, kwargs = _cast_inputs(policy, args, kwargs)
            return _cast_output(policy, super().__call__(*args, **kwargs))
        state, args, kwargs = _enter_call(self, args, kwargs)
        try:
            return _cast_output_eagerly(state.mp_policy, super().__call__(*args, **kwargs))
        finally:
            _leave_call()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedModule:
        """Repack after `.to(...)`, `.to_empty(...)` and their kind, where parameters became other tensors."""
        super()._apply(fn, recurse)
        for unit in cast(ModuleState, self.__dict__[STATE]).nested:
            unit.reattach_if_possible()
        return self

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change `reshard_after_forward` of this module's unit, and of all inside it unless `recurse` is False."""
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(f"reshard_after_forward must be a bool, got {reshard_after_forward!r}.")
        state = cast(ModuleState, self.__dict__[STATE])
        for unit in state.nested if recurse else state.units:
            unit.reshard_after_forward = reshard_after_forward
            unit.publish()


def _require_replaceable(module: nn.Module, name: str, value: object) -> None:
    ref = module.__dict__.get(REFS, {}).get(name)
    if ref is None or value is None:
        return
    for unit_member, mesh in _members_at(ref.flat, module, name):
        require_shard(value, unit_member, mesh)


def _members_at(flat: Tensor, module: nn.Module, name: str) -> Iterator[tuple[Member, DeviceMesh]]:
    unit = flat._fxshard_home.unit  # type: ignore[attr-defined]
    for member in unit.members:
        if any(owner is module and own == name for owner, own in member.owners):
            yield member, unit.mesh


def _cast(dtype: torch.dtype, value: Any) -> Any:
    is_float = isinstance(value, Tensor) and torch.is_floating_point(value)
    return value.to(dtype) if is_float and value.dtype != dtype else value


def _cast_inputs(policy: MixedPrecisionPolicy, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if not policy.cast_forward_inputs or policy.param_dtype is None:
        return args, kwargs
    return cast("tuple[Any, Any]", tree_map(functools.partial(_cast, policy.param_dtype), (args, kwargs)))


def _cast_output(policy: MixedPrecisionPolicy, output: Any) -> Any:
    if policy.output_dtype is None:
        return output
    return tree_map(functools.partial(_cast, policy.output_dtype), output)


# While a compiled function runs, Dynamo looks at every Python frame that is called. These must run as they are.
_cast_output_eagerly = torch.compiler.disable(_cast_output)
_leave_call = torch.compiler.disable(eager.leave_call)


@torch.compiler.disable
def _enter_call(module: ShardedModule, args: Any, kwargs: Any) -> tuple[ModuleState, Any, Any]:
    """Open the scope of a call; the outermost one first makes sure that every parameter is a view of its flat."""
    state = cast(ModuleState, module.__dict__[STATE])
    if not eager.inside_call():
        for unit in state.nested:
            unit.check()
    args, kwargs = _cast_inputs(state.mp_policy, args, kwargs)
    eager.enter_call(state.units)
    return state, args, kwargs


@torch.compiler.disable
def _read_eagerly(module: nn.Module, ref: ParameterRef, name: str) -> Any:
    return eager.read(ref) if eager.inside_forward() else module._parameters[name]


def _getter(name: str) -> property:
    @fake.run_this_frame_eagerly
    def get(self: nn.Module) -> Any:
        refs = self.__dict__[REFS]
        if torch.compiler.is_compiling():  # never touch self._parameters here: Dynamo would trace the DTensors in it
            ref = refs[name]
            return torch.ops.fxshard.unshard(ref.flat, ref.key, ref.slot, ref.shape, ref.dtype)
        if name not in self._parameters:
            return nn.Module.__getattr__(self, name)
        return _read_eagerly(self, refs[name], name)

    return property(get)


@functools.lru_cache(maxsize=None)
def _swapped_class(cls: type[nn.Module], names: frozenset[str], is_unit: bool) -> type[nn.Module]:
    """The subclass of `cls` with a property for each of `names`; equal requests give the same class."""
    mixin = ShardedModule if is_unit else ParameterOwner
    body: dict[str, Any] = {name: _getter(name) for name in sorted(names)}
    if issubclass(cls, nn.RNNBase):
        # RNNs keep their weights in a list of their own beside _parameters.
        body["_flat_weights"] = property(_rnn_weights, lambda self, weights: None)
    body["_fxshard_base"] = cls
    name = f"Sharded{cls.__name__}" if is_unit else cls.__name__
    return type(name, (mixin, cls), body)


def _rnn_weights(rnn: nn.RNNBase) -> list[Tensor | None]:
    return [getattr(rnn, name, None) for name in rnn._flat_weights_names]


def _swap_class(module: nn.Module, is_unit: bool) -> None:
    cls = type(module)
    base = getattr(cls, "_fxshard_base", cls)
    names = frozenset(module.__dict__.get(REFS, {}))
    if issubclass(base, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)
    module.__class__ = _swapped_class(base, names, is_unit or issubclass(cls, ShardedModule))


def managed_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules under `roots` outside of nested sharded modules, in `named_modules` order, each once."""
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
    *,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None,
    ignored: Iterable[nn.Parameter] = (),
) -> None:
    """Make one unit of the parameters under `modules` that no unit has taken, and swap the modules' classes.

    All checks of the parameters come first: an error leaves the modules untouched.
    """
    skip = frozenset(ignored)
    paths = _paths(modules)
    taken = {_join(paths[id(places[0][0])], places[0][1]): (param, places) for param, places in _owners(modules, skip)}
    require_shardable({fqn: param for fqn, (param, _) in taken.items()}, mesh)
    _require_untied(taken, [unit for module in modules for unit in units_under(module)])
    _move_buffers(modules, mesh)
    units = (_make_unit(modules, taken, mesh, mp_policy, reshard_after_forward),) if taken else ()
    for unit in units:
        unit.ignored = skip
    state = ModuleState(units, mp_policy)
    for module in modules:
        module.__dict__[STATE] = state
    for module in {id(owner): owner for _, places in taken.values() for owner, _ in places}.values():
        _swap_class(module, is_unit=False)
    for module in modules:
        _swap_class(module, is_unit=True)
    _name_units(modules, state)


Places = list[tuple[nn.Module, str]]


def _make_unit(
    modules: Sequence[nn.Module],
    taken: dict[str, tuple[nn.Parameter, Places]],
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None,
) -> Unit:
    """Cut the parameters to this rank's rows and register the DTensors in their place."""
    rank, world_size = mesh.get_local_rank(), mesh.size()
    members, rows = [], []
    with torch.no_grad(), torch.inference_mode(False):
        for fqn, (param, places) in taken.items():
            full = _on_mesh_device(param, mesh)
            rows.append(shard_rows(full, rank, world_size))
            members.append(Member(fqn, places, as_dtensor(full, rows[-1], mesh), weakref.ref(param)))
    unit = Unit(modules, members, mesh, mp_policy, reshard_after_forward)
    unit.pack(rows)
    for member in members:
        for module, name in member.owners:
            module._parameters[name] = member.parameter
    return unit


def _owners(modules: Sequence[nn.Module], skip: frozenset[nn.Parameter]) -> list[tuple[nn.Parameter, Places]]:
    """Every parameter under `modules` that no unit has, with all places that register it, in registration order."""
    owners: dict[int, tuple[nn.Parameter, Places]] = {}
    for module in managed_modules(modules):
        refs = module.__dict__.get(REFS, {})
        for name, param in module._parameters.items():
            if param is not None and param not in skip and name not in refs:
                owners.setdefault(id(param), (param, []))[1].append((module, name))
    return list(owners.values())


def _require_untied(taken: dict[str, tuple[nn.Parameter, Places]], nested: Sequence[Unit]) -> None:
    """Raise if a parameter is shared with a unit that exists already: each would train a copy of its own."""
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


def _paths(roots: Sequence[nn.Module]) -> dict[int, str]:
    """Module id -> its name from the roots; several roots are numbered."""
    paths: dict[int, str] = {}
    for i, root in enumerate(roots):
        prefix = f"{i}" if len(roots) > 1 else ""
        for path, module in root.named_modules():
            paths.setdefault(id(module), _join(prefix, path))
    return paths


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _on_mesh_device(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    if tensor.device.type in (mesh.device_type, "meta"):
        return tensor
    return tensor.detach().to(mesh.device_type).requires_grad_(tensor.requires_grad)


def _move_buffers(modules: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    for module in managed_modules(modules):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _on_mesh_device(buffer, mesh)


def require_shardable(parameters: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """Raise, naming all offenders, if any parameter cannot be sharded on `mesh`.

    Raises:
        ConfigError: complex, sparse or quantised parameters, or parameters on several devices.
        NotImplementedError: parameters that are DTensors already (tensor parallelism).
    """
    wrong = {
        "complex": [n for n, p in parameters.items() if p.is_complex()],
        "sparse": [n for n, p in parameters.items() if p.layout != torch.strided],
    }
    for kind, names in wrong.items():
        if names:
            raise ConfigError(
                f"{kind} parameters cannot be sharded: {', '.join(names)}. Pass them in ignored_params, or store them "
                "as real, dense tensors."
            )
    dtensors = [n for n, p in parameters.items() if isinstance(p, DTensor)]
    if dtensors:
        raise NotImplementedError(
            f"parameters that are DTensors already (tensor parallelism) are not supported yet: {', '.join(dtensors)}."
        )
    devices = {n: p.device.type for n, p in parameters.items()}
    if len(set(devices.values())) > 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ConfigError(f"parameters of one unit are on several devices: {where}. Move the module to one device.")
    elsewhere = [f"{n} on {d}" for n, d in devices.items() if d not in (mesh.device_type, "meta", "cpu")]
    if elsewhere:
        raise ConfigError(f"the mesh is on {mesh.device_type!r}, but: {', '.join(elsewhere)}. Use one device type.")


def _name_units(modules: Sequence[nn.Module], state: ModuleState) -> None:
    """Name all units under `modules` from there, and mark those inside as not the root."""
    paths = _paths(modules)
    nested = {id(unit): unit for module in modules for unit in units_under(module)}
    for unit in nested.values():
        unit.is_root = unit in state.units
        fqns = [_join(paths.get(id(owner), ""), name) for owner, name in (m.owners[0] for m in unit.members)]
        unit.rename(",".join(filter(None, (paths.get(id(m), "") for m in unit.modules))), fqns)
    state.nested = tuple(nested.values())
