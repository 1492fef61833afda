"""Gathers that reach from graph to graph: who launches what and when, and what happens when the model turns off."""

from __future__ import annotations

import gc
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from fxshard import fully_shard
from fxshard.compile.backend import frames_of
from fxshard.errors import RankMismatchError, UnsupportedGraph
from fxshard.runtime.prefetcher import Prefetcher
from fxshard.runtime.rank_check import Agreement
from fxshard.runtime.unsharded_cache import Gathered
from fxshard.sharding.sharded_module import ShardedModule, units_under
from fxshard.testing import EmulatedLink
from tests.models import FeedForward
from tests.numerics.harness import EAGER
from tests.pairwise import slow
from tests.runtime.blocks import NUM_BLOCKS, RANGE, Between, Blocks, block_by_block, issued, sharded, step, warm


def test_gathers_the_next_block_before_one_computes(link: EmulatedLink) -> None:
    forward, backward = issued(warm(block_by_block(link)))
    assert forward == "ag0 ag1 w0 c ag2 w1 c ag3 w2 c w3 c"
    assert backward == "ag3 ag2 w3 c rs3 ag1 w2 c rs2 w3 ag0 w1 c rs1 w2 w0 c rs0 w1 w0"


def test_gathers_all_that_the_next_block_reads(link: EmulatedLink) -> None:
    forward, backward = issued(warm(block_by_block(link, Between, bucket=1e-6)))  # several launches for each
    assert forward == "agroot ag0 wroot c ag1 w0 c w0 c ag2 w1 c w1 c ag3 w2 c w2 c w3 c w3 c"
    assert backward.startswith("ag3 c ag2 w3 c rs3 w3 c rs3 w3 ag1 w2 c rs2 w2 c rs2 w2 ag0 w1 c")


def test_gathers_for_the_next_graph_alone_where_it_is_of_the_same_unit(link: EmulatedLink) -> None:
    model = fully_shard(Blocks(), mesh=link.mesh)
    model.breaks = True
    model.compile(backend="fxshard", options={**EAGER, "bucket": 1e-6})
    graphs = ["agroot wroot c wroot c"] * 3 + ["wroot c wroot c"]  # the first one is gathered beside the second
    assert issued(warm(model))[0] == " ".join(graphs)


def test_gathers_the_first_block_before_what_runs_outside_of_graphs_computes(link: EmulatedLink) -> None:
    model = warm(block_by_block(link, Between))
    forward, backward = issued(model)
    assert forward == "agroot ag0 wroot c ag1 w0 c ag2 w1 c ag3 w2 c w3 c"
    assert backward.startswith("ag3 c ag2 w3 c rs3")
    assert_nothing_in_flight(model)


def test_a_gradient_that_comes_to_no_graph_launches_nothing(link: EmulatedLink) -> None:
    """One rank alone may look at the gradient of a result."""
    model = warm(block_by_block(link, Between))
    out = model(torch.randn(3, 4))
    before = len(link.transfers)
    torch.autograd.grad(out.square().sum(), out, retain_graph=True)
    assert len(link.transfers) == before
    out.sum().backward()
    assert issued(model)[1].startswith("ag3 c ag2")


def test_forgets_what_it_has_seen_where_ranks_have_gone_different_ways(link: EmulatedLink) -> None:
    model = warm(block_by_block(link, Between))
    unit = units_under(model)[0]
    with pytest.raises(RankMismatchError), unit.agreed("read", "all_gather", "all parameters"):
        raise RankMismatchError("")
    assert issued(model)[0] == "agroot wroot c ag0 w0 c ag1 w1 c ag2 w2 c ag3 w3 c"


@pytest.mark.parametrize("reentrant", [False, slow(True)])
def test_recomputation_is_no_other_way(link: EmulatedLink, monkeypatch: pytest.MonkeyPatch, reentrant: bool) -> None:
    class Recomputed(Between):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = cast(Tensor, checkpoint(block, x, use_reentrant=reentrant))
            return self.head(x)

    waits: list[bool] = []
    before = Agreement.before

    def seen(*args: Any, is_known: bool = True) -> Any:
        waits.append(not is_known)
        return before(*args, is_known=is_known)

    model = warm(warm(block_by_block(link, Recomputed)))
    monkeypatch.setattr(Agreement, "before", seen)
    step(model)
    assert waits
    assert not any(waits)


