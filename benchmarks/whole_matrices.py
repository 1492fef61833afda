"""What a step of Muon takes: `python -m benchmarks.whole_matrices small 1.075`.

Rank 0 of 8 on an emulated link, or with `torchrun` all ranks on gloo. `torch.optim.Muon` steps the matrices of a model:
over the DTensors of FSDP2, by `whole_matrices`, and by hand (momentum of rows, a gather of each update, Newton-Schulz
on every rank). All take turns. Then whole training steps of fxshard: AdamW for all, and Muon for the matrices, also
without Newton-Schulz (`ns_steps=0`). Two bounds say what is left to gain: the link takes no time within Muon's step
(as if all of its transfers were hidden), and nothing is exchanged at all (as if each rank had its matrices whole).
Prints medians in milliseconds.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import _muon

import fxshard
from benchmarks import models
from fxshard.testing import EmulatedLink, Speed, emulated_link


class ByHand(torch.optim.Muon):
    """Muon on gathered updates."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        for p in group["params"]:
            grad = p.grad
            buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(grad))
            buffer.lerp_(grad, 1 - group["momentum"])
            update = grad.lerp(buffer, group["momentum"]).full_tensor()
            args = group["ns_coefficients"], group["ns_steps"], group["eps"]
            update = _muon._zeropower_via_newtonschulz(update, *args)
            rows = update.chunk(p.device_mesh.size())[dist.get_rank()]
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p._local_tensor.add_(rows, alpha=-_muon._adjust_lr(group["lr"], None, p.shape))


def sharded(name: str, shard: Callable[..., Any]) -> tuple[Any, ...]:
    """Return a model, a batch, the loss, its matrices in blocks, and the other parameters."""
    torch.manual_seed(0)
    model, batch, loss_of = getattr(models, name)()
    for unit in (*model.blocks, model):
        shard(unit)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    return model, batch, loss_of, matrices, [p for p in model.parameters() if not any(p is m for m in matrices)]


def steps_of(name: str, link: EmulatedLink | None) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for system, shard, make in (
        ("step: FSDP2", fsdp2_fully_shard, torch.optim.Muon),
        ("step: by hand", fsdp2_fully_shard, ByHand),
        ("step: whole_matrices", fxshard.fully_shard, lambda params: fxshard.whole_matrices(torch.optim.Muon(params))),
    ):
        matrices = sharded(name, shard)[3]
        for p in matrices:
            rows = p.to_local()
            p.grad = DTensor.from_local(
                torch.randn_like(rows), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
        found[system] = make(matrices).step
    found["training: AdamW"] = training(name, None)
    for ns_steps in (5, 0):
        muon = functools.partial(torch.optim.Muon, ns_steps=ns_steps)
        found[f"training: Muon, ns_steps={ns_steps}"] = training(name, functools.partial(as_it_is, muon))
        if link is not None:
            found[f"  transfers at once, ns_steps={ns_steps}"] = training(
                name, functools.partial(at_no_time, muon, link)
            )
        found[f"  nothing exchanged, ns_steps={ns_steps}"] = training(name, functools.partial(on_own, muon))
    return found


def as_it_is(muon: Callable[..., Any], matrices: list[Any]) -> Callable[[], Any]:
    """Return a step of `whole_matrices`."""
    step: Callable[[], Any] = fxshard.whole_matrices(muon(matrices)).step
    return step


def at_no_time(muon: Callable[..., Any], link: EmulatedLink, matrices: list[Any]) -> Callable[[], Any]:
    """Return a step of `whole_matrices` whose transfers arrive at once."""
    optimizer, speed = fxshard.whole_matrices(muon(matrices)), link.engine.speed

    def step() -> None:
        link.engine.speed = Speed(gigabytes_per_s=1e9)
        optimizer.step()
        link.engine.speed = speed

    return step


def on_own(muon: Callable[..., Any], matrices: list[Any]) -> Callable[[], Any]:
    """Return a step of the matrices that this rank owns, with gradients that it has."""
    plan = fxshard.whole_matrices(muon(matrices))._current_plan()
    own = [torch.nn.Parameter(torch.randn(each.seen_shape)) for each in plan.matrices if each.is_owned]
    for parameter in own:
        parameter.grad = torch.randn_like(parameter)
    return muon(own).step


def training(name: str, make: Callable[[list[Any]], Callable[[], Any]] | None) -> Callable[[], Any]:
    """Return a training step with AdamW, and what `make` gives for the matrices if it is given."""
    model, batch, loss_of, matrices, others = sharded(name, fxshard.fully_shard)
    call: Any = torch.compile(model, backend="fxshard")
    adamw = torch.optim.AdamW(others if make is not None else model.parameters(), fused=True)
    step_matrices = None if make is None else make(matrices)

    def step() -> None:
        loss_of(call(batch), batch).backward()
        adamw.step()
        if step_matrices is not None:
            step_matrices()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def main(model: str, gigabytes_per_s: str = "1.075", rounds: str = "7", only: str = "") -> None:
    """Measure those whose names contain `only`, and print."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        link = None
        if "RANK" in os.environ:
            dist.init_process_group("fxshard_gloo")
            stack.callback(dist.destroy_process_group)
        else:
            link = stack.enter_context(emulated_link(8, gigabytes_per_s=float(gigabytes_per_s), latency_us=30))
        steps = {system: step for system, step in steps_of(model, link).items() if only in system}
        times: dict[str, list[float]] = {system: [] for system in steps}
        for _ in range(int(rounds) + 2):
            for system, step in steps.items():
                dist.barrier()
                began = time.perf_counter()
                step()
                times[system].append((time.perf_counter() - began) * 1e3)
        if dist.get_rank() == 0:
            for system, (_, _, *kept) in times.items():
                print(f"{system:32} {statistics.median(kept):9.1f}  ({min(kept):.1f} to {max(kept):.1f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
