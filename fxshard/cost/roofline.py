"""What the compute of a graph costs: FLOPs and bytes per node, and the roofline of the two.

Every op is costed alone, as if it were one kernel, or with what [Note: fusion] makes of pointwise ops. Without that the
time of a chain of those is an upper bound where Inductor fuses them; matrix products, convolutions and attention, which
hide communication, are kernels of their own anyway.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from fxshard.cost.fusion import fused_bytes
from fxshard.cost.symbols import Point, Quantity, product, size_of
from fxshard.hardware import HardwareSpec
from fxshard.ir import collectives, ops, regions
from fxshard.ir.liveness import Liveness, liveness, tensors_in
from fxshard.ir.planned_block import number_of

_aten = torch.ops.aten

_SAME_FLOPS: Mapping[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_fused_attention_overrideable: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: _aten._scaled_dot_product_flash_attention_backward,
    torch.ops.fxshard.addmm_acc: _aten.addmm,
}
"""Kernels that torch's table leaves out -> the one whose formula holds for them."""

_READS_SELECTED = (_aten.embedding, _aten.index, _aten.index_select, _aten.gather, torch.ops.fxshard.copy_out)
"""Ops that read of their first input only what they return."""

_WITH_RANDOM_STATE = ("run_and_save_rng_state", "run_with_rng_state")
"""Higher-order ops of torch that run an op among their arguments, and keep or set the state of the generator."""

_UNINITIALISED = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
"""Ops that write nothing."""


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """What one node costs."""

    flops: Quantity  # of matrix products, convolutions and attention; other ops count as none, their bytes decide
    nbytes: Quantity  # read from and written to device memory
    seconds: Quantity  # `max(flops / peak, nbytes / bandwidth)` plus the overhead of a kernel
    starts: bool = True  # whether it begins a kernel, and is not a further op of one


FREE = NodeCost(flops=0, nbytes=0, seconds=0.0)
"""Views, inputs, sizes, markers; launches and waits, whose time is the link's."""


@dataclass(frozen=True)
class _Shape:
    """Dtype and sizes of a tensor, and its elements in memory: an expanded dim has one."""

    dtype: torch.dtype
    sizes: tuple[Quantity, ...]
    numel: Quantity

    @property
    def nbytes(self) -> Quantity:
        return self.numel * self.dtype.itemsize


class ComputeModel:
    """Costs the nodes of one graph; equal ops on equal shapes are costed once."""

    def __init__(self, live: Liveness, hardware: HardwareSpec, point: Point, *, fuses: bool = False) -> None:
        """Bind the graph; the two sides of the roofline are compared at `point`. `fuses`: see [Note: fusion]."""
        self._live, self._hardware, self._point = live, hardware, point
        self._shapes: dict[fx.Node, tuple[_Shape, ...]] = {}
        self._costs: dict[Hashable, NodeCost] = {}
        self._regions: dict[fx.GraphModule, NodeCost] = {}
        self._fused = fused_bytes(live, lambda node: not self._is_free(node), self._nbytes) if fuses else {}
        self._fuses = fuses

    def cost(self, node: fx.Node) -> NodeCost:
        """The cost of `node`, without the guard that asking a `SymInt` would add."""
        if self._is_free(node):
            return FREE
        if (code := regions.code_of(node)) is not None:
            return self._sum(code)
        if node.target in ops.BETWEEN_HOST_AND_DEVICE:
            nbytes = self._nbytes(node)
            seconds = nbytes / self._hardware.host_bandwidth + self._hardware.kernel_overhead
            return NodeCost(flops=0, nbytes=nbytes, seconds=seconds)
        target, given = _op_of(node)
        read = tuple(shape for source in node.all_input_nodes for shape in self._shapes_of(source))
        written = self._shapes_of(node)
        formula = _formula(target)
        arguments = _freeze((given, node.kwargs), self._shapes_of) if formula is not None else None
        moved, starts = self._fused.get(node, (None, True))
        key = (target, read, written, arguments, moved, starts)
        if key not in self._costs:
            flops = self._flops(formula, arguments, node.meta.get("val")) if formula is not None else 0
            nbytes = _bytes_moved(target, read, written) if moved is None else moved
            share = self._share(node, flops) if formula is not None else 1.0
            self._costs[key] = self._roofline(flops, nbytes, (*read, *written), share, starts)
        return self._costs[key]

    def _sum(self, code: fx.GraphModule) -> NodeCost:
        if code not in self._regions:
            inner = ComputeModel(liveness(code.graph), self._hardware, self._point, fuses=self._fuses)
            costs = [inner.cost(node) for node in code.graph.nodes]
            flops, nbytes = (sum((getattr(c, name) for c in costs), start=0) for name in ("flops", "nbytes"))
            seconds = sum((cost.seconds for cost in costs), start=0.0)
            self._regions[code] = NodeCost(flops=flops, nbytes=nbytes, seconds=seconds)
        return self._regions[code]

    def _is_free(self, node: fx.Node) -> bool:
        target = node.target
        if _op_of(node)[0] is not target:
            return False  # its value is not known, those of its elements are
        if node.op != "call_function" or not (self._live.storages_of[node] or _is_mutable(target)):
            return True
        if (
            (collectives.is_launch(node) and not collectives.waits_itself(node))
            or target in collectives.WAITS
            or ops.is_unshard(node)
            or ops.is_reduce_grad(node)
            or number_of(node) is not None  # its graphs have costs of their own
        ):
            return True
        if getattr(target, "overloadpacket", None) in _UNINITIALISED:
            return True
        return not _is_mutable(target) and not self._live.allocates(node)

    def _nbytes(self, node: fx.Node) -> Quantity:
        return sum((shape.nbytes for shape in self._shapes_of(node)), start=0)

    def _share(self, node: fx.Node, flops: Quantity) -> float:
        """The share of the peak at which an op runs, as if FLOPs that a causal mask leaves out took time."""
        name = str(_op_of(node)[0])
        if "attention" not in name:
            return self._hardware.gemm_share(float(self._point.value(flops)))
        share = self._hardware.attention_efficiency["backward" in name]
        return share * (2 if _is_causal(node) else 1)

    def _shapes_of(self, node: fx.Node) -> tuple[_Shape, ...]:
        if node not in self._shapes:
            self._shapes[node] = tuple(map(_shape_of, tensors_in(node)))
        return self._shapes[node]

    def _flops(self, formula: Any, arguments: Any, value: Any) -> Quantity:
        """By torch's table; at the traced sizes where a formula compares symbolic ones.

        0 where a formula wants real tensors: torch's are so for attention over sequences of different lengths. Results
        keep their places: of a convolution's backward the first is `None` where its input needs no gradient.
        """
        values = value if isinstance(value, tuple | list) else (value,)
        results = tuple(_shape_of(each).sizes if isinstance(each, Tensor) else None for each in values)
        result = results[0] if len(results) == 1 else results
        for (args, kwargs), sizes in ((arguments, result), _at((arguments, result), self._point)):
            try:
                return formula(*args, **dict(kwargs), out_val=sizes)
            except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError):
                continue
        return 0

    def _roofline(
        self, flops: Quantity, nbytes: Quantity, shapes: tuple[_Shape, ...], share: float, starts: bool
    ) -> NodeCost:
        dtype = next((shape.dtype for shape in shapes if shape.dtype.is_floating_point), torch.float32)
        computing, moving = flops / (self._hardware.peak(dtype) * share), nbytes / self._hardware.memory_bandwidth
        longer = computing if self._point.value(computing) > self._point.value(moving) else moving
        seconds = longer + self._hardware.kernel_overhead * starts
        return NodeCost(flops=flops, nbytes=nbytes, seconds=seconds, starts=starts)


