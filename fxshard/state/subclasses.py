"""Optimizer state in tensor subclasses (8-bit optimizers) as a dict of plain parts, and back, to the bit.

A subclass that `DTensor.full_tensor()` can gather says itself how it is cut over ranks: in its rule for all_gather it
gathers some of its parts (codes, a scale for each block) and keeps others (a lookup table). The rule is run without a
process group, and the parts that it gathers are taken to be rows. Source of the layout: torchao's `OptimState8bit`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxshard import torch_private
from fxshard.errors import ConfigError
from fxshard.runtime.parameters import local_of
from fxshard.state.pytree import KeyPath, mapped

KIND = "fxshard.subclass"
"""The key of the dict of parts that holds class, context, shape of the full tensor, and the names of cut parts."""

_ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def flatten(state: Any, where: str) -> Any:
    """Return the state of a parameter with a dict of its parts for each tensor subclass; parts share its memory.

    Parts of a sharded subclass are DTensors: sharded by rows where the class cuts them, else replicated.
    """

    def taken(path: KeyPath, value: Any) -> Any:
        local = local_of(value) if isinstance(value, DTensor) else value
        if not isinstance(local, Tensor) or not torch_private.is_wrapper(local):
            return value
        return _parts(value, local, ": ".join(map(str, (where, *path))))

    return mapped(taken, state)


def unflatten(state: Any, where: str) -> Any:
    """Return what `flatten` was given, of its parts or of others: full tensors, or those of other ranks."""
    if isinstance(state, Mapping) and KIND in state:
        return _whole(state, where)
    if type(state) is dict:
        return {key: unflatten(value, f"{where}: {key}") for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(unflatten(value, f"{where}: {i}") for i, value in enumerate(state))
    return state


def parts_in(skeleton: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, bool]]:
    """Yield the path of each part of a subclass in a flattened state, and whether it is cut into rows."""
    if isinstance(skeleton, Mapping):
        cut = skeleton[KIND]["cut"] if KIND in skeleton else None
        for key, value in skeleton.items():
            if cut is None:
                yield from parts_in(value, (*path, key))
            elif key != KIND:
                yield (*path, key), key in cut
    elif isinstance(skeleton, list | tuple):
        for i, value in enumerate(skeleton):
            yield from parts_in(value, (*path, i))


def kinds_in(skeleton: Any) -> str:
    """Return which values of a flattened state are kept in which subclasses, in words; nothing if none is."""
    found = {}
    for path, _ in parts_in(skeleton):
        inner = skeleton
        for key in path[:-1]:
            inner = inner[key]
        found[".".join(map(str, path[:-1]))] = inner[KIND]["class"].rpartition(".")[2]
    return ", ".join(f"{name}: {kind}" for name, kind in found.items())


class _Gathers(torch_private.DispatchMode):
    """Notes which plain tensors are gathered, and gathers nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gathered: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ALL_GATHER:
            self.gathered.append(args[0])
            return args[0]
        return func(*args, **(kwargs or {}))


def _cut_parts(local: Tensor, where: str) -> list[str]:
    kind: Any = type(local)
    try:
        with _Gathers() as mode:
            kind.__torch_dispatch__(_ALL_GATHER, (kind,), (local, 1, ""), {})
    except Exception as error:
        raise ConfigError(_refusal(where, kind, f"it has no rule for all_gather ({type(error).__name__})")) from error
    names = [name for name in _names(local) if any(getattr(local, name) is each for each in mode.gathered)]
    if not names or len(names) != len(mode.gathered):
        raise ConfigError(_refusal(where, kind, "its rule for all_gather gathers other tensors than its parts"))
    return names


