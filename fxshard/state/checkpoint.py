"""Sharded checkpoints that cannot be lost: `save_checkpoint` and `load_checkpoint`.

The files are those of `torch.distributed.checkpoint`, with the entries "model" and "optim"; a manifest and the extra
stand beside them. How a checkpoint takes the place of the one before it: [Note: a checkpoint is never lost].
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.optim import Optimizer

from fxshard.errors import CheckpointError, ConfigError, FxshardError, RankMismatchError
from fxshard.state import checkpoint_dir, checkpoint_model, checkpoint_optimizer, serializable
from fxshard.state.dcp_reader import CheckpointIndex
from fxshard.state.manifest import FileEntry, Manifest, Reading, verify
from fxshard.state.names import module_in, names_of, require_optimizer
from fxshard.state.ranks import Ranks, require_equal_slices, require_one_set
from fxshard.state.user_hooks import extra_states, handover


def save_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optim: Optimizer | None = None, *, extra: Any = None
) -> None:
    """Write the state of `model` and `optim`, sharded, to the folder `path`, in place of the checkpoint there.

    All ranks of the model call it with the same arguments; each writes the rows it has, rank 0 what is not sharded. The
    checkpoint that was at `path` stays until the new one is complete and synced to disk. The state is read, never
    changed. Each error is raised on every rank. docs/checkpoints.md has more.

    Args:
        path: a folder in a file system that all ranks share; its parents are made.
        model: sharded by fxshard or by FSDP2, or not at all; compiled or not.
        optim: the optimizer of its parameters.
        extra: what else belongs to it, the same on every rank: numbers, strings, `None`, tensors that are not sharded,
            and dicts, lists, tuples and sets of these, such as the `state_dict()` of a scheduler.

    Raises:
        ConfigError: an argument of another kind; something that a checkpoint cannot hold; `path` holds other files.
        RankMismatchError: the ranks pass different paths, models, optimizers, groups, states or extras.
        CheckpointError: it could not be written, or a rank was lost; the checkpoint that was there still is.

    Source: the file format is that of torch.distributed.checkpoint; write, sync, rename is how databases do it.
    """
    ranks = Ranks.of(model)
    saving = _Saving(path, model, optim, extra)
    with _losing_ranks(f"the save to {path}"):
        ranks.compare("save_checkpoint", ranks.together(saving.describe), kind=RankMismatchError)
        require_equal_slices(module_in(model), ranks)
        target = saving.target
        ranks.together(lambda: checkpoint_dir.prepare(target) if ranks.rank == 0 else None)
        folder = checkpoint_dir.unfinished(target, ranks.exchange(secrets.token_hex(4))[0])
        try:
            _write_shards(folder, saving.state, ranks)
            files = _hash_files(folder, saving.extra, ranks)
            finished = saving.manifest(files, ranks.size)
            ranks.together(lambda: _finish(folder, target, finished) if ranks.rank == 0 else None)
        except BaseException:
            if ranks.rank == 0:
                checkpoint_dir.discard(folder)
            raise


def load_checkpoint(path: str | os.PathLike[str], model: nn.Module, optim: Optimizer | None = None) -> Any:
    """Read the checkpoint at `path` into `model` and `optim`, bitwise; any number of ranks may have written it.

    All ranks of the model call it with the same arguments. All is compared, and read into CPU memory, before a change.
    Parameters and state that are there are written in place. Each error is raised on every rank and leaves
    model and optimizer as they were, but for what hooks of the model raise or rename while it is written. Load only
    what you trust: torch's index of a checkpoint is a pickle.

    Args:
        path: as for `save_checkpoint`.
        model: with the parameters and buffers that were saved; sharded in any way, or not at all.
        optim: of the class that was saved, over the same groups of parameters. Without it only the model is loaded.

    Returns:
        The `extra` that was saved, its tensors on the CPU, on every rank.

    Raises:
        ConfigError: an argument of another kind; a parameter on the meta device.
        RankMismatchError: the ranks pass different paths, models, optimizers or groups.
        CheckpointError: there is no checkpoint, or a file is missing or damaged, or a key, shape or dtype does not fit.
    """
    ranks = Ranks.of(model)
    loading = _Loading(path, model, optim)
    with _losing_ranks(f"the load of {path}"):
        ranks.compare("load_checkpoint", ranks.together(loading.describe), kind=RankMismatchError)
        found = ranks.together(lambda: checkpoint_dir.find(loading.target) if ranks.rank == 0 else None)
        folder = Path(ranks.exchange(str(found))[0])
        reading = ranks.together(lambda: Reading(folder))
        described = reading.manifest
        files = {name: str(entry) for name, entry in described.files.items()}
        ranks.compare("load_checkpoint", ranks.together(lambda: reading.whole(lambda: files)), kind=RankMismatchError)
        ranks.together(lambda: reading.whole(lambda: verify(folder, described, ranks.rank, ranks.size)))
        ranks.together(lambda: reading.whole(lambda: loading.stage(folder, described)))
        whole = None if loading.of_optim is None else loading.of_optim.whole
        # The users' code comes first, for it may refuse what it is given.
        with extra_states(model, loading.of_model.state) as set_extra_states, handover(optim, whole) as hand_over:
            ranks.together(set_extra_states)
            ranks.together(hand_over)
        ranks.together(loading.commit)
    return loading.extra


@contextlib.contextmanager
def _losing_ranks(what: str) -> Iterator[None]:
    """Say what it means for a checkpoint that a collective failed because a rank is gone."""
    try:
        yield
    except FxshardError:
        raise
    except RuntimeError as error:
        raise CheckpointError(
            f"{what} did not end, for the ranks have lost each other ({error}). load_checkpoint finds the checkpoint "
            "that was there before, or the new one if it was complete."
        ) from error


def _require_kinds(model: object, optim: object) -> None:
    require_one_set(module_in(model))
    if optim is not None:
        require_optimizer(optim)


class _Saving:
    def __init__(self, path: object, model: nn.Module, optim: Optimizer | None, extra: Any) -> None:
        self._path, self._model, self._optim = path, model, optim
        self.extra = extra
        self.target: Path
        self.state: dict[str, Any]

    def describe(self) -> dict[str, str]:
        self.target = checkpoint_dir.resolve(self._path)
        checkpoint_dir.require_apart(self.target)
        _require_kinds(self._model, self._optim)
        self.extra = serializable.storable(self.extra, "extra")
        self.state = {checkpoint_model.ROOT: checkpoint_model.state_of(self._model)}
        facts = {"the call": "save_checkpoint", "path": str(self.target), "optimizer": "none"}
        if self._optim is not None:
            self.state[checkpoint_optimizer.ROOT] = checkpoint_optimizer.state_of(self._model, self._optim)
            facts |= checkpoint_optimizer.facts_of(self._model, self._optim)
        facts |= checkpoint_model.facts_of(self.state[checkpoint_model.ROOT])
        return facts | dict(serializable.facts(self.extra, "extra"))

    def manifest(self, files: dict[str, FileEntry], world_size: int) -> Manifest:
        optim = self._optim
        placements = {} if optim is None else checkpoint_optimizer.placements_of(self._model, optim)
        name = None if optim is None else type(optim).__name__
        return Manifest(
            files=files, world_size=world_size, torch=str(torch.__version__), optimizer=name, placements=placements
        )


def _write_shards(folder: Path, state: dict[str, Any], ranks: Ranks) -> None:
    # What is on all ranks is written by the first: buffers of one module come from one rank.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    writer, alone = FileSystemWriter(folder), ranks.group is None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(state, storage_writer=writer, planner=planner, process_group=ranks.group, no_dist=alone)
        except CheckpointException as error:
            causes = (f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items())
            raise CheckpointError(f"{folder} could not be written: {'; '.join(causes)}.") from error


def _hash_files(folder: Path, extra: Any, ranks: Ranks) -> dict[str, FileEntry]:
    """Return name and content of all files; each rank reads those that it wrote."""

    def own_files() -> dict[str, FileEntry]:
        if ranks.rank == 0 and extra is not None:
            with (folder / checkpoint_dir.EXTRA).open("wb") as file:
                torch.save(extra, file)
                file.flush()
                os.fsync(file.fileno())
            _require_loadable(folder / checkpoint_dir.EXTRA)
        names = sorted(entry.name for entry in folder.iterdir())
        return {name: FileEntry.of(folder / name) for name in names if _writer(name, ranks.size) == ranks.rank}

    found = ranks.together(own_files)
    return {name: entry for files in ranks.exchange(found) for name, entry in files.items()}


def _require_loadable(path: Path) -> None:
    try:
        torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise ConfigError(f"extra could not be read back, so it would not load: {error}. Convert it first.") from error


def _writer(name: str, world_size: int) -> int:
    written = re.match(r"__(\d+)_", name)
    rank = int(written[1]) if written else 0
    return rank if rank < world_size else 0


def _finish(folder: Path, target: Path, finished: Manifest) -> None:
    unseen = [name for name in finished.files if not (folder / name).exists()]
    if unseen:
        raise ConfigError(
            f"rank 0 does not see {', '.join(unseen)} in {folder}, which other ranks have written: path must be in a "
            "file system that all ranks share."
        )
    finished.write(folder)
    checkpoint_dir.commit(folder, target)


class _Loading:
    def __init__(self, path: object, model: nn.Module, optim: Optimizer | None) -> None:
        self._path, self._model, self._optim = path, model, optim
        self.extra: Any = None
        self.target: Path
        self.of_model: checkpoint_model.ModelStaging
        self.of_optim: checkpoint_optimizer.OptimizerStaging | None = None

    def describe(self) -> dict[str, str]:
        self.target = checkpoint_dir.resolve(self._path)
        _require_kinds(self._model, self._optim)
        facts = {"the call": "load_checkpoint", "path": str(self.target), "optimizer": "none"}
        if self._optim is not None:
            groups = names_of(self._model, self._optim).groups
            facts |= {"optimizer": type(self._optim).__name__, **dict(serializable.facts(groups, "param_groups"))}
        return facts | checkpoint_model.facts_of(checkpoint_model.state_of(self._model))

    def stage(self, folder: Path, described: Manifest) -> None:
        contents, optim = CheckpointIndex(folder, written_by=described.torch), self._optim
        if optim is not None and described.optimizer != (own := type(optim).__name__):
            held = f"the state of {described.optimizer}" if described.optimizer else "no optimizer"
            raise CheckpointError(
                f"{folder} holds {held}, and optim is {own}. Nothing was loaded; leave optim out to load the model "
                "alone."
            )
        self.of_model = checkpoint_model.ModelStaging(contents, self._model)
        if optim is not None:
            self.of_optim = checkpoint_optimizer.OptimizerStaging(contents, self._model, optim, described.placements)
        if checkpoint_dir.EXTRA in described.files:
            self.extra = torch.load(folder / checkpoint_dir.EXTRA, weights_only=True, map_location="cpu")

    def commit(self) -> None:
        self.of_model.commit()
        if self.of_optim is not None:
            self.of_optim.commit()
