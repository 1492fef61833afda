"""Copy all gradients that a reduction sends into its buffer with one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from fxshard.ir import ops, tags
from fxshard.passes._base import GraphPass, PassContext, Property

_aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class CopyInGradients(GraphPass):
    """Replace the casts, pads and the concat before a reduction by one op, on devices where a kernel is a launch.

    Before   %a = cast(%grad_a)  %b = cast(%grad_b)  %sent = cat([view(%a), view(%b)], 1)  reduce_scatter(%sent)
    After    %sent = fxshard.copy_in([%grad_a, %grad_b], 8, f32)  reduce_scatter(%sent)

    Inductor makes of a concat a kernel per gradient. It may also fuse one of them with a kernel of an earlier unit, or
    two of different reductions with each other, which then begin late.

    Attributes:
        devices: types of those devices. Code for a CPU has loops, not kernels, and keeps the concat.

    Numerics: unchanged. Memory: less; a buffer is allocated where it is sent, not where its first gradient is made.
    No-op: reductions of one tensor without a copy; other devices.
    Limits: gradients of several dtypes, and what anything else than the reduction reads, stay a concat.
    Source: FSDP2 `_fsdp_collectives.py` (`fsdp::chunk_cat`).
    """

    requires = frozenset({Property.COLLECTIVES, Property.LOWERED})

    devices: tuple[str, ...] = ("cuda",)

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        changed = False
        for concat in [node for node in gm.graph.nodes if node.target in _CONCATS]:
            value, rows = concat.meta.get("val"), _rows_of(concat)
            if not isinstance(value, Tensor) or value.device.type not in self.devices or not rows:
                continue
            if value.dim() != 2 or not all(map(_is_of_gradient, rows)):
                continue  # it puts together what was reduced, or is none of ours
            gradients = [_gradient_of(row, concat) for row in rows]
            dtypes = {gradient.meta["val"].dtype for gradient in gradients if gradient is not None}
            if None in gradients or len(dtypes) > 1:
                ctx.decline(concat, "its gradients have several dtypes, or are read by others on their way")
                continue
            _replace(concat, gradients)  # type: ignore[arg-type]
            changed = True
        return changed


_CONCATS = (_aten.cat.default, _aten._chunk_cat.default)


def _rows_of(concat: fx.Node) -> list[fx.Node]:
    """Return what is put side by side, `[world_size, n]`; nothing if it is put together otherwise."""
    listed, *rest = concat.args
    fits = rest in ([1], [-1]) if concat.target is _aten.cat.default else rest[:1] == [0]
    rows = list(listed) if isinstance(listed, list | tuple) and fits else []
    return rows if all(isinstance(row, fx.Node) for row in rows) else []


def _is_of_gradient(row: fx.Node) -> bool:
    """Whether a node is a gradient, moved, cast or padded."""
    node = row
    while not tags.meta_of(node).grads:
        if node.target not in ops.MOVEMENT | {_aten.constant_pad_nd.default, _aten.expand.default, _aten.add.Tensor}:
            return False
        node = node.all_input_nodes[0]
    return True


def _gradient_of(row: fx.Node, concat: fx.Node) -> fx.Node | None:
    """Return the gradient, in its parameter's shape and its own dtype, that a row is made of; `None` if it is not."""
    node, is_padded, world_size = row, concat.target is _aten._chunk_cat.default, concat.meta["val"].shape[0]
    passed: list[fx.Node] = []
    while node.target in ops.VIEWS and not tags.meta_of(node).grads:
        passed.append(node)
        node = node.all_input_nodes[0]
    if node.target is _aten.constant_pad_nd.default and not is_padded:
        pads = node.args[1]
        if not isinstance(pads, list | tuple) or any(pads[:-1]) or any(node.args[2:]):
            return None
        passed.append(node)
        node, is_padded = node.all_input_nodes[0], True
    if node.target in ops.CASTS and not tags.meta_of(node).grads:
        passed.append(node)
        node = node.all_input_nodes[0]
    shape = node.meta["val"].shape
    is_read_here_alone = all(len(made.users) == 1 for made in passed)
    return node if is_read_here_alone and shape and (is_padded or shape[0] % world_size == 0) else None


def _replace(concat: fx.Node, gradients: list[fx.Node]) -> None:
    value, graph = concat.meta["val"], concat.graph
    with graph.inserting_before(concat):
        copied = graph.call_function(ops.COPY_IN, (gradients, value.shape[0], value.dtype))
        copied.meta = {**concat.meta, "val": value.new_empty(value.numel())}
        rows = graph.call_function(_aten.view.default, (copied, list(value.shape)))
        rows.meta = dict(concat.meta)
    concat.replace_all_uses_with(rows)
    pending = [concat]
    while pending:
        node = pending.pop()
        if not node.users and node not in gradients:
            pending += node.all_input_nodes
            graph.erase_node(node)
