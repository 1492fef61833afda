"""HardwareSpec: builtin names, JSON files, and what is wrong with a file."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from fxshard.cost.comm import transfer_seconds
from fxshard.errors import ConfigError
from fxshard.hardware import BUILTIN, HardwareSpec, load


def fields(**changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(BUILTIN["cpu"].to_json())
    return given | changed


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("name", ["h100", "h200", "cpu"])
def test_every_builtin_name_loads_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    spec = load(name)
    assert spec.name == name
    assert load(written(tmp_path, spec.to_json())) == spec


def test_a_dtype_that_is_not_listed_runs_at_the_slowest_listed_speed() -> None:
    spec = load("h100")
    assert spec.peak(torch.bfloat16) == 790e12
    assert spec.peak(torch.int8) == min(spec.peak_flops.values())


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"'H10O' \(did you mean 'h100'\?\) is neither a file nor"):
        load("H10O")


def test_a_file_names_all_missing_and_unknown_fields(tmp_path: Path) -> None:
    given = fields(link_bandwith=1.0)
    del given["link_bandwidth"], given["name"]
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path, given))
    assert str(error.value).endswith(
        "mine.json: fields of the hardware do not fit: missing 'name', missing 'link_bandwidth', "
        "unknown 'link_bandwith' (did you mean 'link_bandwidth'?)."
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"memory_gib": -1}, "memory_gib=-1"),
        ({"link_bandwidth": 0}, "link_bandwidth=0"),
        ({"link_latency": "fast"}, "link_latency='fast'"),
        ({"peak_flops": {"bf16": -2.0}}, "peak_flops.bf16=-2.0"),
        ({"kernel_overhead": float("inf")}, "kernel_overhead=inf"),
        ({"memory_gib": 10**400}, "memory_gib=1000"),
        ({"peak_flops": {}}, "peak_flops names no dtype"),
        ({"peak_flops": {"bfloat16": 1.0}}, "unknown dtypes: 'bfloat16' (did you mean 'bf16'?)"),
    ],
)
def test_an_impossible_number_is_refused_with_field_and_file(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path, fields(**changed)))
    assert named in str(error.value)
    assert "mine.json does not describe hardware: hardware 'cpu'" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "a hardware file is a JSON object"),
        ('{"peak_flops": 3}', "a hardware file is a JSON object"),
        ("h100", r"mine\.json is not a JSON file"),
        pytest.param("[" * 100_000, r"mine\.json is not a JSON file", id="nested"),
        pytest.param('{"memory_gib": ' + "9" * 5000 + "}", r"mine\.json is not a JSON file", id="digits"),
        (fields(name=3), "name and source must be texts"),
        (fields(source=None), "name and source must be texts"),
    ],
)
def test_a_file_of_another_form_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(written(tmp_path, content))


def test_a_link_without_latency_is_allowed() -> None:
    assert HardwareSpec(**fields(link_latency=0, kernel_overhead=0)).link_latency == 0


DEVICES = sorted(set(BUILTIN) - {"h100", "h200", "cpu"})


def test_the_devices_that_a_plan_takes_are_there() -> None:
    assert DEVICES == ["a100-80", "b200", "h100-sxm", "h100-sxm-96", "h200-sxm", "mi300x"]


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_figure_of_a_device_has_a_source(name: str) -> None:
    given = json.loads(resources.files("fxshard").joinpath(f"devices/{name}.json").read_text())
    figures = set(given) - {"name", "source", "sources"}
    assert set(given["sources"]) == figures
    assert all(given["sources"].values())


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_reaches_no_more_than_its_data_sheet(name: str) -> None:
    spec = load(name)
    assert spec.data_sheet_flops.keys() == spec.peak_flops.keys()
    assert all(spec.peak_flops[dtype] < spec.data_sheet_flops[dtype] for dtype in spec.peak_flops)
    shares = [share for _, share in spec.gemm_efficiency]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_product_between_two_listed_sizes_reaches_a_share_between_theirs() -> None:
    spec = dataclasses.replace(BUILTIN["cpu"], gemm_efficiency=((256, 1.0), (64, 0.25)))
    assert [spec.gemm_share(2 * side**3) for side in (1, 64, 128, 256, 4096)] == pytest.approx([0.25, 0.25, 0.5, 1, 1])
    assert BUILTIN["cpu"].gemm_share(2.0) == 1.0


TWO_NODES = dataclasses.replace(
    BUILTIN["cpu"],
    link_latency=1.0,
    link_bandwidth=100.0,
    hop_latency=0.5,
    ranks_per_node=4,
    network_latency=2.0,
    network_bandwidth=10.0,
)


def test_the_link_of_a_group_is_that_of_its_node_or_a_part_of_the_network() -> None:
    assert TWO_NODES.link(4) == TWO_NODES.replica_link(2, 2) == (1.0, 0.5, 100.0)
    assert TWO_NODES.link(8) == (1.0, (2.0 + 3 * 0.5) / 4, 40.0)  # shared; every fourth step is between nodes
    assert TWO_NODES.replica_link(2, 4) == (1.0, 2.0, 10.0)  # one rank of each node has its part alone
    assert dataclasses.replace(TWO_NODES, network_bandwidth=1000.0).link(8).bandwidth == 100.0


def test_a_message_that_is_small_beside_the_steps_of_the_ring_does_not_reach_the_bandwidth() -> None:
    link = TWO_NODES.link(8)
    speeds = [nbytes / transfer_seconds("all_gather", nbytes, 8, link) for nbytes in (10, 10**3, 10**6)]
    assert speeds[0] < 0.1 * speeds[2]
    assert speeds[0] < speeds[1] < speeds[2] == pytest.approx(40.0 * 8 / 7, rel=0.01)


def test_a_collective_takes_its_kernels_and_its_part_of_the_memory_bandwidth() -> None:
    spec = dataclasses.replace(BUILTIN["cpu"], collective_share=0.25, memory_bandwidth=60.0)
    assert spec.share_of_collective(1.0, "all_gather") == pytest.approx(0.25 + 3 / 60)
    assert spec.share_of_collective(1.0, "all_reduce") == pytest.approx(0.25 + 6 / 60)
    assert spec.share_of_collective(1e9, "all_gather") == 0.9
    assert BUILTIN["cpu"].share_of_collective(1.0, "all_gather") == 0.0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"ranks_per_node": 8}, "with several nodes network_bandwidth is needed, too. Got 8 and None."),
        ({"ranks_per_node": 1.5, "network_bandwidth": 1.0}, "ranks_per_node must be a whole number"),
        ({"collective_share": 1.0}, "collective_share must be below 1, and efficiencies at most 1, got 1.0"),
        ({"attention_efficiency": [63, 51]}, "efficiencies at most 1"),
        ({"gemm_efficiency": [[512, 14.0]]}, "efficiencies at most 1"),
        ({"gemm_efficiency": [1, 2]}, "gemm_efficiency must be pairs (side, share)"),
        ({"attention_efficiency": [1.0]}, "attention_efficiency (forward, backward)"),
        ({"attention_efficiency": [1.0, 0.0]}, "attention_efficiency=0.0"),
        ({"gemm_efficiency": [[64, -1.0]]}, "gemm_efficiency[0]=-1.0"),
        ({"data_sheet_flops": {"bf16": 0}}, "data_sheet_flops.bf16=0"),
    ],
)
def test_an_impossible_network_or_efficiency_is_refused(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(written(tmp_path, fields(**changed)))
    assert named in str(error.value)
