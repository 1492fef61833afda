"""Pipelines of two ranks, two data-parallel ranks at each of their stages: what is trained, and what else is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fxshard
from fxshard.pipelining import ShardedStage
from fxshard.tools.bench import traffic
from tests.numerics import mesh_bodies
from tests.numerics.harness import EAGER, assert_same_tensors, compile_module, full
from tests.numerics.models import Block

WIDTH, ROWS, NUM_LAYERS, NUM_MICROBATCHES, NUM_STEPS = 6, 8, 4, 4, 3
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
LOOPED = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")

Part = nn.Module
Shard = Callable[[Part], object]


class Net(nn.Module):
    """Named layers between two that are in the unit of the root; a stage keeps some, under the same names."""

    def __init__(self, keep: Iterable[int] = range(NUM_LAYERS), *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        embed, blocks, head = nn.Linear(WIDTH, WIDTH), [Block(WIDTH) for _ in range(NUM_LAYERS)], nn.Linear(WIDTH, 1)
        self.embed = embed if first else None
        self.layers = nn.ModuleDict({str(i): blocks[i] for i in keep})
        self.head = head if last else None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    x, y = (torch.randn(ROWS, width, generator=generator, dtype=torch.float64) for width in (WIDTH, 1))
    return x, y


@dataclass(frozen=True, kw_only=True)
class System:
    """What shards, compiles and runs the stages."""

    shard: Callable[..., Any]
    stage: type[PipelineStage]
    compile: Callable[[nn.Module], nn.Module] = lambda module: module


# Where a backward is split torch finds weights by what is registered: it must be unsharded.
FSDP2 = System(shard=partial(fsdp2_fully_shard, reshard_after_forward=False), stage=PipelineStage)


def ours(**options: Any) -> System:
    compile = partial(compile_module, options={**EAGER, **options})
    return System(shard=fxshard.fully_shard, stage=ShardedStage, compile=compile)


NOT_COMPILED = System(shard=fxshard.fully_shard, stage=ShardedStage)


@dataclass(kw_only=True, eq=False)
class Run:
    """This rank's stages of a pipeline."""

    mesh: DeviceMesh
    parts: list[nn.Module]  # their modules, in the order of the stages
    schedule: Any
    holds_first: bool
    holds_last: bool
    optims: list[torch.optim.Optimizer]
    update: Callable[[Run], None] = lambda run: None  # what follows a step of the schedule
    losses: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)

    @property
    def replica(self) -> int:
        """Which rows this rank trains on."""
        return self.mesh["dp"].get_local_rank() if "dp" in (self.mesh.mesh_dim_names or ()) else 0

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of all parts, by the names that they have in the whole model."""
        return {name: p for part in self.parts for name, p in part.named_parameters()}

    def run_schedule(self, step: int) -> None:
        """Forward and backward of a batch."""
        x, y = batch(step, self.replica)
        losses: list[Tensor] = []
        self.schedule.step(*([x] if self.holds_first else []), target=y if self.holds_last else None, losses=losses)
        if losses:
            self.losses.append(torch.stack(losses).mean().detach())

    def train_step(self, step: int) -> None:
        """A step of the schedule and of the optimizers; the gradients of the first one are kept."""
        self.run_schedule(step)
        if not self.grads:
            self.grads = {name: None if p.grad is None else full(p.grad) for name, p in self.parameters().items()}
        self.update(self)
        for optim in self.optims:
            optim.step()
            optim.zero_grad()

    def final(self) -> dict[str, Tensor | None]:
        """All parameters, whole."""
        return {name: full(p) for name, p in self.parameters().items()}


def stages_of(schedule: str, place: int, size: int) -> list[int]:
    """The stages of a rank of the pipeline."""
    if schedule in SINGLE:
        return [place]
    return [place, 2 * size - 1 - place] if schedule in V_SHAPED else [place, place + size]


def shard_each(part: nn.Module, shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    """A unit for each layer, and one of what is left."""
    for layer in cast(Net, part).layers.values():
        shard(layer, mesh=mesh)
    shard(part, mesh=mesh)


def start(
    system: System,
    schedule: str,
    mesh: DeviceMesh,
    *,
    data: str | tuple[str, ...] = "dp",
    prepare: Shard = lambda part: None,
    static: bool = True,
    **kwargs: Any,
) -> Run:
    """Build, shard and compile this rank's stages.

    Args:
        system: what with.
        schedule: name of its class.
        mesh: with an axis "pp".
        data: its axes that shard and replicate.
        prepare: what is done to a part before it is sharded.
        static: whether stages are told what goes in and comes out.
        **kwargs: of `Run`.
    """
    torch._dynamo.reset()
    place, size, group = mesh["pp"].get_local_rank(), mesh["pp"].size(), mesh.get_group("pp")
    mine = stages_of(schedule, place, size)
    num_stages = size * len(mine)
    per_stage = NUM_LAYERS // num_stages
    parts: list[nn.Module] = []
    stages = []
    for i in mine:
        first, last = i == 0, i == num_stages - 1
        part = Net(range(i * per_stage, (i + 1) * per_stage), first=first, last=last)
        prepare(part)
        shard_each(part, system.shard, mesh[data])
        rows = ROWS // NUM_MICROBATCHES
        given = torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=not first)
        made = torch.randn(rows, 1 if last else WIDTH, dtype=torch.float64, requires_grad=True)
        told: dict[str, Any] = {"input_args": given, "output_args": made} if static else {}
        cpu = torch.device("cpu")
        stages.append(system.stage(system.compile(part), i, num_stages, cpu, group=group, **told))
        parts.append(part)
    runner = getattr(pipelining, schedule, None) or getattr(pipelining.schedules, schedule)
    return Run(
        mesh=mesh,
        parts=parts,
        schedule=runner(stages[0] if schedule in SINGLE else stages, NUM_MICROBATCHES, loss_fn=squared_error),
        holds_first=0 in mine,
        holds_last=num_stages - 1 in mine,
        optims=[torch.optim.SGD(part.parameters(), lr=0.1) for part in parts],
        **kwargs,
    )


def train(run: Run) -> Run:
    for step in range(NUM_STEPS):
        run.train_step(step)
    return run


def unsharded(replicas: int = 2, max_norm: float | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """The first step's gradients, the final parameters and the losses of one process that trains the whole model."""
    model, losses = Net(), []
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    grads: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        batches = [batch(step, replica) for replica in range(replicas)]
        losses.append(torch.stack([squared_error(model(x), y) for x, y in batches]))
        losses[-1].mean().backward()
        grads = grads or {name: cast(Tensor, p.grad).clone() for name, p in model.named_parameters()}
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optim.step()
        optim.zero_grad()
    return grads, {name: p.detach() for name, p in model.named_parameters()}, torch.stack(losses).detach()


