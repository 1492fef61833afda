"""The result as a page of docs/benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.gpu.result import GpuReport, Key
from benchmarks.gpu.settings import COMPUTE, CTAS, INSTANT, LATENCY_US, MAIN, SPEEDS, Link
from benchmarks.gpu.targets import target_rows
from benchmarks.markdown import table
from fxshard.tools.bench.config import ONE_GPU

ROWS: Final[dict[str, tuple[str, ...]]] = {
    "compute alone": (COMPUTE,),
    'fxshard, `streams="off"`: no overlap': ("no_overlap",),
    "FSDP2": ("fsdp2",),
    "FSDP2, compiled blocks": ("fsdp2_compiled",),
    "FSDP2 at its best": ("fsdp2_best",),
    "SimpleFSDP, Inductor's overlap scheduling": ("overlapped_100", "overlapped_50"),
    'fxshard, `prefetch="off"`': ("fxshard_off",),
    "**fxshard**": ("fxshard",),
    "fxshard, `regional=True`": ("fxshard_regional",),
    "fxshard, lists of two ahead": ("fxshard_listed",),
    '**fxshard, both "auto"**': ("fxshard_auto_100", "fxshard_auto_50"),
    'fxshard, `streams="side"`': ("fxshard_side",),
}
_NONE = "-"

_ABOUT: Final = """\
- **Compute alone**: the model without sharding, compiled, in bf16, and an optimizer for as many numbers as a rank has.
- What only bounds or explains the others (no overlap, `prefetch="off"`, lists, `streams="side"`) runs without
  checkpointing and on 16 CTAs. FSDP2 at its best runs on 16 CTAs only.
- **Exposed**: what a step is longer than the same code's on the instant link, which copies all the same.
- **Both "auto"** was told the speed of the link in a hardware file: 100 GB/s where 370 and 100 stand, else 50.
  Inductor's overlap scheduling was told the same, as how long each collective takes.
- **FSDP2** shards the embedding, and the last norm with the head, as units of their own (as torchtitan does), so that
  neither is gathered before the first layer; the one line of fxshard leaves them in the root.
- **ms per step**: median, from the end of one step to the end of the next on the device's clock; nobody waits between
  steps. Ratios are medians of the ratios to FSDP2 in the same round.
- **Host**: what Python takes for forward, backward and optimizer on the instant link, each begun when the device is
  idle. On a GPU the launch queue is four times as long as by default (`CUDA_SCALE_LAUNCH_QUEUES` in the JSON), so that
  the host need not wait for it. What the emulated link costs the host, for each collective, is in it for every system.
- **Peak**: the most that the process has allocated on the device during a step.
"""


def page(report: GpuReport) -> str:
    """Markdown with all tables; what was not measured is a dash."""
    parts = [_head(report), "## Targets\n\n" + table(["target", "measured"], target_rows(report))]
    for checkpointing in (False, True):
        title = f"## {'With' if checkpointing else 'Without'} activation checkpointing"
        found = [*(_speeds(report, checkpointing, ctas) for ctas in CTAS), _costs(report, checkpointing)]
        parts += [title, *found] if any(found) else []
    parts += [_accumulation(report), _consolidation(report), _profiles(report), _missing(report)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _head(report: GpuReport) -> str:
    machine, options = report.machine, report.options
    device = ", ".join(machine["gpus"]) or machine["cpu"]
    commit = machine["fxshard_commit"] or "unknown"
    return f"""\
# Training on one GPU

{device}, torch {machine["torch"]}, Python {machine["python"]}, commit {commit}: {ONE_GPU}.

```
{options["command"]}
```

Llama, {report.num_params / 1e6:.1f}M parameters in {report.num_units} units, {report.tokens} tokens per rank; fp32
parameters gathered as bf16, gradients reduced in fp32, AdamW; rank 0 of {options["world_size"]} on an
[emulated link](../emulated_link.md) with a latency of {LATENCY_US:g} us. Every system has its own process; they take
turns on the device. [How](README.md). The run took {report.seconds:.0f} s.

