"""Run Triton kernels that Inductor generates for CUDA on tensors of the CPU, with Triton's own interpreter in numpy.

[Note: interpreter]
`TRITON_INTERPRET=1` would change a whole process, which then compiles nothing. Here a kernel stays what it is, and the
interpreter's changes of `triton.language` are in force only while a kernel runs (`_interpreting`). `_changes` lists
what is put in beside them: what Triton's interpreter lacks, or computes unlike a GPU.

Each load and store must lie in the memory of an argument, so an index that was read too early is an error.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from torch._inductor.utils import _type_of
from triton.language import core
from triton.language.extra import libdevice as stub
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

Array = NDArray[Any]

_LARGEST = {"XBLOCK": 4096, "YBLOCK": 1024, "ZBLOCK": 1024}
"""Inductor leaves masks out where a size is a multiple of these."""

_MAX_ELEMENTS = 1 << 19
"""Of a block: few programs, each of which numpy runs at once."""

_IN_BITS = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
"""Numpy has no such numbers: the interpreter keeps their bits in unsigned integers."""


class OutOfBounds(AssertionError):
    """A kernel touched memory that is none of its arguments'."""


# Numbers


def _tensor_of(data: Array, dtype: Any) -> Tensor:
    found = torch.from_numpy(np.ascontiguousarray(data))
    return found.view(_IN_BITS[dtype.name]) if dtype.name in _IN_BITS else found


def _array_of(tensor: Tensor, dtype: Any) -> Array:
    bits = {1: torch.uint8, 2: torch.uint16}
    found: Array = (tensor.view(bits[tensor.element_size()]) if dtype.name in _IN_BITS else tensor).numpy()
    return found


def _torch_dtype(dtype: Any) -> torch.dtype:
    return _IN_BITS.get(dtype.name) or torch.from_numpy(np.empty(0, interpreter._get_np_dtype(dtype))).dtype


def _cast(_: Any, source: Any, dtype: Any, *__: Any) -> Any:
    old, new = source.dtype.scalar, dtype.scalar
    with np.errstate(invalid="ignore"):
        if {old.name, new.name}.isdisjoint(_IN_BITS):
            data = source.data.astype(interpreter._get_np_dtype(new))
        else:
            data = _array_of(_tensor_of(source.data, old).to(_torch_dtype(new)), new)
    return interpreter.TensorHandle(data.reshape(source.data.shape), new)


def _unary(function: Callable[..., Tensor], arg: Any) -> Any:
    return interpreter.TensorHandle(function(_tensor_of(arg.data, arg.dtype.scalar)).numpy(), arg.dtype.scalar)


_NAMES = {"fabs": "abs", "fast_tanh": "tanh", "nearbyint": "round", "rint": "round", "llrint": "round", "div_rn": "div"}
"""Functions of libdevice that torch calls otherwise."""


def _extern(_: Any, lib: str, path: str, symbol: str, args: list[Any], dtype: Any, is_pure: bool) -> Any:
    name = symbol.removeprefix("__nv_")
    name = name if hasattr(torch, _NAMES.get(name, name)) else name[:-1]  # for floats or doubles
    function = getattr(torch, _NAMES.get(name, name), None)
    if function is None:
        raise NotImplementedError(f"libdevice has {symbol}, and torch has no {name}")
    found = function(*(_tensor_of(arg.data, arg.dtype.scalar) for arg in args))
    return interpreter.TensorHandle(found.numpy().astype(interpreter._get_np_dtype(dtype.scalar)), dtype.scalar)


# Memory


