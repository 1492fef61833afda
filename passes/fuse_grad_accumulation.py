"""Add to accumulators inside the matrix products that make the gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx import GraphModule

from fxshard.ir import ops, tags
from fxshard.passes._base import GraphPass, PassContext, Property

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class FuseGradAccumulation(GraphPass):
    """Let a matrix product add its result to an accumulator, in place of writing it and adding it afterwards.

    Before   %dw = mm(%g, %x)   %sum = add(%acc, %dw)   copy_(%acc, %sum)
    After    addmm_acc(%acc, %g, %x)

    A product whose transpose is the gradient has its operands swapped and transposed. A product is left as it is if
    something else reads it, if it is one of several gradients of a parameter, or if it is cast.

    Numerics: the sum is rounded once, not twice; left out for `lower="eager"`, which equals FSDP2 to the bit.
    Memory: less by one gradient at a time.
    No-op: a graph without accumulators, or whose gradients are no matrix products.
    Limits: products in low precision are cast to the dtype of their accumulators in a kernel of its own.
    Source: Megatron-LM `gradient_accumulation_fusion`, which does so by hand in its linear layers.
    """

    requires = frozenset({Property.DEDUPED})

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        accumulators = [n for n in gm.graph.find_nodes(op="placeholder") if tags.meta_of(n).acc]
        fused = [_fuse(accumulator) for accumulator in accumulators]
        if any(fused):
            gm.graph.eliminate_dead_code()
        return any(fused)


def _fuse(accumulator: fx.Node) -> bool:
    writes = [user for user in accumulator.users if user.target is aten.copy_.default]
    if len(writes) != 1:
        return False  # it is read, not written: the last microbatch
    (write,) = writes
    total = write.args[1]
    assert isinstance(total, fx.Node)
    if total.target is not aten.add.Tensor:
        return False  # the sum is cast
    product, is_transposed = _product(total.args[1])
    if product is None or len(total.users) != 1:
        return False
    left, right = product.args
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    graph = write.graph
    with graph.inserting_before(write):
        if is_transposed:
            left, right = _transposed(right), _transposed(left)
        graph.call_function(ops.ADDMM_ACC, (accumulator, left, right))
    graph.erase_node(write)
    return True


def _product(gradient: object) -> tuple[fx.Node | None, bool]:
    is_transposed = False
    while isinstance(gradient, fx.Node) and len(gradient.users) == 1:
        if gradient.target is aten.mm.default:
            return gradient, is_transposed
        if not _is_transpose(gradient):
            break
        is_transposed = not is_transposed
        gradient = gradient.args[0]
    return None, False


def _is_transpose(node: fx.Node) -> bool:
    return node.target is aten.t.default or (node.target is aten.permute.default and list(node.args[1]) == [1, 0])  # type: ignore[arg-type]


def _transposed(matrix: fx.Node) -> fx.Node:
    if _is_transpose(matrix):
        return matrix.all_input_nodes[0]
    node = matrix.graph.call_function(aten.permute.default, (matrix, [1, 0]))
    node.meta["val"] = matrix.meta["val"].permute(1, 0)
    return node
