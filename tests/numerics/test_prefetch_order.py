"""With FSDP2's prefetch lists a compiled model launches, waits and computes in the order of eager FSDP2."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx

import fxshard
from fxshard.ir import collectives, tags
from fxshard.ir.liveness import tensors_in
from tests import fake_ranks
from tests.numerics.fsdp2_order import CONFIGS, RECORDED, ROOT, Issue, in_words, loss_of, sharded_model, unit_of_product
from tests.numerics.harness import EAGER, compile_module
from tests.pairwise import slow

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


def issues_in(graph: fx.Graph) -> Iterator[Issue]:
    """What a graph launches, waits for and computes; the waits of reductions, which FSDP2 does not show, left out."""
    last: Issue | None = None
    for node in graph.nodes:
        issue = issue_of(node)
        if issue is not None and (issue != last or issue[0] not in ("wait", "compute")):
            yield issue
        last = issue or last


def issue_of(node: fx.Node) -> Issue | None:
    (unit,) = tags.units_of(node) or (ROOT,)
    if node.target in collectives.GATHERS:
        return "all_gather", unit
    if node.target in collectives.REDUCTIONS:
        return "reduce_scatter", unit
    if collectives.is_wait(node):
        launch = node.all_input_nodes[0]
        launch = launch.all_input_nodes[0] if launch.target not in collectives.LAUNCHES else launch
        return ("wait", unit) if launch.target in collectives.GATHERS else None
    if getattr(node.target, "overloadpacket", None) in PRODUCTS:
        inputs: list[Tensor] = [tensor for source in node.all_input_nodes for tensor in tensors_in(source)]
        return "compute", unit_of_product([tuple(tensor.shape) for tensor in inputs])
    return None


SHOWN = ("two ahead, the root too", "only blocks 1 and 3")


@pytest.mark.parametrize("name", [name if name in SHOWN else slow(name) for name in CONFIGS])
def test_lists_give_the_order_of_fsdp2(name: str) -> None:
    with fake_ranks.fake_ranks(2):
        model = sharded_model(fxshard.fully_shard, CONFIGS[name].for_ours())
        compiled = compile_module(model, EAGER)
        loss_of(compiled).backward()
        (frame,) = fxshard.explanation_of(compiled).frames
        ours = tuple(in_words(issues_in(frame.history.last(kind).graph)) for kind in ("forward", "backward"))
    assert ours == RECORDED[name]