class _Memory:
    """Where the arguments of the kernel lie that runs now."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def holds(self, tensors: Sequence[Tensor]) -> None:
        """Allow a kernel to touch these tensors."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.ranges = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]

    def require(self, pointers: Array, mask: Array, what: str) -> None:
        touched = pointers if mask.all() else pointers[np.broadcast_to(mask, pointers.shape)]
        if not touched.size:
            return
        low, high = int(touched.min()), int(touched.max())
        if not any(start <= low and high < end for start, end in self.ranges):
            raise OutOfBounds(f"{what} from {low:#x} to {high:#x}, outside of the arguments")

    def load(self, pointers: Any, mask: Any, other: Any, *__: Any) -> Any:
        element = pointers.get_element_ty()
        dtype, shape = interpreter._get_np_dtype(element), pointers.data.shape
        self.require(pointers.data, mask.data, "a load")
        if other is not None:
            filler = other.data
        elif dtype.kind == "b":
            filler = np.zeros(shape, bool)
        else:
            filler = np.full(shape, -1, f"i{dtype.itemsize}").view(dtype)
        found = interpreter._interpreter.load(pointers.data, mask.data, filler, dtype)
        return interpreter.TensorHandle(found, element)

    def store(self, pointers: Any, value: Any, mask: Any, *__: Any) -> Any:
        self.require(pointers.data, mask.data, "a store")
        return interpreter._interpreter.store(pointers.data, value.data, mask.data)


_memory = _Memory()


# Reductions: a whole axis at a time, in the order of a tree


def _block(data: Array, dtype: Any) -> Any:
    handle = interpreter.TensorHandle(np.ascontiguousarray(data), dtype.scalar)
    return tl.tensor(handle, tl.block_type(dtype.scalar, list(data.shape)) if data.shape else dtype.scalar)


def _combined(op: Any, left: list[Array], right: list[Array], dtypes: list[Any]) -> list[Array]:
    blocks = [_block(data, dtype) for side in (left, right) for data, dtype in zip(side, dtypes, strict=True)]
    found = op.combine_fn(*blocks)
    found = found if isinstance(found, tuple) else (found,)
    return [np.broadcast_to(one.handle.data, data.shape) for one, data in zip(found, left, strict=True)]


