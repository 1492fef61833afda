"""What passes make of shards that tensor subclasses encode: gathers of bytes, which the verifier tells from rows."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxshard import ConfigError, explain, fully_shard
from fxshard.ir import collectives, tags
from fxshard.passes._base import GraphKind
from fxshard.passes.bucket_collectives import BucketCollectives
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.reshard_policy import ReshardPolicy
from tests.encoded_shards import encoded, twofold, with_hooks
from tests.fake_ranks import fake_ranks
from tests.graphs import SPLIT, Layer, TwoLayers, assert_golden, broken_by, run_pass, text

aten = torch.ops.aten


@pytest.mark.parametrize("kind", SPLIT)
def test_gathers_bytes_and_reduces_what_they_were_made_of(kind: GraphKind) -> None:
    gm, ctx = encoded().at(kind, after=DedupUnshard)
    assert run_pass(InsertCollectives(), gm, ctx)
    assert_golden(text(gm), f"encoded_shards_{kind}")


def test_backward_decodes_again_what_it_gathers_again() -> None:
    gm, ctx = encoded().at("joint", after=DedupUnshard)
    assert run_pass(ReshardPolicy(), gm, ctx)
    assert_golden(text(gm), "encoded_shards_joint")


def test_backward_is_given_no_weight_that_was_decoded_with_what_is_made_of_metadata() -> None:
    """The hook divides one by each scale before it reads a byte."""
    gm, _ = twofold().at("backward", after=InsertCollectives)
    assert {tuple(n.meta["val"].shape) for n in gm.graph.find_nodes(op="placeholder")} <= {(16,), (), (4, 2), (2, 4)}


def _gather_rows(graph: fx.Graph) -> None:
    """Gather the rows of the first matrix, and read them in place of what the bytes were decoded to."""
    rows, launch = graph.find_nodes(op="placeholder")[0], tags.launches_of(graph, collectives.GATHERS)[0]
    decoded = graph.find_nodes(op="call_function", target=aten.div.Tensor)[0]
    tags.tag(rows, shard=tags.ShardKey("layers.0", 0))
    with graph.inserting_before(decoded):
        sent = graph.call_function(collectives.ALL_GATHER, (rows, *launch.args[1:]))
        waited = graph.call_function(collectives.WAIT, (sent,))
        weight = graph.call_function(aten.view.default, (waited, [4, 4]))
    for node, shape in ((sent, (16,)), (waited, (16,)), (weight, (4, 4))):
        node.meta["val"] = rows.meta["val"].new_empty(shape)
    for node in (sent, waited):
        tags.tag_units(node, tags.units_of(launch))
    tags.tag(weight, param="layers.0.weight")
    decoded.replace_all_uses_with(weight)


def test_the_verifier_tells_a_gather_of_the_rows_from_one_of_the_bytes() -> None:
    gm, ctx = encoded().at("forward", after=DedupUnshard)
    assert broken_by(InsertCollectives(), _gather_rows, gm, ctx) == "gathers_match_the_plan"


@pytest.mark.parametrize("kind", SPLIT)
def test_merges_launches_of_several_units(kind: GraphKind) -> None:
    """A launch per dtype in forward; backward gathers one unit, and reduces both shards of both at once."""
    gm, ctx = encoded().at(kind, after=InsertCollectives)
    assert run_pass(BucketCollectives(size=1.0), gm, ctx)
    launches = [tags.launches_of(gm.graph, targets) for targets in (collectives.GATHERS, collectives.REDUCTIONS)]
    assert [len(found) for found in launches] == ([2, 0] if kind == "forward" else [1, 1])


def test_refuses_a_subgroup() -> None:
    with fake_ranks(4) as mesh, pytest.raises(ConfigError, match=r"weight: what .* reshard_after_forward as a number"):
        fully_shard(with_hooks(Layer()), mesh=mesh, reshard_after_forward=2)


def test_explains_what_is_sent() -> None:
    """Of each matrix a byte per element, where it has four."""
    plain, ours = (explain(model, torch.ones(2, 4), world_size=2) for model in (TwoLayers(), with_hooks(TwoLayers())))
    sent = [list(each.frames[0].stats["forward"].values())[-1].evaluate().gathered_bytes for each in (plain, ours)]
    assert sent[0] - sent[1] == 2 * 3 * 16
