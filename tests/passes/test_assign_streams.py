"""AssignStreams: what runs aside, where streams meet, what is left alone, and the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxshard.errors import ConfigError
from fxshard.ir import collectives, liveness, ops, tags
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.assign_streams import AssignStreams
from fxshard.passes.coalesce_collectives import CoalesceCollectives
from tests import graphs
from tests.graphs import EVERY_UNIT, SPLIT, Traced, assert_changes_nothing, broken_by, run_pass
from tests.pairwise import each_once, pairwise
from tests.schedules import (
    DEAR_COPIES,
    DEAR_KERNELS,
    MODELS,
    SCHEDULE,
    SCHEDULED,
    after_passes,
    assert_schedule,
    model_of,
)
from tests.steps import assert_same_step, step


def assigned(model: str, kind: GraphKind, mode: str, before: str = "inserted") -> tuple[fx.GraphModule, PassContext]:
    return after_passes(model_of(model), kind, *SCHEDULED[before], AssignStreams(mode=mode), hardware=DEAR_COPIES)


def on(graph: fx.Graph, stream: str) -> list[fx.Node]:
    """What runs on a side stream."""
    return [node for node in graph.nodes if tags.meta_of(node).stream == stream]


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize(("model", "before"), [("two_layers", "inserted"), ("mixed_precision", "coalesced")])
def test_casts_and_copies_run_aside(model: str, before: str, kind: GraphKind) -> None:
    gm, _ = assigned(model, kind, "side", before)
    assert_schedule(gm, f"assign_streams_side_{model}_{before}_{kind}", whole=True)


@pytest.mark.parametrize("kind", SPLIT)
def test_off_waits_at_once(kind: GraphKind) -> None:
    gm, _ = assigned("two_layers", kind, "off")
    assert_schedule(gm, f"assign_streams_off_{kind}")


@pairwise(model=MODELS, before=SCHEDULED, kind=SPLIT)
def test_off_leaves_nothing_in_flight(model: str, before: str, kind: GraphKind) -> None:
    gm, _ = assigned(model, kind, "off", before)
    for use in liveness.liveness(gm.graph).in_use:
        between = list(gm.graph.nodes)[list(gm.graph.nodes).index(use.user) + 1 : use.until]
        assert all(collectives.is_launch(n) or collectives.is_wait(n) or not _computes(n) for n in between)


def _computes(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.mm.default, torch.ops.aten.add.Tensor)


@pytest.mark.parametrize("mode", ["auto", "nccl"])
@pytest.mark.parametrize("kind", SPLIT)
def test_leaves_the_graph_to_the_streams_of_its_group(mode: str, kind: GraphKind) -> None:
    gm, ctx = after_passes(model_of("mixed_precision"), kind, *SCHEDULE)
    assert_changes_nothing(AssignStreams(mode=mode), gm, ctx)


def test_side_has_nothing_to_do_where_parameters_are_gathered_as_they_are_stored_and_read() -> None:
    gm, ctx = after_passes(model_of("four_layers"), "forward", *SCHEDULED["coalesced"], hardware=DEAR_COPIES)
    assert not run_pass(AssignStreams(mode="side"), gm, ctx)


@pytest.mark.parametrize("fuses_copies", [True, False])
def test_leaves_copies_that_are_no_kernels_with_what_reads_them(fuses_copies: bool) -> None:
    coalesce = CoalesceCollectives(fuses_copies=True)
    gm, ctx = after_passes(graphs.trace(graphs.Norms()), "forward", coalesce, hardware=DEAR_KERNELS)
    assert run_pass(AssignStreams(mode="side", fuses_copies=fuses_copies), gm, ctx) is not fuses_copies
    assert len(gm.graph.find_nodes(op="call_function", target=ops.COPY_OUT)) == (0 if fuses_copies else 2)


@pairwise(model=MODELS, before=SCHEDULED, mode=["side", "off"])
def test_changes_no_bit(model: str, before: str, mode: str) -> None:
    traced = model_of(model)
    passes = SCHEDULED[before]
    found = step(traced, *passes, AssignStreams(mode=mode), hardware=DEAR_COPIES)
    assert_same_step(found, step(traced, *passes, hardware=DEAR_COPIES), rtol=0, atol=0)


@each_once(unit=EVERY_UNIT, world_size=[1, 2, 4])
def test_changes_no_bit_of_any_layout(unit: Callable[..., Traced], world_size: int) -> None:
    traced = unit(world_size=world_size)
    assert_same_step(step(traced, AssignStreams(mode="side")), step(traced), rtol=0, atol=0)


def test_copies_begin_behind_the_launch_and_are_waited_for_where_they_were() -> None:
    gm, _ = assigned("two_layers", "forward", "side")
    order = [node.name for node in gm.graph.nodes]
    for launch in collectives.unshard_launches(gm.graph):
        copies = [user for user in launch.users if user.target is ops.COPY_OUT]
        assert len(copies) == 2
        assert [order[order.index(launch.name) + i] for i in (1, 2)] == [copy.name for copy in copies]
        for copy in copies:
            (wait,) = copy.users
            assert wait.target is collectives.WAIT
            assert not tags.meta_of(wait).stream


def test_a_cast_and_what_sends_it_share_a_stream() -> None:
    gm, _ = assigned("mixed_precision", "forward", "side", "coalesced")
    launches = collectives.unshard_launches(gm.graph)
    assert set(launches) <= set(on(gm.graph, tags.COPY_IN))


def test_gradients_are_put_together_and_then_cast_once() -> None:
    gm, _ = assigned("mixed_precision", "backward", "side", "coalesced")
    casts = [node for node in on(gm.graph, tags.REDUCE) if node.target is torch.ops.aten._to_copy.default]
    assert len(casts) == 3
    assert set(collectives.reduce_launches(gm.graph)) <= set(on(gm.graph, tags.REDUCE))


def test_a_budget_keeps_copies_where_they_were() -> None:
    gm, ctx = after_passes(model_of("two_layers"), "forward", *SCHEDULE, unsharded_budget_bytes=10_000)
    assert not run_pass(AssignStreams(mode="side"), gm, ctx)
    assert "memory budget" in ctx.declined[0].why


def test_refuses_what_is_no_mode() -> None:
    with pytest.raises(ConfigError, match=r"streams must be one of 'auto', 'nccl', 'side', 'off', got 'sied'"):
        AssignStreams(mode="sied")


def test_memory_says_that_copies_are_there_from_the_launch_on() -> None:
    early = max(n for _, n in liveness.unsharded_bytes(assigned("two_layers", "forward", "side")[0].graph))
    late = max(n for _, n in liveness.unsharded_bytes(assigned("two_layers", "forward", "nccl")[0].graph))
    assert (early, late) == (320, 240)


# ---- what the verifier says to a wrong assignment


def _read_without_waiting(graph: fx.Graph) -> None:
    copy = graph.find_nodes(op="call_function", target=ops.COPY_OUT)[0]
    (wait,) = copy.users
    wait.replace_all_uses_with(copy)
    graph.erase_node(wait)


def _read_a_cast_on_the_main_stream(graph: fx.Graph) -> None:
    launch = collectives.unshard_launches(graph)[0]
    tags.tag(launch, stream="reduce")


def _compute_with_two_tensors(graph: fx.Graph) -> None:
    product = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)[-1]
    tags.tag(product, stream="copy_out")


def _write_what_is_sent(graph: fx.Graph) -> None:
    launch = collectives.reduce_launches(graph)[0]
    (sent,) = launch.all_input_nodes
    with graph.inserting_after(launch):
        graph.call_function(torch.ops.aten.zero_.default, (sent,)).meta["val"] = sent.meta["val"]


@pytest.mark.parametrize(
    ("edit", "model", "kind", "invariant"),
    [
        (_read_without_waiting, "two_layers", "forward", "launch_has_one_wait"),
        (_read_a_cast_on_the_main_stream, "mixed_precision", "forward", "side_streams_meet_the_main_one_at_waits"),
        (_compute_with_two_tensors, "two_layers", "forward", "side_streams_meet_the_main_one_at_waits"),
        (_write_what_is_sent, "two_layers", "backward", "nothing_is_written_while_in_use"),
    ],
)
def test_a_wrong_assignment_is_caught(
    edit: Callable[[fx.Graph], None], model: str, kind: GraphKind, invariant: str
) -> None:
    gm, ctx = after_passes(model_of(model), kind, *SCHEDULE, hardware=DEAR_COPIES)
    assert broken_by(AssignStreams(mode="side"), edit, gm, ctx) == invariant
