"""Tensor subclasses with hooks around the all_gather: fp8 with a scale, as torchao's, in bytes that can be counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten
_KEPT = (aten.detach, aten.t, aten.transpose, aten.view, aten.as_strided, aten.alias)
_SUBCLASS = (aten.empty_like, aten.new_zeros, aten.slice, aten.view, aten.as_strided, aten._to_copy, aten.split)
_SUBCLASS_TOO = (*_SUBCLASS, aten.clone, aten.detach, aten.copy_)


class Float8(torch.Tensor):
    """An unsharded weight: fp8 values, and the scale by which they were multiplied."""

    @staticmethod
    def __new__(cls: Any, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=dtype, device=values.device
        )

    def __init__(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.data8, self.scale = values, scale

    def __tensor_flatten__(self) -> Any:
        return ["data8", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Any, dtype: torch.dtype, size: Any, stride: Any) -> Float8:
        return Float8(inner["data8"], inner["scale"], dtype)

    def whole(self) -> Tensor:
        return (self.data8.to(torch.float32) / self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func.overloadpacket in _KEPT:
            return cls(func(args[0].data8, *args[1:], **(kwargs or {})), args[0].scale, args[0].dtype)
        args, kwargs = pytree.tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


class Float8Weight(torch.Tensor):
    """A weight that is gathered in fp8: cast with a scale from the largest value on all ranks, or with one given."""

    @staticmethod
    def __new__(cls: Any, rows: Tensor, scale: Tensor | None = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            rows.shape,
            strides=rows.stride(),
            storage_offset=rows.storage_offset(),
            dtype=rows.dtype,
            device=rows.device,
            requires_grad=rows.requires_grad,
        )

    def __init__(self, rows: Tensor, scale: Tensor | None = None) -> None:
        self.rows, self.scale = rows, scale

    def __tensor_flatten__(self) -> Any:
        return ["rows"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Float8Weight:
        return cls(inner["rows"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given, named = pytree.tree_map_only(cls, lambda each: each.rows, (args, kwargs or {}))
        found = func(*given, **named)
        if func is aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(Tensor, cls, found) if func.overloadpacket in _SUBCLASS_TOO else found

    def _padded(self, num_ranks: int, shape: Any) -> Tensor:
        missing = -(-shape[0] // num_ranks) - self.rows.shape[0]
        return torch.cat([self.rows, self.rows.new_zeros(missing, *shape[1:])]) if missing else self.rows

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        rows, scale = self._padded(mesh.size(), outer_size), self.scale
        if scale is None:
            largest = wait_tensor(all_reduce(rows.abs().max(), "max", mesh.get_group()))
            scale = torch.finfo(torch.float8_e4m3fn).max / largest.clamp(1e-12)
        return ((rows * scale).to(torch.float8_e4m3fn),), (scale, "scaled")

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (values,), (scale, _) = all_gather_outputs, metadata
        if out is not None:
            out.scale = scale
            return None
        return Float8(values, scale, param_dtype), (values,)


class Half(Float8Weight):
    """A weight that is gathered as two tensors, one of them in another dtype; the older form of the first hook."""

    def __tensor_flatten__(self) -> Any:
        return ["rows"], "half"

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        high = self.rows.to(torch.bfloat16)
        return (high, (self.rows - high).to(torch.float16)), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        high, low = all_gather_outputs
        whole = (high.float() + low.float()).to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(whole)
            return None
        return whole, (high, low, whole)


def give_hooks(model: nn.Module, cls: type[Float8Weight] = Float8Weight) -> nn.Module:
    """Make all weights of linear layers such subclasses."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(cls(module.weight.detach()), module.weight.requires_grad)
    return model