def compare(found: Run, other: Run) -> None:
    """Hold two pipelines to the same bits."""
    assert_same_tensors(found.grads, other.grads, "gradient", rtol=0.0, atol=0.0)
    assert_same_tensors(found.final(), other.final(), "parameter", rtol=0.0, atol=0.0)
    torch.testing.assert_close(found.losses, other.losses, rtol=0.0, atol=0.0)


def compare_with_unsharded(run: Run, replicas: int = 2, max_norm: float | None = None) -> None:
    """Hold a pipeline to one process that trains the whole model."""
    grads, params, losses = unsharded(replicas, max_norm)
    for found, expected, what in ((run.grads, grads, "gradient"), (run.final(), params, "parameter")):
        assert_same_tensors(found, {name: expected[name] for name in found}, what, rtol=1e-9, atol=1e-11)
    if run.holds_last:
        torch.testing.assert_close(torch.stack(run.losses), losses[:, run.replica], rtol=1e-9, atol=1e-11)


# ---- bodies


def trains_as_fsdp2(schedule: str, mesh: DeviceMesh, **options: Any) -> None:
    run = train(start(ours(**options), schedule, mesh))
    compare_with_unsharded(run)
    compare(run, train(start(FSDP2, schedule, mesh)))


def trains(schedule: str, mesh: DeviceMesh, system: System, **kwargs: Any) -> None:
    compare_with_unsharded(train(start(system, schedule, mesh, **kwargs)))


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="fxshard", options=EAGER)
    return module


