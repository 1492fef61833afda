"""The public functions, with FSDP2's names and meaning where FSDP2 has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer

from fxshard import torch_private
from fxshard.compile.backend import frames_of
from fxshard.compile.one_line.units import blocks_of
from fxshard.cost import measured
from fxshard.errors import ConfigError
from fxshard.ir import collectives, text
from fxshard.ir.history import CAPTURED
from fxshard.plan.policies import Policy, read_policies
from fxshard.runtime import overlapped_step
from fxshard.runtime.unit import Unit
from fxshard.runtime.whole_matrices import WholeMatrices
from fxshard.sharding import adopt as adopt_module
from fxshard.sharding import forward_methods, fsdp2_settings, per_parameter, shard_module, sharded_module
from fxshard.sharding import release as release_module
from fxshard.sharding.mesh import data_axes, default_mesh, require_mesh
from fxshard.sharding.no_sync import without_sync
from fxshard.sharding.sharded_module import ShardedModule, is_compiled, plain_module
from fxshard.unit_settings import UnitSettings

Modules = TypeVar("Modules", bound=nn.Module | list[Any])
AnyOptimizer = TypeVar("AnyOptimizer")


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Modules:
    """Shard the parameters of `module` over the data-parallel ranks, in place, as torch's FSDP2 does.

    Call it bottom-up, then `torch.compile(module, backend="fxshard")`. Each call makes one unit of the parameters that
    no earlier call has taken: they are gathered together and their gradients are reduced together. Parameters become
    `DTensor(Shard(0))`, on a mesh of two axes `(Replicate(), Shard(0))`; optimizers, `state_dict`,
    `torch.distributed.checkpoint` and `clip_grad_norm_` work on them. Those that are DTensors already (tensor or expert
    parallelism, on another slice of the same mesh) are sharded within each rank's part.

    Args:
        module: the module, or a list of modules that make one unit together.
        mesh: device mesh of the ranks that share the parameters; default: all ranks, with a new process group if there
            is none. With two axes, which need names, the first one replicates and the second shards (hybrid sharding):
            gradients are reduced over the second and then averaged over the first.
        reshard_after_forward: True frees the gathered parameters after forward and gathers them again in backward;
            False keeps them; None is False for the outermost module and True for the others. A number is one of ranks
            that share them in between: with 8, ranks 0 to 7 have all of them, ranks 8 to 15 too, and backward gathers
            within these. Compiled code only: a model that runs eagerly keeps what autograd saved until its backward.
        shard_placement_fn: called with each parameter; `Shard(d)` cuts it along dimension d, None along the first. But
            for the first the ranks must divide it evenly. A gather then ends with a transposed copy, a reduction begins
            with one. torch's `ShardPlacementResult` has a mesh besides: such parameters are a unit of their own.
        mp_policy: dtypes of gathered parameters, of gradient reduction, of inputs and outputs; torch's dataclass.
        offload_policy: `CPUOffloadPolicy()` keeps the shards of this unit, their gradients and the optimizer's state
            in the host's memory, where the optimizer steps; a shard is copied to the device before it is gathered. By
            default they are on the device. `pin_memory=False` takes no page-locked memory, and overlaps no copy.
        ignored_params: parameters that stay as they are: not sharded, their gradients not reduced.
        dp_mesh_dims: torch's `DataParallelMeshDims`: which axes of `mesh` shard and which replicate, for parameters
            that are DTensors on all of its axes, whole on those. Modules read them so, and must be given DTensors on
            `mesh`; several axes of a kind are used as one.

    Returns:
        `module` itself; its class is now a subclass that is also a `ShardedModule`.

    Raises:
        ConfigError: wrong mesh, sharded twice, compiled before, or parameters that cannot be sharded (named).
    """
    _require_kinds(reshard_after_forward, mp_policy, offload_policy)
    modules = _modules(module)
    _require_fresh(modules)
    policy = mp_policy or MixedPrecisionPolicy()
    given, within = (mesh, None) if dp_mesh_dims is None else data_axes(mesh, dp_mesh_dims)
    chosen = require_mesh(given if given is not None else default_mesh())
    units = shard_module.shard(
        modules,
        chosen,
        UnitSettings(
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            offload=offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None,
        ),
        ignored=ignored_params or (),
        settings_of=per_parameter.chooser(policy, shard_placement_fn, chosen),
        within=within,
    )
    for each in dict.fromkeys((chosen, *(unit.mesh for unit in units))):
        _agree([unit for unit in units if unit.mesh == each], each)
    return module


def apply_policies(
    model: nn.Module,
    policies: str | Path | Mapping[str, Policy],
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Shard a model as a plan recommends, in place: each block with its policy, and the rest as one unit.

        fxshard.apply_policies(model, "policies.json")  # of fxshard plan --memory-budget-gib 60 --write policies.json
        model = torch.compile(model, backend="fxshard", options={"regional": True})

    All ranks must be given the same policies, of each block: the file, or `recommend(...).policies`. A block that is
    computed again in backward is put into torch's `checkpoint_wrapper`. Other arguments as of `fully_shard`.

    Raises:
        ConfigError: the policies are of other blocks (each named), the file has none, or as `fully_shard` raises.
    """
    chosen = policies if isinstance(policies, Mapping) else read_policies(policies)
    names = {module: name for name, module in model.named_modules()}
    blocks = {names[block]: block for block in blocks_of(model)}
    if wrong := sorted(blocks.keys() ^ chosen.keys()):
        raise ConfigError(
            f"the policies are not of the blocks of {type(model).__name__}: only one side has {', '.join(wrong)}. "
            "Plan the model that is to be trained."
        )
    for name, block in blocks.items():
        policy = chosen[name]
        if policy.checkpoints:
            model.set_submodule(name, block := torch_private.checkpoint_wrapper(block))
        offload = CPUOffloadPolicy() if policy.offloads else None
        reshard = policy.resident or policy.reshard_after_forward
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=mp_policy, offload_policy=offload)
        if policy.resident:
            cast(ShardedModule, block).set_reshard_after_backward(False)
    return fully_shard(model, mesh=mesh, mp_policy=mp_policy)


