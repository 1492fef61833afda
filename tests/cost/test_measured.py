"""Ranks come to the same numbers: measured, from a file, or of the table; and never hang over it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fxshard
from fxshard import hardware
from fxshard.cost import measured
from fxshard.errors import ConfigError
from fxshard.hardware import TABLE, HardwareSpec
from fxshard.testing import Speed, emulated_link
from tests.ranks import group_folder, join_group, two_ranks

CPU = torch.device("cpu")
SLOW = hardware.BUILTIN["cpu"].to_json().replace(TABLE, "a file of another day").replace("1000000000.0", "12000000.0")


@contextlib.contextmanager
def measuring(folder: Path, switch: str = "1") -> Iterator[None]:
    """Measuring is on, and its files are here."""
    folder.mkdir(exist_ok=True)
    with mock.patch.dict(os.environ, FXSHARD_CALIBRATE=switch, TORCHINDUCTOR_CACHE_DIR=str(folder)):
        yield


@contextlib.contextmanager
def new_group(name: str, *, switch: str = "1", own_disk: bool = False) -> Iterator[Path]:
    """Both ranks in a group of their own, with a folder for files; yields it. Another test gets the table's numbers."""
    dist.destroy_process_group()
    join_group(name)
    folder = group_folder() / f"{name}_cache{dist.get_rank() if own_disk else ''}"
    with measuring(folder, switch):
        yield folder
    dist.destroy_process_group()
    join_group(f"after_{name}")


def both() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def agreed(timeout: float = 60.0) -> HardwareSpec:
    """What the two ranks count on, which is the same."""
    measured.agree(both(), timeout)
    return found()


def found() -> HardwareSpec:
    """The same of a rank that has agreed already."""
    spec = measured.numbers_for([dist.group.WORLD], CPU)
    texts: list[str | None] = [None, None]
    dist.all_gather_object(texts, spec.to_json())
    assert texts[0] == texts[1]
    return spec


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@two_ranks
def test_ranks_measure_once_and_rank_0_keeps_the_numbers_in_a_file() -> None:
    with new_group("measured_once") as folder:
        spec = agreed()
        assert spec.source.startswith("measured on 2 ranks of fxshard_gloo, ")
        (file,) = files(folder)
        assert (file.parent.parent.name, file.suffix) == ("fxshard", ".json")
        assert hardware.load(file) == spec
        with mock.patch.object(measured, "Calibration", side_effect=AssertionError("measured twice")):
            assert agreed() == spec  # they know
            dist.barrier()
            dist.destroy_process_group()
            join_group("measured_later")
            assert agreed() == spec  # from the file


@two_ranks
def test_the_file_of_one_rank_counts_for_all_whichever_has_it() -> None:
    for owner in (0, 1):
        with new_group(f"disks_{owner}", own_disk=True) as folder:
            file = measured._file_of(measured._Axes(both()))
            if dist.get_rank() == owner:
                file.parent.mkdir(parents=True)
                file.write_text(SLOW)
            spec = agreed()
            assert (spec.link_bandwidth, spec.source) == (12e6, "a file of another day")
            assert (files(folder) == []) == (dist.get_rank() != owner)


@two_ranks
def test_a_damaged_file_is_measured_and_written_anew() -> None:
    with new_group("damaged"):
        file = measured._file_of(measured._Axes(both()))
        if dist.get_rank() == 0:
            file.parent.mkdir(parents=True)
            file.write_text('{"name": "cpu"')
        dist.barrier()
        spec = agreed()
        assert spec.source.startswith("measured")
        dist.barrier()
        assert hardware.load(file) == spec


def test_numbers_that_cannot_be_kept_leave_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "cpu.json"
    file.mkdir()  # where the numbers are to be
    measured._write(file, SLOW)
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.json"]
    assert "measured numbers could not be kept" in caplog.text


def test_a_file_that_is_no_text_is_told_by_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "cpu.json"
    file.write_bytes(b"\xff")
    assert measured._read(file) is None
    assert f"{file} could not be read" in caplog.text


