"""Refuse a graph that writes into parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from fxshard.errors import UnsupportedGraph
from fxshard.ir import reads, writes
from fxshard.passes._base import GraphPass, PassContext


def refuse_writes(gm: GraphModule, names: Mapping[fx.Node, str]) -> None:
    """Raise if Dynamo's graph writes into nodes that are parameters to the user's code; `names` has their FQNs."""
    found = writes.writes_of(gm, names) if names else ()
    written = dict.fromkeys(f"{names[w.parameter]} ({', '.join(filter(None, (w.op, w.user_line)))})" for w in found)
    if written:
        raise UnsupportedGraph(
            f"parameters are changed in place during forward: {'; '.join(written)}. {writes.LOST_WRITE}"
        )


@dataclass(frozen=True, kw_only=True)
class RefuseWrites(GraphPass):
    """Raise if the graph writes into a parameter: the write would be lost with the gathered copy.

    Before   %w = parameter(%flat, '0|4 4|float32|...')   %x = mul_(%w, 2)
    After    an error that names the parameter, the op and the line that writes

    Numerics: unchanged. Memory: unchanged. No-op: always; a variant is compiled of a graph that was searched before.
    Source: [Note: writes] in `ir/writes.py`.
    """

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        """Leave `gm.graph` as it is."""
        found = reads.reads_of(gm, ctx.plan)
        names = {
            node: ctx.plan.parameter_name(*key) for read, key in found.items() for node in reads.parameters_of(read)
        }
        placeholders = gm.graph.find_nodes(op="placeholder")
        refuse_writes(gm, names | {placeholders[i]: fqn for i, fqn in ctx.plan.lent.items()} if found else {})
        return False
