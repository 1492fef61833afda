"""The fake model of a model: a copy without data, sharded over ranks that need not exist, to compile in its place.

[Note: fake models]
Nothing that a pass decides depends on a value, so `explain` compiles a copy whose tensors are fake: no memory, no
process group, any number of ranks. The copy is what the ranks would have: a sharded model is copied as it was before
`fully_shard` and sharded again in the same units; an unsharded one is sharded as the one-line path would. The model
itself is only read. The fake model shares the code of its classes, which is why it runs under
`dynamo.untouched_dynamo`. Tensor-parallel parameters stay on the mesh that they are on, and their units on
theirs, for what the model does with DTensors names it, too: its groups exist, and nothing is sent over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard import torch_private
from fxshard.compile import dynamo
from fxshard.compile.one_line import first_call
from fxshard.compile.one_line.units import make_units
from fxshard.errors import ConfigError
from fxshard.inspect.replica import Replica
from fxshard.options import Options, launched_world_size
from fxshard.runtime import mesh_axes
from fxshard.runtime.tensor_parallel import WholeMesh
from fxshard.runtime.unit import Unit, UnitGroups
from fxshard.sharding import regional, shard_module
from fxshard.sharding.mesh import require_mesh, resharding
from fxshard.sharding.per_parameter import Chooser
from fxshard.sharding.sharded_module import ModuleState, plain_module, state_of, states_under, units_under
from fxshard.unit_settings import IN_GRAPHS, UnitSettings


class MeshSize(NamedTuple):
    """How many replicas, and over how many ranks each is sharded."""

    replicas: int
    shards: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshSize:
        """Return the size of a mesh of one or two axes."""
        return cls(mesh_axes.num_replicas(mesh), mesh_axes.num_shards(mesh))

    @classmethod
    def parse(cls, world_size: object) -> MeshSize:
        """Read the argument `world_size`."""
        numbers = world_size if isinstance(world_size, tuple) and len(world_size) == 2 else (1, world_size)
        if any(type(number) is not int or number < 1 for number in numbers):
            raise ConfigError(f"world_size must be a positive int, or (replicas, shards), got {world_size!r}.")
        return cls(*numbers)

    def __str__(self) -> str:
        return f"{self.shards}" if self.replicas == 1 else f"{self.replicas} x {self.shards}"


class StandInMesh(DeviceMesh):
    """Rank 0 of a mesh of ranks that do not exist; what takes no communication works.

    Its axes have names of their own, so that it equals no real mesh: torch caches what it knows of DTensors by mesh.
    Nor does it equal the stand-in of another mesh, which has another `group`.
    """

    def __init__(self, device_type: str, size: MeshSize, group: str = "fsdp") -> None:
        axes = {f"fxshard_fake_{group}_replicas": size.replicas, f"fxshard_fake_{group}": size.shards}
        names = tuple(axes)[-2 if size.replicas > 1 else -1 :]
        shape = [axes[name] for name in names]
        ranks = torch.arange(size.replicas * size.shards, device="cpu").view(shape)
        super().__init__(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)
        named = [_NamedGroup(name) for name in (f"{group}_replicas", group)[-len(shape) :]]
        self._groups = cast("list[dist.ProcessGroup]", named)

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        """Return something with the name of a group."""
        return self._groups[mesh_dim if isinstance(mesh_dim, int) else -1]

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return 0."""
        return 0


class _NamedGroup(str):
    """The name of a group, which a functional collective takes in place of one."""

    @property
    def group_name(self) -> str:
        return str(self)