@two_ranks
def test_a_rank_that_waits_in_vain_counts_on_the_table_and_so_does_who_comes_later() -> None:
    with new_group("in_vain") as folder:
        if dist.get_rank() == 0:
            began = time.monotonic()
            measured.agree(both(), timeout=0.5)
            assert 0.5 <= time.monotonic() - began < 20
        dist.barrier()
        if dist.get_rank() == 1:
            measured.agree(both(), timeout=60.0)  # which it need not wait
        assert found().source == TABLE
        assert files(folder) == []


@two_ranks
def test_where_one_rank_is_told_not_to_measure_all_count_on_the_table() -> None:
    with new_group("one_is_off", switch=str(dist.get_rank())) as folder:
        assert agreed().source == TABLE
        assert files(folder) == []


@two_ranks
def test_nothing_is_measured_where_the_ranks_have_launched_different_collectives() -> None:
    with new_group("under_way") as folder:
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
        measured.agree(both(), timeout=60.0)
        if dist.get_rank() == 1:
            work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        work.wait()
        assert found().source == TABLE
        assert files(folder) == []


@two_ranks
def test_fully_shard_measures_and_the_compiled_graphs_count_on_it() -> None:
    with new_group("fully_shard"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for module in (*model, model):
            fxshard.fully_shard(module)
        torch.compile(model, backend="fxshard", options={"lower": "eager"})(torch.ones(2, 8)).sum().backward()
        explanation = fxshard.explanation_of(model)
        assert explanation.hardware == found()
        assert explanation.hardware.source.startswith("measured on 2 ranks of fxshard_gloo, ")
        torch._dynamo.reset()
        named: dict[str, Any] = {"lower": "eager", "hardware": "h200"}
        torch.compile(model, backend="fxshard", options=named)(torch.ones(2, 8)).sum().backward()
        assert fxshard.explanation_of(model).frames[-1].hardware.label == "h200 (assumed)"  # options win


@two_ranks
def test_the_one_line_form_measures_where_the_ranks_compare_their_models() -> None:
    with new_group("one_line"):
        model: Any = torch.compile(nn.Sequential(nn.Linear(8, 8)), backend="fxshard", options={"lower": "eager"})
        model(torch.ones(2, 8)).sum().backward()
        assert fxshard.explanation_of(model).hardware.source.startswith("measured on 2 ranks")


def test_an_emulated_link_is_measured_where_it_is_made_and_its_transfers_are_not_shown(tmp_path: Path) -> None:
    with measuring(tmp_path), emulated_link(8, gigabytes_per_s=0.1, latency_us=1000.0) as link:
        spec = measured.numbers_for([link.mesh.get_group()], CPU)
        assert spec.source.startswith("measured on 8 ranks of emulated, ")
        assert spec.link_bandwidth <= 0.2e9  # how near it comes to that is tested where it is measured
        assert link.transfers == []
        link.set_speed(gigabytes_per_s=1.0, latency_us=1000.0)
        fxshard.fully_shard(nn.Linear(8, 8), mesh=link.mesh)
        faster = measured.numbers_for([link.mesh.get_group()], CPU)
        assert spec.link_bandwidth < faster.link_bandwidth
    assert files(tmp_path) == []  # its speed is in no file's name


def test_a_mesh_of_two_axes_is_measured_along_both_and_its_graphs_count_on_it(tmp_path: Path) -> None:
    slow = Speed(gigabytes_per_s=0.05, latency_us=2000.0)
    model = nn.Linear(8, 8)
    with measuring(tmp_path), emulated_link(4, latency_us=100.0, ranks_per_machine=2, between_machines=slow):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fxshard.fully_shard(model, mesh=mesh)
        torch.compile(model, backend="fxshard", options={"lower": "eager"})(torch.ones(2, 8)).sum().backward()
        spec = fxshard.explanation_of(model).hardware
        assert spec.source.startswith("measured on 2 x 2 ranks of emulated, ")
        assert spec.replica_link(2, 2).bandwidth <= 0.1e9 < spec.link_bandwidth
        assert spec.link_latency < spec.replica_link(2, 2).latency
    assert fxshard.explanation_of(model).hardware == spec


def test_the_axis_of_tensor_parallelism_has_a_speed_of_its_own(tmp_path: Path) -> None:
    slow = Speed(gigabytes_per_s=0.05, latency_us=2000.0)
    with measuring(tmp_path), emulated_link(4, latency_us=100.0, ranks_per_machine=2, between_machines=slow):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        model = parallelize_module(nn.Linear(8, 8), mesh["tp"], ColwiseParallel(), src_data_rank=None)
        fxshard.fully_shard(model, mesh=mesh["shard"])
        torch.compile(model, backend="fxshard", options={"lower": "eager"})(torch.ones(2, 8)).sum().backward()
        spec = fxshard.explanation_of(model).hardware
        assert spec.source.startswith("measured on 2 x 2 ranks of emulated, ")
        assert spec.link_bandwidth <= 0.1e9 < spec.tensor_link(2).bandwidth
        assert spec.tensor_link(2).latency < spec.link_latency
        assert spec.replica_link(2, 2) == spec.link(2)  # there is none


def test_one_rank_and_a_fake_group_measure_nothing(tmp_path: Path) -> None:
    failure = AssertionError("measured")
    with measuring(tmp_path), mock.patch.object(measured, "Calibration", side_effect=failure):
        fxshard.fully_shard(nn.Linear(8, 8))  # one rank
        dist.destroy_process_group()
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
        try:
            fxshard.fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (2,)))
            assert measured.numbers_for([dist.group.WORLD], CPU).source == TABLE
        finally:
            dist.destroy_process_group()
        fxshard.explain(nn.Linear(8, 8), torch.ones(2, 8), world_size=4, options={"lower": "eager"})


