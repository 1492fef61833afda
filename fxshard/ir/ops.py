"""The ops of `fxshard::`: two markers, and what passes put into graphs beside the ops of torch.

[Note: markers]
`fxshard::unshard(shard, key, slot, shape, dtype)` is the full parameter in slot `slot` of `shard`. Its autograd formula
is `fxshard::reduce_grad(grad, key, slot, numel, dtype)`: the gradient of the shard, with the reduced gradient in that
slot and zeros elsewhere. Both take a device where that is not their input's, for an offloaded shard. Tracing through
them gives a joint graph without collectives. Passes replace them, so no pass has to guess which collective belongs to
which parameter.

While Dynamo traces, a read is `fxshard::parameter(shard, text)`, with all the arguments in one text: Dynamo guards on
each value that it meets, and traces what takes it apart. The key in it is the shard's index and `UnitPlan.sharing_key`
(units that agree on them may share a graph). `passes/bind_markers.py` replaces the op by `unshard` with the key
"<unit fqn>#<shard>@<call>".

A parameter that is cut along another dimension than 0 is stored, gathered and reduced with that dimension first;
`fxshard::whole(rows, dim)` puts it back. AOTAutograd's graphs have its transpose and copy.

The other ops:

- `fxshard::addmm_acc(acc, left, right)` adds a matrix product to `acc`: of `acc.addmm_` Inductor makes a temporary and
  a copy.
- `fxshard::copy_in(gradients, world_size, dtype)` makes what a reduction sends, in one kernel on CUDA; of the ops that
  say the same Inductor makes a kernel per gradient.
- `fxshard::copy(source, dtype)` is a contiguous copy in memory of its own, in another dtype if one is given: Inductor
  drops `clone` where a wait hides that the source is the caller's, and repeats a cast for each that reads a part of it.
- `fxshard::keep_rows(parameters, key, num_ranks, group_name)` is this rank's shard of parameters over a smaller group:
  [Note: subgroups] in `passes/reshard_to_subgroup.py`.
- `fxshard::zero_gradient(parameters, index)` is zeros in place of the gradient of one of a unit's parameters, all of
  which it reads so that they are gathered (`passes/reduce_unused.py`).
- `fxshard::region(operands, name, call)` and `fxshard::region_backward` call code that a repeated module shares; they
  are gone before there is code: [Note: regions].
- `fxshard::prefetched_all_gather` takes an all_gather that was launched ahead, or launches it: [Note: prefetch across
  graphs].
- `fxshard::copy_to_device` and `fxshard::copy_to_host` copy the shard of a unit that is offloaded, and its gradient:
  [Note: offloaded shards] in `runtime/streams.py`. Each result is waited for as a collective's.
- `fxshard::all_gather_on_stream` and `fxshard::reduce_scatter_on_stream` cast and send, `fxshard::copy_out` waits for a
  gathered buffer and copies a part of it, all on a side stream: [Note: side streams]. Each result is waited for as a
  collective's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxshard import torch_private
from fxshard.errors import UnsupportedGraph
from fxshard.ir.plan import ParameterKey

aten = torch.ops.aten


def _overloads(*packets: torch._ops.OpOverloadPacket) -> frozenset[torch._ops.OpOverload]:
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


VIEWS = _overloads(
    aten._unsafe_view,
    aten.alias,
    aten.as_strided,
    aten.detach,
    aten.narrow,
    aten.reshape,
    aten.select,
    aten.slice,
    aten.split,
    aten.split_with_sizes,
    aten.squeeze,
    aten.unsqueeze,
    aten.view,
)
"""Ops that show the same elements in another shape, or some of them."""

TRANSPOSES = _overloads(aten.expand, aten.permute, aten.t, aten.transpose)

COPIES = _overloads(aten.clone, aten.contiguous)

CASTS = _overloads(aten._to_copy, torch.ops.prims.convert_element_type)

MOVEMENT = VIEWS | TRANSPOSES | COPIES | CASTS
"""All of them; `getitem` of a split is not an op and not among them."""


def cast_dtype(node: fx.Node, default: torch.dtype) -> torch.dtype:
    """Return the dtype that a node of `CASTS`, or a deferred wait, casts to."""
    wanted = node.kwargs.get("dtype", node.args[1] if len(node.args) > 1 else None)
    return wanted if isinstance(wanted, torch.dtype) else default


LIBRARY = torch.library.Library("fxshard", "DEF")
LIBRARY.define("parameter(Tensor shard, str text) -> Tensor")
LIBRARY.define("whole(Tensor rows, int dim) -> Tensor")
LIBRARY.define(
    "unshard(Tensor shard, str key, int slot, SymInt[] shape, ScalarType dtype, Device? device=None) -> Tensor"
)
LIBRARY.define(
    "reduce_grad(Tensor grad, str key, int slot, SymInt numel, ScalarType dtype, Device? device=None) -> Tensor"
)
LIBRARY.define(
    "prefetched_all_gather(Tensor flat, ScalarType dtype, int[] starts, int[] numels, int group_size, str group_name, "
    "str role, bool guess, str stream) -> Tensor[]"
)
LIBRARY.define(
    "all_gather_on_stream(Tensor[] inputs, ScalarType dtype, int group_size, str group_name, str stream) -> Tensor[]"
)
LIBRARY.define(
    "reduce_scatter_on_stream(Tensor[] inputs, ScalarType dtype, str reduce_op, int group_size, str group_name, "
    "str stream) -> Tensor[]"
)
LIBRARY.define("copy_out(Tensor gathered, int[] size, int[] stride, int start, str stream) -> Tensor")
LIBRARY.define("deferred_wait(Tensor launched, ScalarType? dtype=None) -> Tensor")
LIBRARY.define("copy_to_device(Tensor shard, str device, str stream) -> Tensor")
LIBRARY.define("copy_to_host(Tensor gradient, bool pinned, str stream) -> Tensor")
LIBRARY.define("copy_in(Tensor[] gradients, int world_size, ScalarType dtype) -> Tensor")
LIBRARY.define("zero_gradient(Tensor[] parameters, int index) -> Tensor")
LIBRARY.define("addmm_acc(Tensor(a!) acc, Tensor left, Tensor right) -> ()")
LIBRARY.define("copy(Tensor source, ScalarType? dtype=None) -> Tensor")
LIBRARY.define("keep_rows(Tensor[] parameters, str key, int num_ranks, str group_name) -> Tensor")
_DRAWS = (torch.Tag.nondeterministic_seeded,)  # a region may: so the partitioner computes none again
LIBRARY.define("region(Tensor[] operands, str name, int call) -> Tensor[]", tags=_DRAWS)
LIBRARY.define("region_backward(Tensor[] inputs, str name, int call) -> Tensor[]", tags=_DRAWS)

PARAMETER = torch.ops.fxshard.parameter.default
WHOLE = torch.ops.fxshard.whole.default
UNSHARD = torch.ops.fxshard.unshard.default
REDUCE_GRAD = torch.ops.fxshard.reduce_grad.default
PREFETCHED_ALL_GATHER = torch.ops.fxshard.prefetched_all_gather.default
ADDMM_ACC = torch.ops.fxshard.addmm_acc.default
COPY = torch.ops.fxshard.copy.default
ALL_GATHER_ON_STREAM = torch.ops.fxshard.all_gather_on_stream.default
REDUCE_SCATTER_ON_STREAM = torch.ops.fxshard.reduce_scatter_on_stream.default
ZERO_GRADIENT = torch.ops.fxshard.zero_gradient.default
KEEP_ROWS = torch.ops.fxshard.keep_rows.default
COPY_OUT = torch.ops.fxshard.copy_out.default
DEFERRED_WAIT = torch.ops.fxshard.deferred_wait.default
COPY_TO_DEVICE = torch.ops.fxshard.copy_to_device.default
COPY_TO_HOST = torch.ops.fxshard.copy_to_host.default
BETWEEN_HOST_AND_DEVICE = (COPY_TO_DEVICE, COPY_TO_HOST)
COPY_IN = torch.ops.fxshard.copy_in.default
REGION = torch.ops.fxshard.region.default
REGION_BACKWARD = torch.ops.fxshard.region_backward.default


class MarkerKey(NamedTuple):
    """The key of a marker once its graph is captured; reads of one `call` of the unit's module share one gather."""

    unit: str
    shard: int
    call: str

    def __str__(self) -> str:
        """Return the form that the marker's `key` argument has."""
        return f"{self.unit}#{self.shard}@{self.call}"

    @classmethod
    def parse(cls, text: str) -> MarkerKey:
        """Invert `str`."""
        rest, _, call = text.rpartition("@")
        unit, _, shard = rest.rpartition("#")
        return cls(unit, int(shard), call)


