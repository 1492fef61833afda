"""Copies of modules and other objects in which every tensor is a fake one."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fxshard import torch_private
from fxshard.errors import UnsupportedGraph
from fxshard.runtime.parameters import REFS, TRACED, ParameterRef, adopt_attributes, like_local_of, placed
from fxshard.sharding.sharded_module import STATE, plain_module

_NOT_COPIED = (REFS, TRACED, STATE, "_compiled_call_impl")
_SHARED = (DeviceMesh, dist.ProcessGroup, torch.Generator, UninitializedParameter, UninitializedBuffer, ModuleType)
_ATOMS = (str, bytes, int, float, complex, type, type(None), FunctionType, BuiltinFunctionType, torch.dtype)

T = TypeVar("T")


class Replica:
    """Deep copies without data, of unsharded modules; they share what originals share, and what cannot be copied."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where tensors go that are on meta, or on a device that this machine does not have."""
        self.mode = torch_private.FakeMode(
            allow_non_fake_inputs=True
        )  # functions may read real tensors: globals, closures
        self.device = device
        self._memo: dict[int, Any] = {}
        self._originals: dict[int, Any] = {}  # kept alive: the memo knows them by their ids
        self.unsharded: list[nn.Parameter] = []
        """The copies of all parameters that no unit holds."""
        self._empty: list[nn.Module] = []

    @contextmanager
    def faking(self) -> Iterator[None]:
        """Everything that is computed in this context is fake."""
        with warnings.catch_warnings(), self.mode:
            # A unit looks at the addresses of its parameters; those of fake ones are all 0, which does no harm.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield

    def copy(self, value: T, name: str) -> T:
        """Copy `value`, which messages call `name`, or raise UnsupportedGraph; its modules may be sharded."""
        self._prepare(value)
        while self._empty:
            module = self._empty.pop()
            for attribute in [a for a in module.__dict__ if a not in _NOT_COPIED]:
                copied = self._deepcopy(module.__dict__[attribute], f"{type(module).__name__}.{attribute}")
                self.of(module).__dict__[attribute] = copied
        return self._deepcopy(value, name)

    def of(self, original: T) -> T:
        """The copy of a module or tensor that was copied before."""
        return cast(T, self._memo[id(original)])

    def knows(self, original: object) -> bool:
        """Whether a module or tensor was copied."""
        return id(original) in self._memo

    def _deepcopy(self, value: T, name: str) -> T:
        try:
            with torch.no_grad(), self.faking(), torch_private.copying_to(self.mode):
                return copy.deepcopy(value, self._memo)
        except Exception as error:  # a copy runs code of the classes it copies
            raise UnsupportedGraph(
                f"{name} cannot be copied ({type(error).__name__}: {error}). The model is explained on a copy of it: "
                "keep what cannot be copied out of the model, or give its class a __deepcopy__."
            ) from error

    def _prepare(self, value: Any) -> None:
        """Put a copy of all tensors, an empty copy of all modules and what is shared into the memo."""
        todo = [value]
        while todo:
            found = todo.pop()
            if isinstance(found, _ATOMS) or id(found) in self._originals:
                continue
            self._originals[id(found)] = found
            if isinstance(found, _SHARED):
                self._memo[id(found)] = found
            elif isinstance(found, Tensor):
                self._memo[id(found)] = self._fake(found)
            elif isinstance(found, nn.Module):
                todo += self._prepare_module(found)
            elif not (parts := _parts(found)) and not _is_copyable(found):
                self._memo[id(found)] = found
            else:
                todo += parts

    def _prepare_module(self, module: nn.Module) -> Iterable[Any]:
        """Put an empty copy of a module, and its parameters, into the memo; return what else it holds."""
        plain = plain_module(module)
        if plain is not module:
            self._prepare(plain)
            self._memo[id(module)] = self.of(plain)
            return ()
        base = getattr(type(module), "_fxshard_base", type(module))
        self._memo[id(module)] = base.__new__(base)
        self._empty.append(module)
        refs = module.__dict__.get(REFS, {})
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in self._originals:
                continue
            self._originals[id(parameter)] = parameter
            if name in refs:
                self._memo[id(parameter)] = self._unsharded_fake(parameter, refs[name])
            elif isinstance(parameter, _SHARED):
                self._memo[id(parameter)] = parameter
            else:
                self._memo[id(parameter)] = self._fake(parameter)
            if name not in refs:
                self.unsharded.append(self.of(parameter))
        return [value for name, value in module.__dict__.items() if name not in _NOT_COPIED]

    def _unsharded_fake(self, sharded: nn.Parameter, ref: ParameterRef) -> Tensor:
        rows, *others = ref.shape or (1,)
        shape = (
            sharded.shape if ref.layout is None else (*others[: ref.dim], rows, *others[ref.dim :])[: len(ref.shape)]
        )
        with torch.no_grad(), self.faking():
            full = torch.empty(shape, dtype=sharded.dtype, device=self._place(sharded))
            full = like_local_of(sharded, full)
            return _like(full if ref.layout is None else placed(full, ref.layout), sharded)

    def _fake(self, tensor: Tensor) -> Tensor:
        with torch.no_grad(), self.faking():
            if tensor.layout != torch.strided or torch_private.is_wrapper(tensor):
                return self.mode.from_tensor(tensor, static_shapes=True)
            shape, stride = tuple(tensor.shape), tensor.stride()
            empty = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=self._place(tensor))
        return _like(empty, tensor)

    def _place(self, tensor: Tensor) -> torch.device:
        return tensor.device if tensor.device.type in ("cpu", self.device.type) else self.device


def _like(empty: Tensor, original: Tensor) -> Tensor:
    """`empty`, as much of a trained parameter as `original` is, with what users and Dynamo hang on it."""
    made = nn.Parameter(empty, original.requires_grad) if isinstance(original, nn.Parameter) else empty
    made.requires_grad_(original.requires_grad)
    adopt_attributes(cast(nn.Parameter, made), original.__dict__)
    if isinstance(original, nn.Parameter):
        made.grad_dtype = original.grad_dtype
    return made


def _parts(value: Any) -> list[Any]:
    """What a value consists of, as far as a copy of it would copy that."""
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts = list(value)
    elif isinstance(value, MethodType):
        parts = [value.__self__]
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    else:
        parts = []
    return [*parts, *getattr(value, "__dict__", {}).values()]


def _is_copyable(value: Any) -> bool:
    if isinstance(getattr(value, "__deepcopy__", None), MethodType):
        return True
    try:
        value.__reduce_ex__(4)
    except Exception:  # of any kind: it runs code of the value's class
        return False
    return True
