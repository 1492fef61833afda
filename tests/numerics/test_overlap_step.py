"""`overlap_step`: the first gather of a forward is launched when the optimizer has stepped."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import subprocess
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import fxshard
from fxshard.errors import UnsupportedGraph
from fxshard.runtime import overlapped_step
from fxshard.sharding.sharded_module import units_under
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    Run,
    adamw,
    compare,
    compile_module,
    full,
    fxshard_system,
    only_shard,
    shard_and_compile,
    start,
    train,
    train_step,
)
from tests.numerics.models import GPT, MLP, rows
from tests.numerics.scenarios import LANGUAGE, ONE_BLOCK, REGRESSION
from tests.numerics.writes import WRITES
from tests.pairwise import slow
from tests.ranks import two_ranks
from tests.watching import said_by

LIVES = int(os.environ.get("FXSHARD_LIVES", "3"))
"""Of 24 steps each."""


def overlapped(parameters: Any) -> Optimizer:
    return fxshard.overlap_step(adamw(parameters))


def in_flight(model: nn.Module) -> int:
    """How many gathers were launched after a step and wait for the forward."""
    cache = units_under(model)[0].model.unsharded
    return sum(gathered.why == "stepped" for gathered in cache.values())


def overlapping() -> Run:
    """A run whose optimizer overlaps, after its first step."""
    run = start(ONE_BLOCK, fxshard_system())
    fxshard.overlap_step(run.optim)
    train_step(run, 0)
    return run


TRAINED = {"MLP": REGRESSION, "GPT": replace(LANGUAGE, model=partial(GPT, num_blocks=1))}


@two_ranks
@pytest.mark.parametrize("lower", ["eager", slow("inductor")])
@pytest.mark.parametrize("name", [slow("MLP"), "GPT"])
def test_trains_like_the_plain_step(name: str, lower: str) -> None:
    scenario, system = TRAINED[name], fxshard_system(lower=lower)
    plain = FSDP2 if lower == "eager" else system
    compare(train(replace(scenario, optimizer=overlapped), system), train(scenario, plain), rtol=0.0, atol=0.0)


@pytest.mark.slow
@two_ranks
def test_the_forward_takes_over_what_the_step_launched() -> None:
    run = start(REGRESSION, fxshard_system())
    kept = run.optim
    assert fxshard.overlap_step(kept) is kept
    train_step(run, 0)
    assert in_flight(run.model) > 0
    with torch.no_grad():
        run.loss(1)
    assert in_flight(run.model) == 0
    train_step(run, 1)
    assert in_flight(run.model) > 0
    with fxshard.no_sync(run.model):
        run.loss(2).backward()
    assert in_flight(run.model) == 0
    run.loss(2).backward()
    assert in_flight(run.model) == 0


@pytest.mark.slow
@two_ranks
def test_sees_every_write_after_the_step() -> None:
    runs = [start(REGRESSION, fxshard_system()) for _ in range(2)]
    for name, write in WRITES.items():
        losses = []
        for run, overlaps in zip(runs, (False, True), strict=True):
            optim = torch.optim.SGD(run.model.parameters(), lr=0.1)
            if overlaps:
                fxshard.overlap_step(optim)
            run.loss(0).backward()
            optim.step()
            assert (in_flight(run.model) > 0) == overlaps, name
            write(run)
            losses.append([run.loss(0).detach(), run.loss(1).detach()])
            for parameter in run.model.parameters():
                parameter.grad = None
        assert losses[0] == losses[1], name


def write_data(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.data.mul_(0.5)


def write_foreach(run: Run) -> None:
    torch._foreach_mul_([cast(DTensor, p).to_local() for p in run.model.parameters()], 0.5)


def write_locally_unseen(run: Run) -> None:
    for parameter in run.model.parameters():
        cast(DTensor, parameter).to_local().mul_(0.5)


def swap_values_unseen(run: Run) -> None:
    """Leave every sum as it is."""
    for parameter in run.model.parameters():
        rows = cast(DTensor, parameter).to_local().data
        rows.copy_(rows.flip(-1))


@two_ranks
def test_refuses_writes_that_torch_does_not_count() -> None:
    run = overlapping()
    for write in (write_data, swap_values_unseen, write_foreach, write_locally_unseen):
        with torch.no_grad():
            write(run)
        with pytest.raises(UnsupportedGraph, match=r"(?s)written after the optimizer's step.*copy_\(\).*reshard\(\)"):
            run.loss(1)
        assert in_flight(run.model) == 0
        train_step(run, 1)  # of the values of now


def random_life(run: Run, seed: int) -> list[Tensor]:
    """Train with evaluation, accumulation, loads, skipped steps and exceptions in between; the same on every rank."""
    choose, told = random.Random(seed), []
    for step in range(24):
        what = choose.choice(["train", "train", "train", "evaluate", "accumulate", "load", "skip", "raise", "second"])
        if what == "evaluate":
            with torch.no_grad():
                told.append(run.loss(step).detach())
        if what == "load":
            run.model.load_state_dict({name: value * 0.9 for name, value in run.model.state_dict().items()})
        if what == "raise":
            with pytest.raises(RuntimeError):
                run.model(torch.ones(2, 3))
        if what == "accumulate":
            with fxshard.no_sync(run.model):
                run.loss(step).backward()
        loss = run.loss(step)
        loss.backward()
        told.append(loss.detach())
        if what == "second":
            torch.optim.SGD(list(run.model.parameters())[:2], lr=0.1).step()
        if what != "skip":
            run.optim.step()
        run.optim.zero_grad()
    return [*told, *(full(p) for p in run.named_parameters().values())]


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("seed", [0, *(slow(seed) for seed in range(1, LIVES))])
def test_a_random_life_is_the_same_to_the_bit(seed: int) -> None:
    ours, plain = (start(replace(REGRESSION, prepare=how), fxshard_system()) for how in (shard_and_compile, only_shard))
    fxshard.overlap_step(ours.optim)
    expected, found = random_life(plain, seed), random_life(ours, seed)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@two_ranks
def test_launches_nothing_where_parameters_stay_resident() -> None:
    run = start(REGRESSION, fxshard_system(resident_gib=1))
    fxshard.overlap_step(run.optim)
    for evaluates in (False, True, False, False):
        with fxshard.no_sync(run.model):
            run.loss(0).backward()
        assert in_flight(run.model) == 0
        train_step(run, 0)
        if evaluates:
            with torch.no_grad():
                run.loss(1)
            train_step(run, 1)
            assert in_flight(run.model) > 0
        else:
            assert in_flight(run.model) == 0


@two_ranks
def test_several_models_of_one_optimizer_launch_in_the_order_of_its_parameters() -> None:
    models = [MLP() for _ in range(3)]
    for model in models:
        fxshard.fully_shard(model)
    calls = [compile_module(model, options=EAGER) for model in models]
    optim = fxshard.overlap_step(torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1))
    for step in range(3):
        x, y = rows()(step, dist.get_rank())
        for call in calls:
            (call(x) - y).square().mean().backward()
        optim.step()
        optim.zero_grad()
        assert all(in_flight(model) == 1 for model in models)
    del models, calls, model, call, optim
    torch._dynamo.reset()
    gc.collect()


PROGRAM = """
import torch, fxshard
from fxshard.testing import emulated_link
with emulated_link(2) as link:
    model = torch.nn.Linear(4, 4)
    fxshard.fully_shard(model, mesh=link.mesh)
    optim = fxshard.overlap_step(torch.optim.SGD(model.parameters(), lr=0.1))
    step = torch.compile(model, backend="fxshard", options={"lower": "eager"})
    for _ in range(2):
        step(torch.ones(2, 4)).sum().backward()
        optim.step()
    print("in flight", len(model.__dict__["_fxshard_state"].units[0].model.unsharded))
