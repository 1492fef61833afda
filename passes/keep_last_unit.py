"""Keep forward's last unit unsharded until backward, which reads it first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.fx import GraphModule

from fxshard.ir import ops
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class KeepLastUnit(GraphPass):
    """Let the last unit of a model's forward stay unsharded until backward, which would gather it again at once.

    Before   plan: reshard layers.0, layers.1   %w = unshard(%shard_layers_0)   %v = unshard(%shard_layers_1)
    After    plan: reshard layers.0             the same graph

    This saves one gather per step. The plan changes, and `ReshardPolicy` tags the markers by it.

    Numerics: unchanged. Memory: no more than one unit ahead takes, for backward's first gather would then be in flight.
    No-op: the graph is not the whole model, nothing is trained, there is a budget, or the user chose for the unit.
    """

    requires = frozenset({Property.MARKED})

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Leave `gm.graph` as it is, and change the plan."""
        plan, first = ctx.plan, dict[str, fx.Node]()
        for marker in filter(ops.is_unshard, gm.graph.nodes):
            first.setdefault(ops.key_of(marker).unit, marker)
        *others, last = [key for key in first if plan.units[key].regathers] or [""]
        ctx.plan = replace(plan, unset=frozenset())  # what is compiled again gets this plan, and is to keep no more
        may_keep = torch.is_grad_enabled() and ctx.unsharded_budget_bytes is None and not plan.is_part
        if may_keep and others and last in plan.unset:
            kept = replace(plan.units[last], reshard_after_forward=False)
            ctx.plan = replace(ctx.plan, units={**plan.units, last: kept})
            ctx.note(first[last], "forward's last unit stays unsharded, for backward reads it first")
        return False
