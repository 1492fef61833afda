"""Train a model that knows nothing of ranks: the first compiled call shards it.

torchrun --nproc-per-node 2 docs/examples/one_line.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import fxshard

WIDTH = 64


def this_device() -> torch.device:
    """One accelerator per rank where there are any, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    return accelerator


def main() -> None:
    """Train, and print what each rank stores and the collectives of each graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lower", choices=["inductor", "eager"], default="inductor")
    args = parser.parse_args()
    device = this_device()
    dist.init_process_group("fxshard_gloo" if device.type == "cpu" else None)

    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend="fxshard", options={"lower": args.lower})  # the one line

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    x = torch.randn(32, WIDTH, device=device)
    for step in range(args.steps):
        loss = F.mse_loss(compiled(x), x.mean(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss of rank 0 {loss.item():.4f}")
    if dist.get_rank() == 0:
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            print(f"{name}: {list(parameter.to_local().shape)} of {list(parameter.shape)} on this rank")
        for graph in fxshard.compiled_graphs(model):
            print(f"{graph.kind}: {graph.collectives}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