def adopt(module: nn.Module | dist.fsdp.FSDPModule) -> nn.Module:
    """Take over a model that torch's FSDP2 has sharded, in place, for libraries that call it themselves.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # FSDP2's plugin
        model = torch.compile(fxshard.adopt(model), backend="fxshard")

    The parameters stay the objects that they are, and the optimizer keeps them and its state; gradients that are there
    stay. FSDP2's settings carry over: units, mesh, mixed precision, resharding, prefetch lists, gradient sync, ignored
    parameters and registered forward methods. So it works before the first step and after many. How the model was
    compiled before, whole or block by block, is forgotten. Memory peaks at the shards of one unit more.

    Args:
        module: the outermost module, compiled or plain. Without a `fully_shard` of its own, what is sharded inside of
            it is taken over.

    Returns:
        The module without `torch.compile`'s wrapper.

    Raises:
        ConfigError: nothing in it is sharded by FSDP2, it is inside of DDP, or FSDP2 was told what fxshard cannot do
            (each module and setting named); nothing has changed then.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"adopt expects the model, got {type(module).__name__}.")
    adopted = adopt_module.adopt(module)
    for unit in sharded_module.units_under(adopted):
        _agree([unit], unit.mesh)
    return adopted


def _agree(units: Sequence[Unit], mesh: DeviceMesh) -> None:
    """Have the ranks count on the same numbers, along the axis of tensor parallelism as well."""
    for whole in dict.fromkeys(unit.whole_mesh for unit in units) or [None]:
        measured.agree(mesh, whole=whole)


def release(module: nn.Module, *, whole: bool = False) -> nn.Module:
    """Give a sharded model back to torch's FSDP2, in place: the opposite of `adopt`.

    Parameters stay the objects that they are, also for the optimizer. What fxshard has compiled is forgotten.

    Args:
        module: the outermost module, compiled or plain, sharded by `fully_shard`, `adopt` or the one-line form.
        whole: give back a plain model instead, with new and whole parameters on every rank; all ranks call it. Those of
            offloaded units are on the host, as their shards were.

    Returns:
        The module without `torch.compile`'s wrapper.

    Raises:
        ConfigError: nothing in it is sharded by fxshard, or gradients wait to be reduced.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"release expects the model, got {type(module).__name__}.")
    return release_module.release(module, whole=whole)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method gather parameters as `forward` does; torch's function of this name, for our modules.

    For methods that read parameters beside those of the modules that they call: `generate` of a model with an encoder,
    say. On a module that is not sharded it does nothing until it is.

    Raises:
        ConfigError: `module` is no module, or has no such method.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"register_fsdp_forward_method expects a module, got {type(module).__name__}.")
    forward_methods.register(plain_module(module), method_name)


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Set nothing, and say so once: torch's function of this name lets models share streams, which graphs do anyway."""
    for module in modules:
        if not isinstance(module, nn.Module) or not isinstance(plain_module(module), ShardedModule):
            raise ConfigError(
                f"share_comm_ctx expects modules that fully_shard has sharded, got {type(module).__name__}."
            )
    fsdp2_settings.say_once("share_comm_ctx")


