"""One line, no fully_shard: the first call of the compiled module shards it, whatever already holds its parameters."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from fxshard.errors import ConfigError, FxshardError
from fxshard.sharding.sharded_module import units_under
from fxshard.testing import emulated_link
from tests.numerics.harness import (
    EAGER,
    Run,
    Tools,
    adamw,
    check,
    check_against_unsharded,
    check_bitwise,
    check_each,
    compile_module,
    full,
    fxshard_system,
    only_compile,
    squared_error,
    start,
    train,
    train_step,
    update,
)
from tests.numerics.loops import clip_and_update, evaluate_once_in_inference_mode, remember_buffers, scaled
from tests.numerics.models import GPT, MLP, Block, rows
from tests.numerics.scenarios import ONE_BLOCK, REGRESSION, SCENARIOS, TIED
from tests.ranks import fresh_ranks, two_ranks
from tests.watching import bytes_of_rows, said_by, storage_bytes


@pytest.mark.slow
@fresh_ranks
def test_trains_what_the_garbage_collector_was_told_to_overlook() -> None:
    """As programs do that freeze what they have set up: the optimizer must be found all the same."""
    torch.manual_seed(0)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="fxshard", options=dict(EAGER))
    gc.collect()
    gc.freeze()
    compiled(rows()(0, 0)[0]).sum().backward()
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    before = [full(p) for p in model.parameters()]
    optimizer.step()
    assert all(not torch.equal(full(p), old) for p, old in zip(model.parameters(), before, strict=True))


def compile_and_call_once(model: nn.Module, tools: Tools) -> nn.Module:
    compiled = only_compile(model, tools)
    if tools.system.ours:
        with torch.no_grad():
            compiled(rows()(0, 0)[0].to(tools.system.dtype))
    return compiled


@two_ranks
def test_shards_at_the_first_call_with_an_optimizer_built_before_or_after() -> None:
    """One of them clips the norm of gradients."""
    after, clips = replace(REGRESSION, prepare=compile_and_call_once), partial(clip_and_update, foreach=None)
    runs = check_each({"after": after, "before": replace(SCENARIOS["one line"], update=clips)})
    for run in runs.values():
        assert all(isinstance(p, DTensor) for p in run.model.parameters())
        assert storage_bytes(run.model.parameters()) <= 2 * bytes_of_rows(run.model)  # in float64


@two_ranks
def test_shards_models_with_tied_frozen_uneven_and_integer_parameters() -> None:
    check(replace(TIED, model=partial(GPT, tied=True, num_blocks=1), prepare=only_compile))
    check(replace(SCENARIOS["frozen parameters"], prepare=only_compile))
    check(replace(SCENARIOS["uneven parameters"], prepare=only_compile))
    check(replace(SCENARIOS["tables"], prepare=only_compile, before_step=remember_buffers))


@two_ranks
def test_keeps_batch_norm_statistics_per_rank() -> None:
    check_bitwise(replace(SCENARIOS["BatchNorm"], prepare=only_compile, before_step=remember_buffers))


@pytest.mark.slow
@two_ranks
def test_scales_the_loss_and_skips_steps_that_overflow() -> None:
    check(scaled(SCENARIOS["one line"]))


@pytest.mark.slow
@two_ranks
def test_evaluates_before_the_first_training_step() -> None:
    check(replace(SCENARIOS["one line"], before_step=evaluate_once_in_inference_mode))


class Scheduled:
    """Steps a learning rate scheduler that was built with the optimizer, before the first call."""

    def __init__(self) -> None:
        self.schedulers: dict[int, torch.optim.lr_scheduler.LRScheduler] = {}

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return an optimizer of two groups, with its scheduler."""
        first, *others = parameters
        optim = torch.optim.AdamW([{"params": [first], "lr": 2e-2}, {"params": others, "weight_decay": 0.1}], lr=1e-2)
        self.schedulers[id(optim)] = torch.optim.lr_scheduler.StepLR(optim, step_size=2, gamma=0.5)
        return optim

    def update(self, run: Run) -> None:
        """Step both."""
        update(run)
        self.schedulers[id(run.optim)].step()
        run.extra.append(torch.tensor([group["lr"] for group in run.optim.param_groups]))


@pytest.mark.slow
@two_ranks
def test_steps_a_scheduler_and_parameter_groups() -> None:
    scheduled = Scheduled()
    scenario = SCENARIOS["one line"]
    check(replace(scenario, optimizer=scheduled.optimizer, update=scheduled.update))


def adamw_with_loaded_state(parameters: Iterable[nn.Parameter]) -> Optimizer:
    parameters = list(parameters)
    if isinstance(parameters[0], DTensor):
        return adamw(parameters)
    torch.manual_seed(1)
    donors = [nn.Parameter(torch.randn_like(p)) for p in parameters]
    donor = adamw(donors)
    for p in donors:
        p.grad = torch.randn_like(p)
    donor.step()
    optim = adamw(parameters)
    optim.load_state_dict(donor.state_dict())
    return optim


