"""Tag the views of parameters, before the graph is split."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from fxshard.ir import ops, tags
from fxshard.ir.liveness import liveness
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class TagParameterViews(GraphPass):
    """Say of each view of a parameter whose it is.

    Before   %w = unshard(...)  %t = t(%w)
    After    %w = unshard(...)  %t = t(%w)  # kept=layers.0.weight

    What forward saves for backward is an input there, and the graph no longer says what it was made of. The tag goes
    with it, so that unsharded parameters are counted in backward, too (memory budgets, peaks).

    Numerics: unchanged. Memory: unchanged. No-op: no view of a parameter.
    """

    requires = frozenset({Property.MARKED})
    reorders_only = True

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        live, changed = liveness(gm.graph), False
        for node in live.nodes:
            makers = (live.storages[index].maker for index in live.storages_of[node])
            for marker in filter(ops.is_unshard, makers):
                parameter = tags.meta_of(marker).param
                if node is not marker and node.op == "call_function" and tags.meta_of(node).kept != parameter:
                    tags.tag(node, kept=parameter)
                    changed = True
        return changed
