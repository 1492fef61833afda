"""EnforceOrder: pins become Inductor's dependencies, and nothing else changes."""

from __future__ import annotations

import inspect

import pytest
from torch import fx
from torch._inductor import lowering

from fxshard import torch_private
from fxshard.errors import InvariantError
from fxshard.ir import ops, tags
from fxshard.ir.text import graph_text
from fxshard.passes._base import GraphKind, PassContext
from fxshard.passes.enforce_order import EnforceOrder
from fxshard.passes.pin_order import PinOrder
from tests.graphs import SPLIT, run_pass, text
from tests.schedules import MODELS, SCHEDULE, after_passes, assert_schedule, model_of


def wrapped(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that Inductor runs behind others."""
    return list(graph.find_nodes(op="call_function", target=torch_private.CONTROL_DEPS))


@pytest.mark.parametrize("kind", SPLIT)
def test_pins_become_dependencies(kind: GraphKind) -> None:
    gm, _ = after_passes(model_of("two_layers"), kind, *SCHEDULE, PinOrder(), EnforceOrder())
    assert_schedule(gm, f"enforce_order_{kind}", whole=True)


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_inside_is_the_graph_as_it_was(model: str, kind: GraphKind) -> None:
    gm, ctx = after_passes(model_of(model), kind, *SCHEDULE, PinOrder())
    before, pinned = text(gm), {n.name for n in gm.graph.nodes if tags.meta_of(n).after}
    run_pass(EnforceOrder(), gm, ctx)
    assert {node.name for node in wrapped(gm.graph)} == pinned
    assert text(gm) == before.replace("# after=", "# control_deps=")


def test_records_show_the_node_inside() -> None:
    _, ctx = after_passes(model_of("two_layers"), "forward", *SCHEDULE, PinOrder(), EnforceOrder())
    (stage,) = [name for name in ctx.history.stages if "enforce_order" in ctx.history.stages[name]]
    assert not wrapped(ctx.history.last(stage).graph)
    assert "control_deps=unshard_layers_1" in str(ctx.history.last(stage))


def test_changes_nothing_where_nothing_is_pinned() -> None:
    gm, ctx = after_passes(model_of("two_layers"), "forward", *SCHEDULE)
    assert not run_pass(EnforceOrder(), gm, ctx)


def test_changes_nothing_when_run_again() -> None:
    gm, ctx = after_passes(model_of("two_layers"), "backward", *SCHEDULE, PinOrder(), EnforceOrder())
    shown = graph_text(gm.graph)
    assert not run_pass(EnforceOrder(), gm, ctx)
    assert graph_text(gm.graph) == shown


def test_knows_of_this_torch_whether_everything_can_be_pinned() -> None:
    assert torch_private.PINS_ALL == ("void" in inspect.getsource(lowering.control_deps_op_lowering))


def test_a_node_without_a_result_is_left_where_torch_cannot_pin_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, ctx = after_passes(model_of("two_layers"), "forward", *SCHEDULE)
    product = next(node for node in gm.graph.nodes if node.name == "mm")
    with gm.graph.inserting_after(product):
        added = gm.graph.call_function(ops.ADDMM_ACC, (product, product, product))
    tags.tag(added, after=("unshard_layers_1",))
    monkeypatch.setattr(torch_private, "PINS_ALL", False)
    assert not EnforceOrder().apply(gm, ctx)


def test_a_change_inside_is_caught() -> None:
    class Wrong(EnforceOrder):
        def apply(self, gm: fx.GraphModule, ctx: PassContext) -> bool:
            changed = super().apply(gm, ctx)
            product = next(node for node in wrapped(gm.graph) if node.name.startswith("mm"))
            product.update_arg(2, product.args[3])
            return changed

    gm, ctx = after_passes(model_of("two_layers"), "forward", *SCHEDULE, PinOrder())
    with pytest.raises(InvariantError, match=r"Wrong.* broke `compute_reads_what_it_read` in the forward graph at %mm"):
        run_pass(Wrong(), gm, ctx)