"""


@pytest.mark.commands
def test_a_program_that_ends_after_a_step_leaves_nothing_behind() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "in flight 1\n"
    assert "unwaited" not in done.stderr


class Ops(TorchDispatchMode):
    """Writes down what runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ops_of_a_step(run: Run) -> list[str]:
    run.loss(0).backward()
    with Ops() as ops:
        run.optim.step(None)  # as wrappers call it
    wanted = ("all_gather", "addcdiv_")
    found = (next((name for name in wanted if name in op), "") for op in ops.names)
    return [name for name, _ in itertools.groupby(filter(None, found))]


@two_ranks
def test_steps_the_rest_while_the_gather_is_on_the_link() -> None:
    run = overlapping()
    assert ops_of_a_step(run) == ["addcdiv_", "all_gather", "addcdiv_"]
    run.optim.register_step_pre_hook(lambda *_: None)  # it may look at all parameters, as clipping does
    assert ops_of_a_step(run) == ["addcdiv_", "all_gather"]


@pytest.mark.slow
@two_ranks
def test_a_closure_and_a_compiled_step_run_once_and_whole() -> None:
    scenario = replace(ONE_BLOCK, optimizer=OPTIMIZERS["SGD"])  # less to trace than AdamW
    runs = [start(scenario, fxshard_system()) for _ in range(2)]
    fxshard.overlap_step(runs[1].optim)
    for step in range(2):
        losses = []
        for run in runs:
            called: list[int] = []

            def closure(run: Run = run, called: list[int] = called, step: int = step) -> Tensor:
                called.append(step)
                run.optim.zero_grad()
                loss = run.loss(step)
                loss.backward()
                return loss

            losses.append(run.optim.step(closure))  # type: ignore[arg-type]
            assert called == [step]
            run.loss(step).backward()
            torch.compile(run.optim.step, backend="eager")()
            run.optim.zero_grad()
        assert losses[0] == losses[1]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW([{"params": p[:1], "weight_decay": 0.0}, {"params": p[1:]}], lr=0.1),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adam, one by one": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}


