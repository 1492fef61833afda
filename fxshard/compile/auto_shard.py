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

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from fxshard.compile import dynamo, fsdp2_or_ddp
from fxshard.cost import measured
from fxshard.errors import ConfigError
from fxshard.live_objects import instances_of, referrers_of
from fxshard.options import Options, launched_world_size
from fxshard.ranks.rendezvous import difference_from, gather_texts
from fxshard.runtime import eager, mesh_axes, process_groups
from fxshard.runtime.extensions import has_hooks
from fxshard.runtime.flat_shard import Home
from fxshard.runtime.parameters import as_dtensor, shard_rows
from fxshard.runtime.raw import checksum
from fxshard.runtime.unit import Unit
from fxshard.sharding import regional, shard_module
from fxshard.sharding.mesh import default_mesh, require_mesh
from fxshard.sharding.sharded_module import plain_module, states_under, units_under
from fxshard.unit_settings import UnitSettings

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


def shard_root(gm: fx.GraphModule, unsharded: dict[str, nn.Parameter], options: Options) -> None:
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
    fsdp2_or_ddp.refuse([dynamo.compiled_around(root) or root for root in roots])
    _require_cast(gm, roots, options)
    _require_ready(roots, unsharded)
    by_block = {root: dynamo.compiled_model(root) for root in roots} if options.regional else {}
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
            _require_no_averages(root, group)
            _agree_on_values(root, group)
        if options.hardware is None:
            measured.agree(mesh)
        _shard(root, mesh, options)
    then = dynamo.allow_again()
    if any([regional.begin_in_first_call(states_under(root), each, then) for root, each in by_block.items()]):
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
    require_plain(
        {
            name: p
            for name, p in parameters.items()
            if isinstance(p, DTensor) and p.requires_grad and p.device_mesh.size() < dist.get_world_size()
        }
    )


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
    _require_all_unsharded(roots)


def _require_all_unsharded(roots: list[nn.Module]) -> None:
    if any(units_under(root) for root in roots):
        raise ConfigError(
            "part of the model is sharded and part is not. Shard all of it before compiling: fully_shard on the inner "
            "modules first, then fxshard.fully_shard(model)"
        )