def overlap_step(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Let each step of an optimizer launch the gather that the next forward begins with.

        optimizer = fxshard.overlap_step(torch.optim.AdamW(model.parameters()))

    Nothing before it in a step can hide that gather; the rest of the step, `zero_grad`, logging, the data loader and
    the copy of the batch can. The optimizer is the same object, and computes the same: torch's own (but LBFGS) step the
    parameters that the next forward reads first, then the others, and all others step as a whole, as these do with a
    closure, with hooks around their steps or a replaced `step()`. A write to parameters that torch counts (`copy_`,
    `load_state_dict`, another optimizer) has the gather repeated. Memory: the buffers of one launch, and a copy of this
    rank's rows of it, are held from the step until the forward. A compiled step launches nothing, nor does one whose
    first unit is offloaded.

    Args:
        optimizer: of torch, or a wrapper with one in its attribute `optimizer`, as accelerate has. Where several own
            parameters of the module that is read first, the one that steps last.

    Raises:
        ConfigError: it is no optimizer of torch. In a forward, `UnsupportedGraph`: parameters of the first launch were
            written after the step in a way that torch does not count (`.data`, `torch._foreach_*`).
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(f"overlap_step expects an optimizer of torch, got {type(optimizer).__name__}.")
    overlapped_step.overlap_step(inner)
    return optimizer


def whole_matrices(
    optimizer: Optimizer,
    *,
    elementwise: Callable[[dict[str, Any]], bool] | None = None,
    rows: Callable[[nn.Parameter], Sequence[int] | None] | None = None,
    bucket_mib: float | None = None,
    over_replicas: bool | None = None,
) -> WholeMatrices:
    """Let an optimizer that needs whole matrices (Muon, Shampoo, SOAP, Adafactor) step sharded parameters.

        optimizer = fxshard.whole_matrices(torch.optim.Muon(matrices, lr=0.02))

    Each matrix has one owner among the ranks that hold its rows. A step brings its gradient and rows there, runs the
    optimizer's own update on it, and brings the rows back: what the optimizer of the unsharded model computes. Owners
    have nearly equal costs of Newton-Schulz. A matrix that lies on one rank, such as a whole expert, does not move. The
    idea is that of Canzona (arXiv 2602.06079).

    Use the result in place of the optimizer, also for schedulers, `GradScaler` and `overlap_step`. State stays with
    owners. All ranks must call `state_dict()`, which cuts it; full states and checkpoints work as with any optimizer.

    Args:
        optimizer: its step treats parameters one by one, and keeps what it knows of each in `optimizer.state`.
        elementwise: called with each of its groups; True for groups whose update of an element depends on nothing else
            (AdamW beside Muon in one optimizer). They step as rows, without communication.
        rows: called with each parameter that is to be whole; how many rows (of the first dimension) each of the
            matrices has that it stacks: `[d] * heads`, or `[1] * E` for experts `[E, m, n]`, which the optimizer sees
            as E matrices `[m, n]`. None is one matrix.
        bucket_mib: of whole parameters of each owner in a round; one round is on the link while another is computed.
            Default: 32 for optimizers of torch; others take all in one call of `step`. Give a size if that may be
            called several times, with a part of the parameters each.
        over_replicas: whether replicas (HSDP) share matrices: each computes its part and holds the state of that alone,
            and rows come back over the replicas' link. False: each computes all. Default: what should take less time.

    Raises:
        ConfigError: it is no optimizer of torch, or is LBFGS. In a step: what `rows` gives does not fit.
    """
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS | WholeMatrices):
        raise ConfigError(
            f"whole_matrices expects an optimizer of torch that treats parameters one by one, got "
            f"{type(optimizer).__name__}."
        )
    return WholeMatrices(optimizer, elementwise, rows, bucket_mib, over_replicas)


@dataclass(frozen=True, kw_only=True)
class CompiledGraph:
    """One graph after all passes.

    Attributes:
        kind: "forward", "backward" or "inference".
        text: one node per line (`ir/text.py`).
        collectives: "all_gather", "reduce_scatter" and "all_reduce" (over replicas, or the user's own) -> how many the
            graph launches; absent where none.
        calls: the units of each call, by FQN ("" is the root): blocks that are alike share a graph.
    """

    kind: str
    text: str
    collectives: dict[str, int]
    calls: tuple[tuple[str, ...], ...] = ()


