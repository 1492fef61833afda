"""Whether the files of a checkpoint are those that were written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fxshard.errors import CheckpointError
from fxshard.state.dcp_reader import INDEX, CheckpointIndex
from fxshard.state.manifest import Manifest

_NUM_NAMES = 5  # of what a damaged file holds

T = TypeVar("T")


class Reading:
    """Reads one checkpoint: not a part of it, and a part of the one that takes its place meanwhile.

    Attributes:
        folder: where it is.
        manifest: what it is.
    """

    def __init__(self, folder: Path) -> None:
        """Read the manifest, which was there a moment ago.

        Raises:
            CheckpointError: it is damaged or gone.
        """
        self.folder = folder
        self._mark = Manifest.mark(folder)
        self.manifest = self.whole(lambda: Manifest.read(folder))

    def whole(self, work: Callable[[], T]) -> T:
        """Do `work`, which reads, and raise if there is another checkpoint now: what was read may be of both.

        Raises:
            CheckpointError: there is.
        """
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
    """Compare all files with the manifest; each rank reads its share of them.

    Raises:
        CheckpointError: files are missing or damaged; names them, and what they hold.
    """
    found = manifest.problems(folder, rank, world_size)
    problems = [f"{name} {problem}{_held_by(folder, manifest, name)}" for name, problem in found]
    if problems:
        raise CheckpointError(
            f"the checkpoint {folder} is damaged: {'; '.join(problems)}. Nothing was loaded; load another one."
        )


def _held_by(folder: Path, manifest: Manifest, name: str) -> str:
    """Which keys a damaged file holds, as far as the index can still be trusted."""
    if name == INDEX or INDEX not in manifest.files or manifest.problem(folder, INDEX) is not None:
        return ""
    try:
        keys = CheckpointIndex(folder).keys_in(name)
    except CheckpointError:  # of a newer torch
        return ""
    more = f" and {len(keys) - _NUM_NAMES} more" if len(keys) > _NUM_NAMES else ""
    return f" (it holds {', '.join(keys[:_NUM_NAMES])}{more})" if keys else ""
