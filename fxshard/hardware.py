"""What a rank and its link can do: the numbers that turn FLOPs and bytes into seconds."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fxshard.errors import ConfigError, nearest
from fxshard.ir.text import dtype_text

TABLE = "assumed"
"""The source of numbers that nobody measured here."""

_DTYPES = sorted({dtype_text(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})


class Link(NamedTuple):
    """What a collective of one process group runs over."""

    latency: float  # seconds before its first byte moves
    hop: float  # seconds that each rank after the first adds
    bandwidth: float  # bus bandwidth of one rank, B/s


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """One rank's device and its link to the others.

    Attributes:
        name: what it is called.
        peak_flops: short name of a dtype (`bf16`, `f32`) -> achievable dense FLOP/s.
        memory_bandwidth: B/s of device memory, reads and writes together.
        link_latency: seconds that a collective takes before its first byte moves.
        link_bandwidth: bus bandwidth of one rank in a collective, B/s.
        memory_gib: device memory.
        host_bandwidth: of the link between the host's memory and the device's, in each direction, B/s.
        kernel_overhead: seconds that each kernel costs besides its work.
        gather_tensor_overhead: seconds that each tensor after the first adds to a coalesced all_gather.
        reduce_tensor_overhead: the same for a coalesced reduce_scatter.
        launch_overhead: seconds that a launch and its wait cost the rank besides what the link takes; on a CPU compute
            stands so long.
        replica_latency: `link_latency` between ranks that hold the same shard; `None`: no other link is between them.
        replica_bandwidth: `link_bandwidth` there.
        tensor_latency: `link_latency` between the ranks of tensor parallelism; `None`: no other link is between them.
        tensor_bandwidth: `link_bandwidth` there.
        data_sheet_flops: as `peak_flops`, by the data sheet: what the share that a model reaches (MFU) is of.
        gemm_efficiency: pairs (side of a square product, share of `peak_flops`) in rising order; none: all of it.
        attention_efficiency: share of `peak_flops` that fused attention reaches, forward and backward.
        hop_latency: seconds that each further rank inside a node adds to a collective.
        ranks_per_node: that share the fast link; 0: there is no other link.
        network_latency: seconds that each further node adds.
        network_bandwidth: of each rank's part of what a node has between nodes, in each direction, B/s.
        host_overhead: seconds that the host takes to launch one kernel; 0: it is always ahead of the device.
        collective_share: share of compute's speed that the kernels of a collective take while it runs, beside that of
            the memory bandwidth that it needs; 0: it takes nothing.
        source: where the numbers are from, in words; decides nothing.
        sources: field -> where its number is from.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    link_latency: float
    link_bandwidth: float
    memory_gib: float
    kernel_overhead: float
    gather_tensor_overhead: float
    reduce_tensor_overhead: float
    launch_overhead: float = 0.0
    replica_latency: float | None = None
    replica_bandwidth: float | None = None
    host_bandwidth: float = 25e9
    tensor_latency: float | None = None
    tensor_bandwidth: float | None = None
    data_sheet_flops: Mapping[str, float] = field(default_factory=dict)
    gemm_efficiency: tuple[tuple[float, float], ...] = ()
    attention_efficiency: tuple[float, float] = (1.0, 1.0)
    hop_latency: float = 0.0
    ranks_per_node: int = 0
    network_latency: float = 0.0
    network_bandwidth: float | None = None
    host_overhead: float = 0.0
    collective_share: float = 0.0
    source: str = field(default=TABLE, compare=False)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.source, str):
            raise ConfigError(f"hardware {self.name!r}: name and source must be texts, got source={self.source!r}.")
        if not self.peak_flops:
            raise ConfigError(f"hardware {self.name!r}: peak_flops names no dtype; give at least one FLOP/s.")
        unknown = [_near(name, _DTYPES) for name in (*self.peak_flops, *self.data_sheet_flops) if name not in _DTYPES]
        if unknown:
            raise ConfigError(f"hardware {self.name!r}: peak_flops has unknown dtypes: {', '.join(unknown)}.")
        tables = {"peak_flops": self.peak_flops, "data_sheet_flops": self.data_sheet_flops}
        numbers = {f"{name}.{dtype}": value for name, table in tables.items() for dtype, value in table.items()}
        numbers |= {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type == "float"}
        numbers |= self._shares()
        overheads = (
            *("kernel_overhead", "gather_tensor_overhead", "reduce_tensor_overhead", "launch_overhead"),
            *("hop_latency", "network_latency", "host_overhead", "collective_share"),
        )
        other_links = ("replica_latency", "replica_bandwidth", "tensor_latency", "tensor_bandwidth")
        given = ((name, getattr(self, name)) for name in (*other_links, "network_bandwidth"))
        numbers |= {name: value for name, value in given if value is not None}
        may_be_zero = ("link_latency", "replica_latency", "tensor_latency", *overheads)
        wrong = [name for name, value in numbers.items() if not _positive(value, or_zero=name in may_be_zero)]
        if wrong:
            listed = ", ".join(f"{name}={numbers[name]!r}" for name in wrong)
            raise ConfigError(f"hardware {self.name!r}: must be positive finite numbers: {listed}.")
        self._require_nodes()

    def _require_nodes(self) -> None:
        if (
            self.collective_share >= 1
            or max(*self.attention_efficiency, *(share for _, share in self.gemm_efficiency)) > 1
        ):
            raise ConfigError(
                f"hardware {self.name!r}: collective_share must be below 1, and efficiencies at most 1, got "
                f"{self.collective_share!r}, {self.gemm_efficiency!r} and {self.attention_efficiency!r}."
            )
        nodes = self.ranks_per_node
        if type(nodes) is not int or nodes < 0 or (nodes and self.network_bandwidth is None):
            raise ConfigError(
                f"hardware {self.name!r}: ranks_per_node must be a whole number, 0 for one link; with several nodes "
                f"network_bandwidth is needed, too. Got {nodes!r} and {self.network_bandwidth!r}."
            )

    def _shares(self) -> dict[str, Any]:
        try:
            curve = tuple(sorted((side, share) for side, share in self.gemm_efficiency))
            forward, backward = self.attention_efficiency
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"hardware {self.name!r}: gemm_efficiency must be pairs (side, share) and attention_efficiency "
                f"(forward, backward), got {self.gemm_efficiency!r} and {self.attention_efficiency!r}."
            ) from error
        object.__setattr__(self, "gemm_efficiency", curve)
        object.__setattr__(self, "attention_efficiency", (forward, backward))
        numbers = {f"gemm_efficiency[{i}]": min(pair, key=_orderable) for i, pair in enumerate(curve)}
        return numbers | {"attention_efficiency": min(forward, backward, key=_orderable)}

    @property
    def label(self) -> str:
        """Its name, and where the numbers are from."""
        return f"{self.name} ({self.source})"

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s in `dtype`; for a dtype that is not listed the slowest listed one."""
        return self.peak_flops.get(dtype_text(dtype)) or min(self.peak_flops.values())

    def data_sheet(self, dtype: torch.dtype) -> float:
        """FLOP/s in `dtype` by the data sheet, `peak` where that is not known."""
        return self.data_sheet_flops.get(dtype_text(dtype)) or self.peak(dtype)

    def share_of_collective(self, speed: float, op: str) -> float:
        """The share of compute's speed that a collective takes which moves so many bytes of its buffer in a second.

        Ranks receive into a buffer, copy out of it and send: a byte is read and written about three times.

        Source: "Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning",
        https://arxiv.org/abs/2507.03114.
        """
        if not self.collective_share:
            return 0.0
        moved = 3 * speed * (2 if op == "all_reduce" else 1)
        return min(self.collective_share + moved / self.memory_bandwidth, 0.9)

    def gemm_share(self, flops: float) -> float:
        """The share of `peak_flops` that a product of so many FLOPs reaches: between its neighbours, on log scales."""
        if not self.gemm_efficiency or flops <= 0:
            return 1.0
        sides, shares = np.log(self.gemm_efficiency).T
        return float(np.exp(np.interp(np.log(flops / 2) / 3, sides, shares)))

    def link(self, ranks: int, stride: int = 1) -> Link:
        """The link of a group in which each rank is so many ranks behind the one before it.

        A ring enters and leaves each node once, and as many rings as ranks of the group are in a node share what these
        have of the network; each step of a ring, of which an all_gather takes `ranks - 1`, has its latency.

        Source: NCCL's table of latencies, as in `torch/_inductor/comm_analysis.py`.
        """
        inside = max(1, self.ranks_per_node // stride) if self.ranks_per_node else ranks
        if ranks <= inside:
            return Link(self.link_latency, self.hop_latency, self.link_bandwidth)
        assert self.network_bandwidth is not None
        hop = (self.network_latency + (inside - 1) * self.hop_latency) / inside
        bandwidth = inside * self.network_bandwidth
        return Link(self.link_latency, hop, min(bandwidth, self.link_bandwidth) if inside > 1 else bandwidth)

    def crosses_nodes(self, ranks: int) -> bool:
        """Whether so many ranks in a row are on several nodes."""
        return bool(self.ranks_per_node) and ranks > self.ranks_per_node

    def replica_link(self, replicas: int, shards: int) -> Link:
        """The link between ranks that hold the same shard."""
        return self._measured(self.replica_latency, self.replica_bandwidth) or self.link(replicas, shards)

    def tensor_link(self, ranks: int) -> Link:
        """The link between the ranks of tensor parallelism, which are next to each other."""
        return self._measured(self.tensor_latency, self.tensor_bandwidth) or self.link(ranks)

    def _measured(self, latency: float | None, bandwidth: float | None) -> Link | None:
        if latency is None and bandwidth is None:
            return None
        return Link(self.link_latency if latency is None else latency, 0.0, bandwidth or self.link_bandwidth)

    def to_json(self) -> str:
        """What `load` reads."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        maps = {name: dict(fields[name]) for name in ("peak_flops", "data_sheet_flops", "sources")}
        return json.dumps(fields | maps, indent=2) + "\n"


