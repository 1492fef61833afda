"""Train a Llama that Hugging Face's accelerate prepares: its FSDP2 plugin shards, fxshard takes over.

torchrun --nproc-per-node 2 docs/examples/accelerate_fsdp2.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import fxshard

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    use_cache=False,
)


def main() -> None:
    """Train, two microbatches per step, with clipping."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lower", choices=["inductor", "eager"], default="inductor")
    args = parser.parse_args()
    on_cpu = not torch.accelerator.is_available()
    if on_cpu:
        dist.init_process_group("fxshard_gloo")  # before accelerate does, which would take torch's gloo

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2, cpu=on_cpu)
    if on_cpu:  # where accelerate would use its plugin on GPUs alone
        for state in (accelerator.state, PartialState()):
            vars(state).update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(0, 8, (4 * args.steps * accelerator.num_processes, 16)).cumsum(dim=1) % 256
    loader: Any = DataLoader(list(text), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    fxshard.adopt(model)  # from here on it is fxshard's: these two lines are the difference
    compiled: Any = torch.compile(model, backend="fxshard", options={"lower": args.lower})

    step = 0
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = compiled(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.print(f"step {step}: loss of rank 0 {loss.item():.4f}")
            step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