@pytest.mark.slow
def test_a_backward_that_comes_to_no_graph_drops_what_was_launched_for_it(link: EmulatedLink) -> None:
    model = warm(block_by_block(link, Between))
    model.skipped = range(NUM_BLOCKS)
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
        assert_nothing_in_flight(model)
    model.skipped = ()
    assert torch.equal(step(model), step(block_by_block(link, Between, prefetch=0)))


@pytest.mark.slow
def test_gathers_nothing_ahead_in_the_first_step_or_without_prefetch(link: EmulatedLink) -> None:
    alone = [
        "ag0 w0 c ag1 w1 c ag2 w2 c ag3 w3 c",
        "ag3 w3 c rs3 ag2 w2 c rs2 w3 ag1 w1 c rs1 w2 ag0 w0 c rs0 w1 w0",
    ]
    assert issued(warm(block_by_block(link, prefetch=0))) == alone
    model = warm(block_by_block(link))
    prefetcher_of(model).forget()
    assert issued(model) == alone


def test_follows_lists_from_graph_to_graph(link: EmulatedLink) -> None:
    model = block_by_block(link)
    blocks = cast(list[ShardedModule], list(model.blocks))
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3] or None)
        block.set_modules_to_backward_prefetch(None)
    forward, backward = issued(warm(model))
    assert forward == "ag0 ag1 ag2 w0 c ag3 w1 c w2 c w3 c"
    assert backward == "ag3 w3 c rs3 ag2 w2 c rs2 w3 ag1 w1 c rs1 w2 ag0 w0 c rs0 w1 w0"


def test_hands_over_where_a_model_breaks_into_graphs(link: EmulatedLink) -> None:
    model = sharded(link)
    model.breaks = True
    model.compile(backend="fxshard", options=EAGER)
    forward, _ = issued(warm(model))
    assert forward == "ag0 ag1 w0 c ag2 w1 c ag3 w2 c w3 c"


