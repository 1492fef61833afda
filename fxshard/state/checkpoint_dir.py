"""Where a checkpoint stands, and how a new one takes its place.

[Note: a checkpoint is never lost]
`path` is a folder, and a folder cannot be replaced in one step. So a save writes `path.fxshard-saving-<id>`, syncs it,
and writes its manifest last. Then it renames `path` to `path.fxshard-former` and the new folder to `path`, and removes
the former. At every moment one of these holds:

    path has a manifest                      it is the checkpoint, the former or the new one
    there is no path, path.fxshard-former    it is the checkpoint: the save was ended between the two renames
    has a manifest

`load_checkpoint` looks in this order. The next save first renames a former that stands alone back to `path`, then
removes what else an ended save has left. Folders that hold files of somebody else are never renamed or removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

from fxshard.errors import CheckpointError, ConfigError
from fxshard.state import manifest
from fxshard.state.manifest import sync_folder

_log = logging.getLogger(__name__)

EXTRA = "extra.pt"
_SAVING = ".fxshard-saving-"
_FORMER = ".fxshard-former"
_OURS = re.compile(
    rf"__\d+_\d+\.distcp|\.metadata(\.tmp)?|{re.escape(manifest.NAME)}(\.tmp)?|{re.escape(EXTRA)}"
    r"|\.nfs[0-9a-f]+"  # what NFS keeps of a file that was removed while it was open
)


def resolve(path: object) -> Path:
    """Return the folder that `path` means, links followed; raise `ConfigError` if it is no path."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"path must be the path of a folder, got {path!r}.")
    return Path(os.fsdecode(path)).resolve()


def find(path: Path) -> Path:
    """Return the folder that holds the checkpoint of `path`; raise `CheckpointError` if there is none."""
    if _is_complete(path):
        return path
    former = _former(path)
    if _is_absent(path) and _is_complete(former):
        _log.warning("%s was left by a save that did not end; loading the checkpoint before it, %s", path, former)
        return former
    if _is_absent(path):
        raise CheckpointError(f"there is no checkpoint at {path}. Save one with fxshard.save_checkpoint first.")
    raise CheckpointError(
        f"{path} has no {manifest.NAME}: fxshard.save_checkpoint did not write it, or not to its end. What "
        "torch.distributed.checkpoint.save wrote is read by torch.distributed.checkpoint.load."
    )


def prepare(path: Path) -> None:
    """Make room for a save to `path`; raise `ConfigError` if it is a file, or holds others than a checkpoint's."""
    missing = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)
    former = _former(path)
    for folder in (path, former):
        _require_ours(folder)
    if _is_absent(path) and _is_complete(former):
        former.rename(path)
        sync_folder(path.parent)
    remove(former)
    for leftover in sorted(path.parent.iterdir()):
        if leftover.name.startswith(path.name + _SAVING):
            remove(leftover)


def require_apart(path: Path) -> None:
    """Raise `ConfigError` if `path` is or holds the working folder: a save would take it away from this process."""
    working = Path.cwd()
    if path in (working, *working.parents):
        raise ConfigError(
            f"{path} is the working folder or holds it, and a save puts another folder in its place. Name a folder "
            "inside of it."
        )


def unfinished(path: Path, name: str) -> Path:
    """Return where the save `name` to `path` writes."""
    return path.with_name(path.name + _SAVING + name)


def commit(folder: Path, path: Path) -> None:
    """Put `folder`, which is complete and synced, in the place of `path`; say which is there if that fails."""
    former = _former(path)
    try:
        if not _is_absent(path):
            path.rename(former)
            sync_folder(path.parent)
        folder.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        if _is_absent(path) and _is_complete(former):
            with contextlib.suppress(OSError):  # load_checkpoint finds it under the other name as well
                former.rename(path)
        raise CheckpointError(f"{path} could not be replaced ({error}): {_what_is_left(folder, path)}.") from error
    try:
        remove(former)
    except OSError as error:
        _log.warning("%s was saved; %s, which it replaces, could not be removed (%s)", path, former, error)


def _what_is_left(folder: Path, path: Path) -> str:
    if not folder.exists():
        return "it is the new checkpoint, but may not outlive a loss of power"
    if _is_complete(path) or _is_complete(_former(path)):
        return "load_checkpoint finds the one that was there before"
    return "there was none before, and there is none now"


def _former(path: Path) -> Path:
    return path.with_name(path.name + _FORMER)


def _is_complete(folder: Path) -> bool:
    return (folder / manifest.NAME).is_file()


def _is_absent(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def _require_ours(folder: Path) -> None:
    if _is_absent(folder):
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; a checkpoint is a folder. Choose another path.")
    foreign = sorted(entry.name for entry in folder.iterdir() if not _OURS.fullmatch(entry.name))
    if foreign or (not _is_complete(folder) and not folder.name.endswith(_FORMER)):
        found = f"holds {', '.join(foreign[:5])}" if foreign else f"has no {manifest.NAME}"
        raise ConfigError(
            f"{folder} {found}: fxshard.save_checkpoint did not write that, and would remove it with the checkpoint "
            "that it replaces. Choose another path, or move the folder away."
        )


def remove(folder: Path) -> None:
    """Remove a folder, its manifest first: what is left of it is no checkpoint."""
    (folder / manifest.NAME).unlink(missing_ok=True)
    if folder.is_dir():
        shutil.rmtree(folder)


def discard(folder: Path) -> None:
    """Remove what a save that failed has written, as far as that goes; the next save removes the rest."""
    with contextlib.suppress(OSError):
        remove(folder)
