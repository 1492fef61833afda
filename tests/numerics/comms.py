"""Objects that do the collectives of a unit, as FSDP2's users write them, and what is trained with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

import fxshard
from fxshard.errors import ConfigError, RankMismatchError
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    Scenario,
    System,
    Tools,
    blocks_of,
    check_bitwise,
    check_inductor,
    compile_each_block,
    compile_module,
    fxshard_system,
    loss_on_ones,
    shard_blocks,
    start,
    world_mesh,
)
from tests.numerics.microbatches import kept, several
from tests.numerics.models import MLP, WIDTH, Uneven, mlp_with_a_frozen_block, rows

Call = tuple[str, int, int, torch.dtype, str]
"""What an object was called with: what it does, elements out and in, dtype, operator."""


class Counting:
    """Keeps what it is called with, and has the group do it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.allocated: list[int] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append(size[0])
        return torch.empty(*size, dtype=dtype, device=device)

    def note(self, what: str, output: Tensor, input: Tensor, op: Any = "") -> None:
        self.calls.append((what, output.numel(), input.numel(), input.dtype, str(op)))


class CountingGather(Counting):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.note("gather", output_tensor, input_tensor)
        start = output_tensor.data_ptr() + group.rank() * input_tensor.nbytes
        assert (input_tensor.data_ptr(), async_op) == (start, False), "FSDP2 gathers in place"
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class CountingReduce(Counting):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self.note("reduce", output_tensor, input_tensor, op)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


class Bf16Gather(CountingGather):
    """Sends half of the bits, and finishes what it does behind the collective."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.note("gather", output_tensor, input_tensor)
        gathered = torch.empty_like(output_tensor, dtype=torch.bfloat16)
        work = dist.all_gather_into_tensor(gathered, input_tensor.bfloat16(), group=group, async_op=async_op)
        output_tensor.copy_(gathered)
        return work


class Int8Reduce(CountingReduce):
    """Sends eight bits, with one scale for the whole buffer: what is in one buffer decides every bit."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self.note("reduce", output_tensor, input_tensor, op)
        ranks = group.size()
        scale = input_tensor.abs().max().clamp(min=1e-12) / 127
        coded = (input_tensor / scale).round().to(torch.int8)
        scales, theirs = scale.new_empty(ranks), torch.empty_like(coded)
        dist.all_gather_into_tensor(scales, scale.view(1), group=group)
        dist.all_to_all_single(theirs, coded, group=group)
        total = (theirs.view(ranks, -1).to(scale.dtype) * scales.view(-1, 1)).sum(0)
        output_tensor.copy_(total / ranks if op == dist.ReduceOp.AVG else total)


