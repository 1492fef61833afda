"""Hold the plan against published training throughput: `python docs/benchmarks/published.py RUNS.csv`.

Each row of the file is a run of FSDP that its authors measured. It is planned from its model, batch, ranks and device
alone, on FSDP2's schedule; docs/benchmarks/plan.md says on which rows four numbers of the devices were tuned.
"""

from __future__ import annotations

import csv
import dataclasses
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fxshard import hardware
from fxshard.errors import ConfigError
from fxshard.hardware import HardwareSpec
from fxshard.plan.outline import outline
from fxshard.plan.plan import FSDP2, FSDP2_COMPILED
from fxshard.plan.run import GIB, RunCost, cost_of
from fxshard.tools.plan import shapes
from fxshard.tools.plan.shapes import SHAPES, DecoderShape

_RANKS_PER_NODE = 8


def _gpt(layers: int, width: int, heads: int) -> DecoderShape:
    return DecoderShape("gpt", layers, width, heads, heads, 4 * width, 50368)


def _llama(layers: int, width: int, heads: int, hidden: int, kv_heads: int = 0) -> DecoderShape:
    return DecoderShape("llama", layers, width, heads, kv_heads or heads, hidden, 32000)


MODELS: Mapping[str, DecoderShape] = {
    "llama3.1-8b": SHAPES["llama3-8b"],
    "llama3.1-70b": SHAPES["llama3-70b"],
    "llama3.1-405b": SHAPES["llama3-405b"],
    "llama2-7b": _llama(32, 4096, 32, 11008),
    "llama2-13b": _llama(40, 5120, 40, 13824),
    "llama2-34b": _llama(48, 8192, 64, 22016, 8),
    "llama2-70b": _llama(80, 8192, 64, 28672, 8),
    "mpt-125m": _gpt(12, 768, 12),
    "mpt-350m": _gpt(24, 1024, 16),
    "mpt-760m": _gpt(24, 1536, 12),
    "mpt-1b": _gpt(24, 2048, 16),
    "mpt-3b": _gpt(32, 2560, 20),
    "mpt-7b": _gpt(32, 4096, 32),
    "mpt-13b": _gpt(40, 5120, 40),
    "mpt-30b": _gpt(48, 7168, 56),
    "mpt-70b": _gpt(80, 8192, 64),
}

DEVICES = {"h100-96": "h100-sxm-96", "h100": "h100-sxm", "h200": "h200-sxm", "a100": "a100-80", "a100-80": "a100-80"}
"""The file's name of a device -> ours."""

TUNED = (0, 1, 5, 6, 15, 17)
"""Rows of docs/benchmarks/published-runs.csv on which numbers were tuned, counted from 0."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """What is known of how a group trained, beside what the rows say.

    Attributes:
        reduce_dtype: of gradients.
        attention: speed of its attention kernels beside FlashAttention-2's.
        node_gbits: network of one node by device, where it is not the device's own.
    """

    reduce_dtype: torch.dtype = torch.bfloat16
    attention: float = 1.0
    node_gbits: Mapping[str, float] = dataclasses.field(default_factory=dict)


GROUPS = {
    "torchtitan": Group(reduce_dtype=torch.float32),
    # FlashAttention of 2022 in Triton: half the speed of FlashAttention-2, https://arxiv.org/abs/2307.08691
    "llm-foundry": Group(attention=0.5),
    "fms": Group(node_gbits={"h100": 800, "a100": 400}),
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the file."""

    number: int
    fields: Mapping[str, str]

    @property
    def tokens_per_second(self) -> float:
        """Of one GPU, as published."""
        return float(self.fields["tokens_per_s"])

    @property
    def memory_gib(self) -> float | None:
        """Peak reserved, as published."""
        given = self.fields["memory_gib"]
        return float(given) if given else None

    @property
    def label(self) -> str:
        """The row in a few words."""
        of = self.fields
        compiled = ", compiled" if of["compile"] == "yes" else ""
        batch = f"{of['micro_batch']}x{of['accumulation']}x{of['seq_len']}"
        return (
            f"{of['source']} {of['model']}, {of['gpus']}x{of['gpu']}, {batch}, {of['ac']}{compiled}, {of['strategy']}"
        )


def rows(path: Path) -> Iterator[Published]:
    """The rows of a file in the form of docs/benchmarks/published-runs.csv."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    for number, fields in enumerate(csv.DictReader(lines)):
        yield Published(number=number, fields=fields)


def predict(row: Published) -> RunCost:
    """Plan a row.

    Raises:
        ConfigError: its model, device or group is not known, or the model has another number of parameters.
    """
    of = row.fields
    for column, known in (("model", MODELS), ("gpu", DEVICES), ("source", GROUPS)):
        if of[column] not in known:
            raise ConfigError(f"row {row.number}: {column} {of[column]!r} is none of {', '.join(known)}.")
    group, sequence, batch, gpus = GROUPS[of["source"]], int(of["seq_len"]), int(of["micro_batch"]), int(of["gpus"])
    shape = MODELS[of["model"]]
    model = shapes.decoder(shape, sequence, of["ac"])
    counted = sum(parameter.numel() for parameter in model.parameters())
    if abs(counted / int(of["params"]) - 1) > 0.01:
        raise ConfigError(f"row {row.number}: {of['model']} has {counted:,} parameters here, {of['params']} there.")
    world_size = (gpus // _RANKS_PER_NODE, _RANKS_PER_NODE) if of["strategy"] == "hsdp" else gpus
    schedule = FSDP2_COMPILED if of["compile"] == "yes" else FSDP2
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": group.reduce_dtype}
    spec = _device(of["gpu"], group)
    options = {**schedule.options, **dtypes, "hardware": DEVICES[of["gpu"]]}
    inputs, saves_all = shapes.inputs(batch, sequence), not schedule.fuses
    traced = outline(model, inputs, {}, world_size=world_size, options=options, saves_all=saves_all)
    return cost_of(traced, spec, schedule, tokens=batch * sequence, accumulation=int(of["accumulation"]))


def _device(name: str, group: Group) -> HardwareSpec:
    spec = hardware.load(DEVICES[name])
    forward, backward = spec.attention_efficiency
    spec = dataclasses.replace(spec, attention_efficiency=(forward * group.attention, backward * group.attention))
    if name not in group.node_gbits:
        return spec
    reached = 0.8 * group.node_gbits[name] * 1e9 / 8 / _RANKS_PER_NODE
    return dataclasses.replace(spec, network_bandwidth=reached)


def report(found: Iterable[tuple[Published, RunCost]]) -> Iterator[str]:
    """A line of a table for each row, and what the errors are of rows that tuned nothing."""
    yield "|run|published tokens/s|planned|error|published GiB|planned|error|"
    yield "|---|---|---|---|---|---|---|"
    errors = []
    for row, cost in found:
        error = cost.tokens_per_second / row.tokens_per_second - 1
        errors += [abs(error)] if row.number not in TUNED else []
        mark = " (tuned)" if row.number in TUNED else ""
        memory = "||||"
        if (published := row.memory_gib) is not None:
            planned = cost.reserved / GIB
            memory = f"|{published:.1f}|{planned:.1f}|{planned / published - 1:+.1%}|"
        speeds = f"{row.tokens_per_second:,.0f}|{cost.tokens_per_second:,.0f}|{error:+.1%}"
        yield f"|{row.label}{mark}|{speeds}{memory}"
    if errors:
        yield f"\nrows that tuned nothing: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}"


def main(argv: Sequence[str]) -> int:
    """Print the table of the files that `argv` names."""
    for line in report((row, predict(row)) for path in argv for row in rows(Path(path))):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
