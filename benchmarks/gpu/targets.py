"""What the project aims at on one GPU, beside what was measured; nothing is asserted."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from benchmarks.gpu.result import GpuReport, Key
from benchmarks.gpu.settings import LATENCY_US, SPEEDS, Link

_AUTO: Final = ("fxshard_auto_100", "fxshard_auto_50")
_OTHERS: Final = ("fsdp2", "fsdp2_compiled", "fsdp2_best", "overlapped_100", "overlapped_50")
_NOT_MEASURED: Final = "not measured"

OVER_FSDP2, OVER_BEST, EXPOSED, HIDEABLE, PEAK, HOST = 1.25, 1.08, 0.05, 0.8, 0.85, 0.5


def target_rows(report: GpuReport) -> list[list[str]]:
    """A target in words, and what was measured, each."""
    rows = []
    for gigabytes_per_s in (100.0, 50.0):
        for text, least, value in (
            (f"{OVER_FSDP2} x FSDP2", OVER_FSDP2, _over_fsdp2),
            (f"{OVER_BEST} x the best of the others", OVER_BEST, _over_best),
        ):
            target = f'{gigabytes_per_s:g} GB/s, tokens per second of both "auto": {text}'
            rows.append([target, _both(report, gigabytes_per_s, value, functools.partial(operator.le, least))])
    rows.append(
        [
            f"exposed at most {EXPOSED:.0%} of a step where transfers take at most {HIDEABLE} x compute alone",
            _exposed(report),
        ]
    )
    rows.append(
        [f"peak memory at most {PEAK} x FSDP2's, 100 GB/s", _both(report, 100.0, _peak, lambda found: found <= PEAK)]
    )
    rows.append([f"host time at most {HOST} x FSDP2's", _host(report)])
    rows.append(['`streams="side"` in place of the default, 100 GB/s: step', _side(report)])
    return rows


def _link(gigabytes_per_s: float) -> Link:
    return Link(gigabytes_per_s=gigabytes_per_s, latency_us=LATENCY_US)


def _both(
    report: GpuReport, speed: float, value: Callable[[GpuReport, Key], float | None], is_met: Callable[[float], bool]
) -> str:
    """A number without and with activation checkpointing, and whether it is as it should be."""
    cells = []
    for checkpointing in (False, True):
        key = report.first(_AUTO, Key(system="", checkpointing=checkpointing, link=_link(speed)))
        found = value(report, key) if key is not None else None
        if found is not None:
            cells.append(f"{found:.2f}{' with checkpointing' if checkpointing else ''}: {_word(is_met(found))}")
    return "; ".join(cells) or _NOT_MEASURED


def _word(is_met: bool) -> str:
    return "met" if is_met else "not met"


def _over_fsdp2(report: GpuReport, key: Key) -> float | None:
    ratio = report.ratio(key, replace(key, system="fsdp2"))
    return None if ratio is None else 1 / ratio


def _over_best(report: GpuReport, key: Key) -> float | None:
    ratios = [report.ratio(key, replace(key, system=other)) for other in _OTHERS]
    found = [1 / ratio for ratio in ratios if ratio is not None]
    return min(found, default=None)


def _peak(report: GpuReport, key: Key) -> float | None:
    mine, base = report.steps.get(key), report.steps.get(replace(key, system="fsdp2"))
    if mine is None or base is None or not mine.peak_bytes or not base.peak_bytes:
        return None
    return mine.peak_bytes / base.peak_bytes


def _exposed(report: GpuReport) -> str:
    """On every link that compute could hide, for the automatic schedule."""
    cells = []
    for checkpointing in (False, True):
        for speed in SPEEDS:
            key = report.first(_AUTO, Key(system="", checkpointing=checkpointing, link=_link(speed)))
            if key is None:
                continue
            compute, exposed = report.compute_s(key), report.exposed_s(key)
            steps = report.steps[key]
            if compute is None or exposed is None or steps.traffic.seconds > HIDEABLE * compute:
                continue
            share = exposed / steps.seconds
            where = f"{speed:g} GB/s{' with checkpointing' if checkpointing else ''}"
            cells.append(f"{where} {share:.1%}: {_word(share <= EXPOSED)}")
    return "; ".join(cells) or _NOT_MEASURED


def _host(report: GpuReport) -> str:
    base = report.host_s("fsdp2")
    return _or_not_measured(
        f"{name} {host / base:.2f}: {_word(host / base <= HOST)}"
        for name in ("fxshard", *_AUTO)
        if base and (host := report.host_s(name)) is not None
    )


def _side(report: GpuReport) -> str:
    key = Key(system="fxshard_side", checkpointing=False, link=_link(100.0))
    ratio = report.ratio(key, replace(key, system="fxshard"))
    return _NOT_MEASURED if ratio is None else f"{ratio:.3f} x"


def _or_not_measured(cells: Iterable[str]) -> str:
    return "; ".join(cells) or _NOT_MEASURED
