"""What a folder that torch.distributed.checkpoint wrote holds, and how to read it."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader, ReadItem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fxshard.errors import CheckpointError
from fxshard.state.fit import Announced
from fxshard.state.pytree import KeyPath
from fxshard.state.serializable import unpacked

INDEX = ".metadata"
"""The file in which torch lists what the others hold."""


class CheckpointIndex:
    """The index of a checkpoint."""

    def __init__(self, folder: Path, written_by: str = "another torch") -> None:
        """Read the index, which torch of version `written_by` wrote; raise `CheckpointError` if that fails."""
        self.folder = folder  # where it is
        if not (folder / INDEX).is_file():
            raise CheckpointError(f"{folder} is not a sharded checkpoint: it has no file {INDEX}.")
        try:
            self._metadata: Metadata = FileSystemReader(folder).read_metadata()
            described = self._metadata.state_dict_metadata
            paths = self._metadata.planner_data or {}
        except Exception as error:  # whatever unpickling a damaged file raises
            raise CheckpointError(
                f"{folder / INDEX} cannot be read: {type(error).__name__}: {error}. It was written by {written_by}, "
                f"and this is {torch.__version__}: an older torch may not read what a newer one has written."
            ) from error
        # path of each value -> its key in the checkpoint.
        self.keys: dict[KeyPath, str] = {tuple(paths.get(key, (key,))): key for key in described}
        # key -> shape and dtype of each value that is a tensor.
        self.tensors = {key: found for key, found in described.items() if isinstance(found, TensorStorageMetadata)}
        self._files: dict[str, list[str]] = {}
        for index, stored in (self._metadata.storage_data or {}).items():
            self._files.setdefault(index.fqn, []).append(stored.relative_path)

    def under(self, *start: str) -> Iterator[tuple[KeyPath, str]]:
        """Return path and key of each value whose path begins with `start`."""
        return ((path, key) for path, key in self.keys.items() if path[: len(start)] == start)

    def files_of(self, key: str) -> str:
        """Return the files that hold a value, to be named in an error."""
        return f"{self.folder} ({self._listed(key)})"

    def _listed(self, key: str) -> str:
        files = sorted(set(self._files.get(key, [])))
        return f"{', '.join(files[:4])}{', ...' if len(files) > 4 else ''}"

    def announced(self, path: KeyPath, key: str) -> Announced:
        """Describe a tensor as `path` of what is coming."""
        found = self.tensors[key]
        shape, dtype = tuple(found.size), found.properties.dtype
        return Announced(path=path, shape=shape, dtype=dtype, where=f" ({self._listed(key)})")

    def room(self, key: str) -> Tensor:
        """Return memory to read a tensor into that is not sharded here; raise as `require_whole`."""
        self.require_whole(key)
        shape, dtype = shape_and_dtype(self.tensors[key])
        return torch.empty(shape, dtype=dtype)

    def keys_in(self, file: str) -> list[str]:
        """Return the keys of all values that have a part in `file`, tensors first."""
        found = [key for key in self.keys.values() if file in self._files.get(key, [])]
        return sorted(found, key=lambda key: key not in self.tensors)

    def require_whole(self, key: str) -> None:
        """Raise `CheckpointError` if rows of a tensor are in no file; torch would leave them as they were."""
        found = self.tensors[key]
        stored = sum(math.prod(chunk.sizes) for chunk in found.chunks)
        if stored != math.prod(found.size):
            raise CheckpointError(
                f"{self.files_of(key)} holds {stored} of {math.prod(found.size)} elements of {key}: a part of the "
                "checkpoint was not saved. Load another checkpoint."
            )

    def read(self, values: dict[str, Any]) -> None:
        """Read into the tensors of `values`, and put what is not a tensor in their place; without collectives."""
        reader = _SelectiveReader(self.folder, self._metadata)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.load(values, storage_reader=reader, planner=_Planner(), no_dist=True)
            except CheckpointException as error:
                causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
                some = next(iter(values), "")
                where = f"{some} in {self.files_of(some)}" if len(values) == 1 else str(self.folder)
                raise CheckpointError(f"{where} cannot be read: {causes}") from error


class _SelectiveReader(FileSystemReader):
    """Reads the index once."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._read = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._read


class _Planner(DefaultLoadPlanner):
    """Takes keys as they are, and nothing from files that could run code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True, map_location="cpu")


def assemble(leaves: dict[KeyPath, Any]) -> dict[str, Any]:
    """Build the nested dicts and lists whose leaves stand at these paths."""
    root: dict[Any, Any] = {}
    for path, value in leaves.items():
        inner = root
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
        inner[path[-1]] = value
    return {key: _with_lists(value) for key, value in root.items()}


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return unpacked(value)
    inner = {key: _with_lists(each) for key, each in value.items()}
    is_list = all(isinstance(key, int) for key in inner)
    return [inner[i] for i in sorted(inner)] if inner and is_list else inner


def shape_and_dtype(tensor: Tensor | TensorStorageMetadata) -> tuple[list[int], torch.dtype]:
    """Return what must be equal for one to be loaded into the other."""
    if isinstance(tensor, Tensor):
        return list(tensor.shape), tensor.dtype
    return list(tensor.size), tensor.properties.dtype