def marker_text(key: str, slot: int, shape: Sequence[int], dtype: torch.dtype, device: str = "") -> str:
    """Return the arguments of a marker after the shard as one text: `2|128 384|float32|0 of 8@0 None/None keep`."""
    kind = f"{str(dtype).removeprefix('torch.')} {device}".rstrip()
    return f"{slot}|{' '.join(map(str, shape))}|{kind}|{key}"


def marker_arguments(text: str) -> tuple[Any, ...]:
    """Invert `marker_text`: key, slot, shape, dtype, and the device if there is one."""
    slot, sizes, kind, key = text.split("|", 3)
    dtype, *device = kind.split()
    return key, int(slot), [int(size) for size in sizes.split()], getattr(torch, dtype), *map(torch.device, device)


def key_of(marker: fx.Node) -> MarkerKey:
    """Return the parsed key of an `unshard` or `reduce_grad` node."""
    return MarkerKey.parse(str(marker.args[1]))


def slot_of(marker: fx.Node) -> int:
    """Return the slot index of an `unshard` or `reduce_grad` node."""
    slot = marker.args[2]
    assert isinstance(slot, int), marker.format_node()
    return slot


def parameter_key_of(marker: fx.Node) -> ParameterKey:
    """Return the parameter that an `unshard` or `reduce_grad` node is of."""
    key = key_of(marker)
    return key.unit, key.shard, slot_of(marker)


