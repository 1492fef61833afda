"""What the benchmark's systems do besides what their authors recommend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from fxshard.tools.bench import systems


@pytest.mark.usefixtures("fake_group")
def test_compiled_blocks_are_given_what_has_arrived() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    whole = DTensor.from_local(x * 1, init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
    on_its_way = whole.redistribute(placements=[Shard(0)], async_op=True).to_local()
    given: list[Tensor] = []

    def block(y: Tensor) -> Tensor:
        given.append(y)
        return y

    systems._with_inputs_there(block)(on_its_way).sum().backward()
    assert type(on_its_way) is not Tensor
    assert [type(y) for y in given] == [Tensor]
    assert x.grad is not None
