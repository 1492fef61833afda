"""One line without fully_shard: shard the model while it is compiled for the first time.

[Note: the one-line path]
`torch.compile(model, backend="fxshard")` on an unsharded model with several ranks must shard it: replicas that train
without synchronisation would be silently wrong. The backend is the first of our code to run, in the middle of the first
call, with the captured graph of the unsharded model. It finds the root module, makes the ranks agree on the values,
shards, gives live optimizers the new parameters, and has Dynamo trace again. ADR 0003 says why so.
"""

from __future__ import annotations

import functools
import gc
import logging
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fxshard.compile import dynamo
from fxshard.compile.one_line import agreement, refusals
from fxshard.compile.one_line.units import make_units, units_of
from fxshard.cost import measured
from fxshard.errors import ConfigError
from fxshard.live_objects import instances_of, referrers_of
from fxshard.options import Options, launched_world_size
from fxshard.runtime import eager, mesh_axes, process_groups
from fxshard.runtime.extensions import has_hooks
from fxshard.runtime.flat_shard import Home
from fxshard.runtime.parameters import as_dtensor, shard_rows
from fxshard.runtime.unit import Unit
from fxshard.sharding import regional, shard_module
from fxshard.sharding.mesh import default_mesh, require_mesh
from fxshard.sharding.sharded_module import states_under, units_under

_log = logging.getLogger(__name__)


def require_no_replicas(unsharded: dict[str, nn.Parameter], flats: dict[int, Home]) -> None:
    """Raise if a sharded model trains parameters that no unit holds and nobody said to ignore."""
    units = [home.unit for home in flats.values()]
    left = _not_ignored(unsharded, units)
    if left and any(unit.world_size > 1 for unit in units):
        raise ConfigError(
            f"trainable parameters are neither sharded nor ignored: {', '.join(left)}. Every rank would train its own "
            "copy. Call fully_shard on the module that contains them, or pass them in ignored_params."
        )


def _not_ignored(unsharded: dict[str, nn.Parameter], units: Iterable[Unit]) -> list[str]:
    """Return the names of those that nobody said to leave whole."""
    ignored: frozenset[nn.Parameter] = frozenset().union(*(unit.settings.ignored for unit in units))
    return [name for name, parameter in unsharded.items() if parameter not in ignored]


def shard_root(
    gm: fx.GraphModule, example_inputs: Sequence[Any], unsharded: dict[str, nn.Parameter], options: Options
) -> None:
    """Shard the model whose parameters entered `gm`, and start the capture again; see [Note: the one-line path].

    Returns only for one rank, and where all of `unsharded` are to be left whole.
    """
    roots = dynamo.roots_of(gm)
    if not _not_ignored(unsharded, (unit for root in roots for unit in units_under(root))):
        return
    mesh = _mesh(options, {parameter.device.type for parameter in unsharded.values()})
    if mesh is None or mesh.size() == 1:
        _announce(roots, offloads=bool(options.offload))
        return
    refusals.refuse_taken([dynamo.compiled_around(root) or root for root in roots])
    _require_cast(gm, roots, options)
    _require_ready(roots, unsharded)
    by_block = {root: dynamo.compiled_model(root) for root in roots} if options.regional else {}
    if options.regional is True and None in by_block.values():
        raise ConfigError(dynamo.REGIONAL_OF_A_FUNCTION)
    require_plain({name: p for root in roots for name, p in root.named_parameters()})
    for root in roots:
        shard_module.require_shardable(dict(root.named_parameters()), mesh)
        if hooked := [name for name, parameter in root.named_parameters() if has_hooks(parameter)]:
            raise ConfigError(
                f"{', '.join(hooked)}: tensor subclasses with fsdp_pre_all_gather cannot be compared and sharded in "
                "the first call. Call fully_shard before torch.compile."
            )
    for root in roots:
        for group in mesh_axes.groups(mesh):
            agreement.require_no_averages(root, group)
            agreement.agree_on_values(root, group)
        if options.hardware is None:
            measured.agree(mesh)
        _shard(root, mesh, options)
    then, inputs = dynamo.allow_again(), dynamo.arguments_of(gm, example_inputs)
    compiled = {root: each for root, each in by_block.items() if each is not None}
    if any([regional.begin_in_first_call(states_under(root), each, inputs, then) for root, each in compiled.items()]):
        dynamo.leave("fxshard compiles the model block by block")
    dynamo.restart("fxshard sharded the model")


