"""Give a sharded model back: to torch's FSDP2, or as a plain model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fxshard import torch_fsdp2, unit_settings
from fxshard.errors import ConfigError
from fxshard.runtime.flat_shard import Member
from fxshard.runtime.parameters import full_tensor_of
from fxshard.runtime.unit import Unit
from fxshard.sharding import forward_methods
from fxshard.sharding.adopt import outermost, unwrap_compiled
from fxshard.sharding.sharded_module import ModuleState, plain_module, state_of
from fxshard.sharding.swapped_class import original_class
from fxshard.unit_settings import BackwardSettings


def release(model: nn.Module, *, whole: bool) -> nn.Module:
    """Give `model` back in place: to FSDP2, or with whole parameters; return it without wrappers of `torch.compile`."""
    plain = plain_module(model)
    states = _states_in(plain)
    _require_releasable(plain, states)
    units = [unit for state, _ in states for unit in state.units]
    if not whole:
        _require_fsdp2_can(plain, states)
    elif on_host := [unit.label for unit in units if unit.settings.offload and unit.mesh.device_type != "cpu"]:
        warnings.warn(
            f"release({type(plain).__name__}, whole=True): whole parameters of {', '.join(on_host)} are in the host's "
            "memory, where their shards were, and buffers where you have put them. Move the model to its device.",
            stacklevel=3,
        )
    unwrap_compiled(plain)
    released = [_Released(modules, state) for state, modules in states]
    for module in plain.modules():
        _strip(module)
    for each in reversed(released):
        each.make_whole() if whole else each.hand_over()
    for each in released:
        each.apply(whole)
    for each in () if whole else outermost(released):
        unit_settings.apply(each.of_model, each.modules[0])
    for module in plain.modules():
        if isinstance(module, nn.RNNBase):  # it keeps its weights in a list of its own, too
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
    return plain


def _states_in(model: nn.Module) -> list[tuple[ModuleState, list[nn.Module]]]:
    found: dict[int, tuple[ModuleState, list[nn.Module]]] = {}
    for module in model.modules():
        if (state := state_of(module)) is not None:
            found.setdefault(id(state), (state, []))[1].append(module)
    return list(found.values())


def _require_releasable(model: nn.Module, states: list[tuple[ModuleState, list[nn.Module]]]) -> None:
    name = type(model).__name__
    if not states:
        raise ConfigError(f"release({name}): fxshard has sharded nothing in it.")
    units = [unit for state, _ in states for unit in state.units]
    if any(not set(units).issuperset(unit.model.units) for unit in units):
        raise ConfigError(f"release({name}): it is part of a sharded model. Pass the outermost module.")
    if waiting := [unit.label for unit in units if unit.step.accumulation.waiting or unit.step.replica_sums.waiting]:
        raise ConfigError(
            f"release({name}): gradients of {', '.join(waiting)} wait to be reduced. Run a backward outside of "
            "no_sync() first, or drop them with reset_iter_state()."
        )
    if hooked := [member.fqn for unit in units for member in unit.members if member.extension is not None]:
        raise ConfigError(
            f"release({name}): {', '.join(hooked)} are tensor subclasses with fsdp_pre_all_gather, which cannot be "
            "handed over. Load the state into a model that is not sharded, or that torch's fully_shard has sharded."
        )
    for unit in units:
        unit.check()


def _require_fsdp2_can(model: nn.Module, states: list[tuple[ModuleState, list[nn.Module]]]) -> None:
    """Raise where FSDP2 would fail: it has subgroups for rows alone, and no `grad_dtype`."""
    units = [unit for state, _ in states for unit in state.units]
    if other := [f"{m.fqn} ({m.spec.grad_dtype})" for unit in units for m in unit.members if m.spec.grad_dtype]:
        raise ConfigError(
            f"release({type(model).__name__}): FSDP2 has no grad_dtype: {', '.join(other)}. Set it to the parameter's "
            "own dtype first, or release it with whole=True."
        )
    found = [m.fqn for u in units if u.settings.subgroup_size for m in u.members if m.tensor_parallel or m.settings.dim]
    if found:
        raise ConfigError(
            f"release({type(model).__name__}): FSDP2 has no reshard_after_forward as a number of ranks for parameters "
            f"that are tensor-parallel or cut along another dimension than 0: {', '.join(found)}. Call "
            "set_reshard_after_forward(True) first, or release it with whole=True."
        )


class _Released:
    """The units of one call of `fully_shard` on their way to FSDP2."""

    def __init__(self, modules: list[nn.Module], state: ModuleState) -> None:
        self.modules, self.policy, self.units = modules, state.mp_policy, state.units
        self.of_model = state.nested[0].model.settings if state.nested else BackwardSettings()
        self.methods = [(module, *each) for module in modules for each in forward_methods.registered(module)]
        for unit in self.units:
            unit.reshard()
            unit.model.prefetcher.forget()

    def hand_over(self) -> None:
        """Let FSDP2 shard the modules, of parameters without memory, and put ours in the place of what it made."""
        if not self.units:
            fsdp2.fully_shard(_one_or_list(self.modules), mp_policy=self.policy)
            return
        for unit in self.units:
            _put(unit, _whole_on_meta)
        first, sizes = self.units[0], [unit.settings.subgroup_size for unit in self.units]
        fsdp2.fully_shard(
            _one_or_list(self.modules),
            **_mesh_of(first),
            reshard_after_forward=next(filter(None, sizes), first.settings.reshard_after_forward),
            shard_placement_fn=_placements_in(self.units),
            mp_policy=self._policy(),
            ignored_params=set(first.settings.ignored),
            offload_policy=first.settings.offload or OffloadPolicy(),
        )
        for unit in self.units:
            _put(unit, _with_memory_of_its_own)
            _free(unit)

    def _policy(self) -> MixedPrecisionPolicy:
        """The policy that treats the parameters, which are on the meta device now, as ours did."""
        keeping = [member for unit in self.units for member in unit.members if member.settings.keeps_dtype]
        kept = {id(module._parameters[name]) for member in keeping for module, name in member.owners}
        if not kept:
            return self.policy
        override: dict[str, Any] = {"param_dtype_override_fn": lambda p: p.dtype if id(p) in kept else None}
        return replace(self.policy, **override)  # who keeps one has had the field

    def make_whole(self) -> None:
        for unit in self.units:
            with unit.agreed("released", "all_gather", "all parameters"):
                _put(unit, _whole)
            _free(unit)

    def apply(self, whole: bool) -> None:
        for owner, name, before in self.methods:
            forward_methods.put_back(owner, name, before)
            if not whole:
                fsdp2.register_fsdp_forward_method(owner, name)
        if not whole and self.units:  # all have the same settings
            ours = self.units[0].settings
            theirs = ours.with_lists(lambda units: tuple(dict.fromkeys(unit.modules[0] for unit in units or ())))
            unit_settings.apply(theirs, self.modules[0])


def _mesh_of(unit: Unit) -> dict[str, Any]:
    for member in unit.members:
        if member.tensor_parallel and (within := member.tensor_parallel.within):
            return {"mesh": within.mesh, "dp_mesh_dims": within.dims}
    return {"mesh": unit.mesh}


def _placements_in(units: Sequence[Unit]) -> Callable[[nn.Parameter], Any] | None:
    """Return what tells FSDP2 how each parameter is cut, where one is not along the first dimension or has a mesh."""
    places: dict[int, Any] = {}
    for unit in units:
        placement: Any = Shard if unit is units[0] else torch_fsdp2.placement_on(unit.mesh)
        for member in unit.members:
            if member.settings.dim or unit is not units[0]:
                places |= {
                    id(module._parameters[name]): placement(member.settings.dim) for module, name in member.owners
                }
    return (lambda parameter: places.get(id(parameter))) if places else None


def _put(unit: Unit, make: Callable[[Member], nn.Parameter]) -> None:
    for member in unit.members:
        parameter = make(member)
        for module, name in member.owners:
            module._parameters[name] = parameter


def _free(unit: Unit) -> None:
    """Give back the memory of the flats, which nothing views any more, before the next unit takes some."""
    for shard in unit.shards:
        shard.flat.data = shard.flat.data.new_empty(0)


def _whole_on_meta(member: Member) -> nn.Parameter:
    parameter, parallel = member.parameter, member.tensor_parallel
    shape = parameter.shape if parallel is None else parallel.shape
    empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
    if parallel is not None:
        empty = DTensor(empty, parallel.before, requires_grad=False)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _whole(member: Member) -> nn.Parameter:
    parameter, parallel = member.parameter, member.tensor_parallel
    full = full_tensor_of(cast(DTensor, parameter.detach()))
    if parallel is not None:
        full = distribute_tensor(full, parallel.before.mesh, parallel.before.placements, src_data_rank=None)
    whole = nn.Parameter(full, requires_grad=parameter.requires_grad)
    whole.grad_dtype = parameter.grad_dtype
    return whole


def _with_memory_of_its_own(member: Member) -> nn.Parameter:
    member.attach(member.local.clone(memory_format=torch.contiguous_format))
    return member.parameter


def _strip(module: nn.Module) -> None:
    for key in [key for key in module.__dict__ if key.startswith("_fxshard_")]:
        del module.__dict__[key]
    module.__class__ = original_class(type(module))


def _one_or_list(modules: list[nn.Module]) -> Any:
    return modules[0] if len(modules) == 1 else modules
