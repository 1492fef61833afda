"""Reads of parameters become markers that know their unit and call."""

from __future__ import annotations

from fxshard.passes.bind_markers import BindMarkers
from tests import graphs


def test_turns_every_read_into_a_marker() -> None:
    traced = graphs.two_layers()
    captured, (bound, ctx) = traced.history.stages["dynamo"]["captured"], traced.at("dynamo", after=BindMarkers)
    assert str(captured).count("fxshard.parameter(") == graphs.text(bound).count("fxshard.unshard(") == 4
    graphs.assert_changes_nothing(BindMarkers(), bound, ctx)
