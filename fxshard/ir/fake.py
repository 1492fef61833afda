"""What torch is doing right now: which fake mode a graph was traced in, whether a backward runs, structured traces.

The questions have no public answer, so this file asks private modules and is one of the few that may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch._logging import trace_structured
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

eval_frame_callback = get_eval_frame_callback
"""Dynamo's state on this thread: a function (compiling), None (off), False (only run what is compiled)."""

Function = TypeVar("Function", bound=Any)


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` has no data behind it."""
    return isinstance(tensor, FakeTensor)


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The fake mode that `graph` was traced in, `None` for a graph without tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for leaf in value if isinstance(value, list | tuple) else (value,):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return None


def run_this_frame_eagerly(function: Function) -> Function:
    """Decorate a function that Dynamo may inline but must never compile for itself.

    While a compiled function runs, Dynamo offers itself every Python frame; a frame whose code is skipped runs as it
    is, the frames that it calls are still offered, and a trace that reaches the function inlines it as usual.
    """
    skip_code(function.__code__)
    return function


def backward_id() -> int | None:
    """Identity of the backward pass that this thread is running, `None` outside of one."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def backward_keeps_graph() -> bool:
    """Whether the running backward was called with `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Hand a text to torch's structured trace (`TORCH_TRACE`, read by `tlparse`); made only if someone traces."""
    metadata = {"name": name, "encoding": "string"}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=text)


def storage_id(tensor: Tensor) -> int:
    """Identity of a tensor's storage: equal for views of one another, also for fake tensors."""
    return cast(int, cast(Any, tensor.untyped_storage())._cdata)
