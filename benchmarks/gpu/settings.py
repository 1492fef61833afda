"""What the GPU benchmark measures: the model, the systems, the links, and in which order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.llama import Shape
from fxshard import hardware
from fxshard.testing.link_engine import Speed
from fxshard.tools.bench.config import FXSHARD, Entry

COMPUTE: Final = "compute"  # no parameter is sharded, nothing is sent
OVERLAPPED: Final = "simplefsdp_overlapped"
LATENCY_US: Final = 30.0
SPEEDS: Final = (370.0, 100.0, 50.0, 25.0)
CTAS: Final = (16, 8)
_ESTIMATION: Final = "aten_distributed_optimizations.custom_runtime_estimation"
PRECISION: Final = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Link(Speed):
    """A setting of the emulated link; without arguments the instant one."""

    ctas: int = CTAS[0]  # thread blocks that carry a transfer on a GPU

    @property
    def name(self) -> str:
        """In words."""
        return "instant" if self.gigabytes_per_s == math.inf else f"{self.gigabytes_per_s:g} GB/s, {self.ctas} CTAs"


INSTANT: Final = Link()


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Llama and its batch on each rank."""

    shape: Shape
    batch_size: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Per rank and microbatch."""
        return self.batch_size * self.seq_len


MODELS: Final = {
    "1b": Model(
        shape=Shape(num_layers=16, dim=2048, ffn_dim=8192, num_heads=32, num_kv_heads=8, vocab_size=32000),
        batch_size=4,
        seq_len=2048,
    ),
    "tiny": Model(
        shape=Shape(num_layers=2, dim=64, ffn_dim=128, num_heads=4, num_kv_heads=2, vocab_size=256),
        batch_size=2,
        seq_len=32,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Told:
    """What Inductor's overlap scheduling is told of a link: how long each collective takes.

    As `aten_distributed_optimizations.custom_runtime_estimation` wants it (torch/_inductor/config.py).
    """

    speed: Speed
    world_size: int

    def __call__(self, node: fx.Node, override_size: int | None = None) -> float | None:
        """Milliseconds; `None` for what is no collective, which Inductor then estimates by itself.

        Args:
            node: of the graph.
            override_size: 0 asks for what a collective costs that sends nothing.
        """
        name = getattr(node.target, "__name__", "")
        op = next((op for op in ("all_gather", "reduce_scatter", "all_reduce") if name.startswith(op)), None)
        is_plain = op is not None and "coalesced" not in name
        if op is None or not is_plain or getattr(node.target, "namespace", "") != "_c10d_functional":
            return None
        if override_size is not None:
            return 1e3 * self.speed.seconds(op, override_size, self.world_size)
        whole = node if op == "all_gather" else node.all_input_nodes[0]
        return 1e3 * self.speed.seconds(op, whole.meta["val"].nbytes, self.world_size)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A system, and where it is measured."""

    entry: Entry  # of `fxshard.tools.bench`, or `COMPUTE`
    speeds: tuple[float, ...] = SPEEDS  # of the links, in GB/s; every system is measured on the instant link
    ctas: tuple[int, ...] = CTAS  # of the links
    checkpointing: bool = True  # also with activation checkpointing
    accumulates: bool = False  # with several microbatches per step too

    @property
    def name(self) -> str:
        """In tables and on the command line."""
        return self.entry.name

    def runs_on(self, link: Link) -> bool:
        """Whether it is measured there."""
        return link == INSTANT or (link.gigabytes_per_s in self.speeds and link.ctas in self.ctas)


def all_cases(folder: Path, device_name: str, world_size: int = 8) -> list[Case]:
    """Every system; `folder` receives what the cost model is told of the links.

    Args:
        folder: exists.
        device_name: what torch calls the GPU, "" for the CPU.
        world_size: ranks that there seem to be.
    """
    told = {speed: {_ESTIMATION: Told(speed=_speed(speed), world_size=world_size)} for speed in (100.0, 50.0)}
    auto = {speed: _auto(_hardware_file(folder, device_name, speed)) for speed in (100.0, 50.0)}
    return [
        _case(COMPUTE, COMPUTE, speeds=()),
        _case("fsdp2", "fsdp2", accumulates=True),
        _case("fsdp2_compiled", "fsdp2_compiled", accumulates=True),
        _case("fsdp2_best", "fsdp2_best", ctas=CTAS[:1]),
        _case("overlapped_100", OVERLAPPED, told[100.0], accumulates=True, speeds=(370.0, 100.0)),
        _case("overlapped_50", OVERLAPPED, told[50.0], speeds=(50.0, 25.0)),
        _case("fxshard", FXSHARD, accumulates=True),
        _case("fxshard_auto_100", FXSHARD, auto[100.0], accumulates=True, speeds=(370.0, 100.0)),
        _case("fxshard_auto_50", FXSHARD, auto[50.0], speeds=(50.0, 25.0)),
        _case("fxshard_regional", FXSHARD, {"regional": True}),
        _case("fxshard_off", FXSHARD, {"prefetch": "off"}, checkpointing=False, ctas=CTAS[:1]),
        _case("fxshard_listed", "fxshard_listed", checkpointing=False, ctas=CTAS[:1]),
        _case("no_overlap", FXSHARD, {"streams": "off"}, checkpointing=False, ctas=CTAS[:1]),
        _case("fxshard_side", FXSHARD, {"streams": "side"}, checkpointing=False, speeds=(100.0, 50.0), ctas=CTAS[:1]),
    ]


def _speed(gigabytes_per_s: float) -> Speed:
    return Speed(gigabytes_per_s=gigabytes_per_s, latency_us=LATENCY_US)


def _auto(path: Path) -> dict[str, Any]:
    return {"prefetch": "auto", "bucket": "auto", "hardware": str(path)}


def _case(name: str, system: str, options: dict[str, Any] | None = None, **where: Any) -> Case:
    entry = Entry(name=name, system=system, options=options or {}, mp_policy=PRECISION)
    return Case(entry=entry, **where)


def _hardware_file(folder: Path, device_name: str, gigabytes_per_s: float) -> Path:
    name = "h200" if "H200" in device_name else "h100" if device_name else "cpu"
    spec = replace(
        hardware.load(name), link_bandwidth=gigabytes_per_s * 1e9, link_latency=LATENCY_US / 1e6, name=f"{name} here"
    )
    path = folder / f"hardware-{gigabytes_per_s:g}.json"
    path.write_text(spec.to_json())
    return path


def links() -> list[Link]:
    """All settings of the link, what matters most first."""
    speeds = [100.0, 50.0, *(speed for speed in SPEEDS if speed not in (100.0, 50.0))]
    timed = [Link(gigabytes_per_s=speed, latency_us=LATENCY_US, ctas=ctas) for ctas in CTAS for speed in speeds]
    return [INSTANT, *timed]


MAIN: Final = Link(gigabytes_per_s=100.0, latency_us=LATENCY_US)
"""Where what is measured on one link only is measured."""


def chosen(cases: Sequence[Case], names: str) -> list[Case]:
    """The cases with these names, separated by commas; all if there are none."""
    wanted = [name for name in names.split(",") if name]
    if unknown := sorted(set(wanted) - {case.name for case in cases}):
        raise ValueError(f"no such systems: {', '.join(unknown)}; there are {', '.join(case.name for case in cases)}")
    return [case for case in cases if not wanted or case.name in wanted]
