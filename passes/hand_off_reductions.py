"""Let the last reductions of a graph reach over its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from fxshard.ir import collectives, launch_groups, ops, signature, tags
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class HandOffReductions(GraphPass):
    """Return the last reduced gradients of a graph before they have arrived; the runtime waits for them later.

    Before   %r = reduce_scatter(%dw)  %g = wait(%r)  return %g
    After    %r = reduce_scatter(%dw)  %g = fxshard.deferred_wait(%r)  return %g

    A model that is compiled block by block would wait at the end of each block's backward for the reduction that it has
    just launched. Instead the graph of the next block runs beside it. The runtime waits when more are in flight than
    `reduce_scatter_max_input_buffers` allows (by default when the next graph but one begins), or when the backward
    ends: `runtime/late_gradients.py`.

    If the gradient is cast after its reduction (`reduce_dtype` other than the parameter's), the runtime casts it.

    No-op: the frame has all units of the model; the reduced gradient is divided or put together first (float16),
    copied to the host, or read again; its launch is on a side stream; a later reduction of the graph follows its wait.
    CUDA graphs and `streams="off"` leave the pass out.

    Numerics: unchanged. Memory: what the last reductions send and bring stays until the next graph but one begins.
    Source: FSDP2 `_fsdp_param_group.py` (`reduce_scatter_state`), which waits in the backward of the next module.
    """

    requires = frozenset({Property.COLLECTIVES})
    reorders_only = True

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        if ctx.kind != "backward" or not ctx.plan.is_part:
            return False
        results = signature.results_of(gm.graph)
        last = max(tags.launches_of(gm.graph, collectives.REDUCTIONS), default=None)  # nodes compare by their place
        changed = False
        kinds = (collectives.REDUCTIONS, collectives.ALL_REDUCES)
        for group in (group for kind in kinds for group in launch_groups.groups_of(gm.graph, kind)):
            for wait in (wait for wait in group.waits if wait.target is not ops.DEFERRED_WAIT):
                brought, launch = _brought(wait), launch_groups.waited_for(wait)
                if why := _why_not(wait, brought, launch, results, last):
                    ctx.decline(launch, f"{why}; it is waited for in this graph")
                    continue
                wait.target, changed = ops.DEFERRED_WAIT, True
                if brought is not wait:
                    wait.args, wait.meta["val"] = (*wait.args, brought.meta["val"].dtype), brought.meta["val"]
                    brought.replace_all_uses_with(wait)
                    gm.graph.erase_node(brought)
        return changed


def _brought(wait: fx.Node) -> fx.Node:
    """Return the reduced gradient in the dtype of its shard: the wait, or the cast of it, which the runtime makes."""
    users = list(wait.users)
    return users[0] if len(users) == 1 and users[0].target in ops.CASTS else wait


def _why_not(wait: fx.Node, brought: fx.Node, launch: fx.Node, results: Sequence[object], last: fx.Node | None) -> str:
    """Say why a reduction must be waited for in its graph; nothing if it need not. `last` is the last reduction."""
    if wait.target is not collectives.WAIT or brought not in results:
        return "more is computed of what it brings"
    if tags.meta_of(launch).stream:
        return "it is launched on a side stream"
    if last is not None and wait < last:
        return "another reduction is launched behind its wait"
    if len(wait.users) > 1 or len(brought.users) > 1 or results.count(brought) > 1:
        return "what it brings is read again"
    return ""