def _mesh(options: Options, device_types: set[str]) -> DeviceMesh | None:
    if options.mesh is not None:
        return require_mesh(options.mesh)
    if dist.is_initialized():
        return default_mesh("cpu" if device_types == {"cpu"} else None)  # it has been called: its inputs are there too
    if launched_world_size() > 1:
        raise ConfigError(
            f"WORLD_SIZE is {launched_world_size()} but there is no process group: every rank would train its own "
            "copy. Before the first call of the model add: torch.distributed.init_process_group()"
        )
    return None


def _require_cast(gm: fx.GraphModule, roots: Sequence[nn.Module], options: Options) -> None:
    """Raise if the first call was given what later calls cast: its frame has its arguments already."""
    if options.param_dtype is None:
        return
    blocks = {id(block) for root in roots for block in units_of(root)[:-1]}
    names = {name for root in roots for name, module in root.named_modules() if id(module) in blocks}
    if found := dynamo.uncast_arguments(gm, options.param_dtype, names):
        wanted = str(options.param_dtype)
        raise ConfigError(
            f"the first call has arguments that are not {wanted.removeprefix('torch.')}, as param_dtype wants: "
            f"{', '.join(found)}. It shards the model when it has them already, too late to cast them. Cast them "
            f"yourself (x.to({wanted})), or write before torch.compile: fxshard.fully_shard(model, "
            f"mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype={wanted}))"
        )


def _announce(roots: list[nn.Module], *, offloads: bool) -> None:
    """Say once per model that it trains unsharded; graph breaks and recompiles come here again."""
    if any(root not in _announced() for root in roots):
        besides = " Nothing is offloaded: for that call fully_shard(..., offload_policy=...)." if offloads else ""
        _log.warning("fxshard: one rank, nothing to shard; the model trains unsharded.%s", besides)
    _announced().update(roots)


@functools.cache
def _announced() -> weakref.WeakSet[nn.Module]:
    return weakref.WeakSet()


def require_all_ranks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise if trained parameters are DTensors on some of the ranks, which nothing shards over the others."""
    trained = {name: p for name, p in parameters.items() if isinstance(p, DTensor) and p.requires_grad}
    require_plain({name: p for name, p in trained.items() if p.device_mesh.size() < dist.get_world_size()})


def require_plain(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise if parameters are DTensors: nothing says which other axis is to shard them."""
    if dtensors := {name: p for name, p in parameters.items() if isinstance(p, DTensor)}:
        mesh = next(iter(dtensors.values())).device_mesh
        raise ConfigError(
            f"parameters are DTensors (tensor parallelism) on the mesh {mesh}: {', '.join(dtensors)}. torch.compile "
            "cannot tell which other axis is to shard them; say so before compiling: "
            'fxshard.fully_shard(model, mesh=mesh["dp"]), a slice of the same mesh.'
        )


def _require_ready(roots: list[nn.Module], unsharded: dict[str, nn.Parameter]) -> None:
    inside = {id(p) for root in roots for p in root.parameters()}
    homeless = [name for name, p in unsharded.items() if id(p) not in inside]
    if homeless:
        raise ConfigError(
            f"cannot find the module of {', '.join(homeless)}. Shard the model yourself before compiling it: "
            "fxshard.fully_shard(model)"
        )
    for root in roots:
        outer = dynamo.compiled_around(root)
        if outer is not None:
            raise ConfigError(
                f"the first graph of the compiled {type(outer).__name__} that was captured holds only its part "
                f"{type(root).__name__}: a graph break hides the rest (TORCH_LOGS=graph_breaks says where). Shard "
                "the model yourself before compiling it: fxshard.fully_shard(model)"
            )
        meta = [name for name, tensor in root.state_dict(keep_vars=True).items() if tensor.is_meta]
        if meta:
            raise ConfigError(
                f"parameters on the meta device: {', '.join(meta)}. The one-line path needs values. Write instead:\n"
                "    fxshard.fully_shard(model)\n    model.to_empty(device=...)  # then initialise, then compile"
            )
        used = [name for name, p in root.named_parameters() if p.grad is not None]
        if used:
            raise ConfigError(
                f"parameters have gradients from before the first compiled call: {', '.join(used)}. Set them to None "
                "(optimizer.zero_grad()) first, or call fxshard.fully_shard(model) before using the model."
            )
    if any(units_under(root) for root in roots):
        raise ConfigError(
            "part of the model is sharded and part is not. Shard all of it before compiling: fully_shard on the inner "
            "modules first, then fxshard.fully_shard(model)"
        )


