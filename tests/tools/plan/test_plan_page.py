"""The page and the trace of a plan: what they draw is what the run costs."""

from __future__ import annotations

import collections
import functools
import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fxshard.errors import ConfigError
from fxshard.plan.plan import Plan, PlanSettings, plan
from fxshard.tools.plan import trace
from fxshard.tools.plan.page import page, save
from tests.plan.models import build

POINTS = [(1e6, 3e-4), (2e6, 2e-4)]


@functools.cache
def planned() -> Plan:
    return plan(build, world_sizes=[8, (2, 8)], batches=[1], settings=PlanSettings(schedules=("FSDP2",)))


@functools.cache
def data() -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page(planned(), POINTS), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_what_is_held_over_time_is_at_most_the_peak_and_once_as_much() -> None:
    for run in planned().runs:
        held = run.cost.record.memory()
        assert held.nbytes.sum(1).max() == run.cost.peak_bytes
        assert (held.nbytes >= 0).all()
        assert held.nbytes[0].tolist() == held.nbytes[-1].tolist()  # the next step begins alike


def test_exposed_time_by_launch_is_the_exposed_time_of_the_step() -> None:
    for run in planned().runs:
        exposed = run.cost.record.exposed
        assert sum(each.seconds for each in exposed) == pytest.approx(sum(run.cost.exposed.values()))
        assert exposed == sorted(exposed, key=lambda each: -each.seconds)
        assert {each.label for each in exposed} & {"all_gather blocks.0", "all_gather blocks.1", "all_gather root"}


def test_the_streams_of_a_page_are_full_from_the_first_to_the_last_moment() -> None:
    for run, drawn in zip(planned().runs, data()["runs"], strict=True):
        rows = sorted(drawn["kernels"])
        assert rows[0][0] == 0.0
        assert rows[-1][1] == pytest.approx(run.cost.seconds * 1e6, abs=0.01)
        assert all(first[1] == pytest.approx(then[0], abs=0.011) for first, then in itertools.pairwise(rows))
        exposed = sum(row[7] for row in drawn["launches"])
        assert exposed == pytest.approx(1e6 * sum(run.cost.exposed.values()), abs=0.01 * len(drawn["launches"]))


def test_a_page_thins_memory_but_keeps_its_peak() -> None:
    for run, drawn in zip(planned().runs, data()["runs"], strict=True):
        sums = [sum(row) for row in zip(*drawn["memory"]["bytes"], strict=True)]
        assert max(sums) == run.cost.peak_bytes == drawn["peak"]
        assert drawn["memory"]["us"] == sorted(drawn["memory"]["us"])


def test_a_page_names_blocks_and_units_and_has_the_points_of_a_solver() -> None:
    drawn = data()["runs"][0]
    assert {"blocks.0", "blocks.2", "all_gather blocks.1", "reduce_scatter root"} <= set(drawn["texts"])
    assert data()["pareto"] == [list(point) for point in POINTS]


def test_a_page_needs_nothing_else() -> None:
    text = page(planned())
    assert not re.search(r'(?:src|href)="(?!#)', text)
    assert not re.search(r"@import|url\(", text)


def events() -> list[dict[str, Any]]:
    return list(trace.events([("a run", planned().runs[1].cost.record)]))


def test_slices_of_a_track_are_nested_or_apart() -> None:
    tracks: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for each in events():
        if each["ph"] == "X":
            start = round(each["ts"] * 1e3)
            tracks[each["tid"]].append((start, start + round(each["dur"] * 1e3)))
    assert len(tracks) == 3  # compute, the shards' group and the replicas'
    for slices in tracks.values():
        open_until: list[int] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_an_arrow_goes_from_each_launch_over_its_stream_to_its_wait() -> None:
    flows: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)
    launches = [each for each in events() if each.get("cat") == "launch" and each["ph"] == "X"]
    for each in events():
        if each["ph"] in "stf":
            flows[each["id"]].append(each)
    assert len(flows) == len(launches)
    needed = [each.needed is not None for each in planned().runs[1].cost.record.launches]
    assert 2 * sum(needed) > len(needed)
    for steps, launch, is_needed in zip(flows.values(), launches, needed, strict=True):
        assert [each["ph"] for each in steps] == (["s", "t", "f"] if is_needed else ["s", "f"])
        assert [each["ts"] for each in steps] == sorted(each["ts"] for each in steps)
        assert (steps[1]["ts"], steps[1]["tid"]) == (launch["ts"], launch["tid"])
        assert {each["tid"] for each in (steps[0], *steps[2:])} == {1}


def test_counters_add_up_to_what_is_held() -> None:
    counters = [each["args"] for each in events() if each["ph"] == "C"]
    assert all(each["all"] == sum(n for name, n in each.items() if name != "all") for each in counters)
    assert max(each["all"] for each in counters) == planned().runs[1].cost.peak_bytes


def test_files_are_written_or_refused(tmp_path: Path) -> None:
    trace.save(planned(), tmp_path / "plan.json.gz")
    trace.save(planned(), tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_bytes()
    assert gzip.decompress((tmp_path / "plan.json.gz").read_bytes()) == text
    names = [each["args"]["name"] for each in json.loads(text)["traceEvents"] if each["name"] == "process_name"]
    assert names == ["8 1 FSDP2", "2x8 1 FSDP2"]
    save(planned(), tmp_path / "plan.html")
    with pytest.raises(ConfigError, match=r"the trace cannot be written to .*: Is a directory"):
        trace.save(planned(), tmp_path)
