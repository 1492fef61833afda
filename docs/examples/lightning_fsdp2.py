"""Train under Lightning's `ModelParallelStrategy`, whose `configure_model` shards and compiles.

torchrun --nproc-per-node 2 docs/examples/lightning_fsdp2.py
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from fxshard import fully_shard  # in place of torch.distributed.fsdp's

WIDTH = 64


def block() -> nn.Module:
    """Return two linear layers around a nonlinearity."""
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Task(lightning.LightningModule):
    """What Lightning trains."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.net: nn.Sequential = nn.Sequential(block(), block(), nn.Linear(WIDTH, 1))

    def configure_model(self) -> None:
        """Shard and compile; Lightning has made the mesh."""
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for module in list(self.net)[:-1]:
            fully_shard(module, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        self.net.compile(backend="fxshard", options=self.options)

    def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        (x,) = batch
        loss = F.mse_loss(self.net(x), x.mean(dim=1, keepdim=True))
        self.print(f"step {index}: loss of rank 0 {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer of the sharded parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lower", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--regional", action="store_true", help="compile block by block")
    args = parser.parse_args()
    on_cpu = not torch.accelerator.is_available()
    ranks = int(os.environ["WORLD_SIZE"])
    lightning.seed_everything(0, verbose=False)
    rows = torch.randn(32, WIDTH).repeat(ranks * args.steps, 1)
    strategy: Any = ModelParallelStrategy(
        data_parallel_size=ranks,  # Lightning's "auto" is tensor parallelism
        tensor_parallel_size=1,
        process_group_backend="fxshard_gloo" if on_cpu else None,
    )
    trainer = lightning.Trainer(
        accelerator="cpu" if on_cpu else "auto",
        devices=ranks,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    options = {"lower": args.lower, "regional": args.regional}
    trainer.fit(Task(options), DataLoader(TensorDataset(rows), batch_size=32, shuffle=False))


if __name__ == "__main__":
    main()
