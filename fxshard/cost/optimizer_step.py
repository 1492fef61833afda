"""What the step of an optimizer costs each rank: its own code runs on tensors without memory.

[Note: planned optimizer steps]
A copy of the optimizer steps fake tensors twice, and the second step counts: every op is one kernel on the roofline, a
number that is read from a tensor is one, and state is what lies in the optimizer's `state` then. Who is given to
`whole_matrices` steps each kind of matrix once for all of its size; owners, rounds and bytes are those of
`runtime/whole_matrices.py`. On the clock of each rank rounds follow each other as there: an exchange begins once all
have launched it, and one link carries one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from fxshard import torch_private
from fxshard.hardware import HardwareSpec
from fxshard.runtime.matrix_explanation import MatrixExplanation
from fxshard.runtime.matrix_owners import Matrix, MatrixTraffic, exchange_seconds
from fxshard.runtime.parameters import adopt_attributes, local_of
from fxshard.runtime.whole_matrices import WholeMatrices, by_team, copy_of, step_without_hooks

OptimizerBuilder = Callable[[nn.Module], Any]
"""Makes one optimizer, or several, of a sharded model."""

Counted = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """What a step costs; lists have one number for each rank, or one where ranks do not differ."""

    name: str  # of the optimizer's class
    matrices: MatrixExplanation | None  # who updates what, and what travels; `None` where all parameters step as rows
    flops: Sequence[float]  # of matrix products
    computing: Sequence[float]  # seconds of compute
    moved_bytes: Sequence[float]  # of device memory
    state_bytes: Sequence[float]  # that the optimizer keeps
    buffer_bytes: Sequence[float]  # of whole gradients, parameters and exchanges that are under way, at most
    seconds: float  # of the step

    @property
    def exposed(self) -> float:
        """Seconds in which the rank with most to compute waits for others, or for the link."""
        return self.seconds - max(self.computing)

    @property
    def received_bytes(self) -> int:
        """That come to the rank to which most come."""
        return max((share.received for share in self.matrices.owners.values()), default=0) if self.matrices else 0


class _OpMeter(torch_private.DispatchMode):
    """Counts what ops on fake tensors do."""

    def __init__(self, hardware: HardwareSpec) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hardware, self.flops, self.seconds, self.nbytes = hardware, 0.0, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return bool(1) if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        result = func(*args, **kwargs)
        is_kernel = isinstance(func, torch._ops.OpOverload) and func.namespace != "prim" and not func.is_view
        if is_kernel and "empty" not in func.name():
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = func._schema
        moved = {each.name: _nbytes(kwargs.get(each.name)) for each in schema.arguments}
        moved |= {each.name: _nbytes(value) for each, value in zip(schema.arguments, args, strict=False)}
        written = {each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write}
        if kwargs.get("grad_scale") is None:
            written -= {"grads"}  # fused optimizers write gradients only to unscale them
        nbytes = sum(moved.values()) + sum(moved[name] for name in written)
        nbytes += _nbytes(result) if all(each.alias_info is None for each in schema.returns) else 0
        if nbytes:
            formula = flop_registry.get(func.overloadpacket)
            flops = formula(*args, **kwargs, out_val=result) if formula else 0
            peak = self.hardware.peak(_tensors((args, kwargs, result))[0].dtype) * self.hardware.gemm_share(flops)
            self.flops += flops
            self.nbytes += nbytes
            moving = nbytes / self.hardware.memory_bandwidth
            self.seconds += max(flops / peak, moving) + self.hardware.kernel_overhead


def _tensors(value: Any) -> list[Tensor]:
    """Return those that are more than a number."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.dim()]


def _nbytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


class _FakeSteps:
    """Steps an optimizer on fake tensors; matrices that are alike once."""

    def __init__(self, given: Optimizer, hardware: HardwareSpec) -> None:
        self.given, self.hardware, self._known = given, hardware, dict[Any, Counted]()
        self.group_of = {p: number for number, group in enumerate(given.param_groups) for p in group["params"]}

    def of_matrix(self, matrix: Matrix) -> Counted:
        key = self.group_of[matrix.parameter], matrix.seen_shape, matrix.parameter.dtype
        if key not in self._known:
            self._known[key] = self.of([(matrix.parameter, matrix.seen_shape)])
        return self._known[key]

    def of(self, parameters: Iterable[tuple[Tensor, Sequence[int]]]) -> Counted:
        """Count the step of parameters that have these shapes here: FLOPs, seconds, bytes moved and bytes of state."""
        state = defaultdict[Any, Any](dict)
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in self.given.param_groups]
        with torch_private.FakeMode(), torch.no_grad():
            for parameter, shape in parameters:
                fake = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="cpu"))
                adopt_attributes(fake, parameter.__dict__)
                fake.grad = torch.empty_like(fake)
                groups[self.group_of[parameter]]["params"].append(fake)
            copied = copy_of(self.given, groups, state)
            for meter in (_OpMeter(self.hardware), _OpMeter(self.hardware)):
                with meter:
                    step_without_hooks(copied)
        return np.array([meter.flops, meter.seconds, meter.nbytes, _nbytes(list(state.values()))])


