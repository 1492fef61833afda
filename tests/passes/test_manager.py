"""The manager: facts before the first pass, a linted and recompiled graph after each, one log line per pass."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from fxshard.errors import InvariantError
from fxshard.ir.plan import FramePlan
from fxshard.passes import _manager
from fxshard.passes._base import Fact, GraphPass, PassContext
from tests.graphs import text

CTX = PassContext(plan=FramePlan(units={}, shard_inputs={}), kind="forward")


def small_graph() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x, y: torch.relu(x + y))


@dataclass(frozen=True, kw_only=True)
class DropRelu(GraphPass):
    """Drops each relu; `keep` leaves the first ones."""

    keep: int = 0
    requires = frozenset({Fact.DEDUPED})
    ensures = frozenset({Fact.COLLECTIVES})

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
    """Needs facts and does nothing."""

    requires = frozenset({Fact.COLLECTIVES, Fact.DEDUPED})

    def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
        return False


def test_names_every_fact_that_a_pass_misses() -> None:
    with pytest.raises(InvariantError) as refused:
        _manager.run(small_graph(), [NeedsCollectives()], CTX, given=[])
    assert_expected_inline(
        str(refused.value),
        """\
NeedsCollectives() requires COLLECTIVES, DEDUPED; run the pass that ensures it before this one.
This is a bug in fxshard or in a pass that was added to it: please report it.""",
    )


def test_counts_on_what_earlier_passes_ensure() -> None:
    assert _manager.run(small_graph(), [DropRelu(), NeedsCollectives()], CTX, given=[Fact.DEDUPED])


def test_checks_the_facts_of_all_passes_before_the_first_one_runs() -> None:
    gm = small_graph()
    before = text(gm)
    with pytest.raises(InvariantError, match=r"requires DEDUPED"):
        _manager.run(gm, [ReverseReads(), DropRelu()], CTX, given=[])
    assert text(gm) == before


def test_names_the_pass_that_left_a_malformed_graph() -> None:
    with pytest.raises(InvariantError, match=r"^ReverseReads\(\) left a malformed forward graph: .*'add'.*'relu'"):
        _manager.run(small_graph(), [ReverseReads()], CTX, given=[])


def test_recompiles_what_has_changed() -> None:
    gm = small_graph()
    assert _manager.run(gm, [DropRelu()], CTX, given=[Fact.DEDUPED])
    assert gm(torch.tensor(-2.0), torch.tensor(1.0)).item() == -1.0


def test_says_that_nothing_changed() -> None:
    assert not _manager.run(small_graph(), [DropRelu(keep=1)], CTX, given=[Fact.DEDUPED])


def without_times(lines: list[str]) -> str:
    return "\n".join(re.sub(r"\d+ ms$", "N ms", line) for line in lines)


def test_logs_one_line_per_pass(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fxshard.passes")
    _manager.run(small_graph(), [DropRelu(), DropRelu(keep=1)], CTX, given=[Fact.DEDUPED])
    lines = [record.getMessage() for record in caplog.records if record.name == "fxshard.passes._manager"]
    assert_expected_inline(
        without_times(lines),
        """\
[forward 01/02] DropRelu(keep=0)  nodes 5 -> 4  N ms
[forward 02/02] DropRelu(keep=1)  nodes 4 -> 4  N ms""",
    )


def test_logs_the_graph_after_each_pass_when_debugging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="fxshard.passes")
    _manager.run(small_graph(), [DropRelu()], CTX, given=[Fact.DEDUPED])
    lines = [record.getMessage() for record in caplog.records if record.name == "fxshard.passes._manager"]
    assert_expected_inline(
        without_times(lines),
        """\
[forward 01/01] DropRelu(keep=0)  nodes 5 -> 4  N ms
forward graph after DropRelu(keep=0):
%x = input
%y = input
%add = add(%x, %y)
return %add""",
    )