def _parts(state: Tensor, local: Tensor, where: str) -> dict[str, Any]:
    cut, context = _cut_parts(local, where), cast(Any, local).__tensor_flatten__()[1]
    kind = f"{type(local).__module__}.{type(local).__qualname__}"
    found: dict[str, Any] = {KIND: {"class": kind, "context": context, "shape": list(state.shape), "cut": cut}}
    for name in _names(local):
        part = getattr(local, name)
        found[name] = _placed(part, state, local, name in cut, where) if isinstance(state, DTensor) else part
    shapes = {name: torch.empty(part.shape, dtype=part.dtype, device="meta") for name, part in _items(found)}
    if (shape := _rebuilt(type(local), shapes, context, state.shape).shape) != state.shape:
        problem = f"it keeps its shape in its context, so its parts of all ranks make {list(shape)}"
        raise ConfigError(_refusal(where, type(local), f"{problem}, expected {list(state.shape)}"))
    return found


def _placed(part: Tensor, state: DTensor, local: Tensor, is_cut: bool, where: str) -> DTensor:
    dims = [placement.dim for placement in state.placements if isinstance(placement, Shard)]
    if any(dims) or not all(type(each) in (Shard, Replicate) for each in state.placements):
        raise ConfigError(_refusal(where, type(local), f"it is placed {state.placements}, not sharded by rows"))
    if not is_cut or not dims:
        return DTensor.from_local(part, state.device_mesh, [Replicate()] * len(state.placements), run_check=False)
    rows, own = state.shape[0], local.shape[0]
    if not own or not part.dim() or part.shape[0] * rows % own:
        raise ConfigError(_refusal(where, type(local), f"{list(part.shape)} of {own} of {rows} rows end in a block"))
    shape = torch.Size((part.shape[0] * rows // own, *part.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, state.device_mesh, state.placements, run_check=False, shape=shape, stride=stride)


def _whole(parts: Mapping[str, Any], where: str) -> Tensor:
    found = parts[KIND]
    kind, cut, shape = _class_of(found["class"], where), list(found["cut"]), torch.Size(found["shape"])
    tensors = dict(_items(parts))
    locals_ = {name: local_of(each) if isinstance(each, DTensor) else each for name, each in tensors.items()}
    first = tensors[cut[0]]
    own = locals_[cut[0]].shape[0] * shape[0] // first.shape[0]
    if any(locals_[name].shape[0] * shape[0] != own * tensors[name].shape[0] for name in cut):
        why = f"the rows of this rank, {own} of {shape[0]}, do not end where a block ends"
        raise ConfigError(_refusal(where, kind, why))
    local = _rebuilt(kind, locals_, found["context"], torch.Size((own, *shape[1:])))
    if not isinstance(first, DTensor):
        return local
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, first.device_mesh, first.placements, run_check=False, shape=shape, stride=stride)


def _rebuilt(kind: Any, parts: Mapping[str, Tensor], context: Any, shape: torch.Size) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    return cast(Tensor, kind.__tensor_unflatten__(dict(parts), context, shape, stride))


def _class_of(name: str, where: str) -> Any:
    """Return a class that was imported already: nothing that a file names is imported for it."""
    for module, loaded in list(sys.modules.items()):
        if name.startswith(f"{module}."):
            kind: Any = loaded
            for part in name.removeprefix(f"{module}.").split("."):
                kind = vars(kind).get(part) if hasattr(kind, "__dict__") else None
            if isinstance(kind, type) and issubclass(kind, Tensor):
                return kind
    raise ConfigError(f"{where} is a {name}, which is not imported. Import the optimizer that saved it, then load.")


def _refusal(where: str, kind: type, why: str) -> str:
    return (
        f"{where} is a {kind.__name__}, which fxshard cannot take apart: {why}. Keep this state in plain tensors, or "
        "use torch.distributed.checkpoint and its get_state_dict and set_state_dict, on as many ranks as wrote it."
    )


def _names(local: Tensor) -> list[str]:
    return list(cast(Any, local).__tensor_flatten__()[0])


def _items(parts: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name, part) for name, part in parts.items() if name != KIND)
