"""SinkWaits: where reductions are waited for, how many are in flight, what goes along, and the same bits."""

from __future__ import annotations

import functools

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxshard.errors import ConfigError
from fxshard.ir import collectives, launch_groups, liveness, tags
from fxshard.passes._base import GraphPass, PassContext
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.sink_waits import SinkWaits
from tests import graphs
from tests.graphs import OFFLOADED, assert_changes_nothing, run_pass
from tests.pairwise import each_once, pairwise
from tests.schedules import BUCKETS, DEAR_COPIES, MODELS, after_passes, assert_schedule, events, model_of
from tests.steps import assert_same_step, step

aten = torch.ops.aten


def sunk(name: str, max_buffers: int, *before: GraphPass) -> tuple[fx.GraphModule, PassContext]:
    passes = (*before, SinkWaits(max_buffers=max_buffers))
    return after_passes(model_of(name), "backward", *passes, hardware=DEAR_COPIES)


reductions = functools.partial(events, launch="reduce_", wait="reduced_")


def most_in_flight(gm: fx.GraphModule) -> int:
    """The largest number of units whose reductions have been launched and not been waited for."""
    waiting: dict[fx.Node, set[fx.Node]] = {}
    most = 0
    for node in gm.graph.nodes:
        if node.target in collectives.REDUCTIONS:
            results = list(node.users) if node.target in collectives.COALESCED else [node]
            waiting[node] = {wait for result in results for wait in result.users}
            most = max(most, len({str(tags.units_of(launch)) for launch in waiting}))
        waiting = {launch: left for launch, waits in waiting.items() if (left := waits - {node})}
    return most


@pytest.mark.parametrize("model", [model for model in MODELS if model != "kept"])
def test_waits_as_late_as_two_buffers_allow(model: str) -> None:
    gm, _ = sunk(model, 2)
    assert_schedule(
        gm, f"sink_waits_{model}", whole=model in ("mixed_precision", "doubles")
    )  # what is made of it sinks too


@pytest.mark.parametrize("before", ["coalesced", "merged", "split"])
def test_waits_late_for_what_other_passes_made(before: str) -> None:
    gm, _ = sunk("four_layers", 1, *BUCKETS[before])
    assert_schedule(gm, f"sink_waits_{before}", whole=before != "merged")


@pytest.mark.parametrize(
    ("max_buffers", "expected"),
    [
        (1, "mm launch3 mm mm wait3 launch2 mm mm wait2 launch1 mm mm wait1 launch0 wait0"),
        (2, "mm launch3 mm mm launch2 mm mm wait3 launch1 mm mm wait2 launch0 wait1 wait0"),
        (3, "mm launch3 mm mm launch2 mm mm launch1 mm mm wait3 launch0 wait2 wait1 wait0"),
        (4, "mm launch3 mm mm launch2 mm mm launch1 mm mm launch0 wait3 wait2 wait1 wait0"),
    ],
)
def test_waits_for_the_oldest_before_one_too_many_is_launched(max_buffers: int, expected: str) -> None:
    assert reductions(sunk("four_layers", max_buffers)[0]) == expected


def test_launches_all_reduces_before_it_waits_for_any() -> None:
    gm, _ = after_passes(model_of("four_layers", replicas=2), "backward", SinkWaits(max_buffers=2))
    assert reductions(gm) == "mm launch3 mm mm launch2 mm mm wait3 launch1 mm mm wait2 launch0 wait1 wait0"
    expected = "mm mm mm mm mm launch3 mm mm launch2 launch1 launch0 wait3 wait2 wait1 wait0"
    assert events(gm, launch="all_reduce_", wait="all_reduced_") == expected


def test_copies_to_the_host_what_replicas_have_averaged_before_it_waits_for_a_copy() -> None:
    traced = model_of("two_layers", replicas=2, **OFFLOADED)
    gm, _ = after_passes(traced, "backward", SinkWaits())
    assert_expected_inline(
        last_events(gm),
        """\
reduced_layers_1
all_reduce_layers_1
reduced_layers_0
all_reduce_layers_0
all_reduced_layers_1
to_host_layers_1
all_reduced_layers_0
to_host_layers_0
on_host_layers_1
on_host_layers_0""",
    )


def last_events(gm: fx.GraphModule) -> str:
    """What is launched and waited for from the first wait on, by name."""
    names = [node.name for node in gm.graph.nodes if tags.units_of(node)]
    return "\n".join(names[names.index("reduced_layers_1") :])


