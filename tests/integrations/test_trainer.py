"""`FxshardTrainer` does what Hugging Face's `Trainer` does on `DistributedDataParallel`."""

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import fxshard
from fxshard.errors import ConfigError
from fxshard.integrations.trainer import FxshardTrainer
from tests.integrations.llama import Sequences, accelerate_state, llama, sequences
from tests.pairwise import slow
from tests.ranks import two_ranks
from tests.state.helpers import shared_folder

STEPS = 4


class Ours(FxshardTrainer):
    """Without the time that Inductor takes."""

    fxshard_options: ClassVar[dict[str, Any]] = {"lower": "eager"}


class Regional(Ours):
    fxshard_options: ClassVar[dict[str, Any]] = {"lower": "eager", "regional": True}


def trainer_of(kind: type[Any], folder: str, model: Any = None, **kwargs: Any) -> Any:
    arguments = TrainingArguments(
        **{
            "output_dir": folder,
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "warmup_steps": 1,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "seed": 7,
            "dataloader_pin_memory": False,
            **kwargs,
        }
    )
    given = {"train_dataset": Sequences(sequences(64)), "eval_dataset": Sequences(sequences(6))}
    return kind(llama() if model is None else model, arguments, **given)


def logged(trainer: Any) -> list[dict[str, float]]:
    """What the trainer has told, but for times."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    rows = [{name: row[name] for name in names if name in row} for row in trainer.state.log_history]
    return [row for row in rows if row]


def close(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs)
    for row, expected in zip(ours, theirs, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@two_ranks
@pytest.mark.parametrize("kind", [Ours, slow(Regional)])
def test_logs_evaluates_and_saves_what_ddp_does(kind: type[Ours]) -> None:
    """With accumulation, clipping and a schedule; from its checkpoint training goes on as if it had not stopped."""
    with accelerate_state(), shared_folder() as folder:
        reference = trainer_of(Trainer, str(folder / "ddp"))
        reference.train()
        with accelerate_state():
            ours = trainer_of(kind, str(folder / "ours"))
            ours.train()
            ours.save_model(str(folder / "saved"))
        close(logged(ours), logged(reference))
        assert len(logged(ours)) == STEPS + 2
        dist.barrier()
        weights = load_file(folder / "saved/model.safetensors")
        expected = load_file(folder / f"ddp/checkpoint-{STEPS}/model.safetensors")
        assert weights.keys() == expected.keys()
        for name, value in expected.items():  # float32: DDP and a reduce_scatter add in other orders, AdamW divides
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
        assert type(LlamaForCausalLM.from_pretrained(folder / "saved")).__name__ == "LlamaForCausalLM"
        with accelerate_state():
            again = trainer_of(kind, str(folder / "ours"))
            again.train(resume_from_checkpoint=str(folder / "ours/checkpoint-2"))
        assert logged(again) == logged(ours)
        dist.barrier()


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("case", [{"bf16": True}, {"gradient_checkpointing": True}])
def test_trains_with_other_arguments(case: dict[str, Any]) -> None:
    with accelerate_state(), shared_folder() as folder:
        extra = {"load_best_model_at_end": True, "save_total_limit": 1}
        ours = trainer_of(Ours, str(folder), **case, **extra)
        ours.train()
        dtypes = {p.dtype for p in ours.model.parameters()}
    first, last = [row["eval_loss"] for row in logged(ours) if "eval_loss" in row]
    assert last < first
    assert dtypes == {torch.float32}


@pytest.mark.slow
@two_ranks
def test_takes_a_model_that_is_sharded_already() -> None:
    with accelerate_state(), shared_folder() as folder:
        model = llama()
        fxshard.fully_shard(model)
        ours = trainer_of(Ours, str(folder), model, eval_strategy="no", save_strategy="no")
        ours.train()
        forwards = [graph for graph in fxshard.compiled_graphs(ours.model) if graph.kind == "forward"]
        assert [graph.collectives for graph in forwards] == [{"all_gather": 1}]
    with accelerate_state(), shared_folder() as folder:
        reference = trainer_of(Trainer, str(folder), eval_strategy="no", save_strategy="no")
        reference.train()
    close(logged(ours), logged(reference))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "torch_compile": ({"torch_compile": True}, r"TrainingArguments\(torch_compile=...\)"),
    "fp16": ({"fp16": True, "torch_compile": True}, r"TrainingArguments\(torch_compile=..., fp16=...\)"),
}


@two_ranks
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_arguments_that_ask_for_another_way(case: str) -> None:
    kwargs, expected = REFUSED[case]
    with accelerate_state(), shared_folder() as folder:
        ours = trainer_of(Ours, str(folder), **kwargs)
        with pytest.raises(ConfigError, match=expected):
            ours.train()


@two_ranks
def test_refuses_an_optimizer_of_whole_parameters_and_foreign_checkpoints() -> None:
    with accelerate_state(), shared_folder() as folder:
        ours = trainer_of(Ours, str(folder))
        ours.optimizer = torch.optim.SGD(ours.model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=r"optimizers=...\): this optimizer has the parameters as they were"):
            ours.train()
        if dist.get_rank() == 0:
            (folder / "checkpoint-2").mkdir()
            (folder / "checkpoint-2/trainer_state.json").write_text('{"train_batch_size": 2, "log_history": []}')
        dist.barrier()
        ours = trainer_of(Ours, str(folder))
        ours.create_optimizer()
        with pytest.raises(ConfigError, match=r"checkpoint-2 has no folder 'fxshard': FxshardTrainer did not write"):
            ours._load_optimizer_and_scheduler(f"{folder}/checkpoint-2")
