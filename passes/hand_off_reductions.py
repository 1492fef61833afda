"""Let the last reductions of a graph reach over its end."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from fxshard.ir import collectives, launch_groups, ops, signature, tags
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class HandOffReductions(GraphPass):
    """Return the last reduced gradients of a graph before they have arrived; the runtime waits for them later.

    Before   %r = reduce_scatter(%dw)  %g = wait(%r)  return %g
    After    %r = reduce_scatter(%dw)  %g = fxshard.deferred_wait(%r)  return %g

    A model that is compiled block by block would wait at the end of each block's backward for the reduction that it has
    just launched. Instead the graph of the next block runs beside it. The runtime waits when a later graph of the same
    backward begins, or when the backward ends: `runtime/late_gradients.py`.

    No-op: the frame has all units of the model, so no graph follows; the reduced gradient is cast, divided or put
    together first (`reduce_dtype` other than the parameter's, float16); it is copied to the host; its launch is on a
    side stream; a later reduction of the graph follows its wait.

    Numerics: unchanged. Memory: what the last reductions send and bring stays until the next graph but one begins.
    Source: FSDP2 `_fsdp_param_group.py` (`reduce_scatter_state`), which waits in the backward of the next module.
    """

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
        if ctx.kind != "backward" or not ctx.plan.is_part:
            return False
        results = signature.results_of(gm.graph)
        last = max(tags.launches_of(gm.graph, collectives.REDUCTIONS), default=None)  # nodes compare by their place
        changed = False
        for targets in (collectives.REDUCTIONS, collectives.ALL_REDUCES):
            for group in launch_groups.groups_of(gm.graph, targets):
                for wait in group.waits:
                    if wait.target is not collectives.WAIT or wait not in results:
                        why = "" if wait.target is ops.DEFERRED_WAIT else "more is computed of what it brings"
                    elif tags.meta_of(group.launches[0]).stream:
                        why = "it is launched on a side stream"
                    elif last is not None and wait < last:
                        why = "another reduction is launched behind its wait"
                    elif len(wait.users) > 1 or results.count(wait) > 1:
                        why = "what it brings is read again"
                    else:
                        wait.target, why, changed = ops.DEFERRED_WAIT, "", True
                    if why:
                        ctx.decline(group.launches[0], f"{why}; it is waited for in this graph")
        return changed
