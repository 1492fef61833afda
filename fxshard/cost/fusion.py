"""What of a graph's pointwise ops and reductions a compiler makes one kernel, and what each kernel then moves.

[Note: fusion]
Inductor makes one kernel of pointwise ops and reductions that feed each other, if no other kernel (a matrix product,
attention, a collective) stands between them. What such a kernel reads from outside counts once, what nobody outside
reads counts as nothing. A node's level is the number of other kernels on the longest way to it, and connected nodes of
one level are one kernel. Whether sizes fit, and what is read twice because a row is too long for a block, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import fx

from fxshard.cost.symbols import Quantity
from fxshard.ir.liveness import Liveness

_SELECTING = ("embedding", "index", "gather")
"""Ops that read of their first input only what they return."""

_FUSED = frozenset(
    """sum mean amax amin var_mean var argmax cumsum prod any all _softmax _log_softmax _softmax_backward_data
    _log_softmax_backward_data native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    nll_loss_forward nll_loss_backward native_dropout clone copy _to_copy cat stack full full_like zeros zeros_like ones
    ones_like arange iota scalar_tensor fill convert_element_type slice_scatter select_scatter slice_backward
    select_backward flip constant_pad_nd roll rand inductor_random repeat""".split()
).union(_SELECTING)
"""Ops beside those with torch's tag `pointwise`."""


def is_fused(node: fx.Node) -> bool:
    """Whether a compiler makes the node part of a kernel of its own making."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags or target._opname in _FUSED
    )


def fused_bytes(
    live: Liveness, is_kernel: Callable[[fx.Node], bool], nbytes_of: Callable[[fx.Node], Quantity]
) -> Mapping[fx.Node, tuple[Quantity, bool]]:
    """For each node of a fused kernel the bytes that it moves, and whether it is the kernel's first.

    `is_kernel` tells the nodes that run on the device; `nbytes_of` gives the bytes of a node's tensors.
    """
    kernels = _Kernels(live, is_kernel)
    found: dict[fx.Node, tuple[Quantity, bool]] = {}
    seen: set[object] = set()
    for node in live.nodes:
        if (kernel := kernels.of(node)) is None or node in kernels.views:
            continue
        moved: Quantity = 0
        for place, source in enumerate(node.all_input_nodes):
            for storage in live.storages_of[source]:
                if kernels.of(live.storages[storage].maker) is not kernel and (kernel, storage) not in seen:
                    seen.add((kernel, storage))
                    selects = place == 0 and node.target._opname in _SELECTING  # type: ignore[union-attr]
                    moved += nbytes_of(node if selects else source)
        if any(kernels.of(reader) is not kernel for reader in kernels.readers(node)):
            moved += nbytes_of(node)
        found[node] = (moved, kernel not in seen)
        seen.add(kernel)
    return found


class _Kernels:
    """Which nodes are one kernel: a union-find whose roots are nodes; views belong to what they are of."""

    def __init__(self, live: Liveness, is_kernel: Callable[[fx.Node], bool]) -> None:
        self._above: dict[fx.Node, fx.Node] = {}
        self.views: dict[fx.Node, fx.Node] = {}
        levels: dict[fx.Node, int] = {}
        for node in live.nodes:
            sources = node.all_input_nodes
            levels[node] = max((levels[source] for source in sources), default=0)
            if not is_kernel(node):
                if sources and node.op == "call_function":
                    self.views[node] = self.views.get(sources[0], sources[0])
            elif is_fused(node):
                self._above[node] = node
                roots = [self.of(source) for source in sources if levels[source] == levels[node]]
                self._above |= dict.fromkeys((root for root in roots if root is not None), node)
            else:
                levels[node] += 1

    def of(self, node: fx.Node) -> fx.Node | None:
        node = self.views.get(node, node)
        if node not in self._above:
            return None
        while self._above[node] is not node:
            self._above[node] = self._above[self._above[node]]
            node = self._above[node]
        return node

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """What reads a node, or a view of it."""
        found = []
        for user in node.users:
            found += self.readers(user) if user in self.views else [user]
        return found
