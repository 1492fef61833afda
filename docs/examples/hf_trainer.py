"""Train a Llama with Hugging Face's Trainer on fxshard: with accumulation, clipping, checkpoints and a saved model.

torchrun --nproc-per-node 2 docs/examples/hf_trainer.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from fxshard.integrations.trainer import FxshardTrainer  # in place of transformers.Trainer

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
)


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences of bytes that grow by small steps."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 8, (count, 16), generator=generator).cumsum(dim=1) % 256

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one of them, and what is to be predicted of it."""
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class PrintLoss(TrainerCallback):
    """Print what the Trainer logs."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Print the loss of a step."""
        if state.is_world_process_zero and logs and "loss" in logs:
            print(f"step {state.global_step - 1}: loss {float(logs['loss']):.4f}")


def main() -> None:
    """Train, two microbatches per step, save, and load the model back without fxshard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lower", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--out", default=os.path.join(tempfile.gettempdir(), "fxshard_hf_trainer"))
    flags = parser.parse_args()
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        dist.init_process_group("fxshard_gloo")  # before accelerate does, which would take torch's gloo
    FxshardTrainer.fxshard_options = {"lower": flags.lower}

    arguments = TrainingArguments(
        output_dir=flags.out,
        max_steps=flags.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=flags.steps,
        use_cpu=on_cpu,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    trainer = FxshardTrainer(model, arguments, train_dataset=Text(256), callbacks=[PrintLoss()])
    trainer.train()
    trainer.save_model(f"{arguments.output_dir}/model")
    dist.barrier()
    loaded = LlamaForCausalLM.from_pretrained(f"{arguments.output_dir}/model")
    if dist.get_rank() == 0:
        print(f"the saved model is a {type(loaded).__name__} of {loaded.num_parameters():,} parameters")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
