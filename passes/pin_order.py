"""Fix the places of collectives among the compute, so that Inductor's fusions do not move them."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx
from torch.fx import GraphModule

from fxshard.ir import collectives, launches, ops, pins, regions
from fxshard.passes._base import GraphPass, PassContext, Property


@dataclass(frozen=True, kw_only=True)
class PinOrder(GraphPass):
    """Say of collectives which kernel they come after, and of kernels which launch.

    Before   %a1 = all_gather  %m = mm  %w0 = wait  %a2 = all_gather  %w1 = wait  (in this order, until something fuses)
    After    %a1 = all_gather  %m = mm  # after=a1  %w0 = wait  # after=m  %a2 = all_gather  # after=m
             %w1 = wait  # after=a2

    Inductor keeps the order of a graph, but a kernel fused of an early and a late node runs at the place of the early
    one, and all that the late one reads runs before it: a wait could come ahead of the compute that was to hide it.
    Pins go to kernels that fuse with nothing (matrix products, attention, convolutions) next to a collective: a launch
    or wait comes after the last of them before it, and the first of them behind a launch comes after that launch. A
    wait with a launch between that kernel and itself comes after the launch. Among themselves launches keep their order
    anyway. `EnforceOrder` turns pins into dependencies. A call of a region is such a kernel, too, but needs no pin; nor
    does a gather which only such calls read. But Inductor does not see the model's own collectives in a region: the
    call comes after what launched such ones before, and what launches the next ones comes after the call.

    Numerics: unchanged. Memory: unchanged. No-op: a graph without collectives, or without such kernels.
    Source: torch's `control_dependencies.py`, which Inductor's own overlap scheduling uses.
    """

    requires = frozenset({Property.COLLECTIVES, Property.LOWERED})
    reorders_only = True

    def apply(self, gm: GraphModule, ctx: PassContext) -> bool:
        kernel: fx.Node | None = None
        launch: fx.Node | None = None  # since the last kernel
        own: fx.Node | None = None  # what last launched collectives of the model's own
        changed = False
        for node in gm.graph.nodes:
            before = None
            if collectives.is_launch(node) or node.target in ops.BETWEEN_HOST_AND_DEVICE:
                before, launch = None if _is_read_by_calls_alone(node) else kernel, node
            elif collectives.is_wait(node):
                before = None if _is_read_by_calls_alone(node) else launch or kernel
            elif node.target is regions.INVOKE:
                kernel, launch = node, None
            elif launches.is_kernel(node):
                before, kernel, launch = launch, node, None
            if launches.is_models_own(node):
                if own is not None and regions.INVOKE in (own.target, node.target) and not _reads(node, own):
                    changed |= pins.pin(node, own)
                own = node
            elif collectives.is_wait(node) and own in node.all_input_nodes:
                own = node  # the call comes after this, for nothing reads what is under way
            if before is not None and pins.pin(node, before):
                changed = True
        return changed


def _reads(node: fx.Node, call: fx.Node) -> bool:
    return any(call in source.all_input_nodes for source in node.all_input_nodes)


def _is_read_by_calls_alone(collective: fx.Node) -> bool:
    """Whether only calls of regions read what was gathered: they keep their order, so it keeps its place."""
    return bool(collective.users) and all(
        user.target is regions.INVOKE
        or ((user.target is operator.getitem or collectives.is_wait(user)) and _is_read_by_calls_alone(user))
        for user in collective.users
    )