def _bytes_moved(target: Any, read: tuple[_Shape, ...], written: tuple[_Shape, ...]) -> Quantity:
    out = sum((shape.nbytes for shape in written), start=0)
    if getattr(target, "overloadpacket", None) in _READS_SELECTED:
        return out + out + sum((shape.nbytes for shape in read[1:]), start=0)
    return out + sum((shape.nbytes for shape in read), start=0)


def _shape_of(tensor: Tensor) -> _Shape:
    sizes = tuple(map(size_of, tensor.shape))
    strides = map(size_of, tensor.stride())
    return _Shape(tensor.dtype, sizes, product(n for n, stride in zip(sizes, strides, strict=True) if stride != 0))


def _op_of(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The op that a node runs, and its arguments: checkpointing wraps ops that may draw random numbers."""
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or node.target.name() not in _WITH_RANDOM_STATE:
        return node.target, node.args
    place = next(i for i, argument in enumerate(node.args) if isinstance(argument, torch._ops.OpOverload))
    return node.args[place], node.args[place + 1 :]


def _is_causal(node: fx.Node) -> bool:
    """Whether an attention op leaves out what a causal mask hides; `False` where it takes no such argument."""
    target, args = _op_of(node)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in target._schema.arguments]
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    given = node.kwargs.get("is_causal", args[place] if place < len(args) else False)
    return given is True


def _is_mutable(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _formula(target: Any) -> Any:
    """Torch's FLOP formula of an op, `None` for ops whose FLOPs do not count."""
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
    if packet is _aten._grouped_mm:
        return _grouped_flops
    return flop_registry.get(_SAME_FLOPS.get(packet, packet))


def _grouped_flops(a: Any, b: Any, *args: Any, **kwargs: Any) -> Quantity:
    """Of products of groups of rows or columns, which add up to a dim of the operand that is 2-D, or of batches."""
    return 2 * (a[0] if len(a) == len(b) == 3 else 1) * a[-2] * a[-1] * b[-1]


def _freeze(value: Any, shapes_of: Any) -> Any:
    """Arguments with shapes in the place of tensors, in a form that can be a key; dicts become pairs."""
    if isinstance(value, fx.Node):
        shapes = shapes_of(value)
        if shapes:
            return shapes[0].sizes if len(shapes) == 1 else tuple(shape.sizes for shape in shapes)
        size = value.meta.get("val")
        return size_of(size) if isinstance(size, int | torch.SymInt) else None
    if isinstance(value, list | tuple):
        return tuple(_freeze(item, shapes_of) for item in value)
    if isinstance(value, dict):
        return tuple((key, _freeze(item, shapes_of)) for key, item in value.items())
    return value


def _at(value: Any, point: Point) -> Any:
    """Frozen arguments with numbers in the place of expressions."""
    if isinstance(value, tuple):
        return tuple(_at(item, point) for item in value)
    return point.value(value) if getattr(value, "free_symbols", None) else value
