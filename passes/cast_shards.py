"""Cast a shard once for all that a gather sends of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from fxshard.ir import ops, tags
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class CastShards(GraphPass):
    """Cast a shard of which several parts are sent by a kernel of its own, where a kernel is a launch.

    Before   %s = cast(%shard)               all_gather_coalesced([slice of %s, slice of %s])
    After    %s = fxshard.copy(%shard, bf16)  all_gather_coalesced([slice of %s, slice of %s])

    Inductor fuses a cast with what reads it, here with each slice: a kernel for each tensor that is sent.

    Attributes:
        devices: types of those devices. Code for a CPU has loops, not kernels, and keeps the cast.

    Numerics: unchanged. Memory: unchanged. No-op: a shard that is sent whole, or as it is stored; other devices.
    Limits: casts on a side stream stay; `LowerStreams` makes one op of them.
    Source: FSDP2 `_fsdp_collectives.py` (`all_gather_copy_in`).
    """

    requires = frozenset({Property.COLLECTIVES, Property.LOWERED})

    devices: tuple[str, ...] = ("cuda",)

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        shards = [node for node in gm.graph.nodes if tags.meta_of(node).shard is not None]
        casts = [cast for shard in shards for cast in shard.users if self._is_repeated(cast)]
        for cast in casts:
            with gm.graph.inserting_before(cast):
                copy = gm.graph.call_function(ops.COPY, (*cast.all_input_nodes, cast.meta["val"].dtype))
            copy.meta = dict(cast.meta)
            cast.replace_all_uses_with(copy)
            gm.graph.erase_node(cast)
        return bool(casts)

    def _is_repeated(self, cast: fx.Node) -> bool:
        is_cast = cast.target in ops.CASTS and not tags.meta_of(cast).stream
        return is_cast and len(cast.users) > 1 and cast.meta["val"].device.type in self.devices
