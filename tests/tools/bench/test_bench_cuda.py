"""What `fxshard bench` does for GPUs, as far as it can be seen without one, and what its systems do besides."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from fxshard.tools.bench import systems, task, worker
from fxshard.tools.bench.config import BenchConfig, Entry
from fxshard.tools.bench.result import Report, SystemResult
from fxshard.tools.bench.show import describe_group, show_report
from fxshard.tools.bench.worker import Ready, Timed
from fxshard.tools.launch.rank_process import RankPlace, join


def config(**kwargs: Any) -> BenchConfig:
    return BenchConfig(target="tests.tools.bench.test_bench_cuda:mixed", entries=(), out=Path(), **kwargs)


def mixed() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Linear(2, 2), {"tokens": torch.ones(2, dtype=torch.int64), "weights": torch.ones(2)}


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.float32), ("bf16", torch.bfloat16)])
def test_parameters_and_floating_point_inputs_are_cast(dtype: str | None, expected: torch.dtype) -> None:
    made = task.make_task(config(dtype=dtype), 0)
    assert {p.dtype for p in made.model.parameters()} == {expected}
    assert {name: tensor.dtype for name, tensor in made.batch.items()} == {"tokens": torch.int64, "weights": expected}


def test_a_rank_chooses_its_gpu_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("torch.cuda.set_device", lambda device: calls.append(device))
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *args, **kwargs: torch.distributed.HashStore())
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    join(RankPlace(rank=9, local_rank=1, num_threads=1, port=1), 16, device="cuda", stall_s=5)
    gpu, (args, kwargs) = calls
    assert gpu == torch.device("cuda", 1)
    assert args == ("nccl",)
    assert (kwargs["rank"], kwargs["world_size"], kwargs["device_id"]) == (9, 16, gpu)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_link_is_on_the_device_of_the_model(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    @contextlib.contextmanager
    def link(world_size: int, **kwargs: Any) -> Iterator[None]:
        asked.append((world_size, kwargs))
        yield

    monkeypatch.setattr(worker, "emulated_link", link)
    monkeypatch.setattr("torch.cuda.set_device", asked.append)
    chosen = config(group="emulated", ranks=1, world_size=8, latency_us=5.0, link_device=device, ctas=24)
    assert chosen.device == device
    with worker._link(chosen):
        pass
    speed = {"gigabytes_per_s": float("inf"), "latency_us": 5.0}
    on_cuda = [0, (8, speed | {"device": "cuda", "ctas": 24})]
    assert asked == (on_cuda if device == "cuda" else [(8, speed)])


def test_the_table_names_one_gpu_and_its_memory() -> None:
    result = SystemResult(entry=Entry(name="fsdp2", system="fsdp2"))
    told = {"num_params": 1, "num_units": 1, "eps": 1e-7, "ready_s": 1.0, "losses": (1.0,), "traffic": {}}
    both = [Ready(**told, unsharded_peak_bytes=None, memory_peak_bytes=mb * 10**6) for mb in (1200, 1500)]  # type: ignore[arg-type] # a dict of many types
    result.prepared(both)
    result.processes[0].add(Timed(seconds=[0.1]))
    chosen = config(group="emulated", ranks=1, world_size=8, gigabytes_per_s=50.0, link_device="cuda", dtype="bf16")
    report = Report(options={"group": "emulated"}, machine={}, systems=[result])
    console = Console(record=True, force_terminal=False, file=io.StringIO())
    show_report(console, report, chosen)
    text = console.export_text()
    assert "GPU MB" in text
    assert "1,500.0" in text
    assert report.to_json()["systems"][0]["memory_peak_bytes"] == 1500 * 10**6
    group = describe_group(chosen)
    assert group == (
        "one GPU, emulated link, identical peers: rank 0 of 8 on an emulated link (50 GB/s, latency 0 us, 16 CTAs)"
    )
    assert "one GPU, emulated link, identical peers" in text
    assert describe_group(config(group="nccl", ranks=16, machines=2)) == "16 ranks (nccl) on 2 machines"


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