def launches(run: Run) -> dict[str, int]:
    """Count the collectives of the second step."""
    run.train_step(0)
    return {name: found.launches for name, found in traffic.measure(partial(run.run_schedule, 1), 8).items()}


def num_units(run: Run) -> int:
    """One for each layer, and for each root that has parameters of its own."""
    return NUM_LAYERS // 2 + run.holds_first + run.holds_last


def launches_once_per_step(schedule: str, mesh: DeviceMesh) -> None:
    """One gather and one reduction per unit, by budget or by the user's word; FSDP2 reduces as often."""
    resident = start(ours(resident_gib=1), schedule, mesh)
    assert launches(resident) == {"all_gather": num_units(resident), "reduce_scatter": num_units(resident)}
    kept = start(ours(), schedule, mesh)
    for part in kept.parts:
        cast(fxshard.ShardedModule, part).set_reshard_after_backward(False)
    assert launches(kept) == {"all_gather": num_units(kept), "reduce_scatter": num_units(kept)}
    plain = start(ours(), schedule, mesh)
    counts = launches(plain)
    assert counts["reduce_scatter"] == num_units(plain)
    assert counts["all_gather"] >= NUM_MICROBATCHES * num_units(plain)
    theirs = launches(start(FSDP2, schedule, mesh))
    assert theirs["reduce_scatter"] == num_units(plain)


def clip(run: Run, max_norm: float) -> None:
    """As torchtitan does: the norm of a rank's stages, and then over the stages."""
    parameters = list(run.parameters().values())
    norms = [full(nn.utils.get_total_norm([cast(Tensor, p.grad) for p in part.parameters()])) for part in run.parts]
    total = torch.stack(norms).square().sum()
    dist.all_reduce(total, group=run.mesh.get_group("pp"))
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total.sqrt())


def clips_gradients(schedule: str, mesh: DeviceMesh) -> None:
    run = train(start(ours(), schedule, mesh, update=partial(clip, max_norm=0.1)))
    compare_with_unsharded(run, max_norm=0.1)


def evaluates(schedule: str, mesh: DeviceMesh) -> None:
    """Between a step and its update: the gradients stay as they are."""
    run = start(ours(), schedule, mesh)
    run.run_schedule(0)
    before = {name: full(cast(Tensor, p.grad)) for name, p in run.parameters().items()}
    x, y = batch(1, run.replica)
    losses: list[Tensor] = []
    with torch.no_grad():
        given = [x] if run.holds_first else []
        output = run.schedule.eval(*given, target=y if run.holds_last else None, losses=losses)
    if run.holds_last:
        expected = Net()(x)
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(torch.stack(losses).mean(), squared_error(expected, y), rtol=1e-9, atol=1e-11)
    after = {name: full(cast(Tensor, p.grad)) for name, p in run.parameters().items()}
    assert_same_tensors(after, before, "gradient", rtol=0.0, atol=0.0)
    for optim in run.optims:
        optim.zero_grad()
    compare_with_unsharded(train(Run(**{**vars(run), "losses": [], "grads": {}})))


def adds_up_steps_without_sync(schedule: str, mesh: DeviceMesh) -> None:
    """A step inside of no_sync reduces nothing; the next one reduces both."""
    run = start(ours(), schedule, mesh)
    first, *rest = run.parts
    with fxshard.no_sync(first), fxshard.no_sync(rest[0] if rest else first):
        run.run_schedule(0)
    assert all(p.grad is None for p in run.parameters().values())
    run.run_schedule(1)
    model = Net()
    for step in range(2):
        for replica in range(2):
            x, y = batch(step, replica)
            (squared_error(model(x), y) / 2).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    found = {name: full(cast(Tensor, p.grad)) for name, p in run.parameters().items()}
    assert_same_tensors(found, {name: expected[name] for name in found}, "gradient", rtol=1e-9, atol=1e-11)


