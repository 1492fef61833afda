"""TagParameterViews: views of parameters are known in backward for what they are."""

from __future__ import annotations

from fxshard.ir import tags
from fxshard.passes.reshard_policy import ReshardPolicy
from fxshard.passes.tag_parameter_views import TagParameterViews
from tests import graphs
from tests.graphs import assert_golden, run_pass, text


def test_views_of_parameters_say_whose_they_are() -> None:
    gm, ctx = graphs.two_layers(reshard_after_forward=False).at("joint", after=ReshardPolicy)
    assert run_pass(TagParameterViews(), gm, ctx)
    assert_golden(text(gm), "tag_parameter_views_joint")


def test_what_forward_saves_is_known_in_backward() -> None:
    gm, _ = graphs.two_layers(reshard_after_forward=False).at("backward")
    kept = {tags.meta_of(node).kept for node in gm.graph.find_nodes(op="placeholder")}
    assert "layers.1.weight" in kept


def test_changes_nothing_when_run_again() -> None:
    gm, ctx = graphs.two_layers().at("joint", after=TagParameterViews)
    assert not TagParameterViews().apply(gm, ctx)


def test_changes_nothing_without_a_view() -> None:
    gm, ctx = graphs.scalar().at("joint", after=ReshardPolicy)
    assert not run_pass(TagParameterViews(), gm, ctx)