{_ABOUT}"""


def _speeds(report: GpuReport, checkpointing: bool, ctas: int) -> str:
    """Steps on each link with so many CTAs."""
    links = [Link(gigabytes_per_s=speed, latency_us=LATENCY_US, ctas=ctas) for speed in SPEEDS]
    rows = []
    for label, names in ROWS.items():
        cells = [_step_cell(report, names, Key(system="", checkpointing=checkpointing, link=link)) for link in links]
        instant = _step_cell(report, names, Key(system="", checkpointing=checkpointing))
        if any(cell != _NONE for cell in [*cells, *([instant] if ctas == CTAS[0] else [])]):
            rows.append([label, instant, *cells])
    if not rows:
        return ""
    heads = ["system", "instant", *(_link_head(report, link, checkpointing) for link in links)]
    return (
        f"{ctas} CTAs; ms per step, in parentheses the ratio to FSDP2; then tokens per second, and ms of exposed "
        f"communication.\n\n{table(heads, rows)}"
    )


def _link_head(report: GpuReport, link: Link, checkpointing: bool) -> str:
    """The speed, and what the transfers of FSDP2 take on it."""
    steps = report.steps.get(Key(system="fsdp2", checkpointing=checkpointing, link=link))
    sent = f": {1e3 * steps.traffic.seconds:.0f} ms" if steps else ""
    return f"{link.gigabytes_per_s:g} GB/s{sent}"


def _step_cell(report: GpuReport, names: Sequence[str], where: Key) -> str:
    key = report.first(names, where)
    seconds = report.seconds_of(key)
    if key is None or seconds is None:
        return _NONE
    ratio = report.ratio(key, report.first(["fsdp2"], where))
    text = _ms(seconds) + (f" ({ratio:.2f})" if ratio is not None else "")
    text += f"; {report.tokens_per_s(key):,.0f}"
    exposed = report.exposed_s(key)
    return text if where.link == INSTANT or exposed is None else f"{text}; {_ms(exposed)}"


def _costs(report: GpuReport, checkpointing: bool) -> str:
    """Memory, host time and traffic on one link."""
    rows = []
    for label, names in ROWS.items():
        where = Key(system="", checkpointing=checkpointing, link=MAIN)
        key = report.first(names, where) or report.first(names, Key(system="", checkpointing=checkpointing))
        if key is None:
            continue
        steps, host = report.steps[key], report.host_s(key.system, checkpointing)
        sent = steps.traffic
        rows.append(
            [
                label,
                _NONE if steps.peak_bytes is None else f"{steps.peak_bytes / 2**30:.2f}",
                _NONE if host is None else _ms(host),
                str(sent.launches),
                _NONE if sent.nbytes is None else f"{sent.nbytes / 1e9:.2f}",
                f"{sent.seconds / sent.expected_s:.3f}" if sent.expected_s else _NONE,
            ]
        )
    heads = ["system", "peak GiB", "host ms", "collectives", "GB, unsharded", "transfers / asked of the link"]
    return table(heads, rows) if rows else ""


def _accumulation(report: GpuReport) -> str:
    several = report.options["microbatches"]
    rows = []
    for label, names in ROWS.items():
        where = Key(system="", checkpointing=True, link=MAIN, microbatches=several)
        key = report.first(names, where)
        if key is not None:
            peak = report.steps[key].peak_bytes
            cell = _step_cell(report, names, where)
            rows.append([label, cell, _NONE if peak is None else f"{peak / 2**30:.2f}"])
    if not rows:
        return ""
    title = f"## {several} microbatches per step, with activation checkpointing"
    about = "FSDP2 and fxshard reduce in the last one, SimpleFSDP in each."
    return f"{title}\n\n{about}\n\n{table(['system', MAIN.name, 'peak GiB'], rows)}"


def _consolidation(report: GpuReport) -> str:
    rows = [
        [f"`{name}`", f"{found['bytes'] / 1e9:.2f}", ", ".join(f"{seconds:.2f}" for seconds in found["seconds"])]
        for name, found in report.consolidation.items()
    ]
    if not rows:
        return ""
    about = (
        "On the instant link, which cannot send to one rank only: every rank is given all of it. `torch_full`: "
        "[state.md](state.md)."
    )
    return f"## The full optimizer state on the CPU\n\n{about}\n\n{table(['way', 'GB', 's, each call'], rows)}"


def _profiles(report: GpuReport) -> str:
    """What bounds a step."""
    parts = [_profile(name, found) for name, found in report.profiles.items() if found["lanes"]]
    if not parts:
        return ""
    return "\n\n".join([f"## What bounds it\n\n{MAIN.name}, without activation checkpointing.", *parts])


def _profile(name: str, found: dict[str, Any]) -> str:
    lanes = [[lane["lane"], f"{lane['kernels']:.0f}", f"{lane['busy_ms']:.1f}"] for lane in found["lanes"][:5]]
    top = [[f"`{k['kernel']}`", k["lane"], f"{k['launches']:.0f}", f"{k['ms']:.2f}"] for k in found["top"]]
    gaps = [
        [f"{gap['ms']:.2f}", f"{gap['others_work_ms']:.2f}", f"`{gap['after']}`", f"`{gap['before']}`"]
        for gap in found["gaps"]
    ]
    about = (
        f"A step takes {found['span_ms']:.1f} ms under the profiler. The first stream below is idle for "
        f"{found['main_idle_ms']:.1f} ms of them: {found['while_others_work_ms']:.1f} ms while another works (it waits "
        f"for a transfer), {found['while_nothing_works_ms']:.1f} ms while none does (it waits for the host)."
    )
    return "\n\n".join(
        [
            f"### {name}\n\n{about}",
            table(["stream", "kernels", "busy, ms"], lanes),
            table(["kernel", "stream", "launches", "ms per step"], top),
            "The longest times in which the first stream does nothing, of single steps:",
            table(["ms", "others work, ms", "after", "before"], gaps),
        ]
    )


def _missing(report: GpuReport) -> str:
    lines = [*(f"PROBLEM: {problem}" for problem in report.problems()), *report.left_out]
    return "## What is missing\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
