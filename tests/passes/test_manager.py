"""The manager: properties before the first pass, a linted graph and a log line after each, recompiled at the end."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxshard.errors import InvariantError
from fxshard.ir.history import Remark
from fxshard.ir.plan import FramePlan
from fxshard.passes import _manager
from fxshard.passes._base import GraphPass, PassContext, Property
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.insert_collectives import InsertCollectives
from fxshard.passes.reshard_policy import ReshardPolicy
from tests.graphs import text


def context() -> PassContext:
    return PassContext(plan=FramePlan(units={}, shard_inputs={}), kind="forward")


def small_graph() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x, y: torch.relu(x + y))


@dataclass(frozen=True, kw_only=True)
class DropRelu(GraphPass):
    """Drops each relu; `keep` leaves the first ones."""

    keep: int = 0
    requires = frozenset({Property.DEDUPED})
    ensures = frozenset({Property.COLLECTIVES})

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        dropped = gm.graph.find_nodes(op="call_function", target=torch.relu)[self.keep :]
        for node in dropped:
            node.replace_all_uses_with(node.all_input_nodes[0])
            gm.graph.erase_node(node)
        return bool(dropped)


@dataclass(frozen=True, kw_only=True)
class ReverseReads(GraphPass):
    """Leaves a node before what it reads."""

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        *_, first, second, _ = gm.graph.nodes
        first.prepend(second)
        return True


@dataclass(frozen=True, kw_only=True)
class NeedsCollectives(GraphPass):
    """Needs properties and does nothing."""

    requires = frozenset({Property.COLLECTIVES, Property.DEDUPED})

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class LeaveAlone(GraphPass):
    """Leaves every call alone, and says why."""

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        for node in gm.graph.find_nodes(op="call_function", target=torch.relu):
            ctx.decline(node, "it is not linear")
        return False


def test_names_every_fact_that_a_pass_misses() -> None:
    with pytest.raises(InvariantError) as refused:
        _manager.run(small_graph(), [NeedsCollectives()], context(), given=[])
    assert_expected_inline(
        str(refused.value),
        """\
NeedsCollectives() requires COLLECTIVES, DEDUPED; run the pass that ensures it before this one.
This is a bug in fxshard or in a pass that was added to it: please report it.""",
    )


@pytest.mark.parametrize(
    ("pass_", "given", "missed"),
    [
        (DedupUnshard(), [], "MARKED"),
        (ReshardPolicy(), [Property.MARKED], "DEDUPED"),
        (InsertCollectives(), [Property.MARKED], "DEDUPED"),
    ],
)
def test_a_pass_says_which_markers_it_wants(pass_: GraphPass, given: list[Property], missed: str) -> None:
    with pytest.raises(InvariantError, match=rf"^{re.escape(repr(pass_))} requires {missed}; run the pass that"):
        _manager.run(small_graph(), [pass_], context(), given=given)


def test_counts_on_what_earlier_passes_ensure() -> None:
    assert _manager.run(small_graph(), [DropRelu(), NeedsCollectives()], context(), given=[Property.DEDUPED])


def test_checks_the_facts_of_all_passes_before_the_first_one_runs() -> None:
    gm = small_graph()
    before = text(gm)
    with pytest.raises(InvariantError, match=r"requires DEDUPED"):
        _manager.run(gm, [ReverseReads(), DropRelu()], context(), given=[])
    assert text(gm) == before


def test_names_the_pass_that_left_a_malformed_graph() -> None:
    with pytest.raises(InvariantError, match=r"^ReverseReads\(\) left a malformed forward graph: .*'add'.*'relu'"):
        _manager.run(small_graph(), [ReverseReads()], context(), given=[])


def test_recompiles_what_has_changed() -> None:
    gm = small_graph()
    assert _manager.run(gm, [DropRelu()], context(), given=[Property.DEDUPED])
    assert gm(torch.tensor(-2.0), torch.tensor(1.0)).item() == -1.0


def test_says_that_nothing_changed() -> None:
    assert not _manager.run(small_graph(), [DropRelu(keep=1)], context(), given=[Property.DEDUPED])


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """What the manager logged, without how long it took."""
    lines = [record.getMessage() for record in caplog.records if record.name == "fxshard.passes._manager"]
    return "\n".join(re.sub(r"\d+ ms$", "N ms", line) for line in lines)


def test_logs_one_line_per_pass(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fxshard.passes")
    _manager.run(small_graph(), [DropRelu(), DropRelu(keep=1)], context(), given=[Property.DEDUPED])
    assert_expected_inline(
        logged(caplog),
        """\
[forward 01/02] DropRelu(keep=0)  nodes 5 -> 4  N ms
[forward 02/02] DropRelu(keep=1)  nodes 4 -> 4  N ms""",
    )


def test_logs_what_a_pass_left_alone_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fxshard.passes")
    _manager.run(small_graph(), [LeaveAlone(), DropRelu()], context(), given=[Property.DEDUPED])
    assert_expected_inline(
        logged(caplog),
        """\
[forward 01/02] LeaveAlone()  nodes 5 -> 5  N ms
[forward 01/02] leave_alone: left %relu alone: it is not linear
[forward 02/02] DropRelu(keep=0)  nodes 5 -> 4  N ms""",
    )


def test_logs_the_graph_before_and_after_each_pass_when_debugging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="fxshard.passes")
    _manager.run(small_graph(), [DropRelu()], context(), given=[Property.DEDUPED])
    assert_expected_inline(
        logged(caplog),
        """\
forward graph as the stage received it:
%x = input
%y = input
%add = add(%x, %y)
%relu = relu(%add)
return %relu
[forward 01/01] DropRelu(keep=0)  nodes 5 -> 4  N ms
forward graph after DropRelu(keep=0):
%x = input
%y = input
%add = add(%x, %y)
return %add""",
    )


# ---- the history


def test_records_the_graph_before_the_first_pass_and_after_each() -> None:
    ctx = context()
    _manager.run(small_graph(), [DropRelu(), LeaveAlone()], ctx, given=[Property.DEDUPED])
    captured, dropped, left = ctx.history.stages["forward"].values()
    assert [captured.name, dropped.name, left.name] == ["captured", "drop_relu", "leave_alone"]
    assert [captured.changed, dropped.changed, left.changed] == [True, True, False]
    assert "%relu" in str(captured)
    assert "%relu" not in str(dropped)
    assert left.graph is dropped.graph


def test_records_under_a_name_of_its_own_what_is_compiled_again() -> None:
    ctx = context()
    for _ in range(2):
        _manager.run(small_graph(), [DropRelu(), DropRelu()], ctx, given=[Property.DEDUPED])
    assert [*ctx.history.stages] == ["forward", "forward_2"]
    assert [*ctx.history.stages["forward_2"]] == ["captured", "drop_relu", "drop_relu_2"]


def test_records_what_a_pass_left_alone_with_that_pass_only() -> None:
    ctx = context()
    _manager.run(small_graph(), [LeaveAlone(), DropRelu()], ctx, given=[Property.DEDUPED])
    records = ctx.history.stages["forward"]
    assert records["leave_alone"].declined == (Remark(node="relu", why="it is not linear"),)
    assert records["drop_relu"].declined == ()


def test_records_a_graph_as_it_was_whatever_happens_to_it_later() -> None:
    ctx, gm = context(), small_graph()
    _manager.run(gm, [LeaveAlone()], ctx, given=[])
    before = str(ctx.history.last("forward"))
    gm.graph.output_node().args = (None,)
    gm.graph.eliminate_dead_code()
    assert str(ctx.history.last("forward")) == before
