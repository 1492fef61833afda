"""What the benchmark makes of its measurements."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch._dynamo.utils import counters

import fxshard
from benchmarks import models
from fxshard.errors import ConfigError, MissingExtraError
from fxshard.passes import pipeline
from fxshard.testing import emulated_link
from fxshard.tools.bench.config import SYSTEMS, BenchConfig, Entry, parse_entries
from fxshard.tools.bench.plot import require_plot, save_plot
from fxshard.tools.bench.result import Report, SystemResult
from fxshard.tools.bench.show import BenchConsole, show_report
from fxshard.tools.bench.systems import _MAKE, _without_order, make_trainer
from fxshard.tools.bench.task import make_task
from fxshard.tools.bench.traffic import Traffic, count
from fxshard.tools.bench.worker import Ready


def result(name: str, *processes: list[float], losses: tuple[float, ...] = (3.0, 2.0, 1.0)) -> SystemResult:
    found = SystemResult(entry=Entry(name=name, system=name.partition(":")[0]))
    for steps in processes:
        found.prepared([ready(losses)])
        found.processes[-1].rounds += [[seconds] for seconds in steps]
    return found


def ready(losses: tuple[float, ...], ready_s: float = 1.0) -> Ready:
    return Ready(
        num_params=10,
        num_units=2,
        eps=1e-7,
        ready_s=ready_s,
        losses=losses,
        traffic={"all_gather": Traffic(launches=2, nbytes=64)},
        unsharded_peak_bytes=None,
    )


def report(*systems: SystemResult, group: str = "gloo") -> Report:
    made = Report(options={"group": group}, machine={}, systems=list(systems))
    made.reference.prepared([ready((3.0, 2.0, 1.0))])
    return made


def test_a_ratio_pairs_the_steps_of_a_round_so_that_drift_cancels() -> None:
    base = result("fsdp2", [1.0, 10.0, 2.0], [5.0])
    fast = result("fxshard", [0.5, 5.0, 1.0], [2.5])
    assert fast.ratio(base) == 0.5
    assert base.ratio(base) == 1.0


def test_a_system_that_ended_early_is_compared_in_the_rounds_it_ran() -> None:
    base, short = result("fsdp2", [1.0, 2.0], [4.0, 4.0]), result("fxshard", [3.0])
    assert short.ratio(base) == 3.0
    assert result("ddp").ratio(base) is None


def test_losses_and_the_first_step_are_those_of_all_ranks() -> None:
    found = result("fsdp2")
    found.prepared([ready((1.0, 2.0), ready_s=1.0), ready((3.0, 5.0), ready_s=4.0)])
    assert found.losses == [2.0, 3.5]
    assert found.ready_s == [4.0]


def test_the_floor_is_the_compiled_local_system_where_it_ran() -> None:
    systems = [result(name, [1.0]) for name in ("local", "local_compiled", "fsdp2")]
    assert list(report(*systems).bases) == ["local_compiled", "fsdp2"]
    assert list(report(systems[0], result("fsdp2_best", [1.0])).bases) == ["local", "fsdp2_best"]
    assert report(result("fxshard", [1.0])).bases == {}


@pytest.mark.parametrize("losses", [(3.0, 2.0, 1.01), (3.0, math.nan, 1.0)])
def test_other_losses_than_without_any_library_are_a_problem(losses: tuple[float, ...]) -> None:
    (first, second) = report(result("fsdp2", [1.0]), result("fxshard", [1.0], losses=losses)).problems()
    assert first.startswith("fxshard trains something else")
    assert second.startswith("the losses of fxshard and fsdp2 differ")


def test_sharded_systems_must_agree_closely() -> None:
    off = result("fxshard", [1.0], losses=(3.0, 2.0, 1.0001))
    (problem,) = report(off, result("fsdp2", [1.0])).problems()
    assert problem.startswith("the losses of fxshard and fsdp2 differ by 1.0e-04")
    assert report(result("ddp", [1.0], losses=(3.0, 2.0, 1.0001)), result("fsdp2", [1.0])).problems() == []


def test_low_precision_is_given_its_own_rounding() -> None:
    made = report(result("fsdp2", [1.0]), result("fxshard", [1.0], losses=(3.0, 2.0, 1.005)))
    made.eps = 2**-7
    assert made.problems() == []


def test_a_local_system_agrees_in_its_first_loss_alone() -> None:
    assert report(result("local", [1.0], losses=(3.0, 9.0, 9.0))).problems() == []
    (problem,) = report(result("local", [1.0], losses=(9.0, 2.0, 1.0))).problems()
    assert problem.startswith("local trains something else")


def test_on_an_emulated_link_sharded_systems_are_compared_with_each_other() -> None:
    copies = (7.0, 6.0, 5.0)
    sharded = [result(name, [1.0], losses=copies) for name in ("fsdp2", "fxshard")]
    assert report(*sharded, result("ddp", [1.0]), group="emulated").problems() == []
    odd = result("simplefsdp", [1.0], losses=(7.0, 6.0, 4.0))
    problems = report(*sharded, odd, group="emulated").problems()
    assert len(problems) == 2
    assert all("simplefsdp" in problem for problem in problems)


def test_a_failure_is_a_problem_and_its_numbers_stay() -> None:
    failed = result("fsdp2", [1.0, 2.0])
    failed.error = "rank 1 failed: boom"
    made = report(failed, result("fxshard"))
    assert made.problems() == ["fsdp2 failed: rank 1 failed: boom"]
    (first, second) = json.loads(json.dumps(made.to_json()))["systems"]
    assert first["status"] == "failed"
    assert first["step_ms"]["by_process"] == [[1000.0, 2000.0]]
    assert second["step_ms"] is None


def test_the_table_has_a_line_for_every_system(tmp_path: Path) -> None:
    console = Console(record=True, width=80, force_terminal=False, file=io.StringIO())
    gone = result("ddp")
    gone.error = "rank 0 failed: boom"
    made = report(result("local", [0.1]), result("fsdp2", [0.2, 0.4], [0.3]), gone)
    config = config_for("m:f", tmp_path)
    with BenchConsole(console, config) as show:
        show.begin(made)
    show_report(console, made, config)
    text = console.export_text()
    assert "300.0 (200.0-400.0)" in text
    assert "2 AG" in text
    assert "1.0 (1.0)" in text, "a cold and a warm first step"
    assert "/ floor" in text
    assert "PROBLEM: ddp failed: rank 0 failed: boom" in text


@pytest.mark.parametrize("name", ["plot.svg", "plot.png"])
def test_the_plot_shows_what_was_measured(name: str, tmp_path: Path) -> None:
    made = report(result("local", [0.1]), result("fsdp2", [0.2, 0.4]), result("ddp"))
    require_plot(tmp_path / name)
    save_plot(made, config_for("m:f", tmp_path), tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert len(content) > 1000
    if name.endswith("svg"):
        assert b"<!-- fsdp2 -->" in content
        assert b"<!-- ddp -->" not in content


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed.*fxshard\[report\]"):
        require_plot(Path("plot.png"))


def test_collectives_of_a_trace_are_counted_with_their_unsharded_bytes() -> None:
    def event(name: str, shapes: list[object], dtypes: list[str]) -> dict[str, Any]:
        return {"name": name, "args": {"Input Dims": shapes, "Input type": dtypes}}

    events: list[dict[str, Any]] = [
        event("c10d::_allgather_base_", [[8, 4], [4, 4], [], []], ["float", "float", "", "Scalar"]),
        event("c10d::_reduce_scatter_base_", [[2], [4], []], ["c10::BFloat16", "c10::BFloat16", "Scalar"]),
        event(
            "c10d::allgather_into_tensor_coalesced_",
            [[[16, 64], [8]], [[8, 64], [4]], []],
            ["TensorList", "TensorList", ""],
        ),
        event("c10d::allgather_", [[[[6], [6]]], [[6]], []], ["", "TensorList", ""]),
        event("c10d::allreduce_", [[], []], ["TensorList", ""]),  # so many tensors that the profiler hides them
        event("c10d::broadcast_", [[[7]]], ["TensorList"]),
        event("aten::mm", [[8, 4], [4, 4]], ["float", "float"]),
        {"name": "no arguments"},
    ]
    assert count(events, itemsize=2) == {
        "all_gather": Traffic(launches=3, nbytes=8 * 4 * 4 + (16 * 64 + 8) * 2 + 12 * 2),
        "all_reduce": Traffic(launches=1, nbytes=None),
        "reduce_scatter": Traffic(launches=1, nbytes=4 * 2),
    }


def test_counts_a_reduction_of_a_group_in_python_once() -> None:
    def at(name: str, begin: float, tid: int = 1, duration: float = 10.0) -> dict[str, Any]:
        facts = {"Input Dims": [[8], [], [], []], "Input type": ["float", "", "Scalar", ""]}
        return {"name": name, "args": facts, "ts": begin, "dur": duration, "tid": tid}

    functional, inner = "_c10d_functional::reduce_scatter_tensor", "c10d::_reduce_scatter_base_"
    one = Traffic(launches=1, nbytes=32)
    assert count([at(functional, 0)], itemsize=4) == {"reduce_scatter": one}
    assert count([at(functional, 0), at(inner, 5)], itemsize=4) == {"reduce_scatter": one}
    twice = [at(functional, 0), at(functional, 5, duration=4)]
    assert count(twice, itemsize=4) == {"reduce_scatter": one}
    assert count([*twice, at(inner, 6, duration=2)], itemsize=4) == {"reduce_scatter": one}
    assert count([*twice, at(functional, 15)], itemsize=4) == {"reduce_scatter": one + one}
    assert count([at(functional, 0), at(inner, 5, tid=2)], itemsize=4) == {"reduce_scatter": one + one}
    assert count([at(functional, 0), at(inner, 15)], itemsize=4) == {"reduce_scatter": one + one}


def test_options_of_an_entry_go_before_those_of_all() -> None:
    texts = ["fsdp2", "fxshard", "fxshard:lower=inductor:verify=False"]
    entries = parse_entries(texts, ["lower=eager", "hardware=cpu"])
    assert [entry.name for entry in entries] == texts
    assert [dict(entry.options) for entry in entries] == [
        {},
        {"lower": "eager", "hardware": "cpu"},
        {"lower": "inductor", "hardware": "cpu", "verify": False},
    ]


def test_every_system_can_be_made() -> None:
    assert SYSTEMS.keys() < _MAKE.keys()


def config_for(target: str, out: Path) -> BenchConfig:
    return BenchConfig(target=target, entries=(), out=out)


@pytest.mark.parametrize("target", ["tests.tools.bench.toys:regression", "tests.tools.bench.toys:never_compiled"])
def test_fsdp2_compiles_every_block_even_in_a_model_that_breaks_graphs(target: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    counters.clear()
    (entry,) = parse_entries(["fsdp2_best"])
    with emulated_link(2) as link:
        trainer = make_trainer(entry, make_task(config_for(target, tmp_path), 0), link.mesh, lr=0.1)
        losses = [float(trainer.step()) for _ in range(2)]
    assert losses[1] < losses[0]
    assert counters["stats"]["unique_graphs"] == 2, "of input that needs no gradient, and of input that does"


def test_ranks_share_the_weights_and_have_batches_of_their_own(tmp_path: Path) -> None:
    config = config_for("tests.tools.bench.toys:regression", tmp_path)
    first, second = make_task(config, 0), make_task(config, 1)
    assert all(map(equal, first.model.parameters(), second.model.parameters()))
    assert not equal(first.batch, second.batch)


def equal(a: object, b: object) -> bool:
    return bool((a == b).all())  # type: ignore[attr-defined]


def test_a_function_that_returns_something_else_is_told_what_to_return(tmp_path: Path) -> None:
    message = r"no_batch returned MLP; return \(model, batch\) or \(model, batch, loss_fn\)"
    with pytest.raises(ConfigError, match=message):
        make_task(config_for("tests.tools.bench.toys:no_batch", tmp_path), 0)


@pytest.mark.parametrize(
    ("name", "num_params", "num_units"), [("tiny", 5.3, 5), ("small", 33.7, 9), ("deep", 6.9, 33), ("llama", 32.0, 9)]
)
def test_the_models_have_the_sizes_that_reports_quote(name: str, num_params: float, num_units: int) -> None:
    from fxshard.tools.bench.task import units_of

    model, tokens, loss_fn = getattr(models, name)()
    assert isinstance(model, nn.Module)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == num_params
    assert len(units_of(model)) == num_units
    assert loss_fn(model(tokens[:, :8]), tokens[:, :8]).shape == ()


@pytest.mark.commands
def test_unordered_leaves_out_what_orders_and_nothing_else(tmp_path: Path) -> None:
    ran = {}
    for system in ("fxshard", "fxshard_unordered"):
        torch._dynamo.reset()
        (entry,) = parse_entries([system])
        with emulated_link(2) as link:
            task = make_task(config_for("tests.tools.bench.toys:regression", tmp_path), 0)
            make_trainer(entry, task, link.mesh, lr=0.1).step()
            (frame,) = fxshard.explanation_of(task.model).frames
            ran[system] = set(frame.history.stages["backward"])
    ordering = {"defer_weight_gradients", "chain_reductions", "sink_waits", "hoist_prefetch"}
    assert ran["fxshard"] - ran["fxshard_unordered"] - {"pin_order"} == ordering
    assert _without_order(pipeline.default()).last == ()  # of code out of a cache no history tells


@pytest.mark.parametrize("system", ["fxshard:lower=eager", "fsdp2", "fsdp2_kept"])
def test_reduces_once_per_step_of_several_microbatches(system: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    (entry,) = parse_entries([system])
    losses, reductions = {}, {}
    for microbatches in (1, 3):
        with emulated_link(2) as link:
            task = make_task(config_for("tests.tools.bench.toys:regression", tmp_path), 0)
            trainer = make_trainer(entry, task, link.mesh, lr=0.1, microbatches=microbatches)
            trainer.step()
            link.clear()
            losses[microbatches] = float(trainer.step())
            reductions[microbatches] = sum(transfer.op == "reduce_scatter" for transfer in link.transfers)
        torch._dynamo.reset()
    assert losses[3] == pytest.approx(losses[1], rel=1e-5)
    assert reductions[3] == reductions[1] > 0
