"""The numbers of this machine and its link: measured once, kept beside the compile cache, the same on all ranks.

[Note: measured hardware]
These numbers decide graphs, so all ranks of a group must count on the same. They agree where they are together anyway:
at the first `fully_shard` on the group, or where the one-line form compares their models; never while a graph is
compiled. A rank may not come there, so nothing is sent over the group before the store has said that all have come.
The first write to one key of the default process group's store (`compare_set`) decides, and no rank waits longer for it
than `TIMEOUT_S`:

- a rank that has a file of this kind of machine writes its numbers: the file of the first one counts for all;
- a rank that has none says that it has come, and waits. The last one decides that they measure, unless the group has
  seen other collectives on one rank than on another: then something is under way on it;
- a rank that has waited too long, must not measure or has no memory for it decides for the table.

So ranks that shard over crossing meshes in different orders, or without each other, wait once and count on the table.
Rank 0 of the group writes the file. A rank that comes after the decision reads it in the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fxshard import hardware, options, torch_private
from fxshard.cost.calibration import Calibration
from fxshard.errors import ConfigError
from fxshard.hardware import HardwareSpec
from fxshard.ranks.rendezvous import Rendezvous, is_alone
from fxshard.runtime import gloo, mesh_axes
from fxshard.runtime.unit import Unit

TIMEOUT_S = 5.0
"""Seconds that a rank waits for the others: as much as building a model may take longer on one than on another."""

EMULATED = "emulated"
"""Name in torch.distributed of the backend whose other ranks are emulated."""

_TABLE, _MEASURE = "table", "measure"  # what may be decided, besides numbers

_log = logging.getLogger(__name__)

_GroupKey = tuple[str, frozenset[tuple[int, ...]]]  # type of device, ranks of each group


def agree(mesh: DeviceMesh, timeout: float = TIMEOUT_S, *, whole: DeviceMesh | None = None) -> None:
    """Have the ranks of a mesh count on the same numbers from now on; see [Note: measured hardware].

    Once per mesh, where all its ranks come, or some of them have waited too long. Does nothing for a mesh that has one
    rank, or whose ranks do not exist.

    Args:
        mesh: what parameters are sharded over; its groups may be stand-ins.
        timeout: seconds to wait for the others.
        whole: the mesh with the axis of tensor parallelism behind those of `mesh`, if parameters are on it.
    """
    axes = _Axes(mesh, whole)
    if not all(isinstance(group, dist.ProcessGroup) for group in axes.all) or not axes.real:
        return
    known, key = _known(), _key(axes.all, mesh.device_type)
    if key not in known:
        known[key] = _Decision(axes, timeout).decide()
        _log.info("fxshard: %d ranks count on %s.", len(axes.ranks), known[key].label)


def forget() -> None:
    """Measure anew at the next `agree`: for a link in this process, whose speed has changed."""
    _known().clear()


def numbers_for(groups: Iterable[object], device: torch.device) -> HardwareSpec:
    """What all ranks count on that run a graph over these groups; the table's numbers where that is nothing.

    Ranks that meet in one group may be in different ones beside it: where there are several, and they are not the axes
    of one mesh, only what all ranks of the job have agreed on is the same on all.
    """
    known = _known() if dist.is_initialized() else {}
    real = [_launched_on(group) for group in groups if isinstance(group, dist.ProcessGroup)]
    found = known.get(_key(real, device.type))
    whole = [group for group in real if dist.get_world_size(group) == dist.get_world_size()]
    if found is None and whole:
        found = known.get(_key(whole[:1], device.type))
    return found or hardware.of_device(device)


def numbers_of(units: Iterable[Unit], given: str | None = None) -> HardwareSpec:
    """What the ranks of these units count on: what an option names, else what they have agreed on."""
    if given is not None:
        return hardware.load(given)
    several = list({id(unit): unit for unit in units}.values())
    groups = [group for unit in several for group in mesh_axes.groups(unit.mesh)]
    groups += [g for unit in several for m in unit.members if m.tensor_parallel for g in m.tensor_parallel.groups]
    return numbers_for(groups, several[0].device)


def measure(mesh: DeviceMesh, progress: Callable[[str], None]) -> tuple[HardwareSpec, Path]:
    """Measure now, with all ranks of the mesh, and keep the numbers for `agree`; and the file where they are.

    Products of several sizes and copies are measured, too; `progress` gets a line before each part.
    """
    device, axes = _here(mesh.device_type), _Axes(mesh)
    spec = _named(axes.calibration(device).run(progress), device)
    file = _file_of(axes)
    if dist.get_rank() == axes.ranks[0]:
        _write(file, spec.to_json())
    return spec, file


@functools.cache
def _by_world() -> weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_GroupKey, HardwareSpec]]:
    """What was agreed on in each default process group that lives."""
    return weakref.WeakKeyDictionary()


def _known() -> dict[_GroupKey, HardwareSpec]:
    world = dist.group.WORLD
    assert world is not None
    return _by_world().setdefault(world, {})


def _key(groups: Iterable[dist.ProcessGroup], device_type: str) -> _GroupKey:
    return device_type, frozenset(tuple(dist.get_process_group_ranks(group)) for group in groups)


def _launched_on(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the present group of that name: a mesh that DTensor's caches hold may be of an earlier default group."""
    try:
        found = torch_private.process_group_of(group.group_name)
    except RuntimeError:  # torch knows no such name
        found = None
    if found is None or dist.get_world_size(found) != group.size():
        raise mesh_axes.destroyed(group.group_name, group.size())
    return found


