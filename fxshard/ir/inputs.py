"""Inputs that a variant of a captured graph has besides those that AOTAutograd gave it."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fxshard.ir import fake, tags
from fxshard.ir.collectives import SlotIndex
from fxshard.ir.plan import FramePlan


def add_parameter(
    graph: fx.Graph, plan: FramePlan, place: tuple[str, SlotIndex], tag: str, dtype: torch.dtype
) -> fx.Node:
    """A new last input of the unsharded shape of a parameter.

    Args:
        graph: of AOTAutograd.
        plan: of its frame.
        place: the parameter: its unit's key, and where it lies in the unit.
        tag: key of the tag that says what the input is, and its name's first word.
        dtype: of the input.
    """
    key, (i, j) = place
    name = plan.parameter_name(key, i, j)
    before = graph.find_nodes(op="placeholder")
    with graph.inserting_after(before[-1]):
        node = graph.placeholder(f"{tag}_{name}".replace(".", "_").replace("'", "_"))
    mode = fake.fake_mode_of(graph)
    assert mode is not None, "a graph with parameters has tensors"
    with mode:
        device = next(n.meta["val"].device for n in before if isinstance(n.meta.get("val"), Tensor))
        node.meta["val"] = torch.empty(plan.units[key].shards[i].slots[j].shape, dtype=dtype, device=device)
    tags.tag(node, tag, name)
    return node