def _require_no_averages(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise on all ranks if an `AveragedModel` holds whole parameters of `root`: it would mix them with shards."""
    names = _averaged(root)
    if names:
        gc.collect()  # it may be dead
        names = _averaged(root)
    texts = gather_texts("one_line_averages", ", ".join(names), group)
    if held := next(filter(None, texts), ""):
        raise ConfigError(
            f"an AveragedModel made before the first call holds copies of parameters: {held}. The call "
            "shards the model, and whole copies cannot be averaged with shards. Make it of the plain model and shard "
            "it as well, before the first call: fxshard.fully_shard(averaged). Or keep averages of your own, made "
            "after the first call: {name: p.detach().clone() for name, p in model.named_parameters()}."
        )


def _averaged(root: nn.Module) -> list[str]:
    """Return the names of parameters of which an `AveragedModel` holds whole copies with their present values."""
    found: dict[str, None] = {}
    for averaged in instances_of(AveragedModel):
        copied = plain_module(averaged.module)
        for path, part in root.named_modules():
            # A copy with other values may be of another model of the class.
            if _is_copy(copied, part):
                found |= dict.fromkeys(name for name, _ in part.named_parameters(path))
    return list(found)


def _is_copy(copied: nn.Module, module: nn.Module) -> bool:
    """Return whether `copied` has the parameters of `module`, none of them sharded."""
    ours, theirs = dict(module.named_parameters()), dict(copied.named_parameters())
    return ours.keys() == theirs.keys() and all(_equal(p, theirs[name]) for name, p in ours.items())


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    if isinstance(theirs, DTensor | UninitializedParameter) or theirs.is_meta:
        return False
    same_kind = (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape)
    return same_kind and torch.equal(ours, theirs.to(ours.device))  # an AveragedModel may be on another device


def _agree_on_values(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the first rank's parameters and buffers; raise if names, shapes or dtypes differ."""
    named = dict(root.named_parameters()) | dict(root.named_buffers())
    layout = [f"{name}: {tensor.dtype}{list(tensor.shape)}" for name, tensor in named.items()]
    texts = gather_texts("one_line_layout", "\n".join(layout), group)
    lines = dict(zip(dist.get_process_group_ranks(group), map(str.splitlines, texts), strict=True))
    if difference := difference_from(dist.get_rank(), lines):
        raise ConfigError(f"the ranks' models differ: {difference}. Build the same model on every rank.")
    tensors = list(named.values())
    if len(set(gather_texts("one_line", str(checksum(tensors)), group))) > 1:
        _broadcast(tensors, group)


def _broadcast(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    source = dist.get_process_group_ranks(group)[0]
    if dist.get_rank() == source:
        _log.warning("fxshard: ranks start from different parameters (seeds?); rank %d's are broadcast.", source)
    with torch.no_grad():
        for tensor in tensors:
            values = tensor.detach().clone(memory_format=torch.contiguous_format)  # gloo ignores strides
            dist.broadcast(values, src=source, group=group)
            _write(tensor.detach(), values)


def _write(tensor: Tensor, values: Tensor) -> None:
    """Do `tensor.copy_(values)`, also for an expanded tensor: write each element of its memory once."""
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def _shard(root: nn.Module, mesh: DeviceMesh, options: Options) -> None:
    old = dict(root.named_parameters())
    units = make_units(root, mesh, options)
    new = dict(root.named_parameters())
    _rebind_optimizers({id(p): (p, new[fqn]) for fqn, p in old.items()})
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


def make_units(root: nn.Module, mesh: DeviceMesh, options: Options) -> tuple[Unit, ...]:
    """Shard the modules of an unsharded model as `options` say."""
    policy = MixedPrecisionPolicy(param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype)
    modules = units_of(root)
    offloaded, offload = offloaded_of(modules, options), options.offload or {}
    for module in modules:
        shard_module.shard(
            [module],
            mesh,
            UnitSettings(
                mp_policy=policy,
                reshard_after_forward=options.reshard_after_forward,
                offload=CPUOffloadPolicy(offload.get("pin_memory", True)) if module in offloaded else None,
                from_one_line=True,
            ),
        )
    return units_under(root)


def units_of(root: nn.Module) -> list[nn.Module]:
    """Choose the modules to make units of, inner ones first.

    Those that stand in ModuleLists and Sequentials, outermost, if they share no parameter; then the root.
    """
    found: dict[nn.Module, None] = {}  # a part that two others share is met twice

    def visit(module: nn.Module) -> None:
        for child in module.children():
            inside_container = isinstance(module, nn.ModuleList | nn.Sequential)
            is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if inside_container and not is_container and next(child.parameters(), None) is not None:
                found[child] = None
            else:
                visit(child)

    visit(root)
    return [*(block for block in found if not _shares(block, root)), root]


def offloaded_of(modules: Sequence[nn.Module], options: Options) -> set[nn.Module]:
    """Choose the units that are offloaded: the last ones, up to the part of the bytes that the option says.

    What a step begins and ends with has no compute that hides its copies: the first units, and the root.
    """
    taken: set[int] = set()
    sizes = []
    for module in modules:  # inner ones first: each has what they left
        own = {id(p): p.numel() * p.element_size() for p in module.parameters() if id(p) not in taken}
        taken.update(own)
        sizes.append((module, sum(own.values())))
    *blocks, root = sizes
    whole, part = sum(size for _, size in sizes), (options.offload or {}).get("params", 0)
    left, chosen, in_turn = part * whole, set[nn.Module](), [*reversed(blocks), root]
    for module, size in in_turn:
        if (left := left - size) < 0:
            break
        chosen.add(module)
    if part and not chosen:
        _log.warning(
            "fxshard: nothing is offloaded: whole units are, the last one first, and it has %.2g of the bytes of the "
            'parameters. Give offload={"params": ...} as much, or make smaller units with fully_shard.',
            in_turn[0][1] / whole,
        )
    return chosen


def _shares(block: nn.Module, root: nn.Module) -> bool:
    inside = {id(module) for module in block.modules()}
    outside = {id(p) for m in root.modules() if id(m) not in inside for p in m._parameters.values()}
    return any(id(p) in outside for p in block.parameters())


def _rebind_optimizers(replaced: dict[int, tuple[nn.Parameter, nn.Parameter]]) -> None:
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


@functools.cache
def guard_optimizers() -> RemovableHandle:
    """Refuse, from now on, an optimizer step that would train an unsynchronised replica.

    Installed when fxshard is imported: a model of which Dynamo captures nothing never comes to the backend. It is the
    one hook that is always there; `guard_optimizers().remove()` takes it away.
    """
    return register_optimizer_step_pre_hook(_ReplicaGuard())


class _ReplicaGuard:
    """Refuses to step what fxshard was to train and never saw: replicas, and models that FSDP2 still has."""

    def __init__(self) -> None:
        # The search for the model is made once per optimizer. A model that was never given to us may be a reference,
        # a small helper, or under DDP.
        self._approved: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # Dynamo cannot trace the search: a compiled step is not checked
            return
        ranks = dist.get_world_size() if dist.is_initialized() else launched_world_size()
        if optimizer in self._approved or ranks == 1:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        fsdp2_or_ddp.refuse_compiled(parameters)
        plain = [p for p in parameters if not isinstance(p, DTensor)]
        replicas = _replicas(plain) if plain else []
        if replicas:
            raise ConfigError(
                f"optimizer step on parameters that are not sharded: {', '.join(replicas)}. Their model was not "
                "captured with backend='fxshard', or only in part (compiled in part, split by graph breaks: "
                "TORCH_LOGS=graph_breaks, or called where Dynamo does nothing: in torch.func transforms, under a "
                "TorchDispatchMode such as FlopCounterMode), so their gradients were never averaged over the ranks. "
                "Compile the outermost module, or call fxshard.fully_shard(model) before compiling, after "
                "torch.distributed.init_process_group()."
            )
        self._approved.add(optimizer)


def _replicas(parameters: Iterable[Tensor]) -> list[str]:
    """Return the FQNs of those with a sharded module beside them or fxshard around them that are not ignored."""
    wanted = {id(p) for p in parameters}
    found: dict[int, str] = {}
    for model in instances_of(nn.Module, thaw=False):  # of any program that imports fxshard
        units = units_under(model)
        ignored = {id(p) for unit in units for p in unit.settings.ignored}
        is_ours = bool(units) or dynamo.is_compiled_by(model, "fxshard")
        for name, parameter in model.named_parameters() if is_ours else ():
            if id(parameter) in wanted - ignored and len(name) > len(found.get(id(parameter), "")):
                found[id(parameter)] = name.removeprefix("_orig_mod.")
    return list(found.values())
