"""Turn pins into dependencies that Inductor keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from fxshard import torch_private
from fxshard.ir import tags
from fxshard.passes._base import GraphPass, PassContext, Property

_WITHOUT_RESULT = (torch.ops.fxshard.addmm_acc.default,)


@dataclass(frozen=True, kw_only=True)
class EnforceOrder(GraphPass):
    """Tell Inductor what each pinned node comes after, in its own terms.

    Before   %m = mm(%x, %w)  # after=a1
    After    %m = control_deps((%a1,), subgraph of mm, %x, %w), printed as %m = mm(%x, %w)  # control_deps=a1

    The history shows the node inside ([Note: pins]), and the rules are checked on it; only dependencies are added.

    Numerics: unchanged. Memory: unchanged.
    No-op: nothing is pinned; with torch 2.11 ops without a result, which then stand where Inductor puts them.
    Source: torch/_inductor/fx_passes/control_dependencies.py.
    """

    requires = frozenset({Property.COLLECTIVES, Property.SCHEDULED, Property.LOWERED})
    reorders_only = True

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Edit `gm.graph` in place; return whether anything changed."""
        nodes = {node.name: node for node in gm.graph.nodes}
        taken = (torch_private.CONTROL_DEPS, *(() if torch_private.PINS_ALL else _WITHOUT_RESULT))
        takes = [node for node in gm.graph.nodes if node.target not in taken]
        before = {node: [nodes[name] for name in tags.meta_of(node).after if name in nodes] for node in takes}
        torch_private.run_after(gm.graph, before)
        return any(before.values())
