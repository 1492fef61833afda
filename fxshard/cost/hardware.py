"""What a rank and its link can do: the numbers that turn FLOPs and bytes into seconds."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fxshard.errors import ConfigError, nearest
from fxshard.ir.text import dtype_text

TABLE = "assumed"
"""The source of numbers that nobody measured here."""

_DTYPES = sorted({dtype_text(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})


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
        launch_overhead: seconds that a launch and its wait cost the rank besides what the link takes.
        replica_latency: `link_latency` between ranks that hold the same shard; `None`: no other link is between them.
        replica_bandwidth: `link_bandwidth` there.
        tensor_latency: `link_latency` between the ranks of tensor parallelism; `None`: no other link is between them.
        tensor_bandwidth: `link_bandwidth` there.
        source: where the numbers are from, in words; decides nothing.
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
    source: str = field(default=TABLE, compare=False)

    def __post_init__(self) -> None:
        """Reject numbers that no hardware has."""
        if not isinstance(self.name, str) or not isinstance(self.source, str):
            raise ConfigError(f"hardware {self.name!r}: name and source must be texts, got source={self.source!r}.")
        if not self.peak_flops:
            raise ConfigError(f"hardware {self.name!r}: peak_flops names no dtype; give at least one FLOP/s.")
        unknown = [_near(name, _DTYPES) for name in self.peak_flops if name not in _DTYPES]
        if unknown:
            raise ConfigError(f"hardware {self.name!r}: peak_flops has unknown dtypes: {', '.join(unknown)}.")
        numbers = {f"peak_flops.{dtype}": value for dtype, value in self.peak_flops.items()}
        numbers |= {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type == "float"}
        overheads = ("kernel_overhead", "gather_tensor_overhead", "reduce_tensor_overhead", "launch_overhead")
        other_links = ("replica_latency", "replica_bandwidth", "tensor_latency", "tensor_bandwidth")
        numbers |= {name: value for name in other_links if (value := getattr(self, name)) is not None}
        may_be_zero = ("link_latency", "replica_latency", "tensor_latency", *overheads)
        wrong = [name for name, value in numbers.items() if not _positive(value, or_zero=name in may_be_zero)]
        if wrong:
            listed = ", ".join(f"{name}={numbers[name]!r}" for name in wrong)
            raise ConfigError(f"hardware {self.name!r}: must be positive finite numbers: {listed}.")

    @property
    def label(self) -> str:
        """Its name, and where the numbers are from."""
        return f"{self.name} ({self.source})"

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s in `dtype`; for a dtype that is not listed the slowest listed one."""
        return self.peak_flops.get(dtype_text(dtype)) or min(self.peak_flops.values())

    @property
    def replica_link(self) -> tuple[float, float]:
        """Latency in seconds and bandwidth in B/s of the link between ranks that hold the same shard."""
        return self._link(self.replica_latency, self.replica_bandwidth)

    @property
    def tensor_link(self) -> tuple[float, float]:
        """The same of the link between the ranks of tensor parallelism."""
        return self._link(self.tensor_latency, self.tensor_bandwidth)

    def _link(self, latency: float | None, bandwidth: float | None) -> tuple[float, float]:
        return (
            self.link_latency if latency is None else latency,
            self.link_bandwidth if bandwidth is None else bandwidth,
        )

    def to_json(self) -> str:
        """What `load` reads."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(fields | {"peak_flops": dict(self.peak_flops)}, indent=2) + "\n"


def _near(name: str, known: Iterable[str]) -> str:
    """`name`, and the known one that it was probably meant to be."""
    return f"{name!r} (did you mean {nearest(name.lower(), known)!r}?)"


def _positive(value: Any, *, or_zero: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max or (or_zero and value == 0)


BUILTIN: Mapping[str, HardwareSpec] = {
    spec.name: spec
    for spec in (
        HardwareSpec(
            name="h100",
            peak_flops={"bf16": 790e12, "f16": 790e12, "f32": 54e12, "f64": 54e12},
            memory_bandwidth=3.0e12,
            link_latency=30e-6,
            link_bandwidth=370e9,
            host_bandwidth=50e9,
            memory_gib=79,
            kernel_overhead=2e-6,
            gather_tensor_overhead=1e-6,
            reduce_tensor_overhead=5e-6,
        ),
        HardwareSpec(
            name="h200",
            peak_flops={"bf16": 790e12, "f16": 790e12, "f32": 54e12, "f64": 54e12},
            memory_bandwidth=4.3e12,
            link_latency=30e-6,
            link_bandwidth=370e9,
            host_bandwidth=50e9,
            memory_gib=140,
            kernel_overhead=2e-6,
            gather_tensor_overhead=1e-6,
            reduce_tensor_overhead=5e-6,
        ),
        HardwareSpec(
            name="cpu",
            peak_flops={"bf16": 25e9, "f16": 25e9, "f32": 50e9, "f64": 25e9},
            memory_bandwidth=10e9,
            link_latency=250e-6,
            link_bandwidth=1e9,
            host_bandwidth=5e9,
            memory_gib=16,
            kernel_overhead=5e-6,
            gather_tensor_overhead=10e-6,
            reduce_tensor_overhead=1e-3,
        ),
    )
}
"""Starting points, none of them measured by fxshard; a JSON file with your own numbers is better.

`h100`, `h200` (SXM): bf16 and the copy bandwidths are what others reach with large GEMMs and copies; fp32 (without
TF32) and fp64 are 80 % of the data sheet's 67e12; the link is NCCL's bus bandwidth over NVLink within one node as in
torch's own tables (`torch/_inductor/comm_analysis.py`), across nodes it is a fraction of that; the link to the host
is what copies from page-locked memory reach over 16 lanes of PCIe 5; latency and overheads are estimates. `cpu`: one
core with gloo over loopback between two ranks; latency and overheads were measured there with coalesced launches of 1
to 24 tensors, the rest are estimates. Gloo reduces each tensor of a coalesced reduce_scatter by itself, which is why a
further one costs it so much.
"""


def of_device(device: torch.device | str) -> HardwareSpec:
    """What to count on where the user named nothing: `cpu` for a CPU, `h100` for all else; the same on every rank."""
    return BUILTIN["cpu" if torch.device(device).type == "cpu" else "h100"]


def describes(spec: HardwareSpec, device_type: str) -> bool:
    """Whether a spec is of such a device, as far as its name tells: `cpu` is a CPU, all else is not."""
    return (spec.name == BUILTIN["cpu"].name) == (device_type == "cpu")


def load(given: str | Path) -> HardwareSpec:
    """The spec of a builtin name (`h100`, `h200`, `cpu`), of a JSON file, or of its text.

    Raises:
        ConfigError: for a name that is neither, and for a file with missing, unknown or impossible fields.
    """
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
    needed = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    wrong = [f"missing {name!r}" for name in needed if name not in fields]
    wrong += [f"unknown {_near(name, known)}" for name in fields if name not in known]
    if wrong:
        raise ConfigError(f"{path}: fields of the hardware do not fit: {', '.join(wrong)}.")
    try:
        return HardwareSpec(**fields)
    except ConfigError as error:
        raise ConfigError(f"{path} does not describe hardware: {error}") from error
