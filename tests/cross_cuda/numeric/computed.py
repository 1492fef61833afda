"""Train a case's model on two emulated ranks, and compute what its code for CUDA computes."""

from __future__ import annotations

from collections import Counter
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
from tests.cross_cuda.numeric.executor import ALLOCATOR, Item, Order, run_all
from tests.cross_cuda.numeric.reference import Errors, Reference, Values, rows_of
from tests.cross_cuda.numeric.remembered import Remembered
from tests.cross_cuda.training import NUM_STEPS, Case, Training, ranks


@dataclass
class Recorded:
    """Two steps of a training, which can be computed in many orders."""

    runs: Sequence[ComputingRun]  # one for all ranks, or one for each
    values: Values  # views of the shadows, of each rank
    items: list[Item]  # what the streams were given

    def computed(self, order: Order, items: Sequence[Item] | None = None) -> Values:
        """Return losses, gradients and parameters, of all items or of what a fault has made of them."""
        with _disable_current_modes(), torch.no_grad():
            for run in self.runs:
                run.begin()
            run_all(self.items if items is None else items, order)
        return {name: [part.clone() for part in parts] for name, parts in self.values.items()}

    @property
    def races(self) -> list[str]:
        """What the clocks have found."""
        return [race for run in self.runs for race in run.streams.races]

    @property
    def count(self) -> Counter[str]:
        """How often each fault could have been put in."""
        return self.runs[0].streams.count

    @property
    def streams(self) -> list[str]:
        """Streams that were given anything."""
        return [name for name in dict.fromkeys(item.stream for item in self.items) if name != ALLOCATOR]


class Computed:
    """A case that is compiled once, and of which steps are recorded, with and without faults."""

    def __init__(
        self, case: Case, mode: FakeTensorMode, training: Training, reference: Reference, rank: int | None
    ) -> None:
        """`rank`: the one whose code it is, `None` for that of all ranks."""
        self.case, self.training, self._mode, self.reference = case, training, mode, reference
        self._ranks = range(case.world_size) if rank is None else [rank]
        self._launch = Remembered()

    def record(self, seeded: Seeded = NO_FAULT) -> Recorded:
        """Take two steps on mock streams."""
        streams = ComputingStreams(seeded, ranks=self._ranks)
        run, lane = ComputingRun(streams, self._launch), installed()
        num_wrappers = len(lane.wrappers)
        values: dict[str, Any] = {}
        with running(run, self._mode), lane.watching(run):
            self._put(run)
            for number in range(NUM_STEPS):
                self.training.step(number, lambda losses, n=number: values.update(_copies(self.training, losses, n)))  # type: ignore[misc]
            values |= {f"parameter {name}": _local(it) for name, it in self.training.model.named_parameters()}
            views = {name: run.get(fake) for name, fake in values.items()}
        assert len(lane.wrappers) == num_wrappers, "something was compiled in a step that is computed"
        return Recorded([run], views, run.streams.items)

    def _put(self, run: ComputingRun) -> None:
        with _disable_current_modes():
            for name, parameter in self.training.model.named_parameters():
                whole = self.reference.initial[name]
                run.put(_local(parameter), [rows_of(whole, parameter, rank) for rank in self._ranks])
            for state in self.training.optimizer.state.values():
                for fake in state.values():
                    local = _local(fake)
                    run.put(local, [torch.zeros(local.shape, dtype=local.dtype)] * len(self._ranks))
            for number, microbatches in enumerate(self.training.tokens):
                for i, fake in enumerate(microbatches):
                    run.put(fake, [self.reference.tokens[rank, number, i] for rank in self._ranks])

    def errors(self, values: Values) -> dict[str, Errors]:
        """Compare with unsharded training."""
        return self.reference.errors(values, dict(self.training.model.named_parameters()))


@contextmanager
def compiled(case: Case, reference: Reference | None = None, rank: int | None = None) -> Iterator[Computed]:
    """Compile a case for CUDA, without machine code, for all ranks or as a rank does."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ranks(case, rank or 0) as mesh, installed().compiling(case.gpu, machine_code=False):
        with mode:
            training = Training(case, mesh)
            training.run()
        yield Computed(case, mode, training, reference or Reference(case), rank)


def _local(tensor: Tensor) -> Tensor:
    local: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return getattr(local, "rows", local)  # of a weight that is gathered in fp8


def _copies(training: Training, losses: Sequence[Tensor], number: int) -> dict[str, Tensor]:
    """Copy losses and gradients, as the optimizer and what comes after it use their memory again."""
    of_losses = {f"step {number} loss {i}": loss.detach().clone() for i, loss in enumerate(losses)}
    grads = {name: it.grad for name, it in training.model.named_parameters() if it.grad is not None}
    return of_losses | {f"step {number} gradient {name}": _local(grad).clone() for name, grad in grads.items()}
