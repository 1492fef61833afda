"""Compiled graphs as CUDA graphs: recorded once by Inductor's cudagraph trees, then replayed.

[Note: replays]
A replay runs kernels on the addresses that they were recorded with, and no Python. So:

- Flats and accumulators are *static inputs*: they stay where they are, read and written in place. All other inputs are
  copied to where they were when the graph was recorded.
- What a graph gives lies in memory of the recording and is overwritten by a later replay. Gradients outlive it (an
  optimizer reads them, or the next backward adds to them), so a backward's results are copied out: a rank's rows only.
- The ranks' agreement and the choice of a variant stay in front of the graph. A graph neither takes over nor hands on
  launches of other graphs: that is Python's work (`runtime/prefetcher.py`). What is gathered outside of graphs is
  waited for before one runs.
- Launches and waits must be recorded together: a graph is recorded whole, or is an error that says why it cannot be.
- A backward is compiled when it first runs, as is usual: what manages recordings is there once a forward has run. So
  AOTAutograd's cache, which wants it compiled before, is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxshard import torch_private
from fxshard.errors import ConfigError, UnsupportedGraph
from fxshard.ir import tags
from fxshard.ir.plan import FramePlan
from fxshard.options import Options


def require_device(options: Options, device: torch.device, plan: FramePlan) -> None:
    """Raise `ConfigError` if CUDA graphs are wanted where none can be recorded: off CUDA, or of some kinds of units."""
    if options.cudagraphs and device.type != "cuda":
        raise ConfigError(f"cudagraphs=True needs a model on CUDA; this one is on {device}. Leave the option out.")
    offloaded = [unit.fqn or "root" for unit in plan.units.values() if unit.offload is not None]
    if options.cudagraphs and offloaded:
        raise ConfigError(
            f"cudagraphs=True, but units are offloaded to the host, which no recording waits for: "
            f"{', '.join(offloaded)}. Leave one out: the option, or their offload_policy."
        )
    called = [unit.fqn or "root" for unit in plan.units.values() if unit.gathers_whole or unit.reduces_whole]
    if options.cudagraphs and called:
        raise ConfigError(
            f"cudagraphs=True, but an object does the collectives of units, which no recording calls again: "
            f"{', '.join(called)}. Leave one out: the option, or set_custom_all_gather and set_custom_reduce_scatter."
        )


def patches(options: Options, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return Inductor's configuration, as far as this torch has it; `known` is what it has."""
    wanted = {"triton.cudagraphs": True, "triton.cudagraph_trees": True, "graph_partition": False}
    if not options.cudagraphs:
        wanted = {"triton.cudagraphs": False}  # whatever the environment says: ours would not be safe in a recording
    return {name: value for name, value in wanted.items() if name in known}


def static_inputs(options: Options, graph: fx.Graph, given: Sequence[int]) -> list[int]:
    """Return the indices of the inputs that stay where they are, with those that Inductor was `given`."""
    if not options.cudagraphs:
        return list(given)
    inputs = enumerate(graph.find_nodes(op="placeholder"))
    return sorted({*given, *(i for i, node in inputs if _is_static(node))})


def _is_static(placeholder: fx.Node) -> bool:
    meta = tags.meta_of(placeholder)  # what a subgroup keeps is a shard that forward makes each time
    return bool(meta.acc or (meta.shard and placeholder.name.startswith(torch_private.CALLERS_INPUTS)))


def left_out(options: Options, inputs: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Set the device of the forward whose backward is compiled by itself: its recording continues the forward's."""
    devices = (value.device for value in inputs if isinstance(value, Tensor) and value.is_cuda)
    if options.cudagraphs and (device := next(devices, None)) is not None:
        given["boxed_forward_device_index"].set(device.index)


def require_recordable(options: Options, code: Any, kind: str) -> None:
    """Raise `UnsupportedGraph`, with Inductor's reason, if Inductor will not record a graph of which it made `code`."""
    info = getattr(code, "cudagraph_info", None)
    reasons = getattr(code, "disabled_cudagraphs_reason", None) or getattr(info, "cudagraph_fail_reasons", None)
    if options.cudagraphs and (reasons or info is None):
        why = ", ".join(reasons) if isinstance(reasons, list) else reasons or "Inductor gives no reason"
        raise UnsupportedGraph(
            f"cudagraphs=True: the {kind} graph cannot be recorded: {why}. Fix what it names, or leave the option out."
        )


def guarded(
    options: Options, run: Callable[[list[Any]], Any], kind: str, skips: Mapping[str, int]
) -> Callable[[list[Any]], Any]:
    """Wrap `run`: raise if a graph runs without being recorded (`skips`), and copy the results of a backward."""
    if not options.cudagraphs:
        return run

    @functools.wraps(run, assigned=())
    def checked(inputs: list[Any]) -> Any:
        before = skips.get("cudagraph_skips", 0)
        results = run(inputs)
        if skips.get("cudagraph_skips", 0) > before:
            raise UnsupportedGraph(
                f"cudagraphs=True: the {kind} graph was not recorded when it ran; TORCH_LOGS=perf_hints says why "
                "(inputs that are written to, shapes that keep changing). Fix that, or leave the option out."
            )
        if kind != "backward":
            return results
        return tuple(result.clone() if isinstance(result, Tensor) else result for result in results)

    return checked
