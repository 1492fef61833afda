"""Turn pins into dependencies that Inductor keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx import GraphModule

from fxshard import torch_private
from fxshard.ir import regions, tags
from fxshard.passes._base import GraphPass, PassContext, Property

_WITHOUT_RESULT = (torch.ops.fxshard.addmm_acc.default,)


@dataclass(frozen=True, kw_only=True)
class EnforceOrder(GraphPass):
    """Tell Inductor what each pinned node comes after, in its own terms.

    Before   %m = mm(%x, %w)  # after=a1
    After    %m = control_deps((%a1,), subgraph of mm, %x, %w), printed as %m = mm(%x, %w)  # control_deps=a1

    The history shows the node inside ([Note: pins]), and the rules are checked on it; only dependencies are added. A
    call of a region, which is nothing to wrap, reads what it comes after: its code takes it, and does nothing with it.

    Numerics: unchanged. Memory: unchanged.
    No-op: nothing is pinned; with torch 2.11 ops without a result, which then stand where Inductor puts them.
    Source: torch/_inductor/fx_passes/control_dependencies.py.
    """

    requires = frozenset({Property.COLLECTIVES, Property.SCHEDULED, Property.LOWERED})
    reorders_only = True

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        nodes = {node.name: node for node in gm.graph.nodes}
        taken = (torch_private.CONTROL_DEPS, *(() if torch_private.PINS_ALL else _WITHOUT_RESULT))
        takes = [node for node in gm.graph.nodes if node.target not in taken]
        before = {node: [nodes[name] for name in tags.meta_of(node).after if name in nodes] for node in takes}
        added: dict[tuple[object, ...], str] = {}
        for call in [node for node in takes if node.target is regions.INVOKE]:
            if earlier := before.pop(call):
                _read_as_well(gm, call, earlier, added)
        torch_private.run_after(gm.graph, before)
        return any(before.values()) or bool(added)


def _read_as_well(
    gm: GraphModule, call: fx.Node, earlier: Sequence[fx.Node], added: dict[tuple[object, ...], str]
) -> None:
    """Have a call read nodes that its code does nothing with; `added` is the code that takes such."""
    code, old = regions.code_of(call), call.args[0]
    assert code is not None
    key = (code, *map(regions.layout_of, earlier))
    if key not in added:
        copy = regions.copied(code)
        with copy.graph.inserting_after(copy.graph.find_nodes(op="placeholder")[-1]):
            for i, node in reversed(list(enumerate(earlier))):
                copy.graph.placeholder(f"after_{i}").meta["val"] = node.meta["val"]
        copy.recompile()
        added[key] = regions.add_code(gm, f"{regions.called_by(call)}_after", copy)
    with call.graph.inserting_before(call):
        operands = (*regions.operands_of(call), *earlier)
        new = call.graph.call_function(regions.INVOKE, (call.graph.get_attr(added[key]), added[key], *operands))
    new.meta = {name: value for name, value in call.meta.items() if name != "eager_input_vals"}
    tags.tag(new, after=())
    call.replace_all_uses_with(new)
    call.graph.erase_node(call)
    if isinstance(old, fx.Node) and not old.users:
        call.graph.erase_node(old)