def scheduled(run: Run, make: Callable[[Any], Optimizer], *, overlaps: bool, before: bool) -> tuple[list[Tensor], Any]:
    """Train under a scheduler that is made before or after `overlap_step`."""
    optim = make(list(run.model.parameters()))
    if overlaps and not before:
        fxshard.overlap_step(optim)
    schedule = torch.optim.lr_scheduler.StepLR(optim, step_size=1, gamma=0.5)
    if overlaps and before:
        fxshard.overlap_step(optim)
    for step in range(4):
        run.loss(step).backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        optim.step()
        schedule.step()
        optim.zero_grad()
    return [full(p) for p in run.named_parameters().values()], optim.state_dict()


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("name", ["AdamW", "SGD", *(slow(name) for name in OPTIMIZERS if name not in ("AdamW", "SGD"))])
def test_steps_like_the_plain_optimizer_under_a_scheduler(name: str) -> None:
    runs = [start(ONE_BLOCK, fxshard_system()) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler's, if it saw no step
        plain, after, before = (
            scheduled(run, OPTIMIZERS[name], overlaps=i > 0, before=i == 2) for i, run in enumerate(runs)
        )
    for found in (after, before):
        assert all(torch.equal(a, b) for a, b in zip(found[0], plain[0], strict=True))
        assert found[1]["param_groups"] == plain[1]["param_groups"]
        assert found[1]["state"].keys() == plain[1]["state"].keys()


@two_ranks
def test_leaves_the_groups_as_they_were_when_a_step_fails() -> None:
    run = overlapping()
    before = [list(group["params"]) for group in run.optim.param_groups]
    run.loss(1).backward()
    last = list(run.model.parameters())[-1]
    run.optim.state[last]["exp_avg"] = torch.ones(3, 3, 3)
    with pytest.raises(RuntimeError):
        run.optim.step()
    assert all(
        a is b
        for now, old in zip(run.optim.param_groups, before, strict=True)
        for a, b in zip(now["params"], old, strict=True)
    )


@two_ranks
def test_an_optimizer_is_freed_when_it_is_dropped() -> None:
    run = start(ONE_BLOCK, fxshard_system())
    optim = fxshard.overlap_step(adamw(run.model.parameters()))
    torch.optim.lr_scheduler.StepLR(optim, step_size=1)
    alive = weakref.ref(optim)
    gc.disable()
    try:
        del optim
        assert alive() is None
    finally:
        gc.enable()


@two_ranks
def test_a_patched_class_steps_as_a_whole_through_the_patch() -> None:
    run = overlapping()
    plain, seen = torch.optim.AdamW.step, []

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(self.param_groups[0]["params"]))
        return plain(self, *args, **kwargs)

    for wraps in (False, True):
        patch = functools.wraps(plain)(patched) if wraps else patched
        with mock.patch.object(torch.optim.AdamW, "step", patch):
            train_step(run, 1)
    assert seen == [len(list(run.model.parameters()))] * 2


