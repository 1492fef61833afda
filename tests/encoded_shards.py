"""Layers whose matrices are tensor subclasses with hooks around the all_gather, traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests import graphs
from tests.graphs import Layer, TwoLayers, layers_of
from tests.numerics.float8 import Float8Weight


class Scaled(Float8Weight):
    """Gathered in fp8 with a scale of its own."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        scale = 448 / self.rows.abs().max()
        return ((self.rows * scale).to(torch.float8_e4m3fn),), (scale, "scaled")


class Residual(Float8Weight):
    """Gathered as two tensors in fp8, the second of what the first rounds away, each with a scale."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        scale = 448 / self.rows.abs().max()
        high = (self.rows * scale).to(torch.float8_e4m3fn)
        low = ((self.rows * scale - high.float()) * 16).to(torch.float8_e4m3fn)
        return (high, low), (scale, 16 * scale)

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        high, low = (each.float() * (1 / scale) for each, scale in zip(all_gather_outputs, metadata, strict=True))
        return (high + low).to(param_dtype), ()


def with_hooks(module: nn.Module, cls: type[Float8Weight] = Scaled) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, Layer):
            layer.weight = nn.Parameter(cls(layer.weight.detach()))
    return module


@graphs.traced_once
def encoded(cls: type[Float8Weight] = Scaled, **kwargs: Any) -> graphs.Traced:
    """Two units of a matrix in fp8 and a vector in float32."""
    return graphs.trace(with_hooks(TwoLayers(), cls), units=layers_of, **kwargs)


def twofold(**kwargs: Any) -> graphs.Traced:
    """The same, of which each matrix is sent as two tensors of one layout."""
    return encoded(cls=Residual, **kwargs)
