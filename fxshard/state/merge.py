"""One safetensors file of a sharded checkpoint, made offline: one tensor at a time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fxshard.errors import CheckpointError, ConfigError, MissingExtraError
from fxshard.runtime.raw import as_bytes
from fxshard.state import checkpoint_dir, checkpoint_model, manifest
from fxshard.state.dcp_reader import CheckpointIndex, shape_and_dtype
from fxshard.state.manifest import Manifest, sync_folder, verify
from fxshard.state.serializable import unpacked

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8  # bytes; where the data begins


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What became of a checkpoint."""

    tensors: int  # how many were written
    size: int  # of the file, in bytes
    left_out: dict[str, str]  # key of each value that was not written -> why


@dataclass(kw_only=True)
class _Selection:
    """What goes into the file: name there -> key in the checkpoint, and text beside the tensors."""

    names: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def merge(
    checkpoint: Path,
    out: Path,
    *,
    everything: bool = False,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Merged:
    """Write the tensors of a checkpoint, whole, to one safetensors file.

    The entry "model" is written under the FQNs of the model; parameters that are tied stand under each of their names.
    A checkpoint without that entry is written under its own keys, all of it.

    Args:
        checkpoint: a folder of `save_checkpoint`, whose files are compared with their manifest first, or of
            `torch.distributed.checkpoint.save`.
        out: the file; written under another name beside it, then renamed. A link stays, and what it names is replaced.
        everything: whether to add what stands beside the model, under its keys in the checkpoint. What is not a tensor
            becomes JSON in the file's metadata, where it can.
        overwrite: whether `out` may exist.
        on_progress: called with bytes written and bytes in all.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise MissingExtraError("safetensors", "state") from error
    path, target = checkpoint_dir.resolve(checkpoint), out.resolve()
    _require_free(out, target, overwrite)
    folder = _folder(path)
    if any(target.is_relative_to(each) for each in (path, folder)):
        raise ConfigError(f"{out} lies in the checkpoint {folder}, which holds its own files only. Name one elsewhere.")
    contents = _open(folder)
    selection = _select(contents, everything)
    unfinished = target.with_name(f"{target.name}.fxshard-merging-{secrets.token_hex(4)}")
    try:
        _write(unfinished, contents, selection, on_progress)
        with safe_open(unfinished, "pt") as file:  # what wrote it shall not be what judges it
            _require_same(unfinished, {name: file.get_slice(name) for name in file.keys()}, contents, selection)
        os.replace(unfinished, target)
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written ({error}). Choose another place, or make room.") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    return Merged(tensors=len(selection.names), size=target.stat().st_size, left_out=selection.left_out)


def _require_free(out: Path, target: Path, overwrite: bool) -> None:
    if target.is_dir():
        raise ConfigError(f"{out} is a folder. Name the file to write.")
    if target.exists() and not overwrite:
        raise ConfigError(f"{out} exists. Choose another name, or say --overwrite.")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent} to write {out.name} to.")


def _folder(path: Path) -> Path:
    """Return the folder that holds the checkpoint of `path`; torch's own, and what is unknown, is where it is."""
    if path.is_dir() and any(path.iterdir()) and not (path / manifest.NAME).is_file():
        return path
    return checkpoint_dir.find(path)


def _open(folder: Path) -> CheckpointIndex:
    if not (folder / manifest.NAME).is_file():
        return CheckpointIndex(folder)
    verify(folder, described := Manifest.read(folder))
    return CheckpointIndex(folder, written_by=described.torch)


def _select(contents: CheckpointIndex, everything: bool) -> _Selection:
    found = _Selection()
    has_model = any(len(path) > 1 for path, _ in contents.under(checkpoint_model.ROOT))
    for path, key in contents.keys.items():
        of_model = has_model and path[0] == checkpoint_model.ROOT and len(path) > 1
        name = ".".join(map(str, path[1:])) if of_model else key
        if has_model and not of_model and not everything:
            found.left_out[key] = "beside the model (--all adds it)"
        elif name == ("__metadata__" if key in contents.tensors else "format"):
            found.left_out[key] = "safetensors has that name for itself"
        elif key not in contents.tensors:
            _add_text(contents, found, key)
        elif name in found.names:
            raise ConfigError(f"{key} and {found.names[name]} would both be called {name}. Leave out --all.")
        else:
            found.names[name] = key
    if (contents.folder / checkpoint_dir.EXTRA).is_file():
        found.left_out[checkpoint_dir.EXTRA] = "it is read by torch.load"
    unknown = [key for key in found.names.values() if contents.tensors[key].properties.dtype not in _DTYPES]
    if unknown:
        listed = ", ".join(f"{key} ({contents.tensors[key].properties.dtype})" for key in unknown)
        raise CheckpointError(f"safetensors has no name for the dtype of: {listed}. Convert them before the save.")
    return found


def _add_text(contents: CheckpointIndex, found: _Selection, key: str) -> None:
    try:
        value: dict[str, Any] = {key: None}
        contents.read(value)
        found.texts[key] = json.dumps(unpacked(value[key]))
    except CheckpointError as error:  # damaged, or a Python object that is not loaded
        found.left_out[key] = str(error)
    except (TypeError, ValueError):
        found.left_out[key] = "JSON has no form for it"


def _write(
    path: Path, contents: CheckpointIndex, selection: _Selection, on_progress: Callable[[int, int], None]
) -> None:
    tensors = {name: contents.tensors[key] for name, key in selection.names.items()}
    # Larger elements first, as the library has it: every tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].properties.dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **selection.texts}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].size.numel() * tensors[name].properties.dtype.itemsize
        shape, dtype = shape_and_dtype(tensors[name])
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        done = 0
        for name in order:
            done += file.write(_bytes_of(contents, selection.names[name]))
            on_progress(done, end)
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(contents: CheckpointIndex, key: str) -> memoryview:
    values = {key: contents.room(key)}
    contents.read(values)
    return as_bytes(values[key]).numpy().data


def _require_same(path: Path, slices: dict[str, Any], contents: CheckpointIndex, selection: _Selection) -> None:
    found = {name: (slice_.get_shape(), slice_.get_dtype()) for name, slice_ in slices.items()}
    described = {name: shape_and_dtype(contents.tensors[key]) for name, key in selection.names.items()}
    if found != {name: (shape, _DTYPES[dtype]) for name, (shape, dtype) in described.items()}:
        raise CheckpointError(f"{path} was not written as it should have been. Look for a full or failing disk.")
