"""What training loops do around forward and backward, as scenarios take it."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.numerics.harness import FSDP2, Batch, Run, Scenario, full, squared_error, update
from tests.numerics.models import WIDTH, rows


def output_of_fixed_rows(run: Run) -> Tensor:
    x = torch.linspace(-1, 1, 3 * WIDTH, dtype=run.system.dtype, device=run.system.device).view(3, WIDTH)
    output: Tensor = run.model(x)
    return output.detach().clone()


def evaluate(run: Run, step: int) -> None:
    run.model.eval()
    with torch.no_grad():
        run.extra.append(output_of_fixed_rows(run))
    run.model.train()
    run.extra.append(output_of_fixed_rows(run))


def evaluate_once_in_inference_mode(run: Run, step: int) -> None:
    if step == 0:
        # FSDP2 gathers into buffers that it keeps, and cannot train after an inference mode has made them.
        with torch.no_grad() if run.system.fully_shard is FSDP2.fully_shard else torch.inference_mode():
            output = output_of_fixed_rows(run)
        run.extra.append(output.clone())


def step_in_backward(run: Run, step: int) -> None:
    """Give each parameter an optimizer of its own, which steps as soon as the gradient is there."""

    def steps(parameter: nn.Parameter) -> None:
        own = torch.optim.AdamW([parameter], lr=1e-2)

        def hook(_: Tensor) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)

    if step == 0:
        for parameter in run.model.parameters():
            steps(parameter)


def update_and_zero(run: Run) -> None:
    run.optim.step()
    run.optim.zero_grad(set_to_none=False)
    assert all(full(p.grad).count_nonzero() == 0 for p in run.named_parameters().values() if p.grad is not None)


def clip_and_update(run: Run, **kwargs: Any) -> None:
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm=0.05, **kwargs)
    run.extra.append(full(norm))
    update(run)


def rows_with_an_overflow(step: int, rank: int) -> Batch:
    x, y = rows()(step, rank)
    if (step, rank) == (1, dist.get_world_size() - 1):
        y[0, 0] = float("inf")
    return x, y


class ScaledLoop:
    """The steps of a loop with a GradScaler."""

    def __init__(self) -> None:
        # By the run itself: the id of a run that is gone may come again, on one rank and not on the other.
        self.scalers: MutableMapping[Run, torch.amp.GradScaler] = WeakKeyDictionary()

    def scaler_of(self, run: Run) -> torch.amp.GradScaler:
        """Return the scaler of a run."""
        return self.scalers.setdefault(
            run, torch.amp.GradScaler(run.system.device, init_scale=2.0**10, growth_interval=2)
        )

    def backward(self, run: Run, step: int) -> Tensor:
        """Run backward of the scaled loss."""
        loss = run.loss(step)
        self.scaler_of(run).scale(loss).backward()
        return loss

    def update(self, run: Run) -> None:
        """Unscale, clip, step."""
        scaler = self.scaler_of(run)
        scaler.unscale_(run.optim)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), max_norm=1.0)
        scaler.step(run.optim)
        scaler.update()
        run.optim.zero_grad()
        run.extra.append(torch.tensor(scaler.get_scale()))


def scaled(scenario: Scenario) -> Scenario:
    """Return the scenario with a GradScaler in its loop, and a gradient that overflows on one rank."""
    loop = ScaledLoop()
    return replace(scenario, batch=rows_with_an_overflow, backward=loop.backward, update=loop.update)


def foreach_adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def fused_adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def freeze_then_thaw(run: Run, step: int) -> None:
    parameters = run.named_parameters()
    if step == 2:
        assert parameters["head.weight"].grad is None
    if step > 0:
        parameters["blocks.0.up.weight"].requires_grad_(step == 2)
        parameters["head.weight"].requires_grad_(step == 2)


def remember_buffers(run: Run, step: int) -> None:
    run.extra += [buffer.clone() for buffer in run.model.buffers()]


def halve_gradients(run: Run, step: int) -> None:
    if step == 0:
        parameters = run.named_parameters()
        parameters["head.weight"].register_hook(lambda grad: grad * 0.5)
        parameters["blocks.0.up.bias"].register_hook(lambda grad: grad * 0.25)


def squared_error_under_autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return squared_error(model, x, y)


def two_forwards_before_two_backwards(run: Run, step: int) -> Tensor:
    first, second = run.loss(step), run.loss(step + 10)
    first.backward()
    second.backward()
    return first.detach() + second.detach()


def one_backward_through_two_forwards(run: Run, step: int) -> Tensor:
    loss = run.loss(step) + run.loss(step + 10)
    loss.backward()
    return loss


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True)