@dataclass(frozen=True, kw_only=True)
class FakeModel:
    """A sharded copy of a model, of fake tensors, and how they became so; see [Note: fake models]."""

    model: nn.Module
    world_size: int
    replica: Replica = field(repr=False)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Compile and call the model in this context, on what `inputs` returned."""
        with dynamo.untouched_dynamo(), self.replica.faking():
            yield

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy the arguments of a call; every tensor in them, however deep, becomes a fake one."""
        copied: tuple[tuple[Any, ...], dict[str, Any]] = self.replica.copy((args, kwargs), "the arguments")
        return copied

    def compile(
        self, backend: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, by_block: bool = False
    ) -> None:
        """Compile the model with `backend` and call it once, on fake copies of the arguments; may raise `NO_VALUE`."""
        fake_args, fake_kwargs = self.inputs(args, kwargs)
        plans = [unit.plan for unit in units_under(self.model)]
        groups = {name: size for plan in plans for name, size in plan.groups.items()}
        with torch_private.named_groups(groups), self.tracing():
            if by_block and regional.compile_blocks(states_under(self.model), backend, dynamic=False):
                self.model(*fake_args, **fake_kwargs)
            else:
                torch.compile(self.model, backend=backend)(*fake_args, **fake_kwargs)


def fake_model_of(
    model: nn.Module,
    *,
    world_size: int | tuple[int, int] | None = None,
    mesh: DeviceMesh | None = None,
    options: Options | None = None,
) -> FakeModel:
    """Copy a model, sharded or not, without its data; the model and a live process group are left alone.

    `world_size`: ranks of an unsharded model, or (replicas, shards), by default of the mesh (`mesh`, else
    `options.mesh`), the process group or the launcher. `options` say how an unsharded model is sharded.
    """
    model, options = plain_module(model), options or Options()
    mesh = mesh if mesh is not None else options.mesh
    if mesh is not None:
        require_mesh(mesh)
    units = units_under(model)
    size = _size(units, world_size, mesh)
    if not units:
        first_call.require_plain(dict(model.named_parameters()))
    replica = Replica(_device(model, units[0].mesh if units else mesh))
    with torch.inference_mode(False), torch.enable_grad():
        outside = {id(module): module for unit in units for module in unit.modules}
        copied = replica.copy([model, *outside.values()], f"a {type(model).__name__}")[0]
        if units:
            _shard_alike(model, units, replica)
        else:
            mesh = StandInMesh(replica.device.type, size)
            with replica.faking():
                reshard = resharding(mesh, options.reshard_after_forward)
                separate = options.separate_reduce_scatter_group
                for unit in make_units(copied, mesh, replace(options, reshard_after_forward=None)):
                    _set(unit, replace(unit.settings, reshard_after_forward=reshard, uses_reduce_group=separate))
    return FakeModel(model=copied, world_size=size.shards, replica=replica)


def _size(units: tuple[Unit, ...], world_size: object, mesh: DeviceMesh | None) -> MeshSize:
    given = None if world_size is None else MeshSize.parse(world_size)
    of_mesh = None if mesh is None else MeshSize.of(mesh)
    if given is not None and of_mesh is not None and given != of_mesh:
        raise ConfigError(f"world_size is {given}, but the mesh has {of_mesh} ranks. Give only one of them.")
    asked = of_mesh or given
    if units:
        found = MeshSize.of(units[0].mesh)
        if asked not in (None, found):
            raise ConfigError(
                f"asked for {asked} ranks, but the model is sharded over {found}. Leave out world_size and mesh, or "
                "pass an unsharded model."
            )
        return found
    if asked is not None:
        return asked
    if dist.is_initialized():
        return MeshSize(1, dist.get_world_size())
    if launched_world_size() > 1:
        return MeshSize(1, launched_world_size())
    raise ConfigError(
        "explain needs to know over how many ranks to shard: the model is not sharded and there is no process group. "
        "Pass world_size=..."
    )