class OneBuffer:
    """Gives the same memory again and again, as FSDP2 allows, and returns before the data is there."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.memory.numel() < size[0] or self.memory.dtype is not dtype:
            self.memory = torch.empty(*size, dtype=dtype, device=device)
        return self.memory[: size[0]]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)


class OneBufferReduce(Counting):
    """Sends from the same memory again and again, and returns before it has been sent."""

    def __init__(self, is_async: bool) -> None:
        super().__init__()
        self.memory, self.is_async = torch.empty(0), is_async

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append(size[0])
        if len(self.allocated) % 2 == 0:  # what it gives is second
            return torch.empty(*size, dtype=dtype, device=device)
        if self.memory.numel() < size[0]:
            self.memory = torch.empty(*size, dtype=dtype, device=device)
        return self.memory[: size[0]]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any) -> Any:
        work = dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=self.is_async)
        return work


def reduce_from_one_buffer(model: nn.Module, tools: Tools) -> nn.Module:
    """FSDP2 waits for no work of a reduction."""
    shard_blocks(model, tools)
    give(model, None, OneBufferReduce(is_async=tools.system.ours))
    return tools.compile(model)


def with_objects(
    gather: Callable[[], Any] | None, reduce: Callable[[], Any] | None, *, compiled: bool = True
) -> Callable[[nn.Module, Tools], nn.Module]:
    """Shard block by block, give all units the objects, and compile the whole."""

    def prepare(model: nn.Module, tools: Tools) -> nn.Module:
        shard_blocks(model, tools)
        give(model, gather() if gather else None, reduce() if reduce else None)
        return tools.compile(model) if compiled else model

    return prepare


def give(model: nn.Module, gather: Any, reduce: Any) -> None:
    """Give all units of a model the objects."""
    for module in (*blocks_of(model), model):
        unit: Any = module
        if gather is not None:
            unit.set_custom_all_gather(gather)
        if reduce is not None:
            unit.set_custom_reduce_scatter(reduce)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def of(gather: Any = Bf16Gather, reduce: Any = Int8Reduce, *, compiled: bool = True, **changes: Any) -> Scenario:
    return replace(
        Scenario(model=MLP, batch=rows(), prepare=with_objects(gather, reduce, compiled=compiled)), **changes
    )


def replicated() -> Scenario:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return of(shard_kwargs={"mesh": mesh})


SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "all": of,
    "gathers alone": lambda: of(reduce=None),
    "reductions alone": lambda: of(gather=None),
    "counted": lambda: of(CountingGather, CountingReduce),
    "one buffer": lambda: of(OneBuffer, None),
    "one buffer to send": lambda: of(prepare=reduce_from_one_buffer),
    "not compiled": lambda: of(compiled=False),
    "kept": lambda: of(shard_kwargs={"reshard_after_forward": False}),
    "uneven": lambda: of(model=Uneven, batch=rows(15, 15)),
    "frozen": lambda: of(model=mlp_with_a_frozen_block),
    "mixed precision": lambda: of(shard_kwargs={"mp_policy": MIXED}),
    "offloaded": lambda: of(shard_kwargs={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "resident": lambda: of(backward=kept),
    "accumulation": lambda: of(backward=several),
}


def train_in_subgroups() -> None:
    """Half of the ranks share the parameters between forward and backward."""
    check_bitwise(of(shard_kwargs={"reshard_after_forward": dist.get_world_size() // 2}))


def train_compiled() -> None:
    """With code of Inductor's: an object that rounds nothing, for a rounding may tip over."""
    check_inductor(of(CountingGather, CountingReduce))


def train_blocks() -> None:
    """Blocks that are compiled one by one share a graph, and prefetch across graphs."""

    def prepare(model: nn.Module, tools: Tools) -> nn.Module:
        model = compile_each_block(model, tools)
        give(model, Bf16Gather(), Int8Reduce())
        return model

    check_bitwise(of(prepare=prepare))


def train(name: str) -> None:
    check_bitwise(SCENARIOS[name]())


def train_replicas() -> None:
    check_bitwise(replicated())


def calls_of(system: System, compiled: bool) -> tuple[Counter[Call], Counter[int]]:
    """Return what one step calls objects with, and what it has them allocate, of some kind of system."""
    gather, reduce = CountingGather(), CountingReduce()
    torch._dynamo.reset()
    run = start(of(lambda: gather, lambda: reduce, compiled=compiled), system)
    run.loss(0).backward()
    return Counter(gather.calls + reduce.calls), Counter(gather.allocated + reduce.allocated)


def get_what_they_get_in_fsdp2(compiled: bool, **options: Any) -> None:
    """Whatever the options say: the same calls. A backward that reads nothing of a unit does not gather it."""
    theirs, ours = calls_of(FSDP2, True), calls_of(fxshard_system(**options), compiled)
    assert not ours[0] - theirs[0]
    assert not ours[1] - theirs[1]
    left_out = theirs[0] - ours[0]
    assert {what for what, *_ in left_out} <= {"gather"}
    assert left_out.total() <= 2


def sharded(gather: Any = None, reduce: Any = None, *, compiled: bool = True, **options: Any) -> nn.Module:
    model = MLP()
    for module in (*model.blocks, model):
        fxshard.fully_shard(module, mesh=world_mesh())
    give(model, gather, reduce)
    return compile_module(model, options={**EAGER, **options}) if compiled else model


class Failing(Counting):
    def __call__(self, **given: Any) -> Any:
        raise ValueError("no more bits")


