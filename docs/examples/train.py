"""Train a small model with its parameters sharded over the ranks, unit by unit.

torchrun --nproc-per-node 2 docs/examples/train.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fxshard import fully_shard

WIDTH = 64


class Block(nn.Module):
    """Two linear layers around a nonlinearity, added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform `[batch, WIDTH]`."""
        y: Tensor = self.down(F.gelu(self.up(x)))
        return x + y


class Net(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Predict one number for each row of `[batch, WIDTH]`."""
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def this_device() -> torch.device:
    """One accelerator per rank where there are any, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    return accelerator


def main() -> None:
    """Learn the mean of some random rows, and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lower", choices=["inductor", "eager"], default="inductor")
    args = parser.parse_args()
    device = this_device()
    dist.init_process_group("fxshard_gloo" if device.type == "cpu" else None)

    torch.manual_seed(0)  # the same parameters on every rank
    model = Net().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    compiled = torch.compile(model, backend="fxshard", options={"lower": args.lower})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    x = torch.randn(32, WIDTH, device=device)
    for step in range(args.steps):
        loss = F.mse_loss(compiled(x), x.mean(dim=1, keepdim=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
