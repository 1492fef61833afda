"""What one rank trains, sharded, and the unsharded training it is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from fxshard import compiled_graphs
from fxshard.tools.demo.config import DemoConfig
from fxshard.tools.demo.events import Event, Graph, Run, Started, Step, UnitLaunches
from fxshard.tools.demo.gpt import GPT
from fxshard.tools.demo.llama import Llama
from fxshard.tools.demo.text import global_batch, read_corpus

Tell = Callable[[Event], None]
Batch = Callable[[int], tuple[Tensor, Tensor]]

_WARMUP_STEPS: Final = 10  # without it the loss jumps at about the fifth step


def train_sharded(config: DemoConfig, rank: int, mesh: DeviceMesh, tell: Tell) -> None:
    """Train this rank's shard on this rank's rows of every batch; rank 0 writes the graphs."""
    batches = _batches(config, slice(rank * config.batch_size, (rank + 1) * config.batch_size))
    model = build_model(config)
    full_bytes = unsharded_state_bytes(model)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    options: dict[str, Any] = {"lower": config.lower, "mesh": mesh, "regional": True}
    compiled = torch.compile(model, backend="fxshard", options=options)

    tell(Started(run=Run.SHARDED, num_params=num_params, full_bytes=full_bytes))
    for step in _train(compiled, model, batches, config.steps, Run.SHARDED, rank):
        tell(step)
    if rank == 0:
        for graph in write_graphs(config, model):
            tell(graph)
        for unit in units_of(model):
            tell(unit)


def train_unsharded(config: DemoConfig, tell: Tell) -> None:
    """Train the same model from the same weights on the whole of every batch: plain PyTorch, not compiled."""
    model = build_model(config)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    tell(Started(run=Run.UNSHARDED, num_params=num_params, full_bytes=unsharded_state_bytes(model)))
    for step in _train(model, model, _batches(config, slice(None)), config.steps, Run.UNSHARDED, 0):
        tell(step)


def build_model(config: DemoConfig) -> nn.Module:
    """Return the model with the weights that `config.seed` stands for, equal on every rank."""
    torch.manual_seed(config.seed)
    model = GPT(config.seq_len) if config.model == "gpt" else Llama(config.seq_len)
    return model.to(config.device)


def unsharded_state_bytes(model: nn.Module) -> int:
    """Bytes of parameters, gradients and the two AdamW moments of `model`, nothing sharded."""
    return 4 * sum(parameter.nbytes for parameter in model.parameters())


@torch.no_grad()
def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Count the storage behind parameters, gradients and optimizer state on this rank, padding included."""
    parameters = list(model.parameters())
    tensors: list[Tensor] = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    storages = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def write_graphs(config: DemoConfig, model: nn.Module) -> Iterator[Graph]:
    """Write each graph as it is after all passes to `config.out`, one file per graph."""
    seen: dict[str, int] = {}
    for graph in compiled_graphs(model):
        index = seen[graph.kind] = seen.get(graph.kind, -1) + 1
        path = config.out / (f"{graph.kind}_{index}.txt" if index else f"{graph.kind}.txt")
        path.write_text(graph.text + "\n")
        yield Graph(kind=graph.kind, path=str(path), collectives=dict(graph.collectives))


def units_of(model: nn.Module) -> Iterator[UnitLaunches]:
    """Say of each unit what is launched for it; what no graph reads is gathered and reduced where it is read."""
    graphs = compiled_graphs(model)
    sizes: dict[str, int] = {}
    blocks = [name for name, _ in model.get_submodule("blocks").named_children()]
    for name, parameter in model.named_parameters():
        unit = next((f"blocks.{block}" for block in blocks if name.startswith(f"blocks.{block}.")), "")
        sizes[unit] = sizes.get(unit, 0) + parameter.numel()
    for unit, num_params in sizes.items():
        launches = {graph.kind: graph.collectives for graph in graphs if (unit,) in graph.calls}
        yield UnitLaunches(name=unit or "the rest", num_params=num_params, launches=launches)


def _batches(config: DemoConfig, rows: slice) -> Batch:
    corpus = read_corpus(config.seq_len + 1)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = global_batch(
            corpus, step=step, seed=config.seed, num_rows=config.ranks * config.batch_size, seq_len=config.seq_len
        )
        return tokens[rows].to(config.device), targets[rows].to(config.device)

    return batch


def _train(
    forward: Callable[[Tensor], Tensor], model: nn.Module, batches: Batch, num_steps: int, run: Run, rank: int
) -> Iterator[Step]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=_WARMUP_STEPS)
    for step in range(num_steps):
        tokens, targets = batches(step)
        started = time.perf_counter()
        loss = F.cross_entropy(forward(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        value = loss.item()
        seconds = time.perf_counter() - started
        yield Step(
            run=run, rank=rank, step=step, loss=value, seconds=seconds, state_bytes=state_bytes(model, optimizer)
        )
        optimizer.zero_grad()
        warmup.step()