def _reduce(op: Any, inputs: Any) -> list[Any]:
    dtypes, parts = [one.dtype for one in inputs], [one.handle.data for one in inputs]
    axis = op.axis
    if axis is None:
        parts, axis = [part.reshape(-1) for part in parts], 0
    while (length := parts[0].shape[axis]) > 1:  # a power of two
        halves = zip(*(np.split(part, [length // 2], axis) for part in parts), strict=True)
        left, right = (list(half) for half in halves)
        parts = _combined(op, left, right, dtypes)
    parts = parts if op.keep_dims else [np.squeeze(part, axis) for part in parts]
    return [op.to_tensor(part if part.shape else part.item(), dtype) for part, dtype in zip(parts, dtypes, strict=True)]


# Functions: kernels, and what they call


class _Rewriter(interpreter.ASTTransformer):  # type: ignore[misc] # of triton
    def visit_UnaryOp(self, node: Any) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            return ast.Call(func=ast.Name(id="_elementwise_not", ctx=ast.Load()), args=[node.operand], keywords=[])
        return node


def _elementwise_not(value: Any) -> Any:
    if isinstance(value, tl.tensor) and value.type.is_block():
        return _block(~value.handle.data.astype(bool), tl.int1)
    return not value


@functools.cache
def _rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    rewriter = interpreter.FunctionRewriter(function)
    rewriter.ast_transformer = _Rewriter()
    function.__globals__.setdefault("_elementwise_not", _elementwise_not)
    return rewriter.rewrite_ast()


Change = tuple[Any, str, Any]
"""An owner, a name of it, and its value while a kernel runs."""


def _changes_of_triton() -> list[Change]:
    """What Triton's interpreter changes at each launch: found once, to be put in and taken out."""
    scope = interpreter._patch_lang(_cast)  # for a function of a module that knows `tl` and `core`
    try:
        changed = {(id(owner), name): (owner, name, vars(owner)[name]) for owner, name, _ in scope._changes}
        return [*changed.values()]
    finally:
        scope.restore()


@functools.cache
def _changes() -> tuple[Change, ...]:
    builder = interpreter.InterpreterBuilder
    functions = inspect.getmembers(libdevice, core.is_builtin)
    bound = [(name, functools.partial(it, _semantic=interpreter.interpreter_semantic)) for name, it in functions]
    of_builder: dict[str, Callable[..., Any]] = {
        # rounds to nearest even, as a GPU; theirs truncates
        **dict.fromkeys(("cast_impl", "create_fp_to_fp", "create_fp_ext", "create_fp_trunc"), _cast),
        # theirs checks no address, and gives 0 where a mask without `other` leaves the value undefined
        "create_masked_load": _memory.load,
        "create_masked_store": _memory.store,
        # theirs knows no libdevice, and computes erf one by one
        "create_extern_elementwise": _extern,
        **{
            f"create_{name}": functools.partial(_unary, getattr(torch, name))
            for name in ("erf", "exp", "exp2", "log", "rsqrt")
        },
    }
    return (
        *_changes_of_triton(),
        *((owner, name, function) for owner in (stub, libdevice) for name, function in bound),
        *((builder, name, function) for name, function in of_builder.items()),
        # theirs goes element by element
        (interpreter.ReduceOps, "generic_reduce", _reduce),
        # theirs rewrites only functions that were made under TRITON_INTERPRET
        (JITFunction, "__call__", lambda function, *args, **kwargs: _rewritten(function.fn)(*args, **kwargs)),
    )


_GONE = object()


@contextmanager
def _interpreting() -> Iterator[None]:
    changes = _changes()
    before = [(owner, name, vars(owner).get(name, _GONE)) for owner, name, _ in changes]
    knob, triton.knobs.runtime.interpret = triton.knobs.runtime.interpret, True  # `constexpr_function` looks at it
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        triton.knobs.runtime.interpret = knob
        for owner, name, value in reversed(before):
            delattr(owner, name) if value is _GONE else setattr(owner, name, value)


# A launch


def _blocks(kernel: Any, config: Any, sizes: dict[str, int]) -> dict[str, int]:
    """Return as large blocks as Inductor allows, for few programs."""
    blocks, meta = dict(config.kwargs), kernel.inductor_meta
    if meta.get("grid_type") not in ("Grid1D", "Grid2D", "Grid3D") or "RSPLIT" in blocks or "combo_grid_meta" in meta:
        return blocks
    hints = {f"{name.upper()}BLOCK": triton.next_power_of_2(hint) for name, hint in (kernel.size_hints or {}).items()}
    reduced = math.prod(blocks.get(name, hint) for name, hint in hints.items() if name.startswith("R"))
    left = max(1, _MAX_ELEMENTS // reduced)
    for name in [name for name in _LARGEST if name in blocks]:
        wanted = triton.next_power_of_2(max(1, sizes.get(f"{name[0].lower()}numel", 1)))
        blocks[name] = min(_LARGEST[name], wanted, left)
        left = max(1, left // blocks[name])
    return blocks


def _require_dtypes(given: Mapping[str, Any], signature: Mapping[str, str]) -> None:
    """Raise unless each tensor is of what the kernel was compiled for: a GPU would read its bits as that."""
    for name, value in given.items():
        if isinstance(value, Tensor) and signature[name] != _type_of(value.dtype):
            raise AssertionError(f"{name} is {signature[name]} in the kernel, and given {value.dtype}")


def launch(kernel: Any, args: Sequence[Any]) -> None:
    """Run a kernel of Inductor's, a `CachingAutotuner`, on tensors of the CPU and numbers."""
    config, names = kernel.configs[0], [parameter.name for parameter in kernel.fn.params]
    constants = {parameter.name for parameter in kernel.fn.params if parameter.is_constexpr} | {*config.kwargs}
    given = dict(zip((name for name in names if name not in constants), args, strict=False))
    _require_dtypes(given, kernel.triton_meta["signature"])
    blocks = _blocks(kernel, config, {name: value for name, value in given.items() if isinstance(value, int)})
    kept, grid = kernel._interpret_args_grid(tuple(args), triton.Config(blocks, num_warps=4))
    given = dict(zip(given, kept, strict=True))
    _memory.holds([value for value in given.values() if isinstance(value, Tensor)])
    with _interpreting(), np.errstate(all="ignore"):
        run, grid = _rewritten(kernel.fn.fn), (*grid, 1, 1)[:3]
        missing = {**kernel.triton_meta.get("constants", {}), **blocks}
        arguments = {name: interpreter._implicit_cvt(value) for name, value in given.items()}
        arguments |= {name: missing[name] for name in names if name in missing and name not in arguments}
        interpreter.interpreter_builder.set_grid_dim(*grid)
        for place in np.ndindex(*grid):
            interpreter.interpreter_builder.set_grid_idx(*place)
            run(**arguments)
