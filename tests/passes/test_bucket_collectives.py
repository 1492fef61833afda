"""BucketCollectives: what is merged, what is split, what the budget allows, and the same bits for all ranks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from fxshard.errors import ConfigError
from fxshard.hardware import BUILTIN, HardwareSpec
from fxshard.ir import collectives, liveness, tags
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.insert_collectives import InsertCollectives
from tests import graphs
from tests.graphs import SPLIT, Traced, assert_changes_nothing, assert_golden, run_pass, text
from tests.models import Doing, matrix
from tests.pairwise import pairwise
from tests.schedules import LAYER, model_of
from tests.steps import assert_same_step, step


def bucketed(
    traced: Traced, kind: GraphKind, size: str | float, peak_share: float = math.inf, **context: object
) -> tuple[fx.GraphModule, PassContext]:
    gm, ctx = traced.at(kind, after=InsertCollectives)
    ctx = dataclasses.replace(ctx, **context)  # type: ignore[arg-type]
    run_pass(BucketCollectives(size=size, peak_share=peak_share), gm, ctx)
    return gm, ctx


def gathered(gm: fx.GraphModule) -> list[str]:
    """The units of each all_gather."""
    return [" ".join(tags.units_of(launch)) for launch in collectives.unshard_launches(gm.graph)]


def reduced(gm: fx.GraphModule) -> list[str]:
    """The units of each reduce_scatter."""
    return [" ".join(tags.units_of(launch)) for launch in collectives.reduce_launches(gm.graph)]


def test_merges_small_gathers() -> None:
    gm, _ = bucketed(graphs.two_layers(), "forward", 2 * LAYER)
    assert_golden(text(gm), "bucket_collectives_merged_forward")


def test_merges_small_reductions_into_one_buffer() -> None:
    gm, _ = bucketed(graphs.two_layers(), "backward", 2 * LAYER)
    assert_golden(text(gm), "bucket_collectives_merged_backward")


@pytest.mark.parametrize("kind", SPLIT)
def test_merges_nothing_of_different_meshes(kind: GraphKind) -> None:
    gm, ctx = graphs.two_meshes().at(kind, after=InsertCollectives)
    assert_changes_nothing(BucketCollectives(size=1.0), gm, ctx)


def test_splits_a_large_unit_where_its_parameters_are_read() -> None:
    gm, _ = bucketed(graphs.two_layers(), "forward", 0.9 * LAYER)
    assert_golden(text(gm), "bucket_collectives_split_forward")


def test_splits_a_large_reduction() -> None:
    gm, _ = bucketed(graphs.two_layers(), "backward", 0.9 * LAYER)
    assert_golden(text(gm), "bucket_collectives_split_backward")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1.0 * LAYER, ["layers.0", "layers.1", "layers.2", "layers.3"]),
        (2.5 * LAYER, ["layers.0 layers.1", "layers.2 layers.3"]),
        (3.0 * LAYER, ["layers.0 layers.1 layers.2", "layers.3"]),
        (100.0, ["layers.0 layers.1 layers.2 layers.3"]),
    ],
)
def test_fills_buckets_up_to_the_size(size: float, expected: list[str]) -> None:
    gm, _ = bucketed(model_of("four_layers"), "forward", size)
    assert gathered(gm) == expected


def test_fills_buckets_of_reductions_in_the_order_of_backward() -> None:
    gm, _ = bucketed(model_of("four_layers"), "backward", 3 * LAYER)
    assert reduced(gm) == ["layers.3 layers.2 layers.1", "layers.0"]


def test_leaves_every_unit_its_own_launch_by_default() -> None:
    gm, ctx = bucketed(model_of("four_layers"), "forward", "unit")
    assert gathered(gm) == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert not ctx.history.last("forward").changed


WHERE_THREE_LAYERS_ARE_ENOUGH = dataclasses.replace(BUILTIN["cpu"], link_bandwidth=1.0, link_latency=13.0)


def test_auto_merges_until_latency_is_a_tenth_of_the_time() -> None:
    # 2 ranks: 80 bytes take latency + 40 s; buckets of 3 layers are the first with latency below a tenth.
    gm, _ = bucketed(model_of("four_layers"), "forward", "auto", hardware=WHERE_THREE_LAYERS_ARE_ENOUGH)
    assert gathered(gm) == ["layers.0 layers.1 layers.2", "layers.3"]


@pytest.mark.parametrize(
    ("share", "launches"),
    [
        (0, [["layers.0"], ["layers.1"], ["layers.2"], ["layers.3"]]),
        (1, [["layers.0", "layers.1"], ["layers.2", "layers.3"]]),
        (1.9, [["layers.0", "layers.1"], ["layers.2", "layers.3"]]),
    ],
)
def test_auto_raises_the_peak_by_no_more_than_a_share(share: float, launches: list[list[str]]) -> None:
    traced = model_of("four_layers")
    before, _ = traced.at("forward", after=InsertCollectives)
    forward, _ = bucketed(traced, "forward", "auto", peak_share=share, hardware=WHERE_THREE_LAYERS_ARE_ENOUGH)
    backward, _ = bucketed(traced, "backward", "auto", peak_share=share, hardware=WHERE_THREE_LAYERS_ARE_ENOUGH)
    assert gathered(forward) == [" ".join(units) for units in launches]
    assert reduced(backward) == [" ".join(reversed(units)) for units in reversed(launches)]
    alone, merged = (max(nbytes for _, nbytes in liveness.unsharded_bytes(gm.graph)) for gm in (before, forward))
    assert merged <= (1 + share) * alone


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("share", [0, 0.3, 1, 2.5])
def test_auto_keeps_to_the_share_where_the_root_is_read_at_both_ends(share: float, kind: GraphKind) -> None:
    traced = model_of("root")
    before, _ = traced.at(kind, after=InsertCollectives)
    gm, _ = bucketed(traced, kind, "auto", peak_share=share, hardware=WHERE_THREE_LAYERS_ARE_ENOUGH)
    alone, merged = (max(nbytes for _, nbytes in liveness.unsharded_bytes(each.graph)) for each in (before, gm))
    assert merged <= (1 + share) * alone


def test_auto_splits_what_takes_forty_times_the_latency() -> None:
    link = dataclasses.replace(BUILTIN["cpu"], link_bandwidth=1.0, link_latency=0.9)
    gm, _ = bucketed(graphs.two_layers(), "forward", "auto", hardware=link)
    assert gathered(gm) == ["layers.0", "layers.0", "layers.1", "layers.1"]


# Of 2 ranks: a launch of 63 bytes is enough, 273 are the most, and the latency is longer or shorter than any kernel.
LONG, SHORT = (
    dataclasses.replace(BUILTIN["cpu"], link_bandwidth=3.5 / latency, link_latency=latency) for latency in (3.5, 1e-9)
)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_auto_gives_what_the_root_reads_first_and_last_launches_of_their_own(kind: GraphKind) -> None:
    gm, _ = bucketed(model_of("root"), kind, "auto", hardware=LONG)
    assert_golden(text(gm), f"bucket_collectives_ends_{kind}")


def test_auto_gives_what_is_too_small_no_launch_of_its_own() -> None:
    # What is read last of the root moves in less than the latency: it is worth no launch.
    link = dataclasses.replace(BUILTIN["cpu"], link_bandwidth=10.0, link_latency=3.5)
    gm, _ = bucketed(model_of("root"), "forward", "auto", hardware=link)
    assert gathered(gm) == [" layers.0 layers.1 layers.2"]


def three_products() -> nn.Module:
    """A unit whose matrices are read one after the other; each is just enough for a launch. Backward reads no bias."""
    parts = {"one": matrix(4, 4), "bias": matrix(4), "two": matrix(4, 4), "three": matrix(4, 4)}
    return Doing(lambda m, x: (x @ m.one + m.bias) @ m.two @ m.three, **parts)


@functools.cache
def two_of_three() -> Traced:
    return graphs.trace(nn.Sequential(three_products(), three_products()), units=lambda m: [*m.children(), m])


def test_auto_makes_small_what_is_read_first_and_what_is_reduced_last() -> None:
    forward, _ = bucketed(two_of_three(), "forward", "auto", hardware=SHORT)
    assert gathered(forward) == ["0", "0", "0", "1"]
    backward, _ = bucketed(two_of_three(), "backward", "auto", hardware=SHORT)
    assert gathered(backward) == ["1", "1", "1", "0"]
    assert reduced(backward) == ["1", "0", "0", "0"]


def test_auto_cuts_nothing_at_the_ends_of_a_part_of_the_model() -> None:
    traced = dataclasses.replace(two_of_three(), plan=dataclasses.replace(two_of_three().plan, is_part=True))
    forward, _ = bucketed(traced, "forward", "auto", hardware=SHORT)
    backward, _ = bucketed(traced, "backward", "auto", hardware=SHORT)
    assert (gathered(forward), gathered(backward), reduced(backward)) == (["0", "1"], ["1", "0"], ["1", "0"])


@pytest.mark.parametrize(("hands_off", "parts"), [(True, 1), (False, 3)])
def test_auto_does_not_split_the_last_reduction_that_the_next_graph_hides(hands_off: bool, parts: int) -> None:
    traced = dataclasses.replace(two_of_three(), plan=dataclasses.replace(two_of_three().plan, is_part=True))
    gm, ctx = traced.at("backward", after=InsertCollectives)
    ctx = dataclasses.replace(ctx, hardware=dataclasses.replace(LONG, link_latency=1.5))  # a unit is too large for it
    run_pass(BucketCollectives(size="auto", hands_off=hands_off), gm, ctx)
    assert reduced(gm) == ["1"] * 3 + ["0"] * parts


def test_auto_cuts_nothing_at_the_ends_that_is_there_within_a_latency() -> None:
    backward, _ = bucketed(two_of_three(), "backward", "auto", hardware=LONG)
    assert (gathered(backward), reduced(backward)) == (["1", "0"], ["1", "0"])


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_stays_within_the_budget(layers: int) -> None:
    traced = model_of("four_layers")
    gm, _ = traced.at("forward", after=InsertCollectives)
    alone = max(nbytes for _, nbytes in liveness.unsharded_bytes(gm.graph))
    budget = alone + (layers - 1) * 80
    gm, _ = bucketed(traced, "forward", 100.0, unsharded_budget_bytes=budget)
    assert max(nbytes for _, nbytes in liveness.unsharded_bytes(gm.graph)) <= budget
    assert max(len(units.split()) for units in gathered(gm)) == layers


def test_never_gathers_two_calls_of_a_unit_at_once() -> None:
    gm, _ = bucketed(graphs.called_twice(), "forward", 100.0)
    assert gathered(gm) == ["layers.0", "layers.0"]


def test_reduces_each_dtype_by_itself() -> None:
    gm, _ = bucketed(graphs.two_dtypes(), "backward", 100.0)
    dtypes = {launch.meta["val"].dtype for launch in collectives.reduce_launches(gm.graph)}
    assert dtypes == {torch.float32, torch.bfloat16}


def test_says_what_a_merged_launch_costs_in_memory() -> None:
    link = WHERE_THREE_LAYERS_ARE_ENOUGH
    _, ctx = bucketed(model_of("four_layers"), "forward", "auto", peak_share=1, hardware=link)
    memory = "; 0.00 MiB more memory than 2 launches, where 0.00 are the most"
    assert [note.why.endswith(memory) for note in ctx.history.last("forward").notes] == [True, True]


def test_says_why() -> None:
    _, ctx = bucketed(model_of("four_layers"), "forward", 2 * LAYER)
    notes = [f"{note.node}: {note.why}" for note in ctx.history.last("forward").notes]
    assert_expected_inline(
        "\n".join(notes),
        """\
