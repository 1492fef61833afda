"""The manifest of a checkpoint: the size and SHA-256 of each of its files, written last and compared before a load."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fxshard.errors import CheckpointError
from fxshard.state.dcp_reader import INDEX, CheckpointIndex

NAME = "fxshard.json"
_FORMAT = "fxshard checkpoint"
_VERSION = 1
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_NUM_NAMES = 5  # of what a damaged file holds

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What a file must be: its size in bytes, and the SHA-256 of its content in hex."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Read the file at `path`."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return cls(size=file.tell(), sha256=digest)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder must hold to be a checkpoint.

    `placements` maps the key of a tensor in the optimizer's state that is not placed as its parameter is -> per mesh
    axis the dimension that is sharded, `None` for a replica; nothing for a plain tensor.
    """

    files: dict[str, FileEntry]  # name -> what it must be
    world_size: int  # ranks that wrote it
    torch: str  # the version that wrote it
    optimizer: str | None = None  # class of the one whose state it holds
    placements: dict[str, list[int | None]] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it under another name, then rename it: a folder with a manifest is complete."""
        body = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}
        unfinished = folder / (NAME + ".tmp")
        with unfinished.open("w") as file:
            json.dump({**body, "sha256": _digest(body)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(folder / NAME)
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest in `folder`; raise `CheckpointError` if it is damaged or of a later release."""
        path = folder / NAME
        try:
            body = json.loads(path.read_bytes())
            expected = body.pop("sha256")
            if body.pop("format") != _FORMAT or expected != _digest({"format": _FORMAT, **body}):
                raise ValueError("its own SHA-256 is another")
            version = body.pop("version")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}). Load another checkpoint.") from error
        if version != _VERSION:
            raise CheckpointError(
                f"{path} has version {version} of the format, and this fxshard reads version {_VERSION}. Use the "
                "fxshard that wrote it, or a later one."
            )
        files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
        return cls(files=files, **body)

    @staticmethod
    def mark(folder: Path) -> tuple[int, ...] | None:
        """Return what no other manifest in `folder` would have, even one of equal content; `None` if there is none."""
        try:
            with (folder / NAME).open("rb") as file:  # a network file system looks at the server when a file is opened
                found = os.fstat(file.fileno())
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return None
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def problem(self, folder: Path, name: str) -> str | None:
        """Say what is wrong with one file, `None` if nothing is."""
        expected, path = self.files[name], folder / name
        if not path.exists():
            return "is missing"
        if (size := path.stat().st_size) != expected.size:
            return f"has {size} bytes, expected {expected.size}"
        if (found := FileEntry.of(path).sha256) != expected.sha256:
            return f"is damaged: its SHA-256 is {found}, expected {expected.sha256}"
        return None


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make what was created and renamed in `folder` outlive a power loss, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)


class Reading:
    """Reads the checkpoint in `folder` and notices if another one takes its place meanwhile."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest, which was there a moment ago; raise `CheckpointError` if it is damaged or gone."""
        self.folder = folder
        self._mark = Manifest.mark(folder)
        self.manifest = self.whole(lambda: Manifest.read(folder))

    def whole(self, work: Callable[[], T]) -> T:
        """Do `work`, which reads; raise `CheckpointError` if there is another checkpoint now: it may have read both."""
        try:
            found = work()
        except Exception:
            with contextlib.suppress(OSError):  # the first error says more
                self._require_same()  # files that are gone look like damage
            raise
        self._require_same()
        return found

    def _require_same(self) -> None:
        if self._mark is None or Manifest.mark(self.folder) != self._mark:  # None: between the old one and the new
            raise CheckpointError(
                f"{self.folder} was replaced or removed while it was read; load again. Nothing was loaded."
            )


def verify(folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> None:
    """Compare all files with the manifest; each rank reads its share of them."""
    found = {name: manifest.problem(folder, name) for name in sorted(manifest.files)[rank::world_size]}
    problems = [f"{name} {problem}{_held_by(folder, manifest, name)}" for name, problem in found.items() if problem]
    if problems:
        raise CheckpointError(
            f"the checkpoint {folder} is damaged: {'; '.join(problems)}. Nothing was loaded; load another one."
        )


def _held_by(folder: Path, manifest: Manifest, name: str) -> str:
    """Say which keys a damaged file holds, as far as the index can still be trusted."""
    if name == INDEX or INDEX not in manifest.files or manifest.problem(folder, INDEX) is not None:
        return ""
    try:
        keys = CheckpointIndex(folder).keys_in(name)
    except CheckpointError:  # of a newer torch
        return ""
    more = f" and {len(keys) - _NUM_NAMES} more" if len(keys) > _NUM_NAMES else ""
    return f" (it holds {', '.join(keys[:_NUM_NAMES])}{more})" if keys else ""
