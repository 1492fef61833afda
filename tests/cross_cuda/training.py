"""Train a small model on fake tensors: compiled for CUDA, and then run on mock streams."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxshard
from fxshard.compile import backend
from fxshard.runtime.frame import Frame
from fxshard.sharding.sharded_module import ShardedModule
from fxshard.tools.demo.gpt import GPT
from tests.cross_cuda import layouts
from tests.cross_cuda.clocks import NO_FAULT, Seeded
from tests.cross_cuda.dry_run import DryRun, dry_run
from tests.cross_cuda.gpus import H100, Gpu
from tests.cross_cuda.lane import Compiled, installed

WORLD_SIZE = 8
BF16 = fxshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = fxshard.MixedPrecisionPolicy()


class Broken(GPT):
    """A GPT with a graph break between its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 `[batch, seq]` to logits."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(self.norm(x))


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how."""

    model: type[GPT] = GPT  # class of it
    dim: int = 256  # its width
    num_layers: int = 2  # its blocks
    batch: int = 2  # rows of a microbatch
    # dtypes; `None` for a model in bfloat16 that is not sharded, and compiled by torch alone
    policy: fxshard.MixedPrecisionPolicy | None = BF16
    gpu: Gpu = H100  # for which it is compiled
    layout: layouts.Layout = layouts.by_block  # how its parameters are shared by the ranks
    replicas: int = 1  # of each shard; the ranks that share the parameters are fewer by as much
    microbatches: int = 1  # of a step; all but the last only accumulate
    overlaps_step: bool = False  # whether the optimizer launches the next forward's first gather
    offloads: bool = False  # whether shards are in the host's memory
    options: tuple[tuple[str, Any], ...] = ()  # of the backend
    faults: tuple[Seeded, ...] = ()  # to seed, a further run for each


@dataclass(kw_only=True)
class Trained:
    """What came of it."""

    compiled: Compiled  # the kernels and wrappers
    graphs: list[dict[str, fx.Graph]]  # stage -> the graph that became code, of each frame in the order of capture
    run: DryRun  # one step, after those that compiled
    faulty: list[DryRun]  # one step with each of the case's faults


def trained(case: Case) -> Trained:
    """Train a model for two steps, in which all is compiled, and then for two more that are noted."""
    mode, lane = FakeTensorMode(allow_non_fake_inputs=True), installed()
    with warnings.catch_warnings(), _ranks(case.replicas) as mesh, lane.compiling(case.gpu) as compiled:
        # A unit looks at the addresses of its parameters; those of fake ones are all 0, which does no harm.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with mode:
            model, step = _built(case, mesh)
            step()
            step()
        num_wrappers = len(lane.wrappers)
        run, *faulty = [_noted(step, mode, seeded) for seeded in (NO_FAULT, *case.faults)]
        assert len(lane.wrappers) == num_wrappers, "something was compiled in a step that is looked at"
        graphs = [_code_graphs(frame) for frame in backend.frames_of(model)] if case.policy else []
    return Trained(compiled=compiled, graphs=graphs, run=run, faulty=faulty)


@functools.cache
def trained_once(case: Case) -> Trained:
    """Do the same, once for all tests of a process."""
    return trained(case)


@contextmanager
def _ranks(replicas: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    try:
        if replicas > 1:
            shape = (replicas, WORLD_SIZE // replicas)
            yield init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard"))
        else:
            yield init_device_mesh("cuda", (WORLD_SIZE,))
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()


def _noted(step: Callable[[], None], mode: FakeTensorMode, seeded: Seeded) -> DryRun:
    """Run a step that makes the prefetcher know what comes next, and note the one after it."""
    with dry_run(mode, seeded) as run, installed().watching(run):
        step()
        run.steps.clear()
        step()
    return run


def _built(case: Case, mesh: DeviceMesh) -> tuple[nn.Module, Callable[[], None]]:
    """Return a model, sharded unless the case has no policy, and a step of its training."""
    with torch.device("cuda"), _default_dtype(torch.bfloat16 if case.policy is None else torch.float32):
        model = case.model(64, dim=case.dim, num_layers=case.num_layers, num_heads=4)
        tokens = torch.zeros(case.batch, 64, dtype=torch.int64)
    if case.policy is None:
        compiled: Any = torch.compile(model)
    else:
        policy = fxshard.CPUOffloadPolicy() if case.offloads else fxshard.OffloadPolicy()
        case.layout(model, mesh, functools.partial(fxshard.fully_shard, mp_policy=case.policy, offload_policy=policy))
        compiled = torch.compile(model, backend="fxshard", options=dict(case.options))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if case.overlaps_step:
        optimizer = fxshard.overlap_step(optimizer)

    def step() -> None:
        for left in reversed(range(case.microbatches)):
            if isinstance(model, ShardedModule):
                model.set_requires_gradient_sync(left == 0)
            compiled(tokens).float().square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _code_graphs(frame: Frame) -> dict[str, fx.Graph]:
    """Map what the history calls a graph, such as `backward`, to the graph from which code was made."""
    last = [list(results.values())[-1] for results in frame.history.stages.values()]
    made = {result.stage: result.graph for result in last if result.stage.phase == "codegen"}
    return {str(replace(stage, phase="")): graph for stage, graph in made.items()}
