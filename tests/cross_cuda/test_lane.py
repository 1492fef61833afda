"""The lane itself: patches that do not apply are errors, and the dry run finds what it looks for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.cross_cuda import reading
from tests.cross_cuda.clocks import Streams
from tests.cross_cuda.dry_run import Step, dry_run
from tests.cross_cuda.lane import installed
from tests.cross_cuda.patches import Dead, Patch, Synchronised
from tests.numerics.float8 import Float8Weight

pytestmark = [pytest.mark.cuda_lane, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("patch", "state"),
    [
        (Patch(name="torch.cuda.no_such_name", value=None, why="of a test"), "lacks"),
        (Patch(name="torch.cuda.is_available", value=None, why="of a test", is_new=True), "has"),
    ],
)
def test_a_patch_that_does_not_apply_is_an_error(patch: Patch, state: str) -> None:
    with pytest.raises(Dead, match=f"{state} {patch.name}, which is patched because of a test"):
        patch.apply(set())


@pytest.fixture
def tensor() -> Tensor:
    installed()
    with FakeTensorMode():
        return torch.empty(1, device="cuda")


@pytest.mark.parametrize("wait", [Tensor.item, Tensor.cpu, Tensor.nonzero])
def test_finds_a_host_that_waits_for_a_tensor(wait: object, tensor: Tensor) -> None:
    mode: FakeTensorMode = tensor.fake_mode  # type: ignore[attr-defined]
    with dry_run(mode), pytest.raises(AssertionError, match="the host wait"):
        wait(tensor)  # type: ignore[operator]


def test_finds_a_host_that_synchronises() -> None:
    installed()
    with pytest.raises(Synchronised, match="the host waits for the GPU"):
        torch.cuda.synchronize()


RACES = {
    "forks": "read on side1 reads what was not waited for: write on main",
    "waits": "other on main overwrites what is in use: read on side1",
    "records": "other on main is given memory that is in use: read on side1",
}
"""What is found where a stream does not fork, where nobody waits for it, and where memory is freed that it reads."""


@pytest.mark.parametrize("fault", ["", *RACES])
def test_finds_races(fault: str) -> None:
    installed()
    streams = Streams()
    side, mode = streams.made(), FakeTensorMode()
    with mode:
        read = torch.empty(4, device="cuda")
    streams.run("write", [], [read])
    if fault != "forks":
        side.wait_stream(streams.main)
    with streams.using(side):
        streams.run("read", [read], [])
    if fault == "waits":
        streams.run("other", [], [read])
    elif fault != "records":
        streams.record(read, side)
    del read
    with mode:
        streams.run("other", [], [torch.empty(4, device="cuda")])
    assert streams.races == ([RACES[fault]] if fault else [])


@pytest.mark.parametrize("is_encoded", [False, True])
def test_finds_a_cast_that_does_not_wait_for_the_optimizer(is_encoded: bool) -> None:
    installed()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cuda", (2,))
        with dry_run(FakeTensorMode(allow_non_fake_inputs=True)) as run:
            flat = torch.zeros(4, device="cuda")
            parameter: Tensor = Float8Weight(flat) if is_encoded else DTensor.from_local(flat, mesh, [Shard(0)])
            parameter.add_(1.0)
            with run.streams.using(run.streams.made()):
                flat.to(torch.bfloat16)
    finally:
        dist.destroy_process_group()
    assert run.streams.races == ["aten::_to_copy on side1 reads what was not waited for: aten::add_.Tensor on main"]


def test_counts_no_copy_out_of_memory_that_has_become_another_tensors() -> None:
    gather = Step("gather", "all_gather", "nccl", (0,), (1,), 8, 64)
    copy = Step("triton", "copy", "main", (1,), (2,), 64, 64)
    overwrite = Step("kernel", "mm", "main", (3,), (1,), 64, 64)
    assert reading.copied_bytes([gather, copy]) == 64
    assert reading.copied_bytes([gather, overwrite, copy]) == 0