class _Axes:
    """The axes of a mesh, that which shards first, and of the one that it is a part of; groups may be stand-ins."""

    def __init__(self, mesh: DeviceMesh, whole: DeviceMesh | None = None) -> None:
        self.mesh = whole or mesh
        beside = self.mesh.get_all_groups()[mesh.ndim :] if whole else []
        self.all = [*mesh_axes.groups(mesh), *beside]
        self._names = {id(group): "tensor" if group in beside else "replica" for group in self.all[1:]}

    @property
    def ranks(self) -> list[int]:
        return mesh_axes.ranks_of(self.mesh)

    @property
    def real(self) -> list[dist.ProcessGroup]:
        """Those of the groups that send anything."""
        return [group for group in self.all if _is_real(group)]

    def calibration(self, device: torch.device) -> Calibration:
        return Calibration(self.real, device, [self._names[id(group)] for group in self.real[1:]])


def _is_real(group: dist.ProcessGroup) -> bool:
    """Whether collectives of the group take time: it has several ranks, here or on an emulated link."""
    backend = dist.get_backend(group)
    if dist.get_world_size(group) == 1 or backend == "fake":
        return False
    return backend == EMULATED or not is_alone()


class _Decision:
    """How the ranks of one mesh come to the same numbers."""

    def __init__(self, axes: _Axes, timeout: float) -> None:
        self._axes, self._device, self._timeout = axes, _here(axes.mesh.device_type), timeout
        self._at_store = Rendezvous(f"hardware/{axes.mesh.device_type}/{axes.mesh.shape}", axes.ranks)

    def decide(self) -> HardwareSpec:
        if not options.measures_hardware():
            return self._take(_TABLE if is_alone() else self._at_store.decide(_TABLE))
        if is_alone():  # the speed of an emulated link is in no file's name
            return _named(self._axes.calibration(self._device).run(), self._device)
        kept = _read(_file_of(self._axes))
        if kept is not None:
            return self._take(self._at_store.decide(kept.to_json()))
        try:
            calibration = self._axes.calibration(self._device)
        except RuntimeError as error:
            _log.warning("fxshard: no memory to measure the link in, so its speed is assumed: %s", error)
            return self._take(self._at_store.decide(_TABLE))
        said = self._meet()
        return self._measured(calibration) if said == _MEASURE else self._take(said)

    def _meet(self) -> str:
        """Say that this rank has come, and wait for what is decided; `_MEASURE` only if all stand here."""
        ours = str([torch_private.num_collectives(group, self._device) for group in self._axes.real])
        if self._at_store.arrive(ours):
            return self._at_store.decide(_MEASURE if {*self._at_store.texts().values()} == {ours} else _TABLE)
        if said := self._at_store.decision(self._timeout):
            return said
        if (said := self._at_store.decide(_TABLE)) == _TABLE:
            _log.warning(
                "fxshard: the %d ranks of a mesh did not come to fully_shard within %.0f s of each other, so "
                "the speed of their link is assumed. `fxshard calibrate`, started as training is, measures it once.",
                len(self._axes.ranks),
                self._timeout,
            )
        return said

    def _measured(self, calibration: Calibration) -> HardwareSpec:
        spec = _named(calibration.run(), self._device)
        if dist.get_rank() == self._axes.ranks[0]:
            _write(_file_of(self._axes), spec.to_json())
            # For groups of the same ranks that meet at this store later.
            self._at_store.write("decision", spec.to_json())
        return spec

    def _take(self, decision: str) -> HardwareSpec:
        # Nobody is told to measure without having met: those who were are gone, and so is their group.
        return hardware.of_device(self._device) if decision in (_TABLE, _MEASURE) else hardware.load(decision)


# ---- the file


def _here(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _named(spec: HardwareSpec, device: torch.device) -> HardwareSpec:
    return dataclasses.replace(spec, source=f"{spec.source}, {_device_name(device)}")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return processor()


@functools.cache
def processor() -> str:
    """Return the name of this machine's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file_of(given: _Axes) -> Path:
    """Where numbers of such a machine and such a mesh are kept: beside the compile cache."""
    mesh, axes = given.mesh, given.real
    device, per_machine = _here(mesh.device_type), options.ranks_per_machine()
    on = [{rank // per_machine for rank in dist.get_process_group_ranks(axis)} if per_machine else () for axis in axes]
    what: Mapping[str, object] = {
        "device": (device.type, _device_name(device)),
        "host": (platform.machine(), processor(), torch.get_num_threads() if device.type == "cpu" else 0),
        "backend": gloo.backend_of(axes[0], device.type),
        "world_size": dist.get_world_size(),
        "axes": [(dist.get_world_size(axis), len(machines)) for axis, machines in zip(axes, on, strict=True)],
        "torch": torch.__version__,
    }
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    shape = "x".join(map(str, mesh.shape))
    name = f"{device.type}-{shape}-of-{dist.get_world_size()}-{digest}.json"
    return Path(options.compile_cache_dir() or torch_private.default_cache_dir()) / "fxshard" / "hardware" / name


def _read(file: Path) -> HardwareSpec | None:
    """What is kept in a file; nothing if it is not there or is damaged."""
    if not file.is_file():
        return None
    try:
        return hardware.read(file.read_text(), file)
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        _log.warning("fxshard: %s could not be read, and its numbers are measured again: %s", file, error)
        return None


def _write(file: Path, text: str) -> None:
    """Write all of it, or nothing."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
            part.write(text)
        try:
            os.replace(part.name, file)
        except OSError:
            os.unlink(part.name)
            raise
    except OSError as error:
        _log.warning("fxshard: measured numbers could not be kept, and will be measured again: %s", error)
