"""torch.distributed.checkpoint works on fxshard models as on FSDP2's, and each reads what the other has written."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

import fxshard
from tests.numerics.harness import Scenario, fxshard_system, only_compile, shard_and_compile, start, train_step
from tests.numerics.models import MLP, rows
from tests.numerics.scenarios import REGRESSION
from tests.pairwise import slow
from tests.ranks import two_ranks
from tests.state import processes
from tests.state.bodies import build, state_of, train
from tests.state.helpers import shared_folder
from tests.state.states import assert_same


def save(path: Path, model: nn.Module, optim: Optimizer) -> None:
    states = get_state_dict(model, optim)
    dcp.save(dict(zip(("model", "optim"), states, strict=True)), checkpoint_id=path)


def load(path: Path, model: nn.Module, optim: Optimizer) -> None:
    model_state, optim_state = get_state_dict(model, optim)
    dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=model_state, optim_state_dict=optim_state)


@two_ranks
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [("fxshard", "fxshard"), ("fxshard", "fsdp2"), ("fsdp2", "fxshard")]
)
def test_what_one_has_saved_the_other_one_loads(saved_by: str, loaded_by: str) -> None:
    model, optim = build("uneven", saved_by)
    train(model, optim, range(2))
    other, other_optim = build("uneven", loaded_by, seed=1)
    with shared_folder() as folder:
        save(folder / "a", model, optim)
        load(folder / "a", other, other_optim)
    assert_same(state_of(other, other_optim), state_of(model, optim))
    assert train(other, other_optim, range(2, 4)) == train(model, optim, range(2, 4))
    assert_same(state_of(other, other_optim), state_of(model, optim))


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize(
    ("prepare", "lower"),
    [
        slow(shard_and_compile, "inductor"),
        (shard_and_compile, "eager"),
        (only_compile, "eager"),
        slow(only_compile, "inductor"),
    ],
)
def test_a_compiled_model_goes_on_with_what_is_loaded(prepare: Any, lower: str) -> None:
    scenario = Scenario(model=MLP, batch=rows(), prepare=prepare)
    torch._dynamo.reset()
    run, other = (start(scenario, fxshard_system(lower=lower)) for _ in range(2))
    with shared_folder() as folder:
        for step in range(2):
            train_step(run, step)
        save(folder / "a", run.model, run.optim)
        train_step(other, 5)
        load(folder / "a", other.model, other.optim)
        assert_same(state_of(other.model, other.optim), state_of(run.model, run.optim))
        train_step(other, 2)
        train_step(run, 2)
    assert torch.equal(other.losses[-1], run.losses[-1])
    assert_same(state_of(other.model, other.optim), state_of(run.model, run.optim))


@pytest.mark.slow
@two_ranks
def test_a_compiled_model_and_one_that_is_not_read_each_other() -> None:
    run = start(REGRESSION, fxshard_system())
    train_step(run, 0)
    model = fxshard.fully_shard(MLP())
    optim = torch.optim.AdamW(model.parameters())
    with shared_folder() as folder:
        save(folder / "a", run.model, run.optim)
        load(folder / "a", model, optim)
        expected = state_of(run.model, run.optim)
        assert_same(state_of(model, optim), expected)
        train_step(run, 1)
        save(folder / "b", model, optim)
        load(folder / "b", run.model, run.optim)
        assert_same(state_of(run.model, run.optim), expected)


def train_and_save(path: str, steps: int) -> dict[str, Any]:
    model, optim = build("uneven")
    train(model, optim, range(steps))
    save(Path(path), model, optim)
    return state_of(model, optim)


def load_all(path: str) -> dict[str, Any]:
    model, optim = build("uneven", seed=1)
    load(Path(path), model, optim)
    return state_of(model, optim)


@pytest.mark.slow
@pytest.mark.multi_rank
def test_any_number_of_ranks_loads_what_any_number_has_saved(tmp_path: Path) -> None:
    for saving in (1, 2, 4):
        path = str(tmp_path / f"from{saving}")
        expected, *_ = processes.run(saving, train_and_save, path, 2)
        for loading in (1, 2, 4):
            for found in processes.run(loading, load_all, path):
                assert_same(found, expected)


@two_ranks
@pytest.mark.parametrize("system", ["fxshard", "fsdp2"])
def test_an_asynchronous_save_holds_the_state_of_its_call(system: str) -> None:
    model, optim = build("mlp", system)
    train(model, optim, range(1))
    with shared_folder() as folder:
        expected = state_of(model, optim)
        states = get_state_dict(model, optim)
        state = dict(zip(("model", "optim"), states, strict=True))
        # Its collectives run in a thread of their own: beside those of training they need a group of their own.
        group = dist.new_group(backend="gloo")
        saving = dcp.async_save(state, checkpoint_id=folder / "a", process_group=group)
        train(model, optim, range(1, 6))  # writes the flats while the files are written
        future: Any = getattr(saving, "upload_completion", saving)
        future.result()
        dist.destroy_process_group(group)
        changed = state_of(model, optim)
        assert not torch.equal(changed["model"]["head.weight"], expected["model"]["head.weight"])
        dist.barrier()
        other, other_optim = build(seed=1)
        load(folder / "a", other, other_optim)
    assert_same(state_of(other, other_optim), expected)


@two_ranks
def test_a_full_state_dict_is_that_of_the_unsharded_model() -> None:
    model, _ = build("uneven")
    plain, _ = build("uneven", "unsharded")
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_same(dict(found), dict(plain.state_dict()))


@two_ranks
@pytest.mark.parametrize("system", ["fxshard", "fsdp2"])
def test_torch_loads_what_save_checkpoint_has_written(system: str) -> None:
    model, optim = build("uneven")
    train(model, optim, range(2))
    other, other_optim = build("uneven", system, seed=1)
    with shared_folder() as folder:
        fxshard.save_checkpoint(folder / "a", model, optim, extra=1)
        load(folder / "a", other, other_optim)
    assert_same(state_of(other, other_optim), state_of(model, optim))


@two_ranks
def test_the_files_hold_the_rows_of_their_rank_and_no_more() -> None:
    model, _ = build()
    with shared_folder() as folder:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "a")
        index = pickle.loads((folder / "a" / ".metadata").read_bytes())
        sizes = {stored.length for stored in index.storage_data.values()}
    largest = max(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
    assert max(sizes) < largest + 2000  # torch.save's own bytes; the flat behind is larger by far