def compiled_graphs(module: nn.Module) -> list[CompiledGraph]:
    """Return the graphs of a sharded module after all passes, in the order in which they were compiled.

    `module` may be compiled or plain. `fxshard.explanation_of` has the graphs after every pass.
    """
    return [
        _compiled_graph(stage.name, frame.history.last(stage).graph, tuple(frame.calls))
        for frame in frames_of(module)
        for stage in (records[CAPTURED].stage for records in frame.history.stages.values())
        if stage.runs
    ]


def _compiled_graph(kind: str, graph: fx.Graph, calls: tuple[tuple[str, ...], ...]) -> CompiledGraph:
    launches = {
        "all_gather": len(collectives.unshard_launches(graph)),
        "reduce_scatter": len(collectives.reduce_launches(graph)),
        "all_reduce": len(collectives.all_reduce_launches(graph)),
    }
    used = {op: count for op, count in launches.items() if count}
    return CompiledGraph(kind=kind, text=text.graph_text(graph), collectives=used, calls=calls)


@contextlib.contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Add up gradients instead of reducing them, for every backward that runs inside; DDP's and FSDP's `no_sync`.

        for microbatch in microbatches[:-1]:
            with fxshard.no_sync(model):
                loss_of(model, microbatch).backward()
        loss_of(model, microbatches[-1]).backward()

    The gradients stay unsharded, in the reduce dtype, and are reduced once, by the first backward outside. When the
    block ends, also by an exception, every unit is as it was; see `ShardedModule.set_requires_gradient_sync`.

    Args:
        module: sharded by `fully_shard`, or by the first call of a compiled model inside the block.

    Raises:
        ConfigError: it is no module.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"no_sync expects the model, got {type(module).__name__}.")
    with without_sync(plain_module(module)):
        yield


def release_accumulators(module: nn.Module) -> None:
    """Free the memory in which gradients of microbatches are added up; the next `no_sync` allocates it again.

    Raises:
        ConfigError: `module` is no module, or gradients in it wait to be reduced.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"release_accumulators expects the model, got {type(module).__name__}.")
    units = sharded_module.units_under(plain_module(module))
    waiting = [unit.label for unit in units if unit.step.accumulation.waiting]
    if waiting:
        raise ConfigError(
            f"release_accumulators: gradients of {', '.join(waiting)} wait to be reduced. Run a backward outside of "
            "no_sync() first, or drop them with reset_iter_state()."
        )
    for unit in units:
        unit.step.accumulation.release()


def _require_kinds(reshard: object, mp_policy: object, offload: object) -> None:
    if not isinstance(reshard, bool | int | None):
        raise ConfigError(f"reshard_after_forward must be True, False, None or a number of ranks, got {reshard!r}.")
    if not isinstance(mp_policy, MixedPrecisionPolicy | None):
        raise ConfigError(f"mp_policy must be a MixedPrecisionPolicy, got {mp_policy!r}.")
    if type(offload) not in (CPUOffloadPolicy, OffloadPolicy, type(None)):
        raise ConfigError(f"offload_policy must be CPUOffloadPolicy() or OffloadPolicy(), got {offload!r}.")


def _modules(module: Any) -> list[nn.Module]:
    modules = list(module) if isinstance(module, list | tuple) else [module]
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ConfigError(f"fully_shard expects an nn.Module or a list of them, got {type(each).__name__}.")
        if isinstance(each, nn.ModuleList | nn.ModuleDict) and type(each).forward is nn.Module.forward:
            raise ConfigError(
                f"fully_shard: {type(each).__name__} has no forward of its own. Shard the modules in it, or the module "
                "that contains it."
            )
    if not modules:
        raise ConfigError("fully_shard got an empty list of modules.")
    nested = [m for m in modules if any(m is child for other in modules if other is not m for child in other.modules())]
    return [m for m in modules if m not in nested]


def _require_fresh(modules: list[nn.Module]) -> None:
    for module in modules:
        name = type(module).__name__
        if isinstance(module, ShardedModule):
            raise ConfigError(f"fully_shard was called twice on the same module ({name}). Call it once per module.")
        for path, child in module.named_modules():
            where = f"{name}.{path}" if path else name
            if is_compiled(child) and not isinstance(child, ShardedModule | dist.fsdp.FSDPModule):
                raise ConfigError(
                    f"{where} was compiled before fully_shard: its graph would never see the sharding. Call "
                    'fully_shard first, then torch.compile(module, backend="fxshard").'
                )
            if isinstance(child, dist.fsdp.FSDPModule):
                raise ConfigError(
                    f"{where.removeprefix('FSDP')} is sharded by torch's fully_shard already. Take it over with "
                    "fxshard.adopt(model), or leave torch's fully_shard out."
                )
