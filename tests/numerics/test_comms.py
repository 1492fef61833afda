"""Objects that do a unit's collectives (FSDP2's `set_custom_all_gather`): they get, and make, what they do in FSDP2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

import fxshard
from fxshard.errors import ConfigError, RankMismatchError
from tests.numerics import harness
from tests.numerics.comms import (
    Bf16Gather,
    Call,
    Counting,
    CountingGather,
    CountingReduce,
    Int8Reduce,
    OneBuffer,
    OneBufferReduce,
)
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    Prepare,
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
from tests.numerics.scenarios import BF16, REGRESSION
from tests.pairwise import each_once, slow
from tests.ranks import two_ranks
from tests.state import processes


def reduce_from_one_buffer(model: nn.Module, tools: Tools) -> nn.Module:
    """FSDP2 waits for no work of a reduction."""
    shard_blocks(model, tools)
    give(model, None, OneBufferReduce(is_async=tools.system.ours))
    return tools.compile(model)


def with_objects(
    gather: Callable[[], Any] | None, reduce: Callable[[], Any] | None, *, compiled: bool = True
) -> Prepare:
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


def of(gather: Any = Bf16Gather, reduce: Any = Int8Reduce, *, compiled: bool = True, **changes: Any) -> Scenario:
    given: dict[str, Any] = {"prepare": with_objects(gather, reduce, compiled=compiled), **changes}
    return replace(REGRESSION, **given)


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
    "mixed precision": lambda: of(shard_kwargs={"mp_policy": BF16}),
    "offloaded": lambda: of(shard_kwargs={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "resident": lambda: of(backward=kept),
    "accumulation": lambda: of(backward=several),
}


def in_subgroups() -> Scenario:
    """Half of the ranks share the parameters between forward and backward."""
    return of(shard_kwargs={"reshard_after_forward": dist.get_world_size() // 2})


ALSO = ("gathers alone", "reductions alone", "counted", "kept", "frozen", "accumulation", "resident", "offloaded")
"""Scenarios of which "one buffer", "one buffer to send", "all" and the tests that count calls run the lines."""


@two_ranks
@pytest.mark.parametrize("name", [slow(name) if name in ALSO else name for name in SCENARIOS])
def test_trains_as_fsdp2_with_the_same_object(name: str) -> None:
    check_bitwise(SCENARIOS[name]())


def train_on_four_ranks() -> None:
    for scenario in (of, replicated, in_subgroups):
        check_bitwise(scenario())


@pytest.mark.slow
@pytest.mark.multi_rank
def test_on_four_ranks_and_on_two_replicas() -> None:
    processes.run(4, train_on_four_ranks)


@pytest.mark.slow
@two_ranks
def test_trains_with_code_of_inductors() -> None:
    """By an object that rounds nothing, for a rounding may tip over."""
    check_inductor(of(CountingGather, CountingReduce))


@two_ranks
def test_trains_block_by_block() -> None:
    """Blocks that are compiled one by one share a graph, and prefetch across graphs."""

    def prepare(model: nn.Module, tools: Tools) -> nn.Module:
        model = compile_each_block(model, tools)
        give(model, Bf16Gather(), Int8Reduce())
        return model

    check_bitwise(of(prepare=prepare))


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


@two_ranks
@pytest.mark.parametrize("lower", ["eager", slow("inductor")])  # equal blocks below count calls of Inductor's code
@pytest.mark.parametrize(("bucket", "prefetch"), [slow("unit", 1), ("auto", "auto"), (64.0, 2)])
def test_gets_what_it_gets_in_fsdp2(bucket: str | float, prefetch: int | str, lower: str) -> None:
    get_what_they_get_in_fsdp2(True, bucket=bucket, prefetch=prefetch, lower=lower)


@two_ranks
def test_gets_what_it_gets_in_fsdp2_where_nothing_is_compiled() -> None:
    get_what_they_get_in_fsdp2(False)


def sharded(gather: Any = None, reduce: Any = None, *, compiled: bool = True, **options: Any) -> nn.Module:
    model = harness.sharded(MLP(num_blocks=1), mesh=world_mesh())
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


@two_ranks
@pytest.mark.parametrize("compiled", [True, False])
def test_an_error_is_what_the_object_raises_or_gets_wrong(compiled: bool) -> None:
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


@two_ranks
@pytest.mark.parametrize("compiled", [True, False])
def test_ranks_with_and_without_an_object_are_an_error(compiled: bool) -> None:
    model = sharded(CountingGather() if dist.get_rank() else None, compiled=compiled)
    with pytest.raises(RankMismatchError, match=r"by tests\.numerics\.comms\.CountingGather"):
        loss_on_ones(model)


@pytest.mark.slow
@two_ranks
def test_cached_code_calls_the_object_that_is_there_now() -> None:
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            gather = CountingGather()
            loss_on_ones(sharded(gather, lower="inductor")).backward()
            assert gather.calls


@two_ranks
def test_an_object_of_torchs_takes_it_back() -> None:
    gather, reduce = CountingGather(), CountingReduce()
    model = sharded(gather, reduce)
    loss_on_ones(model).backward()
    before = len(gather.calls), len(reduce.calls)
    give(model, DefaultAllGather(), DefaultReduceScatter())
    loss_on_ones(model).backward()
    assert (len(gather.calls), len(reduce.calls)) == before
    assert all(before)


@two_ranks
@each_once(lower=["eager", "inductor"], each=[False, True])
def test_equal_blocks_have_objects_of_their_own(lower: str, each: bool) -> None:
    """Blocks with objects of one type, one object each: equal code must not call another block's."""
    model, comms = harness.sharded(MLP(block=partial(nn.Linear, WIDTH, WIDTH)), mesh=world_mesh()), []
    for block in model.blocks:
        comms.append((CountingGather(), CountingReduce()))
        give(block, *comms[-1])
        if each:
            block.compile(backend="fxshard", options={"lower": lower})
    compiled = model if each else compile_module(model, options={"lower": lower})
    for _ in range(2):
        loss_on_ones(compiled).backward()
    assert {len(reduce.calls) for _, reduce in comms} == {2}
    assert all(len(gather.calls) >= 2 for gather, _ in comms)


@pytest.mark.slow
@two_ranks
def test_serves_inference() -> None:
    """Under inference mode, before and after training."""
    ours, plain = (sharded(comm, lower=lower) for comm, lower in ((OneBuffer(), "eager"), (None, "eager")))
    plain.load_state_dict(ours.state_dict())
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(loss_on_ones(ours), loss_on_ones(plain))
        loss_on_ones(ours).backward()


@two_ranks
def test_explain_says_which_object() -> None:
    model = sharded(CountingGather(), CountingReduce(), compiled=False)
    found = fxshard.explain(model, torch.ones(2, WIDTH))
    names = {
        (stage, cls)
        for stage in ("forward", "backward")
        for cls in ("CountingGather", "CountingReduce")
        if f" by tests.numerics.comms.{cls}" in str(found.graphs[stage]["insert_collectives"])
    }
    assert names == {("forward", "CountingGather"), ("backward", "CountingGather"), ("backward", "CountingReduce")}


@two_ranks
def test_adopt_and_release_carry_objects_over() -> None:
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
