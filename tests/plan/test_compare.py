"""Profiles beside plans: a real one of the CPU, and traces as those of a GPU whose times are known."""

import dataclasses
import functools
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

import fxshard
from fxshard.cost.step_record import OTHER
from fxshard.errors import ConfigError
from fxshard.hardware import HardwareSpec, load
from fxshard.plan.plan import Plan, PlanSettings, plan
from fxshard.testing import emulated_link
from tests.plan.models import LAYERS, ROWS, WIDTH, Stack, build

DEVICE = dataclasses.replace(load("h100-sxm"), kernel_overhead=0.0, collective_share=0.0, host_overhead=0.0)
"""Whose kernels take what its speeds say: a trace has no overheads between kernels."""

SETTINGS = PlanSettings(schedules=("FSDP2",), param_dtype=torch.float32)
NCCL = {"all_gather": "AllGather_RING_LL", "reduce_scatter": "ReduceScatter_Sum_f32_RING_LL"}
PRODUCTS = 3 * (LAYERS + 2) - 1  # the first one's input needs no gradient


@functools.cache
def planned(hardware: str = DEVICE.to_json()) -> Plan:
    return plan(build, world_sizes=[8], batches=[1], hardware=hardware, settings=SETTINGS)


def as_of_a_gpu(hardware: HardwareSpec, slower: float = 1.0, *, step: bool = True) -> list[dict[str, Any]]:
    """The events of a step that takes `slower` times as long as the plan on this hardware.

    The kernel of a product has its shapes in the op that launched it, one that is fused stands for several nodes.
    """
    (run,) = planned(hardware.to_json()).runs
    record = run.cost.record
    events: list[dict[str, Any]] = []

    def add(name: str, start: float, end: float, stream: int, cat: str = "kernel", **args: Any) -> None:
        times = {"ts": start * slower * 1e6 + 1e3, "dur": (end - start) * slower * 1e6}
        events.append({"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "args": args, **times})

    for number, each in enumerate(record.kernels()):
        if each.work.flops:
            (rows, inner), (_, columns) = (source.meta["val"].shape for source in each.work.node.args)  # type: ignore[union-attr]
            call: dict[str, Any] = {"External id": number}
            add("sm90_xmma_gemm_f32", each.start, each.end, 7, **call)
            call["Input Dims"] = [[rows, inner], [inner, columns]]
            add("aten::mm", each.start, each.end, 1, "cpu_op", **call)
        else:
            add("triton_poi_fused_relu_0", each.start, each.end, 7)
    for copy in (each for each in record.stands if each.name == "copy out"):
        add("split_with_sizes_copy_out", copy.start, copy.end, 7)
    for launch, (op, nbytes) in record.collectives:
        whole, part = ("Out", "In") if op == "all_gather" else ("In", "Out")
        sizes: dict[str, Any] = {f"{whole} msg nelems": nbytes / 4, f"{part} msg nelems": nbytes / 32}
        add(f"ncclDevKernel_{NCCL[op]}", launch.start, launch.end, 20, dtype="Float", **sizes)
    if step:
        end = run.cost.seconds
        add("ProfilerStep#3", -end, 0.0, 7, "gpu_user_annotation")
        add("ProfilerStep#4", 0.0, end, 7, "gpu_user_annotation")
        add("sm90_xmma_gemm_f32", -end, -end / 2, 7)  # of the step before
        add("multi_tensor_apply_kernel", end * 0.999, end, 7)  # the optimizer
    return events


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(events: list[dict[str, Any]]) -> Path:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": events}))
        return path

    return write


def test_a_profile_that_is_as_planned_shows_the_same_device(written: Any) -> None:
    found = fxshard.compare(planned(), written(as_of_a_gpu(DEVICE)))
    assert found.unmatched == (0, 0)
    assert sum(node.kind == "product" for node in found.nodes) == PRODUCTS
    assert {node.label for node in found.nodes} >= {"forward model mm", "backward blocks.1 mm_2", "all_gather blocks.2"}
    assert all(node.measured == pytest.approx(node.planned) for node in found.nodes)
    assert found.exposed == pytest.approx(sum(found.run.cost.exposed.values()), rel=1e-3)
    assert found.seconds == pytest.approx(found.run.cost.seconds)
    shown = found.hardware
    assert shown.link_bandwidth == pytest.approx(DEVICE.link_bandwidth)
    assert shown.link_latency == pytest.approx(DEVICE.link_latency)
    for side in (WIDTH, 1024, 8192):
        flops = 2.0 * side**3
        planned_speed, speed = (each.gemm_share(flops) * each.peak(torch.float32) for each in (DEVICE, shown))
        assert speed == pytest.approx(planned_speed, rel=1e-6)


def test_events_may_have_null_for_arguments(written: Any) -> None:
    events = [{**event, "args": event["args"] or None} for event in as_of_a_gpu(DEVICE)]
    assert None in [event["args"] for event in events]
    assert fxshard.compare(planned(), written(events)).unmatched == (0, 0)


def test_a_slower_device_and_link_are_found(written: Any) -> None:
    slower = dataclasses.replace(
        DEVICE,
        link_latency=2.5e-5,
        link_bandwidth=DEVICE.link_bandwidth / 40,
        memory_bandwidth=DEVICE.memory_bandwidth / 3,
        peak_flops={name: peak / 2 for name, peak in DEVICE.peak_flops.items()},
    )
    found = fxshard.compare(planned(), written(as_of_a_gpu(slower)))
    shown = found.hardware
    assert shown.link_bandwidth == pytest.approx(slower.link_bandwidth, rel=1e-3)
    assert shown.link_latency == pytest.approx(slower.link_latency, rel=1e-3)
    assert shown.memory_bandwidth == pytest.approx(slower.memory_bandwidth, rel=1e-3)
    for node in (node for node in found.nodes if node.kind == "product"):
        assert node.size / (shown.gemm_share(node.size) * shown.peak(torch.float32)) == pytest.approx(node.measured)
    assert load(shown.to_json()) == shown
    assert shown.sources["link_bandwidth"] == "measured by torch.profiler, 8 1 FSDP2"
    assert shown.sources["host_overhead"] == DEVICE.sources["host_overhead"]


def test_the_proposed_device_plans_what_was_profiled(written: Any) -> None:
    slower = dataclasses.replace(DEVICE, link_latency=4e-5, link_bandwidth=2e10)
    found = fxshard.compare(planned(), written(as_of_a_gpu(slower)))
    again, truth = (planned(each.to_json()).runs[0].cost.seconds for each in (found.hardware, slower))
    assert again == pytest.approx(truth, rel=1e-3)
    assert truth > 1.2 * found.run.cost.seconds


def test_kernels_without_shapes_are_matched_in_their_order(written: Any) -> None:
    events = [event for event in as_of_a_gpu(DEVICE, 2.0, step=False) if event["cat"] == "kernel"]
    for event in events:
        event["args"] = {}
    found = fxshard.compare(planned(), written(events))
    assert found.unmatched == (0, 0)
    assert {round(node.measured / node.planned, 3) for node in found.nodes} == {2.0}


def test_what_one_side_lacks_is_counted_and_moves_nothing_else(written: Any) -> None:
    events = as_of_a_gpu(DEVICE)
    gathers = [event for event in events if "AllGather" in event["name"]]
    events.remove(gathers[1])
    events.append({**gathers[-1], "ts": gathers[-1]["ts"] + 1, "args": {**gathers[-1]["args"], "Out msg nelems": 9e9}})
    found = fxshard.compare(planned(), written(events))
    assert found.unmatched == (1, 1)
    assert all(node.measured == pytest.approx(node.planned) for node in found.nodes)


def test_a_real_profile_of_the_cpu_is_matched_node_by_node() -> None:
    with emulated_link(8, gigabytes_per_s=1.0, latency_us=50.0):
        mesh = init_device_mesh("cpu", (8,))
        model = Stack()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
        for block in (*model.blocks, model):
            fxshard.fully_shard(block, mesh=mesh)
        compiled = torch.compile(model, backend="fxshard", options={"lower": "eager"})
        x = torch.randn(ROWS, WIDTH)
        compiled(x).backward()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            for number in range(2):
                with record_function(f"ProfilerStep#{number}"):
                    compiled(x).backward()
    found = fxshard.compare(planned("cpu"), profiled)
    products = [node for node in found.nodes if node.kind == "product"]
    assert len(products) == PRODUCTS  # of the second step alone
    assert any(node.kind == OTHER for node in found.nodes)
    assert 0 < sum(node.measured for node in found.nodes) < found.seconds
    assert found.hardware.peak(torch.float32) > 1e8
    assert (found.hardware.link_bandwidth, found.hardware.name) == (load("cpu").link_bandwidth, "cpu-profiled")


def test_the_table_has_a_row_for_each_kind(written: Any) -> None:
    console = Console(width=120, record=True)
    console.print(fxshard.compare(planned(), written(as_of_a_gpu(DEVICE, 2.0))))
    rows = [line.split("│")[1:-1] for line in console.export_text().splitlines() if "│" in line]
    names = [row[0].strip() for row in rows]
    assert names[-2:] == ["exposed", "step"]
    assert {"product", "all_gather", "reduce_scatter"} < set(names)
    assert {row[-1].strip() for row in rows} == {"2.00"}


def test_what_cannot_be_compared_is_refused(written: Any, tmp_path: Path) -> None:
    two = dataclasses.replace(planned(), runs=[*planned().runs, *planned().runs])
    with pytest.raises(ConfigError, match="compare takes a plan of one run, and this one has 2"):
        fxshard.compare(two, tmp_path)
    whole = gzip.compress(json.dumps({"traceEvents": []}).encode() * 50)
    damaged = {
        "cut": whole[: len(whole) // 2],
        "other": whole[:20] + b"xxxx" + whole[24:],
        "none": b'{"traceEvents": [1]}',
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
    for name in ("nowhere.json", *damaged):
        with pytest.raises(ConfigError, match=r"is no trace that torch.profiler exported"):
            fxshard.compare(planned(), tmp_path / name)
    other = {"ph": "X", "cat": "kernel", "name": "copy_kernel", "ts": 1.0, "dur": 1.0}
    with pytest.raises(ConfigError, match=r"the profile has 1 kernels, and none is of the plan's"):
        fxshard.compare(planned(), written([other]))
