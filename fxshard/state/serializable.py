"""Values that are not tensors of the model: which of them can be stored, and how ranks compare them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard.errors import ConfigError
from fxshard.runtime.raw import as_bytes
from fxshard.state.local_shards import hold
from fxshard.state.pytree import KeyPath, LeafMark

# What torch.load(weights_only=True) gives back as it was.
_LEAVES = (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SEQUENCES = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict, Counter)

_PLAIN = (int, float, complex, str, bytes, torch.dtype, type(None))  # their values must be the same on all ranks

_DICT = "fxshard.dict"  # before a dict that is saved as one value


def storable(value: Any, where: str) -> Any:
    """Return a copy of `value` that holds only what can be loaded without running code from the file."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, np.generic) and not isinstance(number := value.item(), np.generic):  # Python has no longdouble
        return storable(number, where)
    if kind in _MAPPINGS:
        pairs = ((storable(key, f"the key {key!r} of {where}"), each) for key, each in value.items())
        return kind({key: storable(each, f"{where}[{key!r}]") for key, each in pairs})
    if kind in _SEQUENCES:
        return kind(storable(each, f"{where}[{i}]") for i, each in enumerate(value))
    if kind in (Tensor, nn.Parameter) and _is_dense(value):
        whole = value.detach().resolve_conj().resolve_neg()
        # torch.save would write all of a larger storage.
        return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()
    raise ConfigError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: numbers, strings, None, "
        "dense tensors that are not sharded, and dicts, lists, tuples and sets of these. Convert it first."
    )


def named(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return what is saved value by value, each under its name; raise as `nested`, or if keys are not strings."""
    if others := [key for key in value if not isinstance(key, str)]:
        raise ConfigError(
            f"{where} has keys that are not strings, which a checkpoint cannot hold here, for it names values by them: "
            f"{', '.join(map(repr, others))}. Use strings."
        )
    return {key: nested(each, f"{where}[{key!r}]") for key, each in value.items()}


def nested(value: Any, where: str) -> Any:
    """Return what optimizers and modules keep: tensors, also sharded ones, anywhere in dicts and lists.

    torch saves the values of dicts one by one, by keys that are strings; a dict that has other keys, or none, becomes
    one value, which `unpacked` turns back.
    """
    if isinstance(value, Tensor) and _is_dense(value):
        return value.detach().resolve_conj().resolve_neg()
    if isinstance(value, Mapping):
        if value and all(isinstance(key, str) for key in value):
            return named(value, where)
        return (_DICT, storable(dict(value), where))
    if isinstance(value, list) and any(isinstance(each, Tensor | Mapping | list) for each in value):
        return [nested(each, f"{where}[{i}]") for i, each in enumerate(value)]
    return storable(value, where)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def unpacked(value: Any) -> Any:
    """Return what was given to `nested`, of a value that was saved as one."""
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    return value[1] if isinstance(value, tuple) and value[:1] == (_DICT,) else value


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether this rank's rows of two tensors are the same; not a number equals itself."""
    first, second = (each.to_local() if isinstance(each, DTensor) else each for each in (one, other))
    return torch.equal(as_bytes(first), as_bytes(second).to(first.device))


def facts(value: Any, name: str = "", texts: Mapping[KeyPath, str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield the name of each value inside, and words that are equal where values are; `texts` of tensors taken out."""
    if isinstance(value, LeafMark):
        yield name, (texts or {}).get(value.path, "tensor")
    elif isinstance(value, Tensor):
        yield name, hold(value).valued
    elif isinstance(value, Mapping | list | tuple) and not value:
        yield name, f"an empty {'dict' if isinstance(value, Mapping) else 'list'}"
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from facts(each, f"{name}[{key!r}]", texts)
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            yield from facts(each, f"{name}[{i}]", texts)
    elif isinstance(value, set):
        yield name, f"{{{', '.join(sorted(map(repr, value)))}}}"
    else:
        yield name, repr(value) if isinstance(value, _PLAIN) else type(value).__name__
