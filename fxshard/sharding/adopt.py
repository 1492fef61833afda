"""Take over a model that torch's FSDP2 has sharded: `fxshard.adopt`.

[Note: adopted models]
Libraries call torch's `fully_shard` themselves. What it leaves on a model is the same as what ours needs: DTensor
parameters sharded on dimension 0, cut in the same rows. So the parameters stay the objects that they are, with their
gradients and attributes, and optimizers keep them; a unit copies their rows into its flat and they become views of it.
All is checked before anything changes. Then units change hands one by one, inner ones first, so that at no time more
than the rows of one unit exist twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fxshard import torch_fsdp2, unit_settings
from fxshard.errors import ConfigError
from fxshard.runtime import gloo
from fxshard.runtime.flat_shard import Member
from fxshard.runtime.parameters import ParameterSettings
from fxshard.runtime.tensor_parallel import TensorParallel, WholeMesh
from fxshard.runtime.unit import Unit
from fxshard.sharding import forward_methods
from fxshard.sharding.mesh import require_mesh, resharding
from fxshard.sharding.shard_module import ignore, ignored_under, install, join, module_paths, subgroup_for
from fxshard.sharding.sharded_module import ShardedModule, is_compiled, plain_module
from fxshard.torch_fsdp2 import Fsdp2Parameter, Fsdp2Unit


def adopt(model: nn.Module) -> nn.Module:
    """Take over `model` from FSDP2, in place, and return it without wrappers of `torch.compile`."""
    plain = plain_module(model)
    units = torch_fsdp2.units_of(plain)
    _require_adoptable(plain, units)
    for unit in units:
        unit.reshard()
    unwrap_compiled(plain)
    adopted = [_Adopted(unit) for unit in units]
    torch_fsdp2.unmark(plain)
    for each in reversed(adopted):
        each.hand_over()
    for each in adopted:
        each.apply()
    for each in outermost(adopted):
        unit_settings.apply(each.of_model, each.modules[0])
    return plain


def outermost(calls: Sequence[Any]) -> list[Any]:
    """Return the calls of `fully_shard` whose modules are inside of those of no other one."""
    inner = {id(child) for call in calls for each in call.modules for child in each.modules() if child is not each}
    return [call for call in calls if inner.isdisjoint(map(id, call.modules))]


def _require_adoptable(model: nn.Module, units: list[Fsdp2Unit]) -> None:
    name = type(model).__name__
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"adopt({name}): {path or 'it'} is a DistributedDataParallel, which reduces the gradients itself. Pass "
                "the module in it, without DDP."
            )
        if isinstance(module, ShardedModule):
            raise ConfigError(f"adopt({name}): {path or 'it'} is sharded by fxshard already. Leave adopt out.")
    if not units:
        raise ConfigError(
            f"adopt({name}): torch's fully_shard has sharded nothing in it. For a plain model call "
            "fxshard.fully_shard, or compile it as it is."
        )
    if (outer := torch_fsdp2.outer_root(units)) is not None:
        raise ConfigError(
            f"adopt({name}): it has run inside of {type(outer).__name__}, which torch's fully_shard has sharded as "
            "well. Pass the outermost module."
        )
    paths = module_paths([model])
    found = []
    for unit in units:
        where = ", ".join(paths.get(id(module), "?") or "the root" for module in unit.modules)
        found += [f"{where}: {obstacle}" for obstacle in unit.obstacles()]
    if found:
        raise ConfigError(
            f"adopt({name}): FSDP2's settings that fxshard cannot take over, nothing was changed:\n  "
            + "\n  ".join(found)
            + "\nUndo them before adopt, or keep FSDP2 for this model."
        )
    for mesh in (mesh for unit in units for mesh in unit.meshes):
        require_mesh(mesh)


def unwrap_compiled(model: nn.Module) -> None:
    """Forget how the modules in `model` were compiled: `module.compile()` and `torch.compile(module)`."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and plain_module(child) is not child:
                module._modules[name] = plain_module(child)
        if is_compiled(module):
            module._compiled_call_impl = None


def _tensor_parallel(given: Fsdp2Parameter) -> TensorParallel | None:
    if (before := given.before) is None:
        return None
    within = WholeMesh(*given.within) if given.within is not None else None
    return TensorParallel(cast(DTensor, given.parameter)._spec, before, given.local_shape, within)


class _Adopted:
    """One unit on its way from FSDP2."""

    def __init__(self, unit: Fsdp2Unit) -> None:
        self.unit, self.of_model = unit, unit.of_model
        self.modules = [plain_module(module) for module in unit.modules]
        self.settings = unit.settings.with_lists(lambda modules: tuple(map(plain_module, modules or ())))
        self.methods = [
            (module, name, before)
            for module, outer in zip(self.modules, unit.modules, strict=True)
            for name, before in torch_fsdp2.forward_methods(outer)
        ]

    def hand_over(self) -> None:
        told, paths = self.settings.only(unit_settings.ARGUMENTS), module_paths(self.modules)
        parts: dict[DeviceMesh, list[Member]] = {}
        for each in self.unit.parameters():
            member = Member(
                join(paths[id(each.places[0][0])], each.places[0][1]),
                each.places,
                each.parameter,
                cast("weakref.ref[nn.Parameter]", weakref.ref(each.key)),
                ParameterSettings(keeps_dtype=each.keeps_dtype, dim=each.dim),
                _tensor_parallel(each),
            )
            parts.setdefault(each.mesh, []).append(member)
        self.unit.remove()
        units = []
        for mesh, members in parts.items():
            gloo.warn_of_two_threads(mesh)
            own = replace(told, reshard_after_forward=resharding(mesh, told.reshard_after_forward))
            units.append(Unit(self.modules, members, mesh, own, subgroup_for(mesh, own)))
        install(self.modules, tuple(units), told.mp_policy)
        ignore(self.modules, ignored_under(self.modules))

    def apply(self) -> None:
        unit_settings.apply(self.settings, self.modules[0])
        for owner, name, before in self.methods:
            forward_methods.put_back(owner, name, before)
            forward_methods.register(owner, name)
