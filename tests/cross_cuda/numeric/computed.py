"""Train a case's model on two emulated ranks, and compute what its code for CUDA computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.cross_cuda.clocks import NO_FAULT, Seeded
from tests.cross_cuda.dry_run import running
from tests.cross_cuda.lane import installed
from tests.cross_cuda.numeric.computing import ComputingRun, ComputingStreams
from tests.cross_cuda.numeric.executor import ALLOCATOR, Item, Order
from tests.cross_cuda.numeric.reference import Errors, Reference, Values, rows_of
from tests.cross_cuda.training import NUM_STEPS, Case, Training, ranks


@dataclass
class Recorded:
    """Two steps of a training, which can be computed in many orders."""

    run: ComputingRun
    values: Values  # views of the shadows

    def computed(self, order: Order, items: Sequence[Item] | None = None) -> Values:
        """Return losses, gradients and parameters."""
        self.run.compute(order, self.items if items is None else items)
        return {name: [part.clone() for part in parts] for name, parts in self.values.items()}

    @property
    def items(self) -> list[Item]:
        """What the streams were given."""
        return self.run.streams.items

    @property
    def streams(self) -> list[str]:
        """Streams that were given anything."""
        return [name for name in dict.fromkeys(item.stream for item in self.items) if name != ALLOCATOR]


class Computed:
    """A case that is compiled once, and of which steps are recorded, with and without faults."""

    def __init__(self, case: Case, mode: FakeTensorMode, training: Training) -> None:
        self.case, self.training, self._mode, self.reference = case, training, mode, Reference(case)

    def record(self, seeded: Seeded = NO_FAULT) -> Recorded:
        """Take two steps on mock streams."""
        streams = ComputingStreams(seeded, num_ranks=self.case.world_size)
        run, lane = ComputingRun(streams), installed()
        num_wrappers = len(lane.wrappers)
        values: dict[str, Any] = {}
        with running(run, self._mode), lane.watching(run):
            self._put(run)
            for number in range(NUM_STEPS):
                self.training.step(number, lambda losses, n=number: values.update(_copies(self.training, losses, n)))  # type: ignore[misc]
            values |= {f"parameter {name}": _local(it) for name, it in self.training.model.named_parameters()}
            views = {name: run.get(fake) for name, fake in values.items()}
        assert len(lane.wrappers) == num_wrappers, "something was compiled in a step that is computed"
        return Recorded(run, views)

    def _put(self, run: ComputingRun) -> None:
        num_ranks = self.case.world_size
        with _disable_current_modes():
            for name, parameter in self.training.model.named_parameters():
                whole = self.reference.initial[name]
                run.put(_local(parameter), [rows_of(whole, parameter, rank) for rank in range(num_ranks)])
            for state in self.training.optimizer.state.values():
                for fake in state.values():
                    local = _local(fake)
                    run.put(local, [torch.zeros(local.shape, dtype=local.dtype)] * num_ranks)
            for number, microbatches in enumerate(self.training.tokens):
                for i, fake in enumerate(microbatches):
                    run.put(fake, list(self.reference.tokens[:, number, i]))

    def errors(self, values: Values) -> dict[str, Errors]:
        """Compare with unsharded training."""
        return self.reference.errors(values, dict(self.training.model.named_parameters()))


@contextmanager
def compiled(case: Case) -> Iterator[Computed]:
    """Compile a case for CUDA, without machine code."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ranks(case) as mesh, installed().compiling(case.gpu, machine_code=False):
        with mode:
            training = Training(case, mesh)
            training.run()
        yield Computed(case, mode, training)


def _local(tensor: Tensor) -> Tensor:
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return getattr(local, "rows", local)  # of a weight that is gathered in fp8


def _copies(training: Training, losses: Sequence[Tensor], number: int) -> dict[str, Tensor]:
    """Copy losses and gradients, as the optimizer and what comes after it use their memory again."""
    of_losses = {f"step {number} loss {i}": loss.detach().clone() for i, loss in enumerate(losses)}
    grads = {name: it.grad for name, it in training.model.named_parameters() if it.grad is not None}
    return of_losses | {f"step {number} gradient {name}": _local(grad).clone() for name, grad in grads.items()}
