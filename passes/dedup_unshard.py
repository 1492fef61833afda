"""Read each parameter once per call of its unit."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from fxshard.ir import ops
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class DedupUnshard(GraphPass):
    """Let all reads of a parameter within one call of its unit share the first read's marker.

    Before   %a = unshard(%shard, 'blocks.0', 3)  mm(%a)  %b = unshard(%shard, 'blocks.0', 3)  mm(%b)
    After    %a = unshard(%shard, 'blocks.0', 3)  mm(%a)  mm(%a)

    A unit that is called twice (weights shared between layers) is gathered twice, as in FSDP2: merged, it would stay
    gathered in between. `MarkerKey.call` tells the calls apart.

    Numerics: unchanged; the gradients of the reads are still added one by one, in the order of backward.
    Memory: a parameter read at both ends of its unit's call lives for the whole call.
    No-op: every parameter is read once.
    Limits: the shard is never written inside a graph, so two reads of one call always agree.
    """

    requires = frozenset({Property.MARKED})
    ensures = frozenset({Property.DEDUPED})

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        first: dict[tuple[fx.node.Argument, ...], fx.Node] = {}
        changed = False
        for marker in [node for node in gm.graph.nodes if ops.is_unshard(node)]:
            kept = first.setdefault(marker.args[:3], marker)
            if kept is not marker:
                marker.replace_all_uses_with(kept)
                gm.graph.erase_node(marker)
                changed = True
        return changed
