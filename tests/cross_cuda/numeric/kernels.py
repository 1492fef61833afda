"""What CUDA's library kernels compute where the CPU has none of the name, or one with other dtypes.

Attention is written down here: its numbers say nothing of CUDA's kernels. It reads `out` and `logsumexp` where those
do, so memory that is reused too early shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_aten = torch.ops.aten


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    return (
        scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf) if is_causal else scores
    )


def _attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: Any) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, is_causal, scale or query.shape[-1] ** -0.5)
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp.unsqueeze(-1)).exp().to(query.dtype).float()
    return (weights @ value.float()).to(query.dtype), logsumexp


def _attention_backward(
    grad: Tensor, inputs: tuple[Tensor, ...], out: Tensor, logsumexp: Tensor, is_causal: bool, scale: Any
) -> tuple[Tensor, ...]:
    query, key, value = (one.float() for one in inputs)
    scale, grad = scale or query.shape[-1] ** -0.5, grad.float()
    scores = _scores(query, key, is_causal, scale)
    weights = (scores - logsumexp[..., : scores.shape[-2]].unsqueeze(-1)).exp()
    inner = weights * (grad @ value.transpose(-1, -2) - (grad * out.float()).sum(-1, keepdim=True)) * scale
    grads = (inner @ key, inner.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad)
    return tuple(found.to(one.dtype) for found, one in zip(grads, inputs, strict=True))


def _flash(q: Any, k: Any, v: Any, dropout: float, is_causal: bool, *_: Any, scale: Any = None) -> Any:
    assert not dropout
    return *_attention(q, k, v, is_causal, scale), *7 * (None,)  # what dropout alone needs


def _flash_backward(grad: Tensor, *given: Any, scale: Any = None) -> Any:
    return _attention_backward(grad, given[:3], given[3], given[4], given[10], scale)


def _efficient(
    q: Any, k: Any, v: Any, bias: Any, _: bool, dropout: float, is_causal: bool, *, scale: Any = None
) -> Any:
    assert not dropout
    assert bias is None
    out, logsumexp = _attention(q, k, v, is_causal, scale)
    return out, F.pad(logsumexp, (0, -q.shape[2] % 32), value=math.inf), None, None


def _efficient_backward(grad: Tensor, *given: Any, scale: Any = None) -> Any:
    return *_attention_backward(grad, given[:3], given[4], given[5], given[10], scale), None


def _float(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.float()


def _layer_norm(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    out, mean, rstd = torch.native_layer_norm(x.float(), shape, _float(weight), _float(bias), eps)
    return out.to(x.dtype), mean, rstd  # CUDA keeps both in fp32, and the CPU's backward takes no such ones beside bf16


def _layer_norm_backward(
    grad: Any, x: Tensor, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any
) -> Any:
    wide = (grad.float(), x.float(), shape, mean, rstd, _float(weight), _float(bias), mask)
    return tuple(None if one is None else one.to(x.dtype) for one in _aten.native_layer_norm_backward(*wide))


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