def stepping_as_wrapped(run: Run, *, overlaps: bool, schedules: bool) -> list[Tensor]:
    """Train with a `step()` that somebody has replaced by one that clips gradients, and leaves out every third step."""
    optim, steps = torch.optim.SGD(run.model.parameters(), lr=0.5), itertools.count(1)
    plain = optim.step

    def step(optimizer: Optimizer, closure: None = None) -> None:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
        if next(steps) % 3:
            plain(closure)

    optim.step = types.MethodType(step, optim)  # type: ignore[method-assign]
    schedule = torch.optim.lr_scheduler.StepLR(optim, step_size=1) if schedules else None
    if overlaps:
        fxshard.overlap_step(optim)
    for i in range(4):
        run.loss(i).backward()
        optim.step()
        if schedule is not None:
            schedule.step()
        optim.zero_grad()
    assert (in_flight(run.model) > 0) == overlaps
    return [full(p) for p in run.named_parameters().values()]


@two_ranks
def test_a_replaced_step_is_taken_as_a_whole() -> None:
    for schedules in (False, True):
        runs = [start(ONE_BLOCK, fxshard_system()) for _ in range(2)]
        plain, ours = (stepping_as_wrapped(run, overlaps=i > 0, schedules=schedules) for i, run in enumerate(runs))
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@two_ranks
def test_nothing_is_stepped_where_gradients_of_any_unit_wait() -> None:
    run = overlapping()
    before = [full(p).clone() for p in run.named_parameters().values()]
    run.loss(1).backward()
    last = units_under(run.model)[0]  # not the one that is read first
    assert last is not last.model.prefetcher.first
    last.step.accumulation.waiting.add((0, 0))
    last.model.watch_steps()
    with pytest.raises(UnsupportedGraph, match="an optimizer steps while gradients of unit"):
        run.optim.step()
    last.step.accumulation.waiting.clear()
    assert all(torch.equal(full(p), old) for p, old in zip(run.named_parameters().values(), before, strict=True))


@two_ranks
def test_a_model_that_is_collected_while_somebody_traces_leaves_no_trace() -> None:
    run = overlapping()
    cache = units_under(run.model)[0].model.unsharded
    assert cache

    def collected(x: Tensor) -> Tensor:
        cache.__del__()  # as the garbage collector does, at any time
        return x + 1

    graph = make_fx(collected)(torch.ones(2)).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]
    assert not cache


@two_ranks
def test_says_that_an_optimizer_that_looks_at_all_parameters_steps_as_a_whole() -> None:
    run = start(ONE_BLOCK, fxshard_system())
    with said_by(overlapped_step.__name__) as lines:
        optim = fxshard.overlap_step(torch.optim.LBFGS(run.model.parameters(), lr=0.1, max_iter=2))
    assert any("takes the steps of LBFGS as a whole" in line for line in lines)
    optim.step(lambda: run.loss(0))