@pairwise(model=MODELS, before=BUCKETS, max_buffers=[1, 2, 3])
def test_never_has_more_in_flight_than_buffers(model: str, before: str, max_buffers: int) -> None:
    gm, _ = sunk(model, max_buffers, *BUCKETS[before])
    num_units = len(launch_groups.groups_of(gm.graph, collectives.REDUCTIONS))
    assert most_in_flight(gm) <= max_buffers
    if (model, before) != ("tied_head", "split"):  # one unit that is reduced early and late
        assert most_in_flight(gm) == min(max_buffers, num_units)


def test_waits_before_the_next_buffer_is_put_together() -> None:
    """What is in flight is two buffers of 20 floats; a third one is made when the first is free."""
    gm, _ = sunk("four_layers", 2)
    live = liveness.liveness(gm.graph, donated=True)
    sent = {live.storages_of[launch.all_input_nodes[0]][0] for launch in collectives.reduce_launches(gm.graph)}
    alive = live.running_sum([int(i in sent) for i in range(len(live.storages))])
    assert max(alive) == 2


def test_waits_no_earlier_than_the_launch_where_the_next_one_was_prepared_before_it() -> None:
    gm, ctx = model_of("tied_head").at("backward", after=InsertCollectives)
    (total,) = [node for node in gm.graph.nodes if node.target is aten.add.Tensor]
    max(total.all_input_nodes).append(total)  # another pass may have the sum where its last summand is
    assert run_pass(SinkWaits(max_buffers=1), gm, ctx)
    assert reductions(gm) == "mm mm mm mm mm launch1 mm mm wait1 launch0 mm mm wait0 reduce_root reduced_root"


@pytest.mark.parametrize(("model", "made"), [("doubles", aten.div.Tensor), ("four_layers", aten.cat.default)])
def test_takes_along_what_is_made_of_a_reduced_gradient(model: str, made: object) -> None:
    gm, _ = sunk(model, 2, *BUCKETS["split"])
    graph = gm.graph
    waits = [node for node in graph.find_nodes(op="call_function", target=collectives.WAIT) if node.name[:4] == "redu"]
    last_launch = collectives.reduce_launches(graph)[-1]
    read_late = {user for wait in waits if wait > last_launch for user in wait.users if user.op != "output"}
    assert {node.target for node in read_late} == {made}
    assert all(node > last_launch for node in read_late)


def test_says_why() -> None:
    _, ctx = sunk("four_layers", 2)
    assert_expected_inline(
        "\n".join(f"{note.node}: {note.why}" for note in ctx.notes),
        """\
reduce_layers_3: waited for before layers.1 is reduced: 2 may be in flight
reduce_layers_2: waited for before layers.0 is reduced: 2 may be in flight
reduce_layers_1: waited for at the end
reduce_layers_0: waited for at the end""",
    )


@pytest.mark.parametrize("max_buffers", [0, -1, 1.0, "auto", True, None])
def test_refuses_what_is_no_number_of_buffers(max_buffers: object) -> None:
    with pytest.raises(ConfigError, match="reduce_scatter_max_input_buffers must be a positive int, got "):
        SinkWaits(max_buffers=max_buffers)  # type: ignore[arg-type]


@each_once(model=MODELS, max_buffers=[1, 2, 4])
def test_changes_nothing_when_run_again(model: str, max_buffers: int) -> None:
    gm, ctx = sunk(model, max_buffers)
    assert_changes_nothing(SinkWaits(max_buffers=max_buffers), gm, ctx)


def test_changes_nothing_without_reductions() -> None:
    gm, ctx = model_of("four_layers").at("forward", after=InsertCollectives)
    assert not run_pass(SinkWaits(), gm, ctx)


def test_changes_nothing_behind_the_last_reduction() -> None:
    gm, ctx = graphs.uneven().at("backward", after=InsertCollectives)
    assert len(launch_groups.groups_of(gm.graph, collectives.REDUCTIONS)) == 1
    assert not run_pass(SinkWaits(), gm, ctx)


@pairwise(model=MODELS, before=["inserted", "split"], max_buffers=[1, 2, 8])
def test_computes_the_same_bits(model: str, before: str, max_buffers: int) -> None:
    traced = model_of(model)
    rewritten = step(traced, *BUCKETS[before], SinkWaits(max_buffers=max_buffers), hardware=DEAR_COPIES)
    assert_same_step(rewritten, step(traced), rtol=0, atol=0)
