"""Hold the plan against the emulated link on a CPU: `python docs/benchmarks/emulated.py [NUMBER ...]`.

Twelve configurations of model, ranks, bandwidth, accumulation and system. What the plan knows of the machine is what
`fxshard calibrate` measures first, on a link of 16 ranks; no configuration calibrates it. Beside each pair of runs
stands one that computes alone, with all parameters, to tell compute from communication. The machine is measured before
and after each configuration, and its plan counts on the mean of both. Leave the link a core: OMP_NUM_THREADS=1 on two.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxshard.cost.calibration import Calibration
from fxshard.hardware import HardwareSpec, load
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
ALONE = "local_compiled"
"""Name of what computes alone."""
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_ARENA_MAX": "1",
}
"""With these glibc keeps what is freed, as torch's allocator does on a GPU; else each large tensor maps pages anew."""


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
    """What `fxshard calibrate` measures, on a link of 16 ranks."""
    with emulated_link(16, latency_us=LATENCY_US):
        assert dist.group.WORLD is not None
        return Calibration([dist.group.WORLD], torch.device("cpu")).run(lambda line: None)


def mean(before: HardwareSpec, after: HardwareSpec) -> HardwareSpec:
    """The mean of each number that `machine` measured twice."""
    one, two = (json.loads(spec.to_json()) for spec in (before, after))
    found = {name: _mean(value, two[name]) for name, value in one.items()}
    return load(json.dumps(found))


def _mean(one: Any, two: Any) -> Any:
    if isinstance(one, dict):
        return {name: _mean(value, two[name]) for name, value in one.items()}
    if isinstance(one, list):
        return [_mean(*pair) for pair in zip(one, two, strict=False)]  # the longer one has a size more
    return (one + two) / 2 if isinstance(one, float) else one


def on_link(of: Configuration, machine: HardwareSpec) -> HardwareSpec:
    """The machine with the link of a configuration."""
    return dataclasses.replace(machine, link_latency=LATENCY_US * 1e-6, link_bandwidth=of.gigabytes_per_s * 1e9)


def planned(of: Configuration, schedule: str, given: HardwareSpec, spec: HardwareSpec) -> RunCost:
    """The plan of a configuration whose graphs were made for what was `given`, on what it ran on."""
    settings = PlanSettings(param_dtype=torch.float32, accumulation=of.accumulation, reduces_each=False)
    how = SCHEDULES[schedule]
    model, args, kwargs = checked(
        (shapes.decoder(MODELS[of.model], SEQUENCE), shapes.inputs(1, SEQUENCE)), "the builder"
    )
    traced = outline(
        model, args, kwargs, world_size=of.ranks, options=settings.options(given, how), saves_all=not how.fuses
    )
    return cost_of(traced, spec, how, tokens=tokens_of(args), **settings.run)


def measured(of: Configuration, spec: HardwareSpec, rounds: int) -> dict[str, Any]:
    """What `fxshard bench` measures of the three systems, by name; fxshard buckets by what the plan counts on."""
    with tempfile.TemporaryDirectory() as folder:
        file, device = Path(folder) / "result.json", Path(folder) / "device.json"
        device.write_text(spec.to_json())
        given = {
            "--systems": ",".join((*SYSTEMS, ALONE)),
            "--options": f"hardware={device}",
            "--group": "emulated",
            "--world-size": of.ranks,
            "--gigabytes-per-s": of.gigabytes_per_s,
            "--latency-us": LATENCY_US,
            "--microbatches": of.accumulation,
            "--rounds": rounds,
            "--warm": 1,
            "--json": file,
        }
        words = [str(word) for pair in given.items() for word in pair]
        target = f"docs.benchmarks.emulated:{of.model}"
        subprocess.run([sys.executable, "-m", "fxshard", "bench", target, *words], check=True, stdout=sys.stderr)
        return {system["name"]: system for system in json.loads(file.read_text())["systems"]}


def rows(numbers: Sequence[int], rounds: int = 10) -> Iterator[str]:
    """A line of a table for each configuration and system."""
    yield "|model|ranks|GB/s|microbatches|GFLOP/s|system|measured ms|planned ms|error|gathered measured|planned|"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    before = machine()
    for number in numbers:
        of = CONFIGURATIONS[number]
        given = on_link(of, before)
        found = measured(of, given, rounds)
        after = machine()
        there, before = on_link(of, mean(before, after)), after
        speed = f"{max(there.peak_flops.values()) / 1e9:.0f}"
        costs = {system: planned(of, schedule, given, there) for system, schedule in SYSTEMS.items()}
        cost = costs[next(iter(SYSTEMS))]
        seconds = {system: cost.seconds for system, cost in costs.items()}
        seconds[ALONE] = sum(each.seconds for each in cost.record.kernels()) + cost.optimizer * of.ranks
        for system, each in seconds.items():
            step, peak = found[system]["step_ms"]["median"], found[system]["gathered_peak_bytes"]
            times = f"{step:.1f}|{each * 1e3:.1f}|{each * 1e3 / step - 1:+.1%}"
            peaks = f"{peak}|{costs[system].gathered}" if peak else "|"
            yield f"|{of.model}|{of.ranks}|{of.gigabytes_per_s}|{of.accumulation}|{speed}|{system}|{times}|{peaks}|"


if __name__ == "__main__":
    if not ALLOCATOR.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ALLOCATOR})
    for line in rows([*map(int, sys.argv[1:])] or range(len(CONFIGURATIONS))):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
