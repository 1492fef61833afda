"""Ops on side streams, as the CPU runs them: what they give, when they run, and that a wait is what makes it so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fxshard.ir import ops
from fxshard.runtime import streams
from fxshard.testing import EmulatedLink, emulated_link

_c10d = torch.ops._c10d_functional
WORLD = 4


@pytest.fixture
def link() -> object:
    with emulated_link(WORLD) as found:
        yield found


def group() -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


def test_a_gather_casts_what_it_sends(link: EmulatedLink) -> None:
    parts = [torch.arange(4.0), torch.arange(6.0)]
    gathered = ops.ALL_GATHER_ON_STREAM(parts, torch.bfloat16, WORLD, group(), "copy_in")
    for buffer, part in zip(gathered, parts, strict=True):
        assert torch.equal(_c10d.wait_tensor(buffer), part.bfloat16().repeat(WORLD))


def test_a_reduction_casts_what_it_sends(link: EmulatedLink) -> None:
    sent = [torch.arange(8.0).bfloat16(), torch.arange(4.0)]
    reduced = ops.REDUCE_SCATTER_ON_STREAM(sent, torch.float32, "avg", WORLD, group(), "reduce")
    for buffer, tensor in zip(reduced, sent, strict=True):
        assert buffer.dtype is torch.float32
        assert torch.equal(_c10d.wait_tensor(buffer), tensor[: len(tensor) // WORLD].float())  # the mean of equal ones


def gathered(shard: Tensor) -> Tensor:
    return ops.ALL_GATHER_ON_STREAM([shard], torch.float32, WORLD, group(), "")[0]


def test_a_copy_waits_for_the_gather_and_is_waited_for(link: EmulatedLink) -> None:
    shard = torch.arange(5.0)
    buffer = gathered(shard)
    columns = ops.COPY_OUT(buffer, [WORLD, 3], [5, 1], 1, "copy_out")
    others = ops.COPY_OUT(buffer, [WORLD, 2], [5, 1], 0, "copy_out")
    assert torch.equal(_c10d.wait_tensor(others), torch.tensor([[0.0, 1.0]] * WORLD))
    assert torch.equal(_c10d.wait_tensor(columns), torch.tensor([[1.0, 2.0, 3.0]] * WORLD))


def test_a_copy_runs_as_late_as_a_stream_could(link: EmulatedLink) -> None:
    """What overwrites the buffer before the wait shows in the copy: so would it on a GPU, sometimes."""
    buffer = gathered(torch.ones(5))
    copy = ops.COPY_OUT(buffer, [20], [1], 0, "copy_out")
    buffer.zero_()
    assert not _c10d.wait_tensor(copy).any()


def test_a_second_wait_copies_nothing(link: EmulatedLink) -> None:
    buffer = gathered(torch.ones(5))
    copy = ops.COPY_OUT(buffer, [20], [1], 0, "copy_out")
    assert _c10d.wait_tensor(copy).all()
    buffer.zero_()
    assert _c10d.wait_tensor(copy).all()


@pytest.mark.parametrize(("op", "operator"), [(ops.ALL_GATHER_ON_STREAM, ()), (ops.REDUCE_SCATTER_ON_STREAM, ("avg",))])
def test_fake_results_have_the_shapes_of_real_ones(op: object, operator: tuple[str, ...], link: EmulatedLink) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs, rest = [torch.ones(8), torch.ones(4)], (torch.bfloat16, *operator, WORLD, group(), "")
    real = [_c10d.wait_tensor(tensor) for tensor in op(inputs, *rest)]  # type: ignore[operator]
    with FakeTensorMode() as mode:
        fake = op([mode.from_tensor(tensor) for tensor in inputs], *rest)  # type: ignore[operator]
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


def test_nothing_changes_without_a_name_or_without_streams() -> None:
    for name in ("", "copy_in"):
        with streams.on_side_stream(name, torch.device("cpu")) as side:
            assert side is None