def _near(name: str, known: Iterable[str]) -> str:
    return f"{name!r} (did you mean {nearest(name.lower(), known)!r}?)"


def _orderable(value: Any) -> float:
    return value if isinstance(value, int | float) else -1.0


def _positive(value: Any, *, or_zero: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max or (or_zero and value == 0)


def _devices() -> Iterator[HardwareSpec]:
    for file in sorted(resources.files(__package__).joinpath("devices").iterdir(), key=lambda file: file.name):
        yield read(file.read_text(), file.name)


def of_device(device: torch.device | str) -> HardwareSpec:
    """What to count on where the user named nothing: `cpu` for a CPU, `h100` for all else; the same on every rank."""
    return BUILTIN["cpu" if torch.device(device).type == "cpu" else "h100"]


def describes(spec: HardwareSpec, device_type: str) -> bool:
    """Whether a spec is of such a device, as far as its name tells: `cpu` is a CPU, all else is not."""
    return (spec.name == BUILTIN["cpu"].name) == (device_type == "cpu")


def load(given: str | Path) -> HardwareSpec:
    """The spec of a builtin name (`h100-sxm`, `cpu`), of a JSON file, or of its text; a ConfigError if it is none."""
    builtin = BUILTIN.get(str(given))
    if builtin is not None:
        return builtin
    if str(given).startswith("{"):
        return read(str(given))
    path = Path(given)
    if not path.is_file():
        raise ConfigError(f"hardware {_near(str(given), BUILTIN)} is neither a file nor one of {', '.join(BUILTIN)}.")
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a JSON file: {error}.") from error
    spec = read(text, path)
    return dataclasses.replace(spec, source=str(path) if spec.source == TABLE else f"{path}, {spec.source}")


def read(text: str, path: Path | str = "the text") -> HardwareSpec:
    """The spec that `HardwareSpec.to_json` wrote; `path` is what errors call it."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, or an int with too many digits to be read
        raise ConfigError(f"{path} is not a JSON file: {error}.") from error
    return _from_fields(fields, path)


def _from_fields(fields: Any, path: Path | str) -> HardwareSpec:
    known = {field.name: field for field in dataclasses.fields(HardwareSpec)}
    if not isinstance(fields, dict) or not isinstance(fields.get("peak_flops", {}), dict):
        raise ConfigError(f"{path}: a hardware file is a JSON object, and so is its peak_flops.")
    needed = [name for name, field in known.items() if field.default is field.default_factory is dataclasses.MISSING]
    wrong = [f"missing {name!r}" for name in needed if name not in fields]
    wrong += [f"unknown {_near(name, known)}" for name in fields if name not in known]
    if wrong:
        raise ConfigError(f"{path}: fields of the hardware do not fit: {', '.join(wrong)}.")
    try:
        return HardwareSpec(**fields)
    except ConfigError as error:
        raise ConfigError(f"{path} does not describe hardware: {error}") from error


BUILTIN: Mapping[str, HardwareSpec] = {spec.name: spec for spec in _devices()}
"""The devices of `devices/*.json`, where each figure has its source; a file with your own numbers is better.

`h100`, `h200` and `cpu` are what the passes count on where nobody measured: one link, products of any size alike. The
others tell the links inside a node from those between nodes, and what products of each size reach.
"""
