"""What a module keeps about its sharded parameters, and what Dynamo guards on because of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.device_mesh import DeviceMesh

from fxshard import fully_shard
from fxshard.ir import ops
from fxshard.runtime.parameters import ParameterRef, traced_key
from tests.graphs import Layers
from tests.numerics.harness import EAGER


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 5)], ids=str)
def test_a_reference_as_text_gives_the_arguments_of_the_marker(shape: tuple[int, ...]) -> None:
    ref = ParameterRef(torch.empty(4), "2@a|b None/None keep", 7, shape, torch.bfloat16)
    assert ops.marker_arguments(ref.text) == (ref.key, ref.slot, [*ref.shape], ref.dtype)


def test_no_parameter_can_be_called_as_a_flat_is() -> None:
    with pytest.raises(KeyError, match="contain"):
        nn.Module().register_parameter(traced_key("weight", "flat"), nn.Parameter(torch.ones(1)))


def test_a_parameter_more_is_one_guard_more(mesh: DeviceMesh) -> None:
    model = fully_shard(Layers(3), mesh=mesh)
    torch.compile(model, backend="fxshard", options=EAGER)(torch.ones(2, 4))
    guards = leaf_guards_of(model)
    assert [guard for guard in guards if "_fxshard_refs" in guard] == []
    assert (
        len([guard for guard in guards if re.search(r"EQUALS_MATCH: .*_fxshard_traced\b.*\['\w+'\] == ", guard)]) == 6
    )
    assert len([guard for guard in guards if ".flat']" in guard and "TENSOR_MATCH" in guard]) == 1


def leaf_guards_of(model: nn.Module) -> list[str]:
    """The conditions under which Dynamo runs the compiled forward again."""
    code: Any = type(model).forward.__code__
    (entry,) = _debug_get_cache_entry_list(code)
    lines = str(entry.guard_manager).splitlines()
    return [line for line in lines if "GuardManager: source" not in line]