def test_graphs_over_several_groups_count_on_what_all_ranks_have_agreed_on(fake_group: None) -> None:
    world, part = dist.group.WORLD, dist.new_group([0])
    assert world is not None
    known = measured._known()
    of_world, of_part = (hardware.read(SLOW.replace("12000000.0", speed)) for speed in ("2.0", "3.0"))
    known["cpu", frozenset({(0,)})] = of_part
    assert measured.numbers_for([part], CPU) == of_part
    assert measured.numbers_for([part, world], CPU) == hardware.BUILTIN["cpu"]  # another rank is in another part
    known["cpu", frozenset({(0, 1)})] = of_world
    assert measured.numbers_for([part, world], CPU) == of_world
    assert measured.numbers_for([object()], CPU) == hardware.BUILTIN["cpu"]  # `explain` has stand-ins


def test_the_switch_must_be_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXSHARD_CALIBRATE", "off")
    with pytest.raises(ConfigError, match=r"FXSHARD_CALIBRATE must be 0 .* or 1, got 'off'"):
        fxshard.options.measures_hardware()


def test_a_model_that_outlives_its_link_is_refused_where_it_is_compiled_anew() -> None:
    with emulated_link(2) as link:
        model = fxshard.fully_shard(nn.Linear(4, 4), mesh=link.mesh)
    with (
        emulated_link(4),
        pytest.raises(Exception, match="over process group '0' of 2 ranks, which has been destroyed"),
    ):
        torch.compile(model, backend="fxshard")(torch.ones(2, 4))


def test_tensor_parallelism_on_a_second_link_finds_its_groups_though_torch_caches_the_first_ones_mesh() -> None:
    for _ in range(2):
        with emulated_link(4):
            whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), whole["tp"], {"0": ColwiseParallel()})
            fxshard.fully_shard(model, mesh=whole["dp"])
            torch.compile(model, backend="fxshard")(torch.ones(2, 4)).sum().backward()
        torch._dynamo.reset()