@pytest.mark.slow
@two_ranks
def test_shards_the_state_that_was_loaded_into_the_optimizer() -> None:
    scenario = replace(SCENARIOS["one line"], optimizer=adamw_with_loaded_state)
    check_against_unsharded(scenario)
    run = train(scenario, fxshard_system())
    states = [x for state in run.optim.state.values() for x in state.values() if x.dim() > 0]
    assert storage_bytes(states) <= 2 * bytes_of_rows(run.model)


def forward_only(run: Run) -> Tensor:
    return run.model(run.batch(0)[0])


@two_ranks
def test_refuses_a_parameter_list_taken_before_the_first_call() -> None:
    run = start(SCENARIOS["one line"], fxshard_system())
    taken = list(run.model.parameters())
    with pytest.raises(ConfigError, match=r"(?s)(?=.*model\.parameters\(\))(?=.*first call)(?=.*fully_shard)"):
        forward_only(run)
    assert len(taken) == len(list(run.model.parameters()))


def initialised_by_rank(model: nn.Module, tools: Tools) -> nn.Module:
    if tools.system.fully_shard is not None and dist.get_rank() == 1:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    return only_compile(model, tools)


@two_ranks
def test_broadcasts_the_values_of_rank_zero_with_one_warning_when_ranks_differ() -> None:
    with said_by("fxshard") as messages, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_against_unsharded(replace(ONE_BLOCK, prepare=initialised_by_rank))
    texts = [text for text in [*messages, *(str(w.message) for w in caught)] if "rank 0" in text]
    assert len(texts) <= 1, texts
    assert texts or dist.get_rank() != 0, "rank 0 said nothing"


@pytest.mark.slow
@two_ranks
def test_says_nothing_when_ranks_agree() -> None:
    with said_by("fxshard") as messages:
        train(SCENARIOS["one line"], fxshard_system())
    assert messages == []


class Holder(nn.Module):
    """A root of which only one child is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module = nn.Sequential(Block(), Block())
        self.rest = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.body(x))


@pytest.mark.slow
@two_ranks
def test_refuses_to_step_when_only_a_submodule_was_compiled() -> None:
    model = Holder()
    model.body = compile_module(model.body, options=EAGER)
    optim = adamw(model.parameters())
    squared_error(model, *rows()(0, dist.get_rank())).backward()
    with pytest.raises(FxshardError, match=r"rest\.norm\.weight"):
        optim.step()


@pytest.mark.slow
@two_ranks
def test_trains_a_submodule_compiled_alone_when_the_rest_is_frozen() -> None:
    def compile_body(model: nn.Module, tools: Tools) -> nn.Module:
        assert isinstance(model, Holder)
        model.rest.requires_grad_(False)
        if tools.system.ours:
            tools.compile_in_place(model.body)
        return model

    check_against_unsharded(replace(REGRESSION, model=Holder, prepare=compile_body))


def test_leaves_a_model_on_the_cpu_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    with emulated_link(2):
        model = MLP()
        compile_module(model, EAGER)(rows()(0, 0)[0]).sum().backward()
        assert {unit.mesh.device_type for unit in units_under(model)} == {"cpu"}
        torch._dynamo.reset()


@pytest.mark.slow
@two_ranks
def test_takes_the_options_of_fully_shard() -> None:
    options = {**EAGER, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "reshard_after_forward": True}
    model = compile_module(MLP(), options=options)
    output = model(rows()(0, dist.get_rank())[0])
    assert output.dtype == torch.bfloat16
    output.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


class Stem(nn.Module):
    """A model that reads its argument itself, before its blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 6)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.stem(x))


@pytest.mark.parametrize("regional", [False, True])
def test_refuses_a_first_call_whose_arguments_it_can_no_longer_cast(regional: bool) -> None:
    options = {**EAGER, "param_dtype": torch.bfloat16, "regional": regional}
    with emulated_link(2):
        with pytest.raises(ConfigError, match=r"(?s)not bfloat16, as param_dtype wants: x: float32.*fully_shard"):
            compile_module(Stem(), options)(torch.ones(2, 6))
        torch._dynamo.reset()
        compile_module(Stem(), options)(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
        torch._dynamo.reset()


def nbytes_of(storage: StorageWeakRef) -> int:
    """Return the bytes of a storage, 0 if it is gone."""
    if storage.expired():
        return 0
    return torch.UntypedStorage._new_with_weak_ptr(storage.cdata).nbytes()


@pytest.mark.slow
@two_ranks
def test_frees_the_full_parameters_after_the_first_backward() -> None:
    run = start(SCENARIOS["one line"], fxshard_system())
    storages = {name: StorageWeakRef(p.untyped_storage()) for name, p in run.named_parameters().items()}
    train_step(run, 0)
    gc.collect()
    assert {name: nbytes_of(storage) for name, storage in storages.items() if nbytes_of(storage)} == {}
