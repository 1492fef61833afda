"""How much of a cold compile the pass manager and the verifier take: `python -m benchmarks.manager_share`."""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.clock import Clock, clocked, table
from fxshard import fully_shard
from fxshard.tools.demo.gpt import GPT
from tests.fake_ranks import fake_ranks

WORLD_SIZE, SEQ_LEN, BATCH = 4, 64, 2
TARGET = 0.03


@dataclass(frozen=True, kw_only=True)
class Share:
    """One measurement."""

    cold: float  # seconds of the first forward and backward
    warm: float  # seconds of the second
    clock: Clock  # of the manager

    @property
    def compile_seconds(self) -> float:
        """What compiling took."""
        return self.cold - self.warm

    @property
    def share(self) -> float:
        """Of the compile, what manager and verifier took."""
        return self.clock.overhead / self.compile_seconds


def sharded_gpt(num_layers: int, dim: int, mesh: DeviceMesh) -> nn.Module:
    """The demo GPT, a unit for each block, compiled with Inductor."""
    model = GPT(SEQ_LEN, dim=dim, num_layers=num_layers)
    for unit in [*model.blocks, model]:
        fully_shard(unit, mesh=mesh)
    return cast(nn.Module, cast(Any, torch.compile)(model, backend="fxshard"))


def step(model: nn.Module) -> float:
    """Seconds of one forward and backward."""
    start = time.perf_counter()
    model(torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)).sum().backward()
    return time.perf_counter() - start


def measure(num_layers: int, dim: int) -> Share:
    """Compile with caches off, on a fake group; what a process pays once is paid before, by a small model."""
    with fresh_cache(), inductor_config.patch(force_disable_caches=True), fake_ranks(WORLD_SIZE) as mesh:
        step(sharded_gpt(1, dim // 2, mesh))
        model = sharded_gpt(num_layers, dim, mesh)
        with clocked() as clock:
            cold = step(model)
        return Share(cold=cold, warm=step(model), clock=clock)


def main() -> None:
    """Print the measurement."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args.layers, args.dim)
    print(f"torch {torch.__version__}, {args.layers} layers, dim {args.dim}, {found.clock.num_nodes} nodes")
    print(f"first step {found.cold:.1f} s, second {found.warm:.2f} s, compile {found.compile_seconds:.1f} s")
    print(table(found.clock, found.compile_seconds))
    print(f"share {found.share:.2%}, target {TARGET:.0%}")


if __name__ == "__main__":
    main()
