"""Hold the plan against the emulated link on a CPU: `python docs/benchmarks/emulated.py [NUMBER ...]`.

Twelve configurations of model, ranks, bandwidth, accumulation and system. What the plan knows of the machine is
measured first, on products, sums and small ops of other sizes, and on a link of 16 ranks what each further tensor of a
launch costs, which decides what is copied; no configuration calibrates it. Leave the link a core: OMP_NUM_THREADS=1 on
two cores.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxshard.cost.calibration import calibrate
from fxshard.hardware import HardwareSpec
from fxshard.inspect.target import checked
from fxshard.plan.outline import outline
from fxshard.plan.plan import SCHEDULES, PlanSettings, tokens_of
from fxshard.plan.run import RunCost, cost_of
from fxshard.testing import emulated_link
from fxshard.tools.plan import shapes
from fxshard.tools.plan.shapes import DecoderShape

SEQUENCE, LATENCY_US = 256, 100.0
MODELS = {
    "llama": DecoderShape("llama", 4, 512, 8, 4, 1408, 4096),
    "gpt": DecoderShape("gpt", 6, 384, 6, 6, 1536, 4096),
}
SYSTEMS = {"fxshard:regional=True": "fxshard", "fsdp2_best": "FSDP2 compiled"}
"""Name for `fxshard bench` -> key of `SCHEDULES`."""


class Configuration(NamedTuple):
    """Two of the twelve runs: both systems."""

    model: str
    ranks: int
    gigabytes_per_s: float
    accumulation: int


CONFIGURATIONS = (
    Configuration("llama", 8, 0.5, 1),
    Configuration("llama", 8, 4.0, 2),
    Configuration("llama", 64, 1.0, 1),
    Configuration("gpt", 8, 0.5, 2),
    Configuration("gpt", 4, 4.0, 1),
    Configuration("gpt", 64, 1.0, 1),
)


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """What `fxshard bench` trains."""
    return _real("llama")


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """What `fxshard bench` trains."""
    return _real("gpt")


def _real(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = shapes.decoder(MODELS[name], SEQUENCE).to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.normal_(tensor.data, std=0.02)
    tokens = torch.randint(MODELS[name].vocabulary, (1, SEQUENCE))
    return model, (tokens, tokens)


def machine() -> HardwareSpec:
    """Measure products of four sizes, the memory, and what a small op and a further tensor of a launch cost."""
    speeds = {side: 2 * side**3 / _seconds(_product(side)) for side in (96, 192, 320, 640)}
    best, large, small = max(speeds.values()), torch.ones(2**24), torch.ones(8)
    overhead = _seconds(lambda: small + small, repeats=2000)
    with emulated_link(16, latency_us=LATENCY_US):
        assert dist.group.WORLD is not None
        link = calibrate([dist.group.WORLD], torch.device("cpu"))
    return HardwareSpec(
        name="cpu",
        peak_flops={"f32": best},
        gemm_efficiency=tuple((side, speed / best) for side, speed in speeds.items()),
        memory_bandwidth=2 * large.nbytes / _seconds(lambda: torch.add(large, 1, out=large)),
        memory_gib=16,
        link_latency=1e-4,
        link_bandwidth=1e9,
        kernel_overhead=overhead,
        gather_tensor_overhead=link.gather_tensor_overhead,
        reduce_tensor_overhead=link.reduce_tensor_overhead,
    )


def _product(side: int) -> Callable[[], Tensor]:
    left, right = torch.randn(side, side), torch.randn(side, side)
    return lambda: left @ right


def _seconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """The least of five means."""
    found = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        found.append((time.perf_counter() - start) / repeats)
    return min(found)


def planned(of: Configuration, schedule: str, machine: HardwareSpec) -> tuple[RunCost, int]:
    """The plan of a configuration, and the most that unsharded parameters take in one of its graphs."""
    settings = PlanSettings(param_dtype=torch.float32, accumulation=of.accumulation, reduces_each=False)
    link = {"link_latency": LATENCY_US * 1e-6, "link_bandwidth": of.gigabytes_per_s * 1e9}
    spec = dataclasses.replace(machine, **link)  # type: ignore[arg-type]
    how = SCHEDULES[schedule]
    model, args, kwargs = checked(
        (shapes.decoder(MODELS[of.model], SEQUENCE), shapes.inputs(1, SEQUENCE)), "the builder"
    )
    traced = outline(
        model, args, kwargs, world_size=of.ranks, options=settings.options(spec, how), saves_all=not how.fuses
    )
    frames = [*traced.outer.frames, *(traced.blocks.frames if traced.blocks else ())]
    stats = [frame.stats_of(frame.running(stage)).evaluate() for frame in frames for stage in frame.scheduled]
    cost = cost_of(traced, spec, how, tokens=tokens_of(args), **settings.run)
    return cost, max(int(each.unsharded_peak_bytes) for each in stats)


def measured(of: Configuration, rounds: int) -> dict[str, Any]:
    """What `fxshard bench` measures of both systems, by name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        given = {
            "--systems": ",".join(SYSTEMS),
            "--group": "emulated",
            "--world-size": of.ranks,
            "--gigabytes-per-s": of.gigabytes_per_s,
            "--latency-us": LATENCY_US,
            "--microbatches": of.accumulation,
            "--rounds": rounds,
            "--json": file,
        }
        words = [str(word) for pair in given.items() for word in pair]
        target = f"docs.benchmarks.emulated:{of.model}"
        subprocess.run([sys.executable, "-m", "fxshard", "bench", target, *words], check=True, stdout=sys.stderr)
        return {system["name"]: system for system in json.loads(file.read_text())["systems"]}


def rows(numbers: Sequence[int], rounds: int = 15) -> Iterator[str]:
    """A line of a table for each configuration and system."""
    spec = machine()
    yield f"peak {max(spec.peak_flops.values()) / 1e9:.1f} GFLOP/s, memory {spec.memory_bandwidth / 1e9:.1f} GB/s\n"
    yield "|model|ranks|GB/s|microbatches|system|measured ms|planned ms|error|unsharded measured|planned|"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for number in numbers:
        of = CONFIGURATIONS[number]
        found = measured(of, rounds)
        for system, schedule in SYSTEMS.items():
            cost, unsharded = planned(of, schedule, spec)
            step, peak = found[system]["step_ms"]["median"], found[system]["unsharded_peak_bytes"]
            error = f"{cost.seconds * 1e3 / step - 1:+.1%}"
            times = f"{step:.1f}|{cost.seconds * 1e3:.1f}|{error}|{peak or ''}|{unsharded if peak else ''}"
            yield f"|{of.model}|{of.ranks}|{of.gigabytes_per_s}|{of.accumulation}|{system}|{times}|"


if __name__ == "__main__":
    for line in rows([*map(int, sys.argv[1:])] or range(len(CONFIGURATIONS))):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
