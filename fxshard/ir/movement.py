"""Ops that only cast, view or copy: what comes out is the parameter that went in, in another form."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def _overloads(*packets: torch._ops.OpOverloadPacket) -> frozenset[torch._ops.OpOverload]:
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


VIEWS = _overloads(
    aten._unsafe_view,
    aten.alias,
    aten.as_strided,
    aten.detach,
    aten.narrow,
    aten.reshape,
    aten.select,
    aten.slice,
    aten.split,
    aten.split_with_sizes,
    aten.squeeze,
    aten.unsqueeze,
    aten.view,
)
"""Ops that show the same elements in another shape, or some of them."""

TRANSPOSES = _overloads(aten.expand, aten.permute, aten.t, aten.transpose)

COPIES = _overloads(aten.clone, aten.contiguous)

CASTS = _overloads(aten._to_copy, torch.ops.prims.convert_element_type)

MOVEMENT = VIEWS | TRANSPOSES | COPIES | CASTS
"""All of them; `getitem` of a split is not an op and not among them."""


def cast_dtype(node: fx.Node, default: torch.dtype) -> torch.dtype:
    """The dtype that a node of `CASTS` casts to."""
    wanted = node.kwargs.get("dtype", node.args[1] if len(node.args) > 1 else None)
    return wanted if isinstance(wanted, torch.dtype) else default
