"""What a compilation reads from around it, kept for one that comes later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxshard import torch_private


@dataclass(frozen=True, kw_only=True)
class CompileContext:
    """The surroundings of one compilation.

    Attributes:
        inputs: of the graph, fake.
        mode: their fake mode.
        grad: whether gradients are recorded.
        autocast: device type, dtype and whether it is on.
    """

    inputs: list[Any]
    mode: Any
    grad: bool
    autocast: tuple[str, torch.dtype, bool]

    @classmethod
    def now(cls, graph: fx.Graph) -> CompileContext:
        """Of a compilation of `graph`, which Dynamo captured, that begins now."""
        inputs = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        device = tensors[0].device.type  # a flat is among them
        autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return cls(inputs=inputs, mode=torch_private.mode_of(tensors), grad=torch.is_grad_enabled(), autocast=autocast)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """As it was then, and as there outside of all dispatch modes: a forward's may be on by now."""
        device, dtype, on = self.autocast
        grad, autocast = torch.set_grad_enabled(self.grad), torch.autocast(device, dtype, on)
        with torch_private.without_modes(), torch_private.tracing_in(self.mode), grad, autocast:
            yield
