"""HardwareSpec: builtin names, JSON files, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fxshard.cost.hardware import BUILTIN, HardwareSpec, load
from fxshard.errors import ConfigError


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
