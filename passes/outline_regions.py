"""Call the code of repeated units instead of repeating it."""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch.fx import GraphModule

from fxshard.cost import bucket_sizes
from fxshard.ir import ops, tags, text
from fxshard.ir.plan import ParameterKey
from fxshard.ir.regions import Region
from fxshard.ir.spans import Span, spans_of
from fxshard.ir.surroundings import Surroundings
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class OutlineRegions(GraphPass):
    """Put one call in the place of the code of each unit whose code occurs at least twice.

    Before   %w = unshard(%shard_0)   %x = linear(%input, %w)   %y = relu(%x)
             %v = unshard(%shard_1)   %z = linear(%y, %v)       %u = relu(%z)     return %u
    After    %w = unshard(%shard_0)   %y = region([%input, %w], 'Block', 0)[0]
             %v = unshard(%shard_1)   %u = region([%y, %v], 'Block', 1)[0]      return %u

    The code of a unit is a span of nodes that Dynamo traced inside of one call of its module; markers move before it.
    So is a block under activation checkpointing, whose markers come out of the checkpointed function: what it computes
    again is then inside of the region. Spans are alike if their ops, their constants, the layouts of what they read and
    the policies of selective checkpointing are. DTensors may be inside, with their collectives; a mesh is a constant.

    Attributes:
        bucket: as `BucketCollectives` takes it. A unit that it gathers by several launches becomes as many regions, so
            that each of them can be launched, and its gradients reduced, between two calls.

    Numerics: unchanged, but for the order in which gradients of a module that is called twice may be added.
    Memory: unchanged, where the partitioner saves the same of a region as of the whole graph.
    No-op: no unit's code occurs twice.
    Limits: left alone, with a remark: what writes to its inputs, gives out views, takes or gives DTensors, has sizes
        that are not known, makes tensors of constants, calls functions that are not torch's, or holds another
        higher-order op (cond); a checkpointed block with a collective of its own that no DTensor makes, at which other
        spans end; what stands behind a change of torch's state (autocast, a choice of kernels) or is written to in
        place. What is checkpointed is not cut. A policy of selective checkpointing is asked once for all blocks that it
        is given for.
    Source: [Note: regions] in `ir/regions.py`.
    """

    requires = frozenset({Property.MARKED})

    bucket: str | float = "unit"

    def __post_init__(self) -> None:
        bucket_sizes.check(self.bucket)

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        groups: dict[tuple[Any, ...], list[Span]] = defaultdict(list)
        surroundings, launch_of = Surroundings(gm.graph), self._launches(ctx)
        for span in chain.from_iterable(whole.cut(launch_of) for whole in spans_of(gm)):
            if why := span.refused(surroundings):
                ctx.decline(span.nodes[0], why)
            else:
                groups[span.module, *span.text(), *span.identities()].append(span)
        num_calls, names = 0, set[str]()
        for spans in groups.values():
            if len(spans) < 2:
                continue
            name = text.free_name(spans[0].module, names)
            names.add(name)
            code, parameters = spans[0].copied(), [ops.is_unshard(node) for node in spans[0].reads]
            region = ctx.trace_region(name, spans[0].cached_as(), code, parameters)
            if isinstance(region, str):
                ctx.decline(spans[0].nodes[0], f"its code occurs {len(spans)} times, but {region}")
                continue
            for span in spans:
                _replace(span, region, num_calls)
                num_calls += 1
        tags.tag_markers(gm.graph, ctx.plan)  # some came out of functions
        return num_calls > 0

    def _launches(self, ctx: PassContext) -> dict[ParameterKey, int]:
        """Number the launches that each unit's parameters will be gathered with, of those that are split."""
        found: dict[ParameterKey, int] = {}
        for key, unit in ctx.plan.units.items():
            slots = [(i, j) for i, shard in enumerate(unit.shards) for j in range(len(shard.slots))]
            limits = bucket_sizes.limits_of(self.bucket, ctx.hardware, unit.world_size)
            for number, together in enumerate(bucket_sizes.split(slots, unit.unsharded_bytes_of, limits.most)):
                found |= {(key, *slot): number for slot in together}
        return found


def _replace(span: Span, region: Region, number: int) -> None:
    first, graph = span.nodes[0], span.nodes[0].graph
    operands, results = span.operands(), span.results
    stack: dict[str, Any] = {key: first.meta[key] for key in ("nn_module_stack", "stack_trace") if key in first.meta}
    with graph.inserting_after(span.nodes[-1]):
        call = graph.call_function(ops.REGION, (operands, region.name, number))
    call.meta = {**stack, "example_value": [node.meta["example_value"] for node in results]}
    inside, after = set(span.nodes), call
    for i, result in enumerate(results):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (call, i))
        after.meta = {**stack, "example_value": result.meta["example_value"]}
        result.replace_all_uses_with(after, delete_user_cb=lambda user: user not in inside)
    for node in reversed(span.nodes):
        graph.erase_node(node)