unshard_layers_0_to_layers_1: 0.00 MiB, where 0.00 are enough and 0.00 the most
unshard_layers_2_to_layers_3: 0.00 MiB, where 0.00 are enough and 0.00 the most""",
    )


@pytest.mark.parametrize("size", ["units", 0, -1.0, float("inf"), float("nan"), True, None, [1]])
def test_refuses_what_is_no_size(size: object) -> None:
    with pytest.raises(ConfigError, match=r'bucket must be "unit", "auto" or a positive number of MiB, got '):
        BucketCollectives(size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("size", [2 * LAYER, 0.9 * LAYER])
def test_changes_nothing_when_run_again(kind: GraphKind, size: float) -> None:
    gm, ctx = bucketed(model_of("four_layers"), kind, size)
    assert_changes_nothing(BucketCollectives(size=size), gm, ctx)


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("model", [two_of_three, functools.partial(model_of, "root")])
def test_auto_changes_nothing_when_run_again(kind: GraphKind, model: Callable[[], Traced]) -> None:
    for link in (LONG, SHORT):
        gm, ctx = bucketed(model(), kind, "auto", hardware=link)
        assert_changes_nothing(BucketCollectives(size="auto"), gm, ctx)


@pytest.mark.parametrize("link", [LONG, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("model", ["root", "tied_head", "two_dtypes"])
def test_auto_computes_the_same_bits(model: str, link: HardwareSpec) -> None:
    traced = model_of(model)
    assert_same_step(step(traced, BucketCollectives(size="auto"), hardware=link), step(traced), rtol=0, atol=0)


@pairwise(build=graphs.EVERY_UNIT, size=[1e-5, 100.0], world_size=[1, 4])
def test_computes_the_same_bits(build: Callable[..., Traced], size: float, world_size: int) -> None:
    traced = build(world_size=world_size)
    assert_same_step(step(traced, BucketCollectives(size=size)), step(traced), rtol=0, atol=0)


def frozen() -> nn.Module:
    """Its first layer is not trained."""
    fixed = nn.Linear(8, 8).requires_grad_(False)
    return Doing(lambda m, x: x + m.down(m.up(m.fixed(x))), up=nn.Linear(8, 17), down=nn.Linear(17, 8), fixed=fixed)


@functools.cache
def two_frozen() -> Traced:
    return graphs.trace(nn.Sequential(frozen(), frozen()), units=lambda m: [*m.children(), m], width=8)


@pytest.mark.parametrize("size", [0.0003, 0.0005, 0.001])
def test_sends_no_shard_that_backward_does_not_read(size: float) -> None:
    gm, _ = bucketed(two_frozen(), "backward", size)
    assert gathered(gm)


class SideBySide(graphs.Layers):
    """Adds two layers of one input: one node is the gradient of both."""

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        return last(torch.tanh(first(x) + second(x)))


@functools.cache
def side_by_side() -> Traced:
    return graphs.trace(SideBySide(3), units=graphs.layers_of)


@pytest.mark.parametrize(("size", "expected"), [(1.0, 1), (1e-5, 6)])
def test_reduces_a_node_for_each_unit_whose_gradient_it_is(size: float, expected: int) -> None:
    gm, _ = bucketed(side_by_side(), "backward", size)
    assert len(reduced(gm)) == expected
    assert_same_step(step(side_by_side(), BucketCollectives(size=size)), step(side_by_side()), rtol=0, atol=0)