def is_unshard(node: fx.Node) -> bool:
    """Return whether `node` is an `unshard` marker."""
    return node.op == "call_function" and node.target is UNSHARD


def is_reduce_grad(node: fx.Node) -> bool:
    """Return whether `node` is a `reduce_grad` marker."""
    return node.op == "call_function" and node.target is REDUCE_GRAD


def reduce_markers(result: fx.node.Argument) -> list[fx.Node]:
    """Return the `reduce_grad` markers whose sum `result` is, in the order of autograd's additions; else nothing."""
    if not isinstance(result, fx.Node):
        return []
    if (copy := copy_to_host_behind(result)) is not None:
        return reduce_markers(copy.args[0])
    if is_reduce_grad(result):
        return [result]
    if result.target is not torch.ops.aten.add.Tensor or result.kwargs:
        return []
    terms = [reduce_markers(term) for term in result.args]
    return [marker for term in terms for marker in term] if all(terms) else []


def copy_to_host_behind(result: fx.node.Argument) -> fx.Node | None:
    """Return the copy that a result of a graph has waited for, if it is the gradient of an offloaded shard."""
    return _source_of_wait(result, COPY_TO_HOST)


def copy_to_device_behind(node: fx.node.Argument) -> fx.Node | None:
    """Return the copy that a node has waited for, if it is an offloaded shard on the device."""
    return _source_of_wait(node, COPY_TO_DEVICE)


def _source_of_wait(wait: fx.node.Argument, target: torch._ops.OpOverload) -> fx.Node | None:
    if not isinstance(wait, fx.Node) or wait.target is not torch.ops._c10d_functional.wait_tensor.default:
        return None
    source = wait.args[0]
    return source if isinstance(source, fx.Node) and source.target is target else None


def implement(**functions: Callable[..., Any]) -> None:
    """Set what ops do, by their names; called once for each, by the runtime for those that it runs."""
    for name, function in functions.items():
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")


def _addmm_acc(acc: Tensor, left: Tensor, right: Tensor) -> None:
    acc.addmm_(left, right)


def _copy_in(gradients: list[Tensor], world_size: int, dtype: torch.dtype) -> Tensor:
    made = _fake_copy_in(gradients, world_size, dtype)
    aten._chunk_cat.out(gradients, 0, world_size, out=made.view(world_size, -1))  # casts, pads and copies in one kernel
    return made