@pytest.mark.slow
def test_trains_after_a_part_under_inference_mode(link: EmulatedLink) -> None:
    class Mixed(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            first, *rest = self.blocks
            with torch.inference_mode():
                y = first(x)
            x = x + y.clone()
            for block in rest:
                x = block(x)
            return x

    gradients = []
    for prefetch in (0, 1):
        model = block_by_block(link, Mixed, prefetch=prefetch)
        gradients += [step(model) for _ in range(3)]
    assert all(map(torch.equal, gradients[:3], gradients[3:]))


@pytest.mark.slow
def test_drops_what_the_model_does_not_request(link: EmulatedLink) -> None:
    model = warm(block_by_block(link))
    reference = block_by_block(link, prefetch=0)
    for skipped in [(1,), (), (1, 2), (3,)]:
        model.skipped = reference.skipped = skipped
        assert torch.equal(step(model), step(reference))
    model.skipped = ()
    step(model)
    assert_nothing_in_flight(model)


@pytest.mark.slow
@pytest.mark.parametrize("lower", ["eager", slow("inductor")])
def test_trains_to_the_same_bits(link: EmulatedLink, lower: str) -> None:
    gradients = []
    for prefetch in (0, 1):
        model = block_by_block(link, prefetch=prefetch, lower=lower)
        optim = torch.optim.AdamW(model.parameters(), fused=True)  # does not raise the parameters' versions
        for _ in range(3):
            gradients.append(step(model))
            optim.step()
    assert all(map(torch.equal, gradients[:3], gradients[3:]))


@pytest.mark.slow
def test_unshard_launches_ahead_of_the_call(link: EmulatedLink) -> None:
    model, reference = warm(block_by_block(link)), block_by_block(link, prefetch=0)
    third = cast(ShardedModule, list(model.blocks)[2])
    with profile(activities=[ProfilerActivity.CPU]) as record:
        handle = third.unshard(async_op=True)
        assert handle is not None
        handle.wait()
    assert [event.name for event in record.events() or () if RANGE.fullmatch(event.name)] == [
        "fxshard::unshard(blocks.2)"
    ]
    forward, _ = issued(model)
    assert forward == "ag0 ag1 w0 c w1 c ag3 w2 c w3 c"
    assert third.unshard() is None
    assert torch.equal(step(model), step(reference))


def test_an_event_after_the_optimizer_holds_for_one_forward_and_changes_nothing_on_the_cpu(link: EmulatedLink) -> None:
    model, reference = warm(block_by_block(link)), warm(block_by_block(link))
    root = cast(ShardedModule, model)
    event = torch.Event()
    root.set_post_optim_event(event)
    assert prefetcher_of(model).after is event
    assert issued(model) == issued(reference)
    assert prefetcher_of(model).after is None


@pytest.mark.parametrize("lower", ["not compiled", "eager"])
def test_an_event_is_waited_for_where_no_gather_is_the_prefetchers(link: EmulatedLink, lower: str) -> None:
    model = sharded(link)
    compiled: Any = model
    if lower == "eager":  # bucket=1000: all blocks share one launch
        compiled = torch.compile(model, backend="fxshard", options={"lower": lower, "bucket": 1000})
    step(compiled)
    cast(ShardedModule, model).set_post_optim_event(torch.Event())
    step(compiled)
    assert prefetcher_of(model).after is None


@pytest.mark.slow
def test_a_model_on_the_cpu_has_no_gpu_wait_where_there_is_one(
    link: EmulatedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = warm(block_by_block(link))
    for frame in frames_of(model):
        frame.replays = True
    cast(ShardedModule, model).set_post_optim_event(torch.Event())
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: asked.append(device))
    step(model)
    assert (asked, prefetcher_of(model).after) == ([], None)


def test_reshard_frees_what_was_asked_for(link: EmulatedLink) -> None:
    model = warm(block_by_block(link))
    third = cast(ShardedModule, list(model.blocks)[2])
    third.unshard(async_op=True)
    third.reshard()
    assert_nothing_in_flight(model)
    third.unshard(async_op=True)
    with torch.no_grad():
        for parameter in third.parameters():
            parameter.zero_()
    with pytest.raises(UnsupportedGraph, match=r"unit 'blocks\.2' were changed"):
        model(torch.randn(3, 4))
    third.unshard()
    third.reshard()
    forward, _ = issued(model)
    assert forward == "ag0 ag1 w0 c ag2 w1 c ag3 w2 c w3 c"


@pytest.mark.slow
def test_unshard_gathers_anew_what_it_gathered_before(link: EmulatedLink) -> None:
    model, reference = warm(block_by_block(link)), warm(block_by_block(link, prefetch=0))
    for each in (model, reference):
        optim = torch.optim.AdamW(each.parameters(), fused=True, lr=1.0)
        for _ in range(2):
            step(each)
            optim.step()
            cast(ShardedModule, list(each.blocks)[2]).unshard(async_op=True)
    assert torch.equal(step(model), step(reference))


@pytest.mark.slow
def test_a_model_that_is_dropped_leaves_no_collective_unwaited(link: EmulatedLink) -> None:
    model = warm(block_by_block(link))
    gc.collect()  # what other tests have left
    unwaited = _get_work_registry_size()
    cast(ShardedModule, list(model.blocks)[2]).unshard(async_op=True)
    assert _get_work_registry_size() == unwaited + 1
    del model
    torch._dynamo.reset()
    gc.collect()
    assert _get_work_registry_size() == unwaited


def test_unshard_of_what_no_graph_requested_launches_nothing(link: EmulatedLink) -> None:
    model = block_by_block(link)
    cast(ShardedModule, next(iter(model.blocks))).unshard()
    assert_nothing_in_flight(model)


def test_forgets_what_an_interrupted_step_left(link: EmulatedLink) -> None:
    model = warm(block_by_block(link))
    reference = step(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = next(iter(model.blocks)).register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(3, 4))
    handle.remove()
    assert_nothing_in_flight(model)
    cast(ShardedModule, list(model.blocks)[2]).unshard(async_op=True)
    assert in_flight(model)
    cast(ShardedModule, model).reset_iter_state()
    assert_nothing_in_flight(model)
    assert torch.equal(step(model), reference)


def test_does_not_reach_over_the_end_of_a_call_or_of_a_backward(link: EmulatedLink) -> None:
    model = warm(block_by_block(link))
    with torch.no_grad():
        model(torch.randn(3, 4))
    assert_nothing_in_flight(model)
    step(model)
    assert_nothing_in_flight(model)


def test_refuses_what_it_gathered_of_weights_that_changed(link: EmulatedLink) -> None:
    model = warm(block_by_block(link))
    first, second = list(model.blocks)[:2]

    def double(*_: Any) -> None:
        with torch.no_grad():
            for parameter in second.parameters():
                parameter.mul_(2.0)

    handle = first.register_forward_hook(double)
    with pytest.raises(UnsupportedGraph, match=r"(?s)unit 'blocks\.1' were changed after their gather.*prefetch.*off"):
        model(torch.ones(3, 4))
    handle.remove()
    step(model)
    assert_nothing_in_flight(model)


@pytest.mark.slow
def test_gathers_no_more_often_where_blocks_are_called_twice(link: EmulatedLink) -> None:
    class Twice(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(block(x))
            return x

    gathers = []
    for prefetch in (0, 1):
        torch._dynamo.reset()
        model = warm(block_by_block(link, Twice, prefetch=prefetch))
        before = len(link.transfers)
        step(model)
        gathers.append(sum(transfer.op == "all_gather" for transfer in link.transfers[before:]))
    assert gathers[0] == gathers[1] > 0


@pytest.mark.parametrize("times", [1, 2])
def test_a_block_called_many_times_is_gathered_once_for_each(link: EmulatedLink, times: int) -> None:
    class Looped(Between):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(times):
                for block in self.blocks[:2]:
                    x = block(block(block(x)))
            return self.head(self.embed(x))

    model = warm(block_by_block(link, Looped))
    in_flight_before = _get_work_registry_size()
    step(model)
    assert _get_work_registry_size() == in_flight_before
    assert_nothing_in_flight(model)


@pytest.mark.slow
def test_recomputation_gathers_no_more_often(link: EmulatedLink) -> None:
    class Recomputed(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = cast(Tensor, checkpoint(block, x, use_reentrant=False))
            return x

    gathers, gradients = [], []
    for prefetch in (0, 1):
        torch._dynamo.reset()
        model = warm(block_by_block(link, Recomputed, prefetch=prefetch))
        before = len(link.transfers)
        gradients.append(step(model))
        gathers.append(sum(transfer.op == "all_gather" for transfer in link.transfers[before:]))
        assert_nothing_in_flight(model)
    assert gathers == [3 * NUM_BLOCKS] * 2
    assert torch.equal(*gradients)


def test_equal_blocks_share_a_graph_and_still_gather_their_own(link: EmulatedLink) -> None:
    class Equal(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(FeedForward(4, 8) for _ in range(NUM_BLOCKS))

    results = []
    for prefetch in (0, 1):
        model = block_by_block(link, Equal, prefetch=prefetch)
        results += [step(model) for _ in range(3)]
    assert all(map(torch.equal, results[:3], results[3:]))


def prefetcher_of(model: nn.Module) -> Prefetcher:
    (prefetcher,) = {unit.model.prefetcher for unit in units_under(model)}
    return prefetcher


def in_flight(model: nn.Module) -> list[Gathered]:
    return list(units_under(model)[0].model.unsharded.values())


def assert_nothing_in_flight(model: nn.Module) -> None:
    assert not in_flight(model)