def cost_of_step(optimizer: Optimizer, hardware: HardwareSpec) -> OptimizerCost:
    """Return what a step of an optimizer costs in which all parameters have gradients."""
    given = optimizer.given if isinstance(optimizer, WholeMatrices) else optimizer
    matrices = optimizer.matrices_on(hardware) if isinstance(optimizer, WholeMatrices) else []
    steps, whole = _FakeSteps(given, hardware), {matrix.parameter for matrix in matrices}
    rest = (p for p in steps.group_of if p not in whole)
    others = steps.of((p, (local_of(p) if isinstance(p, DTensor) else p).shape) for p in rest)
    ranks = sorted({rank for matrix in matrices for rank in matrix.team.ranks}) or [0]
    rounds = [
        _TimedRound.of(taken, steps, ranks)
        for taken in (optimizer.rounds_of(matrices) if whole else [[]])  # type: ignore
    ]
    work = sum((each.work for each in rounds), others[:, None])
    rounds[0].work[1] += others[1]
    return OptimizerCost(
        name=type(given).__name__,
        matrices=optimizer.explain() if isinstance(optimizer, WholeMatrices) else None,
        flops=work[0].tolist(),
        computing=work[1].tolist(),
        moved_bytes=work[2].tolist(),
        state_bytes=work[3].tolist(),
        buffer_bytes=_most_held(rounds).tolist(),
        seconds=_clocked(rounds),
    )


@dataclass(frozen=True, kw_only=True)
class _TimedRound:
    """What is updated together; arrays have a number for each rank."""

    work: Counted  # [4, ranks]
    wholes: Counted  # bytes of parameters and gradients
    sent_in: Counted  # bytes of the buffers
    sent_back: Counted
    seconds: tuple[float, float]  # of the exchanges

    @classmethod
    def of(cls, matrices: Sequence[Matrix], steps: _FakeSteps, ranks: Sequence[int]) -> _TimedRound:
        work, (wholes, sent_in, sent_back) = np.zeros((4, len(ranks))), np.zeros((3, len(ranks)))
        place, seconds = {rank: i for i, rank in enumerate(ranks)}, [0.0, 0.0]
        for team, its in by_team(matrices).items():
            at, traffic = [place[rank] for rank in team.ranks], MatrixTraffic.of(team, its)
            sent_in[at] += traffic.to_owners + traffic.at_owners
            sent_back[at] += traffic.from_owners + traffic.back
            seconds = [a + b for a, b in zip(seconds, exchange_seconds(team, its, steps.hardware), strict=True)]
            for matrix in its:
                work[:, at[matrix.owner]] += steps.of_matrix(matrix)
                wholes[at[matrix.owner]] += 0 if matrix.stays else 2 * matrix.nbytes
        return cls(work=work, wholes=wholes, sent_in=sent_in, sent_back=sent_back, seconds=(seconds[0], seconds[1]))


def _most_held(rounds: Sequence[_TimedRound]) -> Counted:
    """Return the most bytes that whole tensors and exchanges of rounds take, by rank."""
    nothing = np.zeros_like(rounds[0].wholes)
    found = [nothing]
    for before, this, after in zip([None, *rounds], rounds, [*rounds[1:], None], strict=False):
        held = this.wholes + this.sent_in + (before.sent_back if before else nothing)
        found.append(held + (after.wholes + after.sent_in if after else nothing))
    return cast(Counted, np.max(found, axis=0))


def _clocked(rounds: Sequence[_TimedRound]) -> float:
    """Return when the last rank is done with all rounds."""
    now, link, back = np.zeros_like(rounds[0].wholes), 0.0, 0.0
    arrived = link = rounds[0].seconds[0]
    for this, following in zip(rounds, [*rounds[1:], None], strict=True):
        came = arrived
        if following:
            arrived = link = max(link, now.max()) + following.seconds[0]
        now = np.maximum(now, came) + this.work[1]
        now = np.maximum(now, back)
        back = link = max(link, now.max()) + this.seconds[1]
    return float(max(now.max(), back))
