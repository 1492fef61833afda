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
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxshard
from fxshard.compile import backend
from fxshard.runtime.frame import Frame
from fxshard.sharding.sharded_module import ShardedModule
from fxshard.tools.demo.gpt import GPT
from tests.cross_cuda import layouts
from tests.cross_cuda.dry_run import DryRun, dry_run
from tests.cross_cuda.gpus import H100, Gpu
from tests.cross_cuda.lane import Compiled, installed

WORLD_SIZE, SEQ_LEN, NUM_STEPS = 8, 64, 2
ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "fused": True}
"""A large `eps`, so that rounding does not turn the sign of a whole update where a gradient is nearly zero."""
BF16 = fxshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = fxshard.MixedPrecisionPolicy()


class Broken(GPT):
    """A GPT with a graph break between its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
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
    device: str = "cuda"  # type of it
    gpu: Gpu = H100  # for which it is compiled
    layout: layouts.Layout = layouts.by_block  # how its parameters are shared by the ranks
    world_size: int = WORLD_SIZE  # ranks
    replicas: int = 1  # of each shard; the ranks that share the parameters are fewer by as much
    microbatches: int = 1  # of a step; all but the last only accumulate, unless
    reduces_each: bool = False  # whether each of them is reduced
    in_flight: int = 1  # microbatches that have run forward before the first of them runs backward
    overlaps_step: bool = False  # whether the optimizer launches the next forward's first gather
    offloads: bool = False  # whether shards are in the host's memory
    options: tuple[tuple[str, Any], ...] = ()  # of the backend


@dataclass(kw_only=True)
class Trained:
    compiled: Compiled  # the kernels and wrappers
    graphs: list[dict[str, fx.Graph]]  # stage -> the graph that became code, of each frame in the order of capture
    run: DryRun  # one step, after those that compiled


def trained(case: Case) -> Trained:
    """Train a model for two steps, in which all is compiled, and then for two more that are noted."""
    mode, lane = FakeTensorMode(allow_non_fake_inputs=True), installed()
    with ranks(case) as mesh, lane.compiling(case.gpu) as compiled:
        with mode:
            training = Training(case, mesh)
            training.run()
        num_wrappers = len(lane.wrappers)
        run = _noted(training, mode)
        assert len(lane.wrappers) == num_wrappers, "something was compiled in a step that is looked at"
        graphs = [_code_graphs(frame) for frame in backend.frames_of(training.model)] if case.policy else []
    return Trained(compiled=compiled, graphs=graphs, run=run)


@functools.cache
def trained_once(case: Case) -> Trained:
    """Do the same, once for all tests of a process."""
    return trained(case)


@contextmanager
def ranks(case: Case, rank: int = 0) -> Iterator[DeviceMesh]:
    """Pretend to be one of a case's ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
    try:
        # A unit looks at the addresses of its parameters; those of fake ones are all 0, which does no harm.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            if case.replicas > 1:
                shape = (case.replicas, case.world_size // case.replicas)
                yield init_device_mesh(case.device, shape, mesh_dim_names=("replicate", "shard"))
            else:
                yield init_device_mesh(case.device, (case.world_size,))
    finally:
        torch._dynamo.reset()
        _clear_sharding_prop_cache()  # it knows meshes by their shape, and gives those of this rank to the next one
        dist.destroy_process_group()


def _noted(training: Training, mode: FakeTensorMode) -> DryRun:
    """Run a step that makes the prefetcher know what comes next, and note the one after it."""
    with dry_run(mode) as run, installed().watching(run):
        training.step(0)
        run.steps.clear()
        training.step(1)
    return run


class Training:
    """A case's model, sharded unless it has no policy, and the steps of its training.

    Attributes:
        model: The model.
        optimizer: AdamW in one kernel, as it writes to the shards.
        tokens: Of each step, for each of its microbatches: int64 `[batch, 64]`.
    """

    def __init__(self, case: Case, mesh: DeviceMesh) -> None:
        self._case = case
        with torch.device(case.device), _default_dtype(torch.bfloat16 if case.policy is None else torch.float32):
            model = case.model(SEQ_LEN, dim=case.dim, num_layers=case.num_layers, num_heads=4)
            tokens = functools.partial(torch.zeros, case.batch, SEQ_LEN, dtype=torch.int64)
            self.tokens = [[tokens() for _ in range(case.microbatches)] for _ in range(NUM_STEPS)]
        self.model: nn.Module = model
        if case.policy is None:
            self._compiled: Any = torch.compile(model)
        else:
            offload = fxshard.CPUOffloadPolicy() if case.offloads else fxshard.OffloadPolicy()
            shard = functools.partial(fxshard.fully_shard, mp_policy=case.policy, offload_policy=offload)
            case.layout(model, mesh, shard)
            self._compiled = torch.compile(model, backend="fxshard", options=dict(case.options))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        if case.overlaps_step:
            self.optimizer = fxshard.overlap_step(self.optimizer)

    def run(self) -> None:
        for number in range(NUM_STEPS):
            self.step(number)

    def step(self, number: int, look: Callable[[list[Tensor]], None] = lambda losses: None) -> None:
        """Take a step; between backward and optimizer somebody may look at its losses and at the gradients."""
        losses, num_backwards, last = list[Tensor](), 0, self._case.microbatches - 1
        for i, tokens in enumerate(self.tokens[number]):
            self._reduces(i)
            losses.append(loss_of(self._compiled(tokens)))
            while num_backwards <= (i if i == last else i - self._case.in_flight + 1):
                self._reduces(num_backwards)
                losses[num_backwards].backward()
                num_backwards += 1
        assert all(parameter.grad is not None for parameter in self.model.parameters())
        look(losses)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _reduces(self, microbatch: int) -> None:
        if isinstance(self.model, ShardedModule):
            is_last = microbatch == self._case.microbatches - 1
            self.model.set_requires_gradient_sync(is_last or self._case.reduces_each)


def loss_of(logits: Tensor) -> Tensor:
    """Return what is trained to be small: a scalar of at least float32."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).square().mean()


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
