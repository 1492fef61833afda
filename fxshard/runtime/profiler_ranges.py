"""The launches and waits of units: a torch profiler shows them under the units' names, a policy does not see them.

    fxshard::unshard(blocks.0)   the launch of an all_gather; of several units with commas
    fxshard::reduce(blocks.0)    the launch of a reduce_scatter
    fxshard::wait(blocks.0)      until its result is there

[Note: ranges]
Generated code launches collectives by itself. So while a profiler runs, a graph runs under a dispatch mode that sees
every op, knows from the graph which unit each launch is for, and recognises a wait by the buffer it waits for. Ops are
slower under it; without a profiler only a flag and the stack of modes are looked at per run of a graph.

The same mode is on under the policy of selective activation checkpointing, to hide what it recognises. A policy that
saves `wait_tensor`, for the model's own collectives, would keep parameters unsharded until backward, and nobody would
wait for what recomputation launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import repeat
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from fxshard import torch_private
from fxshard.ir import ops
from fxshard.ir.launches import Launch
from fxshard.runtime.flat_shard import home_of

_VERBS = {"all_gather": "unshard", "reduce_scatter": "reduce"}
_ON_STREAM = {ops.ALL_GATHER_ON_STREAM: "all_gather", ops.REDUCE_SCATTER_ON_STREAM: "reduce_scatter"}


def of_graph(launches: Iterable[Launch]) -> AbstractContextManager[object]:
    """Around one run of a compiled graph that makes these launches, in their order for each kind of collective."""
    if not torch_private.profiler_runs() and not torch_private.policy_is_on():
        return nullcontext()
    launches = list(launches)
    return _Ranges({kind: iter([launch.serves for launch in launches if launch.kind == kind]) for kind in _VERBS})


@contextmanager
def of_unit(fqn: str) -> Iterator[None]:
    """Around launches and waits for one unit, which no policy sees."""
    names = {kind: repeat(fqn or "root") for kind in _VERBS}
    with torch_private.unseen_by_policies(), _Ranges(names) if torch_private.profiler_runs() else nullcontext():
        yield


@contextmanager
def of_wait(fqn: str) -> Iterator[None]:
    """Around a wait outside of graphs for one unit, which no policy sees."""
    in_profile = record_function(f"fxshard::wait({fqn or 'root'})") if torch_private.profiler_runs() else nullcontext()
    with torch_private.unseen_by_policies(), in_profile:
        yield


class _Ranges(torch_private.DispatchMode):
    """Opens the ranges; see [Note: ranges]."""

    supports_higher_order_operators = True

    def __init__(self, names: Mapping[str, Iterator[str]]) -> None:
        """`names`: for each kind of collective, whom the next launches are for; an empty name opens no range."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._in_flight: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op, in a range if it is a launch or a wait of a unit."""
        kwargs = kwargs or {}
        if func is ops.PREFETCHED_ALL_GATHER:
            next(self._names.get("all_gather", iter(())), "")  # blocks that share a graph have names of their own
            home = home_of(args[0])
            with torch_private.unseen_by_policies():
                return self._expect(home.unit.label if home else "", func(*args, **kwargs))
        if func is ops.COPY_OUT:  # who waits for the copy waits for the buffer
            name = self._in_flight.get(args[0].data_ptr(), "")
            with torch_private.unseen_by_policies():
                return self._expect(name, torch_private.run_unrecorded(func, args, kwargs))
        kind = _ON_STREAM.get(func, "")
        if func.namespace != "_c10d_functional" and not kind:
            return torch_private.run_unrecorded(func, args, kwargs)
        if func._opname == "wait_tensor":
            name = self._in_flight.pop(args[0].data_ptr(), "")
            return _in_range("wait", name, func, args, kwargs)
        kind = kind or func._opname.partition("_into_tensor" if "_into_tensor" in func._opname else "_tensor")[0]
        name = next(self._names.get(kind, iter(())), "")
        return self._expect(name, _in_range(_VERBS.get(kind, ""), name, func, args, kwargs))

    def _expect(self, name: str, launched: Any) -> Any:
        """Remember whose wait it will be that waits for these buffers."""
        if name:
            buffers = [launched] if isinstance(launched, Tensor) else launched
            self._in_flight.update({buffer.data_ptr(): name for buffer in buffers})
        return launched


def _in_range(verb: str, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not name:
        return run(*args, **kwargs)
    with torch_private.unseen_by_policies(), record_function(f"fxshard::{verb}({name})"):
        return run(*args, **kwargs)
