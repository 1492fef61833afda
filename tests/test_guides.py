"""The snippets of the README, the guides and contributing.md run, on emulated ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxshard
from fxshard.testing import emulated_link

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs/contributing.md", *sorted((ROOT / "docs/guides").glob("*.md"))]
SNIPPETS = [
    pytest.param(snippet, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE))
]
WIDTH, RANKS = 8, 16


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(RANKS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.experts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.mlp(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Engine(dict[str, Tensor]):
    """Makes room for a weight when it is asked for."""

    def __missing__(self, name: str) -> Any:
        return SimpleNamespace(copy_=lambda weight: self.update({name: weight.clone()}))


def engines() -> dict[str, Any]:
    """Stand-ins for inference engines and their clients, by their names in the guide; `received` is what they load."""
    received = Engine()

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        received.update({name: weight.clone() for name, weight in weights})

    client, server = SimpleNamespace(update_named_params=load), SimpleNamespace(update_weights=lambda _: None)
    return {
        **{"engine": received, "received": received, "client": client, "server": server, "send_weights": load},
        "rollout": SimpleNamespace(update_weights=load),
    }


def here(snippet: str) -> str:
    """What it says, on the CPU and without the time that Inductor takes."""
    snippet = snippet.replace('"cuda"', '"cpu"').replace("options={", 'options={"lower": "eager", ')
    return snippet.replace('backend="fxshard")', 'backend="fxshard", options={"lower": "eager"})')


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_runs(snippet: str) -> None:
    with emulated_link(1 if "full_weights" in snippet else RANKS):  # emulated ranks send nothing to one another
        model: Any = Model()
        if "no_sync" in snippet or "head.weight" in snippet or "_prefetch" in snippet or "full_weights" in snippet:
            for module in (*model.blocks, model):
                fxshard.fully_shard(module)
        if "adopt" in snippet:
            torch.distributed.fsdp.fully_shard(model)
        batch = torch.ones(2, WIDTH)
        given = {
            **{"torch": torch, "nn": nn, "fxshard": fxshard, "fully_shard": fxshard.fully_shard, "Shard": Shard},
            **{"init_device_mesh": init_device_mesh, "parallelize_module": parallelize_module},
            **{"ColwiseParallel": ColwiseParallel, "RowwiseParallel": RowwiseParallel},
            **{"distribute_tensor": distribute_tensor, "CPUOffloadPolicy": CPUOffloadPolicy},
            **{"model": model, "loss_of": loss_of, "first": batch, "second": batch, "inputs": batch, "tokens": batch},
            "labels": torch.zeros(2, dtype=torch.long),
        }
        given |= engines()
        exec(here(snippet), given)
        if "full_weights" in snippet:
            assert {name: w.shape for name, w in given["received"].items()} == {
                name: p.shape for name, p in model.named_parameters()
            }
        if "torch.compile(model" in snippet or "torch.compile(fxshard" in snippet:
            loss_of(given.get("compiled", given["model"]), batch).backward()  # only a call shows what options say