def saves_and_loads(schedule: str, mesh: DeviceMesh) -> None:
    """The names of the whole model: full states, a folder for each part, and one of torch's for all."""
    run = train(start(ours(), schedule, mesh))
    _, params, _ = unsharded()
    for part in run.parts:
        found = fxshard.full_state_dict(part, recipient_rank=None)
        assert_same_tensors(found, {name: params[name] for name in found}, "parameter", rtol=1e-9, atol=1e-11)
    folder = mesh_bodies.shared_folder()
    state: dict[str, Any] = {name: p for part in run.parts for name, p in part.state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=f"{folder}/whole")
    whole: dict[str, Any] = {"model": Net().state_dict()}
    dcp.load(whole, checkpoint_id=f"{folder}/whole")
    assert_same_tensors(whole["model"], params, "parameter", rtol=1e-9, atol=1e-11)
    other = start(ours(), schedule, mesh)
    for part, optim, fresh, new in zip(run.parts, run.optims, other.parts, other.optims, strict=True):
        path = f"{folder}/part-{next(iter(dict(part.named_parameters())))}"
        fxshard.save_checkpoint(path, part, optim)
        fxshard.load_checkpoint(path, fresh, new)
    assert_same_tensors(other.final(), run.final(), "parameter", rtol=0.0, atol=0.0)


def replicas(schedule: str, _: DeviceMesh) -> None:
    """Hybrid sharding below a stage."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "shard"))
    compare_with_unsharded(train(start(ours(), schedule, mesh, data=("dp", "shard"))))


def tensor_parallel(schedule: str, _: DeviceMesh) -> None:
    """Tensor parallelism below a stage."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))

    def split(part: nn.Module) -> None:
        parallelize_module(part, mesh["tp"], {"layers.*.down": ColwiseParallel(output_layouts=Replicate())})

    compare_with_unsharded(train(start(ours(), schedule, mesh, prepare=split)), replicas=1)


def a_layer_of_two_stages(schedule: str, mesh: DeviceMesh) -> None:
    """The first layer of the first stage is also the last but one of the last stage, on the same rank."""
    layers: list[Any] = []

    def tie(part: nn.Module) -> None:
        net: Any = part
        if net.embed is not None:
            layers.append(fxshard.fully_shard(net.embed, mesh=mesh["dp"]))
        if net.head is not None and layers:
            net.head = nn.Sequential(layers[0], net.head)

    model: Any = Net()
    model.head = nn.Sequential(model.embed, model.head)
    for replica in range(2):
        x, y = batch(0, replica)
        (squared_error(model(x), y) / 2).backward()
    expected = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    run = start(ours(), schedule, mesh, prepare=tie)
    for _ in range(2):
        for p in run.parameters().values():
            p.grad = None
        run.run_schedule(0)
        found = {name: full(cast(Tensor, p.grad)) for name, p in run.parameters().items()}
        assert_same_tensors(found, {name: expected[name] for name in found}, "gradient", rtol=1e-9, atol=1e-11)


BODIES: dict[str, mesh_bodies.Body] = {
    "as FSDP2": trains_as_fsdp2,
    "resident": partial(trains_as_fsdp2, resident_gib=1),
    "compiled code": partial(trains, system=ours(lower="inductor")),
    "compiled in place": partial(trains, system=replace(NOT_COMPILED, compile=compiled_in_place)),
    "not compiled": partial(trains, system=NOT_COMPILED),
    "shapes not told": partial(trains, system=ours(), static=False),
    "counts": launches_once_per_step,
    "clipping": clips_gradients,
    "evaluation": evaluates,
    "no_sync": adds_up_steps_without_sync,
    "state": saves_and_loads,
    "replicas": replicas,
    "tensor parallel": tensor_parallel,
}
ON_ONE_RANK = {"a layer of two stages": a_layer_of_two_stages}
"""Where the first and the last stage are on one rank."""


def run(schedule: str, *names: str) -> None:
    """Run bodies under a schedule, on four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    mesh_bodies.run(BODIES | ON_ONE_RANK, names, schedule, mesh)