class WrongBuffer(CountingGather):
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size[0] + 1, dtype=dtype, device=device)


class WrongResult(Counting):
    def __call__(self, **given: Any) -> Any:
        return given["output_tensor"]


def fail_with_what_they_raise(compiled: bool) -> None:
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="no more bits"):
        loss_on_ones(sharded(Failing(), compiled=compiled))
    dist.barrier()
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match=r"WrongBuffer.*allocate\(\(.*gave \(torch.float32, device\(type='cpu'\)"):
        loss_on_ones(sharded(WrongBuffer(), compiled=compiled))
    dist.barrier()
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match=r"WrongResult.*its call returned a Tensor, and neither a Work nor None"):
        loss_on_ones(sharded(WrongResult(), compiled=compiled))


def differ_between_ranks(compiled: bool) -> None:
    torch._dynamo.reset()
    model = sharded(CountingGather() if dist.get_rank() else None, compiled=compiled)
    with pytest.raises(RankMismatchError, match=r"by tests\.numerics\.comms\.CountingGather"):
        loss_on_ones(model)


def are_found_again_by_their_type() -> None:
    """Code that was cached runs with the object that is there now."""
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            gather = CountingGather()
            loss_on_ones(sharded(gather, lower="inductor")).backward()
            assert gather.calls


def may_be_taken_back() -> None:
    gather, reduce = CountingGather(), CountingReduce()
    torch._dynamo.reset()
    model = sharded(gather, reduce)
    loss_on_ones(model).backward()
    before = len(gather.calls), len(reduce.calls)
    give(model, DefaultAllGather(), DefaultReduceScatter())
    loss_on_ones(model).backward()
    assert (len(gather.calls), len(reduce.calls)) == before
    assert all(before)


def are_told_apart(lower: str, each: bool) -> None:
    """Blocks with objects of one type, one object each: equal code must not call another block's."""
    torch._dynamo.reset()
    model, comms = sharded(compiled=False), []
    for block in blocks_of(model):
        comms.append((CountingGather(), CountingReduce()))
        give(block, *comms[-1])
    if each:
        for block in blocks_of(model):
            block.compile(backend="fxshard", options={"lower": lower})
    compiled = model if each else compile_module(model, options={"lower": lower})
    for _ in range(2):
        loss_on_ones(compiled).backward()
    assert {len(reduce.calls) for _, reduce in comms} == {2}
    assert all(len(gather.calls) >= 2 for gather, _ in comms)


def serve_inference() -> None:
    """Under inference mode, before and after training."""
    torch._dynamo.reset()
    ours, plain = (sharded(comm, lower=lower) for comm, lower in ((OneBuffer(), "eager"), (None, "eager")))
    plain.load_state_dict(ours.state_dict())
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(loss_on_ones(ours), loss_on_ones(plain))
        loss_on_ones(ours).backward()


def are_explained() -> None:
    model = sharded(CountingGather(), CountingReduce(), compiled=False)
    found = fxshard.explain(model, torch.ones(2, WIDTH))
    names = {
        (stage, cls)
        for stage in ("forward", "backward")
        for cls in ("CountingGather", "CountingReduce")
        if f" by tests.numerics.comms.{cls}" in str(found.graphs[stage]["insert_collectives"])
    }
    assert names == {("forward", "CountingGather"), ("backward", "CountingGather"), ("backward", "CountingReduce")}


def are_carried_over() -> None:
    """From FSDP2 by `adopt`, and back by `release`."""
    gather, reduce = CountingGather(), CountingReduce()
    model = MLP()
    for module in (*model.blocks, model):
        fsdp2_fully_shard(module, mesh=world_mesh())
    give(model, gather, reduce)
    torch._dynamo.reset()
    loss_on_ones(compile_module(fxshard.adopt(model), options=EAGER)).backward()
    calls = Counter(gather.calls), Counter(reduce.calls)
    gather.calls.clear()
    reduce.calls.clear()
    loss_on_ones(fxshard.release(model)).backward()
    assert (Counter(gather.calls), Counter(reduce.calls)) == calls
    assert all(calls)