def _device(model: nn.Module, mesh: DeviceMesh | None) -> torch.device:
    """Where the fake tensors say that they are: where the model would run, as far as this machine has it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    wanted = mesh.device_type if mesh is not None else next((p.device.type for p in model.parameters()), "cpu")
    if accelerator is not None and wanted in ("meta", accelerator.type):
        return accelerator
    return torch.device("cpu")


def _shard_alike(model: nn.Module, units: tuple[Unit, ...], replica: Replica) -> None:
    meshes = {unit.mesh: unit.mesh for unit in units for member in unit.members if member.tensor_parallel}
    for unit in units:
        group = f"fsdp_{len(meshes)}" if meshes else "fsdp"
        meshes.setdefault(unit.mesh, StandInMesh(replica.device.type, MeshSize.of(unit.mesh), group))
    with replica.faking():
        for state, modules in _calls(model, units):
            # A call that found all parameters taken made no unit: only casts of inputs and outputs.
            first = state.units[0] if state.units else None
            shard_module.shard(
                [replica.of(module) for module in (first.modules if first else modules)],
                meshes[(first or units[0]).mesh],
                UnitSettings(mp_policy=state.mp_policy, offload=first.settings.offload if first else None),
                ignored=replica.unsharded,
                settings_of=_settings_in(state.units, meshes, replica),
                within=_whole_mesh(state.units),
            )
    for unit in units:
        _take_over(unit, replica)
    for unit in units:  # after all names: a list is published by the names of what is in it
        settings = unit.settings.only(IN_GRAPHS).with_lists(lambda listed: _copies(listed, units, replica))
        ignored = frozenset(replica.of(parameter) for parameter in settings.ignored if replica.knows(parameter))
        _set(_copy_of(unit, replica), replace(settings, ignored=ignored))


def _whole_mesh(units: Sequence[Unit]) -> WholeMesh | None:
    """Return the mesh of all axes that a call of `fully_shard` was given with `dp_mesh_dims`."""
    parallel = (member.tensor_parallel for unit in units for member in unit.members)
    return next((each.within for each in parallel if each and each.within), None)


def _settings_in(units: Sequence[Unit], meshes: Mapping[DeviceMesh, DeviceMesh], replica: Replica) -> Chooser:
    """Choose for the copies of the parameters of one call's units what holds for them."""
    places = {
        id(replica.of(module).get_parameter(name)): member.settings._replace(mesh=meshes[unit.mesh])
        for unit in units
        for member in unit.members
        for module, name in member.owners
    }
    return lambda fqn, parameter: places[id(parameter)]


def _set(unit: Unit, settings: UnitSettings) -> None:
    """Change the settings of a copy; groups that these name do not exist."""
    names = (f"{unit.plan.group}_{end}" for end in (settings.subgroup_size, "reduce"))
    unit.groups = UnitGroups(*(cast(dist.ProcessGroup, SimpleNamespace(group_name=name)) for name in names))
    unit.settings = settings
    unit.publish()


def _calls(model: nn.Module, units: tuple[Unit, ...]) -> list[tuple[ModuleState, list[nn.Module]]]:
    """What each call of `fully_shard` left on which modules, inner ones first."""
    modules: dict[int, list[nn.Module]] = {}
    states: dict[int, ModuleState] = {}
    for root in [model, *(module for unit in units for module in unit.modules)]:
        for module in root.modules():
            state = state_of(module)
            if state is not None and module not in modules.setdefault(id(state), []):
                modules[id(state)].append(module)
                states[id(state)] = state
    inner = {
        key: {id(state) for m in given for child in m.modules() if (state := state_of(child)) is not None} - {key}
        for key, given in modules.items()
    }
    return [(states[key], modules[key]) for key in TopologicalSorter(inner).static_order()]


def _take_over(unit: Unit, replica: Replica) -> None:
    """Give the copy of a unit the names and rank that the unit has; it may have been named from further outside."""
    copied = _copy_of(unit, replica)
    names = {(id(replica.of(owner)), name): m.fqn for m in unit.members for owner, name in m.owners}
    places = [(member, member.owners[0]) for member in copied.members]
    copied.is_root = unit.is_root
    copied.rename(unit.fqn, [names.get((id(owner), name), member.fqn) for member, (owner, name) in places])


def _copy_of(unit: Unit, replica: Replica) -> Unit:
    state, copied = (cast(ModuleState, state_of(module)) for module in (unit.modules[0], replica.of(unit.modules[0])))
    return copied.units[state.units.index(unit)]


def _copies(listed: Sequence[Unit] | None, known: Sequence[Unit], replica: Replica) -> tuple[Unit, ...] | None:
    """A prefetch list of the copies; what is listed from outside the model is in no graph of it."""
    copies = tuple(_copy_of(unit, replica) for unit in listed or () if unit in known)
    return copies or (None if listed is None or listed else ())
