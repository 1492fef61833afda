"""Public functions and setters name what they take, and what they were given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard.errors import ConfigError
from fxshard.options import parse
from fxshard.pipelining import ShardedStage

ours: Any = fxshard  # each argument here has a wrong type
LAYER, X, CPU = nn.Linear(2, 2), torch.ones(2, 2), torch.device("cpu")

FUNCTIONS: dict[str, Callable[[], Any]] = {
    "adopt expects the model, got list": lambda: ours.adopt([LAYER]),
    "release expects the model, got str": lambda: ours.release("model"),
    "release(Linear): fxshard has sharded nothing in it.": lambda: ours.release(LAYER),
    "register_fsdp_forward_method expects a module, got str": lambda: ours.register_fsdp_forward_method("model", "f"),
    "no_sync expects the model, got list": lambda: ours.no_sync([]).__enter__(),
    "release_accumulators expects the model, got int": lambda: ours.release_accumulators(1),
    "share_comm_ctx expects modules that fully_shard has sharded, got Linear": lambda: ours.share_comm_ctx([LAYER]),
    "overlap_step expects an optimizer of torch, got Linear": lambda: ours.overlap_step(LAYER),
    "whole_matrices expects an optimizer of torch that treats parameters one by one, got LBFGS": lambda: (
        ours.whole_matrices(torch.optim.LBFGS([X]))
    ),
    "ShardedStage expects a module that fully_shard has sharded, got Linear": lambda: ShardedStage(LAYER, 0, 1, CPU),
    "explain expects an nn.Module, got function": lambda: ours.explain(lambda x: x, X, world_size=2),
    "no graph with sharded parameters was captured from ReLU": lambda: ours.explain(nn.ReLU(), X, world_size=2),
    "Linear is not sharded": lambda: ours.explanation_of(torch.compile(LAYER, backend="fxshard")),
    "bisect_numerics expects an nn.Module, got function": lambda: ours.bisect_numerics(lambda x: x, X),
    "an input has no values": lambda: ours.bisect_numerics(LAYER, X.to("meta")),
    "weight has no values (it is on the meta device or fake), but bisect_numerics compares values. "
    "Call model.to_empty": lambda: ours.bisect_numerics(nn.Linear(2, 2, device="meta"), X),
    "options must be a dict, got ['lower']": lambda: parse(["lower"]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", FUNCTIONS)
def test_a_function_says_what_it_does_not_take(message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        FUNCTIONS[message]()


class Own:
    """What a user may put in the place of a collective."""


SETTERS: dict[str, tuple[Any, str]] = {
    "set_all_reduce_hook": (3, "set_all_reduce_hook expects a function of a tensor, got int"),
    "set_custom_all_gather": (Own(), "set_custom_all_gather expects an object that can be called"),
    "set_custom_reduce_scatter": (print, "as FSDP2's, got builtin_function_or_method"),
    "set_force_sum_reduction_for_comms": ("yes", "enable must be a bool, got 'yes'"),
    "set_gradient_divide_factor": (0, "factor must be a positive number, got 0"),
    "set_is_last_backward": (None, "is_last_backward must be a bool, got None"),
    "set_manual_backward_finalization": (1, "enabled must be a bool, got 1"),
    "set_post_optim_event": (1, "set_post_optim_event expects a torch.Event, got int"),
    "set_reduce_scatter_unused_params": (1, "reduce_scatter_unused_params must be a bool, got 1"),
    "set_requires_all_reduce": (1, "requires_all_reduce must be a bool, got 1"),
    "set_requires_gradient_sync": (1, "requires_gradient_sync must be a bool, got 1"),
    "set_reshard_after_forward": (2, "reshard_after_forward must be a bool, got 2"),
    "set_separate_reduce_scatter_group": ("yes", "enable must be a bool, got 'yes'"),
    "set_unshard_in_backward": (None, "unshard_in_backward must be a bool, got None"),
}


@pytest.mark.parametrize("name", SETTERS)
def test_a_setter_says_what_it_does_not_take(mesh: DeviceMesh, name: str) -> None:
    value, message = SETTERS[name]
    model = fxshard.fully_shard(nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(ConfigError, match=re.escape(message)):
        getattr(model, name)(value)
