"""Which collectives one step launches, and how many bytes they move, as torch's profiler saw it."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fxshard.testing.link_engine import LinkTransfer

# Collective -> the ops of process groups that are it. The first or second input is the unsharded tensor.
_OPS: Final = {
    "all_gather": (
        "allgather_",
        "_allgather_base_",
        "all_gather_single_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
    ),
    "reduce_scatter": (
        "reduce_scatter_",
        "_reduce_scatter_base_",
        "reduce_scatter_single_",
        "reduce_scatter_tensor_coalesced_",
    ),
    "all_reduce": ("allreduce_", "allreduce_coalesced_"),
}
_COLLECTIVE: Final = {f"c10d::{op}": name for name, ops in _OPS.items() for op in ops}
_REDUCTIONS: Final = tuple(f"_c10d_functional::reduce_scatter_tensor{end}" for end in ("", "_coalesced"))
"""In which none of these is seen where their group is written in Python."""
_ITEMSIZE: Final = {
    "double": 8,
    "float": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "long int": 8,
    "int": 4,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one kind of collective does in a step."""

    launches: int = 0  # how many
    # of the unsharded tensors; `None` where the profiler hides some of them (lists of more than 30)
    nbytes: int | None = 0
    seconds: float = 0.0  # that an emulated link was busy with it
    expected_s: float = 0.0  # that it should have been

    def __add__(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(
            launches=self.launches + other.launches,
            nbytes=None if self.nbytes is None or other.nbytes is None else self.nbytes + other.nbytes,
            seconds=self.seconds + other.seconds,
            expected_s=self.expected_s + other.expected_s,
        )


def measure(step: Callable[[], object], itemsize: int) -> dict[str, Traffic]:
    """Run a step under the profiler; return what it launched by collective; `itemsize` is for tensors in lists."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
        if dist.is_initialized():
            dist.barrier()  # torch's profiler must not end while gloo still works: it frees what gloo then writes to
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return count(json.loads(path.read_text())["traceEvents"], itemsize)


def count(events: Iterable[dict[str, Any]], itemsize: int) -> dict[str, Traffic]:
    """Add up the collectives among the events of a trace; arguments as in `measure`."""
    events = list(events)
    names = {id(event): name for event in events if (name := _COLLECTIVE.get(event.get("name", "")))}
    seen = [event for event in events if names.get(id(event)) == "reduce_scatter"]
    reductions = [event for event in events if event.get("name") in _REDUCTIONS]
    seen += reductions  # of one within another (torch dispatches some twice) the inner one counts
    inner = [event for event in reductions if not any(_is_in(event, other) for other in seen if other is not event)]
    names |= {id(event): "reduce_scatter" for event in inner}
    found = []
    for event in events:
        if (name := names.get(id(event))) is not None:
            facts = event.get("args", {})
            tensors = zip(facts.get("Input Dims", []), facts.get("Input type", []), strict=True)
            sizes = [_nbytes(shape, dtype, itemsize) for shape, dtype in tensors]
            nbytes = None if None in sizes else max((size for size in sizes if size), default=0)
            found.append((name, Traffic(launches=1, nbytes=nbytes)))
    return _by_name(found)


def of_link(transfers: Iterable[LinkTransfer]) -> dict[str, Traffic]:
    """Add up what an emulated link carried, by name of the collective; rare ones are left out."""
    return _by_name(
        (
            moved.op,
            Traffic(
                launches=1,
                nbytes=moved.bytes,
                seconds=1e-6 * (moved.end_us - moved.start_us),
                expected_s=1e-6 * moved.expected_us,
            ),
        )
        for moved in transfers
    )


def _is_in(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    return bool(outer["tid"] == inner["tid"] and outer["ts"] <= inner["ts"] <= outer["ts"] + outer["dur"])


def _by_name(launches: Iterable[tuple[str, Traffic]]) -> dict[str, Traffic]:
    found: dict[str, Traffic] = {}
    for name, launch in launches:
        if name in _OPS:
            found[name] = found.get(name, Traffic()) + launch
    return dict(sorted(found.items()))


def _nbytes(shape: Any, dtype: str, itemsize: int) -> int | None:
    """Of a tensor, or of all tensors of a list (of lists); 0 of anything else, `None` of a list that is hidden."""
    if dtype == "TensorList" and not shape:
        return None
    if not _is_nested(shape):
        return math.prod(shape) * _ITEMSIZE[dtype] if dtype in _ITEMSIZE else 0
    return sum(_of_list(inner) for inner in shape) * itemsize


def _of_list(shape: Any) -> int:
    return sum(map(_of_list, shape)) if _is_nested(shape) else math.prod(shape)


def _is_nested(shape: Any) -> bool:
    return bool(shape) and isinstance(shape[0], list)
