"""Say of each read of a parameter which unit and call it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from fxshard.ir import ops, spans
from fxshard.ir.ops import MarkerKey
from fxshard.ir.reads import reads_of
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class BindMarkers(GraphPass):
    """Turn each read into a marker with the key of its unit and call: [Note: markers] in `ir/ops.py`.

    Before   %w = parameter(%flat, '0|4 4|float32|...')
    After    %w = unshard(%shard_layers_0, 'layers.0#0@0', 0, [4, 4], f32)

    Numerics: unchanged. Memory: unchanged. No-op: nothing is read, or a variant is compiled of a bound graph.
    """

    ensures = frozenset({Property.MARKED})
    changes_signature = True  # names of inputs

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        calls: dict[tuple[str, str], int] = {}
        reads = reads_of(gm, ctx.plan)
        for read, (unit, shard, _) in reads.items():
            call, _ = spans.call_of(read) or ("", "")
            numbered = calls.setdefault((unit, call), sum(u == unit for u, _ in calls))
            _, *rest = ops.marker_arguments(str(read.args[1]))
            read.target = ops.UNSHARD
            read.args = (read.args[0], str(MarkerKey(unit, shard, str(numbered))), *rest)
        for module in gm.modules():
            if isinstance(module, GraphModule) and module is not gm:
                module.recompile()
        return bool(reads)
