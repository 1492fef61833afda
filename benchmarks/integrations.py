"""Measure what docs/benchmarks/integrations.md tells; see the commands there.

torchrun --nproc-per-node 2 -m benchmarks.integrations accelerate --systems eager,regional,adopt --rounds 12
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import TorchDynamoPlugin
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import fxshard
from fxshard.integrations.trainer import FxshardTrainer
from tests.integrations.llama import Sequences, accelerator_with_fsdp2, use_fsdp2

ROWS, LENGTH = 2, 128
LLAMA_32M = LlamaConfig(
    vocab_size=12800,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=8,
    num_attention_heads=8,
    tie_word_embeddings=True,
    use_cache=False,
    pad_token_id=0,
)
LLAMA_200M = LlamaConfig(
    vocab_size=16000,
    hidden_size=1024,
    intermediate_size=2752,
    num_hidden_layers=15,
    num_attention_heads=16,
    use_cache=False,
)
ADOPTED: dict[str, dict[str, Any]] = {"adopt": {}, "adopt_auto": {"prefetch": "auto", "bucket": "auto"}}


def tokens(step: int) -> torch.Tensor:
    """Return the batch of this rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(1, LLAMA_32M.vocab_size, (ROWS, LENGTH), generator=generator)


def model() -> Any:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA_32M)


def accelerated(system: str) -> Callable[[int], float]:
    """Return what trains one step and returns the loss, as a script of accelerate would."""
    regional = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True) if system == "regional" else None
    with accelerator_with_fsdp2(dynamo_plugin=regional) as accelerator:
        plain = model()
        prepared, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
        optimizer, call = (
            optimizer.optimizer,
            prepared,
        )  # accelerate has one state for all its optimizers
        if system in ADOPTED:
            call = torch.compile(fxshard.adopt(prepared), backend="fxshard", options=ADOPTED[system])

    def step(index: int) -> float:
        batch = tokens(index)
        loss = call(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measure_accelerate(systems: list[str], rounds: int) -> dict[str, Any]:
    """Train each system in turn; one alone also tells its peak memory and a first step that shares no code."""
    steps, losses, first, times = {}, {}, {}, {name: [] for name in systems}  # type: ignore[var-annotated]
    for name in systems:
        steps[name] = accelerated(name)
        dist.barrier()
        begin = time.perf_counter()
        losses[name] = [steps[name](0)]
        first[name] = time.perf_counter() - begin
    for index in range(1, rounds + 1):
        for name in systems[index % len(systems) :] + systems[: index % len(systems)]:
            dist.barrier()
            begin = time.perf_counter()
            losses[name].append(steps[name](index))
            times[name].append(time.perf_counter() - begin)
    settled = {name: values[2:] for name, values in times.items()}
    return {
        "step_ms": {name: round(1e3 * statistics.median(values), 1) for name, values in settled.items() if values},
        "ratio_to_first": {
            name: round(statistics.median(a / b for a, b in zip(values, settled[systems[0]], strict=True)), 3)
            for name, values in settled.items()
            if values
        },
        "first_step_s": {name: round(value, 1) for name, value in first.items()},
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "losses": {name: values[:4] for name, values in losses.items()},
    }


class Steps(TrainerCallback):
    """When each step ended, and its loss."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        self.losses: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.ended.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self.ended.append(time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Note the loss."""
        if "loss" in (logs or {}):
            self.losses.append(float(logs["loss"]))


def measure_trainer(system: str, rounds: int) -> dict[str, Any]:
    """Train with Hugging Face's Trainer: on "ddp", "fsdp2" or "ours"."""
    watch = Steps()
    shape = (4 * ROWS * rounds, LENGTH)
    data = torch.randint(1, LLAMA_32M.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=rounds,
            per_device_train_batch_size=ROWS,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        kind: Any = FxshardTrainer if system == "ours" else Trainer
        trainer = kind(model(), arguments, train_dataset=Sequences(data), callbacks=[watch])
        if system == "fsdp2":
            use_fsdp2(trainer.accelerator)
            trainer.is_fsdp_enabled = True
        trainer.train()
    times = [end - begin for begin, end in zip(watch.ended, watch.ended[1:], strict=False)]
    return {
        "system": system,
        "class": type(trainer.model_wrapped).__name__,
        "first_step_s": round(times[0], 1),
        "step_ms": round(1e3 * statistics.median(times[3:]), 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "losses": watch.losses[:4],
    }


def peak_mib() -> float:
    """Return the largest resident memory since it was last reset, in MiB, and reset it."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**10


def resident_mib() -> float:
    """Return the resident memory now, in MiB."""
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) / 2**10


def measure_adopt() -> dict[str, Any]:
    """Take over a model of 200M parameters, and give it back."""
    torch.manual_seed(0)
    module: Any = LlamaForCausalLM(LLAMA_200M)
    count = sum(p.numel() for p in module.parameters())
    for block in module.model.layers:
        fsdp2_fully_shard(block)
    fsdp2_fully_shard(module)
    unit = max(sum(p.to_local().numel() for p in m.parameters()) for m in (*module.model.layers, module.lm_head)) * 4
    root = sum(p.to_local().numel() for n, p in module.named_parameters() if ".layers." not in n) * 4
    told: dict[str, Any] = {"parameters": count, "block_shard_mib": unit / 2**20, "root_shard_mib": root / 2**20}
    changes: dict[str, Callable[[Any], Any]] = {"adopt": fxshard.adopt, "release": fxshard.release}
    for name, change in changes.items():
        dist.barrier()
        before = resident_mib()
        peak_mib()
        begin = time.perf_counter()
        change(module)
        told[f"{name}_s"] = round(time.perf_counter() - begin, 3)
        told[f"{name}_peak_above_mib"] = round(peak_mib() - before, 1)
    return told


def main() -> None:
    """Measure, and print JSON on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["accelerate", "trainer", "adopt"])
    parser.add_argument("--systems", default="eager,regional,adopt", type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=12)
    flags = parser.parse_args()
    dist.init_process_group("fxshard_gloo")
    torch.set_num_threads(1)
    if flags.what == "accelerate":
        told = measure_accelerate(flags.systems, flags.rounds)
    elif flags.what == "trainer":
        told = measure_trainer(flags.systems[0], flags.rounds)
    else:
        told = measure_adopt()
    if dist.get_rank() == 0:
        print(json.dumps(told, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
