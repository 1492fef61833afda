"""A `parallelize` function as torchtitan has one per model: activation checkpointing, sharding, compiling.

torchrun --nproc-per-node 2 docs/examples/torchtitan_parallelize.py
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fxshard import fully_shard  # in place of torch.distributed.fsdp's

WIDTH, VOCAB = 64, 256


class TransformerBlock(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform `[batch, length, WIDTH]`."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + y


class Transformer(nn.Module):
    """torchtitan's layout: an embedding, a dict of layers, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(i): TransformerBlock() for i in range(4)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[batch, length, VOCAB]`."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        y: Tensor = self.output(self.norm(x))
        return y


def parallelize(model: Transformer, mesh: DeviceMesh, options: dict[str, Any]) -> nn.Module:
    """Apply activation checkpointing, then sharding, then the compiler, which sees the whole model."""
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard([model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.compile(backend="fxshard", options=options)  # in place of each layer's compile()
    return model


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lower", choices=["inductor", "eager"], default="inductor")
    args = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = accelerator or torch.device("cpu")
    if accelerator is not None:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("fxshard_gloo" if accelerator is None else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer()
    model = parallelize(model, mesh, {"lower": args.lower})  # type: ignore[assignment]
    model.to_empty(device=device)
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    tokens = (torch.randint(0, 8, (4, 33)).cumsum(dim=1) % VOCAB).to(device)
    for step in range(args.steps):
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss of rank 0 {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