def _shard(root: nn.Module, mesh: DeviceMesh, options: Options) -> None:
    old = dict(root.named_parameters())
    units = make_units(root, mesh, options)
    new = dict(root.named_parameters())
    rebind_optimizers({id(p): (p, new[fqn]) for fqn, p in old.items()})
    dynamo.refresh_compiled(root)
    if options.separate_reduce_scatter_group:
        process_groups.separate(units)
    orphans = {fqn: weakref.ref(parameter) for fqn, parameter in old.items()}
    for unit in units:
        unit.model.after_first_call = functools.partial(_end_first_call, units, orphans)


def _end_first_call(units: Sequence[Unit], orphans: dict[str, weakref.ref[nn.Parameter]]) -> None:
    """Do for the call that sharded the model what the call of a sharded module does at its end."""
    eager.forward_ended(units)  # its graph may lack units that a loss reads
    _require_no_holders(orphans)
    for unit in units:
        unit.model.after_first_call = None


# ---- what holds the parameters that sharding replaces: optimizers get the new ones, anything else is refused


def rebind_optimizers(replaced: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Put the sharded parameters into every live optimizer, with their rows of its state."""
    for optimizer in instances_of(Optimizer):
        for group in optimizer.param_groups:
            counts_there = group.get("capturable") or group.get("fused")
            for old in [p for p in group["params"] if id(p) in replaced and p in optimizer.state]:
                new, state = replaced[id(old)][1], optimizer.state.pop(old)
                step = {"step": state.pop("step")} if "step" in state and not counts_there else {}
                optimizer.state[new] = step | {name: _beside(new, name, each, old) for name, each in state.items()}
            group["params"] = [replaced[id(p)][1] if id(p) in replaced else p for p in group["params"]]


def _beside(new: nn.Parameter, name: str, value: Any, old: nn.Parameter) -> Any:
    """Return what an optimizer keeps of a parameter where that is now: this rank's rows of what is shaped like it."""
    if not isinstance(value, Tensor):
        return value
    if name == "step" or value.shape != old.shape:
        return value.to(new.device)
    mesh = new.device_mesh  # type: ignore[attr-defined]
    rows = shard_rows(value, mesh_axes.shard_rank(mesh), mesh_axes.num_shards(mesh))
    return as_dtensor(value, rows.to(new.device, copy=True), mesh).detach()


def _require_no_holders(orphans: dict[str, weakref.ref[nn.Parameter]]) -> None:
    """Raise if something still holds a replaced parameter: its values are dead, its gradient stays None."""
    if all(reference() is None for reference in orphans.values()):
        return
    gc.collect()
    alive = [(fqn, parameter) for fqn, reference in orphans.items() if (parameter := reference()) is not None]
    ours = {id(alive), *map(id, alive)}
    holders = {fqn: [r for r in referrers_of(p) if id(r) not in ours and _holds(r)] for fqn, p in alive}
    held = {fqn: found for fqn, found in holders.items() if found}
    if not held:
        return
    kinds = sorted({type(holder).__name__ for found in held.values() for holder in found})
    raise ConfigError(
        f"parameters taken from the model before its first call are still held (by: {', '.join(kinds)}): "
        f"{', '.join(held)}. The first call sharded the model and replaced them, so clipping or averaging the old ones "
        "does nothing. Read model.parameters() after the first call, or call fxshard.fully_shard(model) before it."
    )


def _holds(referrer: object) -> bool:
    """Return whether a referrer is more than variables; loops over `model.parameters()` leave one behind."""
    if isinstance(referrer, dict):
        return "__builtins__" not in referrer
    return not isinstance(referrer, types.FrameType | types.CellType | types.GeneratorType)
