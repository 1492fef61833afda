"""What the first step costs two ranks: `torchrun --nproc-per-node 2 -m tests.tools.bench.first_of_two one 8`.

`all` and `one` are the option `compile_on`. Two gloo ranks train a step of the deep GPT with so many blocks; each has
empty caches in a folder of its own, as on two machines. Wall time of the slower rank, and processor time of both ranks
with the C++ compilers that they have started.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist

import fxshard
from tests.tools.bench.models import DEEP, GPT, next_token_loss


def processor_seconds() -> float:
    """Return those of this process and of the ones that it has waited for."""
    own, started = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + started.ru_utime + started.ru_stime


def main(compile_on: str, num_layers: int) -> None:
    """Train one step, and print what it took."""
    dist.init_process_group("fxshard_gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(replace(DEEP, num_layers=num_layers))
    for part in (*model.blocks, model):
        fxshard.fully_shard(part)
    compiled: Any = cast(Any, torch.compile)(model, backend="fxshard", options={"compile_on": compile_on})
    tokens = torch.randint(0, DEEP.vocab_size, (DEEP.batch_size, DEEP.seq_len))
    dist.barrier()
    begin, before = time.perf_counter(), processor_seconds()
    next_token_loss(compiled(tokens), tokens).backward()
    taken = torch.tensor([time.perf_counter() - begin, processor_seconds() - before])
    found = [torch.empty(2) for _ in range(dist.get_world_size())]
    dist.all_gather(found, taken)
    if dist.get_rank() == 0:
        wall, processor = max(each[0].item() for each in found), sum(each[1].item() for each in found)
        print(
            f"{compile_on} {num_layers}: first step {wall:.1f} s of wall time, {processor:.1f} s of CPU on both ranks"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        main(sys.argv[1], int(sys.argv[2]))
