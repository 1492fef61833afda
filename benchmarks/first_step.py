"""What the first step of a deep model costs: `python -m benchmarks.first_step auto 32 gpt`.

One rank of a fake group of eight, in this process; collectives move nothing. `emulated` as a fifth argument: they copy.
Systems: `off` and `auto` are the option `regions` of one graph, `regional` is that option, `one_line` the same without
`fully_shard`, `default` sets nothing, `fsdp2` is FSDP2 with each block compiled. Models: the deep GPT, and a Llama of
the same width, ours (`llama`) and that of Hugging Face (`hf`). Inductor's and AOTAutograd's caches of graphs are off,
unless a fourth argument says `cached`; the C++ kernels come out of their cache where a run before has made them
(TORCHINDUCTOR_CACHE_DIR says where), so run each line twice for warm kernels. Processor time is that of this process,
without the C++ compilers it starts.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import fxshard
from benchmarks.llama import Llama
from benchmarks.models import DEEP, GPT, LLAMA, next_token_loss
from fxshard.testing import emulated_link

WORLD_SIZE, STEPS, WARM_UP = 8, 31, 5


class HuggingFace(nn.Module):
    """A Llama of Hugging Face that gives logits."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        }
        config = LlamaConfig(**sizes, num_hidden_layers=num_layers, vocab_size=DEEP.vocab_size, use_cache=False)
        self.llama = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.llama(tokens).logits)


def built(name: str, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """Return a model and its blocks."""
    if name == "hf":
        model = HuggingFace(num_layers)
        return model, cast(Any, model.llama).model.layers
    if name == "llama":
        llama = Llama(replace(LLAMA, num_layers=num_layers, dim=128, ffn_dim=352, vocab_size=DEEP.vocab_size))
        return llama, llama.layers
    gpt = GPT(replace(DEEP, num_layers=num_layers))
    return gpt, gpt.blocks


def compiled(system: str, model: nn.Module, blocks: nn.ModuleList) -> nn.Module:
    """Return the model, sharded and compiled by a system."""
    if system == "fsdp2":
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        for i, block in enumerate(blocks):
            blocks[i] = cast(nn.Module, torch.compile(block, fullgraph=True))
        for part in (*blocks, model):
            fsdp2_fully_shard(part, mesh=mesh)
        return model
    for part in (*blocks, model) if system != "one_line" else ():
        fxshard.fully_shard(part)
    one_graph: dict[str, Any] = {"regional": False, "regions": system}
    options = {"regional": dict(regional=True), "one_line": dict(regional=True), "default": {}}.get(system, one_graph)
    return cast(Any, torch.compile)(model, backend="fxshard", options=options)


def main(system: str, num_layers: int, name: str = "gpt", caches: str = "", group: str = "fake") -> None:
    """Train some steps and print what they took."""
    if group != "emulated":
        dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=WORLD_SIZE)
        return measure(system, num_layers, name, caches)
    with emulated_link(WORLD_SIZE):
        return measure(system, num_layers, name, caches)


def measure(system: str, num_layers: int, name: str, caches: str) -> None:
    """Do so in the process group that there is."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = compiled(system, *built(name, num_layers))
    tokens = torch.randint(0, DEEP.vocab_size, (DEEP.batch_size, DEEP.seq_len))
    seconds, begin, on = [], time.perf_counter(), caches == "cached"
    with inductor_config.patch(fx_graph_cache=on), functorch_config.patch(enable_autograd_cache=on):
        for i in range(STEPS):
            start = time.process_time()
            next_token_loss(model(tokens), tokens).backward()
            seconds.append(time.process_time() - start)
            model.zero_grad()
            if i == 0:
                wall = time.perf_counter() - begin
    step = statistics.median(seconds[WARM_UP:]) * 1e3
    print(
        f"{system} {num_layers} {name} {caches}: first step {seconds[0]:.1f} s of CPU, "
        f"{wall:.1f} s of wall time, later ones {step:.1f} ms of CPU"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
