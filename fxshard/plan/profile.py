"""What a trace of `torch.profiler` says of one step: kernels and collectives, with what they are and how large."""

from __future__ import annotations

import gzip
import json
import math
import re
import tempfile
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fxshard.cost.step_record import ATTENTION, OTHER, PRODUCT
from fxshard.errors import ConfigError

COLLECTIVES = {"all_gather": r"all_?gather", "reduce_scatter": r"reduce_?scatter", "all_reduce": r"all_?reduce"}
_COMPUTE = {
    ATTENTION: "attention|flash|fmha|sdpa",
    PRODUCT: r"gemm|cutlass|nvjet|xmma|cublas|\bmm\b|addmm|\bbmm\b|baddbmm|conv|matmul",
}
_DTYPES = {"Float": torch.float32, "BFloat16": torch.bfloat16, "Half": torch.float16, "Double": torch.float64}


class ProfiledKernel(NamedTuple):
    """Something that ran, in seconds of the trace's clock."""

    kind: str  # of `COLLECTIVES`, or of a node of compute
    start: float
    end: float
    size: float  # FLOPs of a product, bytes of a collective's whole buffer; nan where the trace does not say


def read(profile: Any) -> list[dict[str, Any]]:
    """Return the slices of a `torch.profiler.profile`, or of the file that it exported, in the order of their starts.

    Raise `ConfigError` if the file is none.
    """
    try:
        if hasattr(profile, "export_chrome_trace"):
            with tempfile.TemporaryDirectory() as folder:
                profile.export_chrome_trace(f"{folder}/trace.json")
                return read(f"{folder}/trace.json")
        raw = Path(profile).read_bytes()
        events = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"]
        slices = (event for event in events if event.get("ph") == "X" and {"name", "dur"} <= event.keys())
        return sorted(slices, key=lambda event: (event["ts"], -event["dur"]))
    except (OSError, EOFError, zlib.error, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{profile} is no trace that torch.profiler exported: {error!r}.") from error


def kernels_of(events: Iterable[Mapping[str, Any]], ops: Collection[str]) -> list[ProfiledKernel]:
    """Return what ran in the last whole step: kernels of a GPU, or calls of `ops` ("aten::mm") and gloo on a CPU.

    The op that launched a kernel, and its shapes, are found where the trace has them.
    """
    found = [event for event in events if event.get("cat") == "kernel"]
    marks = "gpu_user_annotation" if found else "user_annotation"
    if not found:
        until: dict[Any, float] = {}
        for event in (event for event in events if event["name"] in ops or event["name"].startswith("gloo:")):
            if event["ts"] >= until.get(event["tid"], -math.inf):  # it is called by none of the others
                until[event["tid"]] = event["ts"] + event["dur"]
                found.append(event)
    calls = {_id(event): event for event in events if event.get("cat") == "cpu_op"}
    steps = [event for event in events if event["name"].startswith("ProfilerStep") and event.get("cat") == marks]
    first, last = (steps[-1]["ts"], steps[-1]["ts"] + steps[-1]["dur"]) if steps else (-math.inf, math.inf)
    return [_kernel(event, calls.get(_id(event), event)) for event in found if first <= event["ts"] < last]


def _id(event: Mapping[str, Any]) -> Any:
    return _args(event).get("External id")


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of an event, whose "args" may be missing or null."""
    return event.get("args") or {}


def _kernel(event: Mapping[str, Any], call: Mapping[str, Any]) -> ProfiledKernel:
    args, size = _args(event), math.nan
    table = COLLECTIVES if re.match("nccl|gloo", event["name"]) else _COMPUTE
    names = [re.sub("^(aten::)?_*", "", each["name"]) for each in (call, event)]
    kind = next((kind for name in names for kind, words in table.items() if re.search(words, name, re.I)), OTHER)
    if kind in COLLECTIVES and args.get("dtype") in _DTYPES:
        elements = args.get("Out msg nelems" if kind == "all_gather" else "In msg nelems", math.nan)
        size = float(elements * _DTYPES[args["dtype"]].itemsize)
    shapes = [shape for shape in _args(call).get("Input Dims") or () if len(shape) in (2, 3)]
    if kind == PRODUCT and len(shapes) > 1:
        size = 2.0 * math.prod(shapes[-2]) * shapes[-1][-1]
    return ProfiledKernel(kind, event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6, size)