def _fake_copy_in(gradients: list[Tensor], world_size: int, dtype: torch.dtype) -> Tensor:
    rows = [-(-gradient.shape[0] // world_size) * gradient[0].numel() for gradient in gradients]
    return gradients[0].new_empty((world_size * sum(rows),), dtype=dtype)


def _copy(source: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is None:
        return source.clone(memory_format=torch.contiguous_format)
    return source.to(dtype, copy=True, memory_format=torch.contiguous_format)


def rows_kept(parameters: list[Tensor], num_ranks: int, rank: int) -> Tensor:
    """Return the rows of parameters that a rank of a subgroup keeps, padded, one after the other."""
    made = fake_kept_rows(parameters, "", num_ranks, "").zero_()
    start = 0
    for parameter in parameters:
        numel = _kept_numel(parameter, num_ranks)
        first = rank * numel if parameter.dim() else 0
        part = parameter.reshape(-1)[first : first + numel]
        made[start : start + part.numel()] = part
        start += numel
    return made


def _kept_numel(parameter: Tensor, num_ranks: int) -> int:
    return -(-parameter.shape[0] // num_ranks) * math.prod(parameter.shape[1:]) if parameter.dim() else 1


def fake_kept_rows(parameters: list[Tensor], key: str, num_ranks: int, group_name: str) -> Tensor:
    """Return what `keep_rows` would, without values."""
    return parameters[0].new_empty((sum(_kept_numel(parameter, num_ranks) for parameter in parameters),))


def _zero_gradient(parameters: list[Tensor], index: int) -> Tensor:
    return parameters[index].new_zeros(parameters[index].shape)


_KERNELS: dict[str, Callable[..., Any]] = {
    "deferred_wait": lambda launched, dtype=None: launched,  # nobody may read it yet: who waits casts it
    "zero_gradient": _zero_gradient,
    "keep_rows": lambda parameters, key, num_ranks, group_name: rows_kept(
        parameters, num_ranks, torch_private.process_group_of(group_name).rank()
    ),
    "addmm_acc": _addmm_acc,
    "copy_in": _copy_in,
    "copy": _copy,
}
_FAKES: dict[str, Callable[..., Any]] = {
    "deferred_wait": lambda launched, dtype=None: (
        launched if dtype is None else torch.empty_like(launched, dtype=dtype)
    ),
    "zero_gradient": _zero_gradient,
    "keep_rows": fake_kept_rows,
    "addmm_acc": lambda acc, left, right: None,
    "copy_in": _fake_copy_in,
    "copy": _copy,
    "prefetched_all_gather": lambda flat, dtype, starts, numels, size, *_: [
        flat.new_empty((numel * size,), dtype=dtype) for numel in numels
    ],
    "all_gather_on_stream": lambda inputs, dtype, size, *_: [
        x.new_empty((x.numel() * size,), dtype=dtype) for x in inputs
    ],
    "reduce_scatter_on_stream": lambda inputs, dtype, op, size, *_: [
        x.new_empty((x.numel() // size,), dtype=dtype) for x in inputs
    ],
    "copy_out": lambda gathered, size, *_: gathered.new_empty(size),
    "copy_to_device": lambda shard, device, stream: shard.new_empty(shard.shape, device=device),
    "copy_to_host": lambda gradient, pinned, stream: gradient.new_empty(gradient.shape, device="cpu"),
    "unshard": lambda shard, key, slot, shape, dtype, device=None: shard.new_empty(shape, dtype=dtype, device=device),
    "reduce_grad": lambda grad, key, slot, numel, dtype, device=None: grad.new_empty(
        (numel,), dtype=dtype, device=device
    ),
}
implement(**_KERNELS)
for _name, _kernel in _FAKES.items():
    torch.library.register_fake(f"fxshard::{_name}", _kernel, lib=LIBRARY)


def _refuse(*args: Any) -> Tensor:
    raise UnsupportedGraph(
        "a module sharded by fxshard was compiled with another backend: its graph reads sharded parameters through "
        'fxshard::unshard, which only fxshard\'s passes replace. Use torch.compile(model, backend="fxshard").'
    )


_COMPOSITES: dict[str, Callable[..., Tensor]] = {
    "parameter": lambda shard, text: torch.ops.fxshard.unshard(shard, *marker_arguments(text)),
    "whole": lambda rows, dim: rows.movedim(0, dim).contiguous(),
}
for _name, _kernel in _COMPOSITES.items():
    LIBRARY.impl(_name, _kernel, "CompositeImplicitAutograd")
implement(unshard=_refuse, reduce_grad=_refuse)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, key, slot, *_ = inputs
    ctx.reduce_args, ctx.device = (key, slot, shard.numel(), shard.dtype), shard.device


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    device = () if grad.device == ctx.device else (ctx.device,)
    return torch.ops.fxshard.reduce_grad(grad, *ctx.reduce_args, *device), None, None, None, None, None


torch.library.register_autograd("fxshard::unshard", _backward, setup_context=_setup_context, lib=LIBRARY)
