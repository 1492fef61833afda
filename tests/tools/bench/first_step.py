"""What the first step of the deep GPT costs: `python -m tests.tools.bench.first_step auto 32`.

One rank of a fake group of eight, in this process; collectives move nothing. Systems: `off` and `auto` are the option
`regions`, `fsdp2` is FSDP2 with each block compiled. Inductor's and AOTAutograd's caches of graphs are off; the C++
kernels come out of their cache where a run before has made them, so run each line twice.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxshard
from tests.tools.bench.models import DEEP, GPT, next_token_loss

WORLD_SIZE, STEPS, WARM_UP = 8, 31, 5


def compiled(system: str, model: GPT) -> nn.Module:
    """Return the model, sharded and compiled by a system."""
    if system == "fsdp2":
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        for i, block in enumerate(model.blocks):
            model.blocks[i] = cast(nn.Module, torch.compile(block, fullgraph=True))
        for part in (*model.blocks, model):
            fsdp2_fully_shard(part, mesh=mesh)
        return model
    for part in (*model.blocks, model):
        fxshard.fully_shard(part)
    return cast(Any, torch.compile)(model, backend="fxshard", options={"regions": system})  # type: ignore[no-any-return]


def main(system: str, num_layers: int) -> None:
    """Train some steps and print what they took."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = compiled(system, GPT(replace(DEEP, num_layers=num_layers)))
    tokens = torch.randint(0, DEEP.vocab_size, (DEEP.batch_size, DEEP.seq_len))
    seconds = []
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        for _ in range(STEPS):
            start = time.process_time()
            next_token_loss(model(tokens), tokens).backward()
            seconds.append(time.process_time() - start)
            model.zero_grad()
    step = statistics.median(seconds[WARM_UP:]) * 1e3
    print(f"{system} {num_layers}: first step {seconds[0]:.1f} s of CPU, later ones {step:.1f} ms")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
