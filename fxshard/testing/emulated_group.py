"""What collectives do among identical ranks; see [Note: emulated link]."""
# ruff: noqa: D102 (most methods are those of torch's ProcessGroup)

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fxshard.cost.measured import EMULATED
from fxshard.testing.link_engine import Engine, GatheredBytes, Links, Move

BACKEND = EMULATED
"""Name of the groups' backend in torch.distributed."""

_AS_THEY_ARE = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)  # of equal values


def _unsupported(name: str) -> Callable[..., Work]:
    def refuse(*args: Any, **kwargs: Any) -> Work:
        raise NotImplementedError(f"emulated_link: {name} is not implemented.")

    return refuse


_ProcessGroup: Any = dist.ProcessGroup  # its stubs ask for every overload of a method; torch calls one


class EmulatedGroup(_ProcessGroup):  # type: ignore[misc] # see above
    """Rank 0 of identical ranks, with torch's names, old and new, as methods; see [Note: emulated link]."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        engine: Engine,
        links: Links | None = None,
        gathered: GatheredBytes | None = None,
    ) -> None:
        super().__init__(rank, world_size)
        self.engine = engine
        self.links = links  # of the default group: what its subgroups have
        self.gathered = links.gathered if links else gathered
        self._rank, self._world_size, self._name, self._about = rank, world_size, "", ""
        self._coalesced: list[Work] | None = None

    def getBackendName(self) -> str:
        return BACKEND

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._world_size

    rank, size, name = getRank, getSize, getBackendName

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, about: str) -> None:
        self._about = about

    def getGroupDesc(self) -> str:
        return self._about

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    # ---- collectives

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        moves = [Move(output, input, writes=self._world_size) for output, input in zip(outputs, inputs, strict=True)]
        return self._launch("all_gather", moves)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        return self._launch("all_gather", _spread(inputs, outputs))

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return self.allgather(list(zip(*outputs, strict=True)), inputs)  # one list per rank

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        reduction = self._reduction(opts)
        moves = [
            Move(output, input, *reduction, reads=self._world_size, own=self._rank)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._launch("reduce_scatter", moves, whole=inputs)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        own = [pieces[self._rank] for pieces in inputs]
        return self._launch(
            "reduce_scatter", _pairs(outputs, own, self._reduction(opts)), whole=[*itertools.chain(*inputs)]
        )

    def allreduce(self, tensors: Tensor | Sequence[Tensor], opts: Any = None) -> Work:
        values = _listed(tensors)
        return self._launch("all_reduce", _pairs(values, values, self._reduction(opts)))

    def reduce(self, tensors: Tensor | Sequence[Tensor], opts: Any = None) -> Work:
        values, reduction = _listed(tensors), self._reduction(opts)
        results = values if opts is None or opts.rootRank == self._rank else []
        return self._launch("reduce", _pairs(results, results, reduction), outputs=values)

    def broadcast(self, tensors: Tensor | Sequence[Tensor], opts: Any = None) -> Work:
        return self._launch("broadcast", [], outputs=_listed(tensors))

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        if not inputs:
            raise NotImplementedError("emulated_link: scatter from another rank than 0 is not implemented.")
        own = [pieces[self._rank] for pieces in inputs]
        return self._launch("scatter", _pairs(outputs, own), whole=[*itertools.chain(*inputs)])

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        return self._launch("gather", _spread(inputs, outputs) if outputs else [])  # none if another rank is the root

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Work:
        sizes, received = (
            list(splits) or [tensor.shape[0] // self._world_size] * self._world_size
            for splits, tensor in ((input_splits, input), (output_splits, output))
        )
        own = input.split(sizes)[self._rank]
        if set(received) == {own.shape[0]}:  # every peer sends what this rank would send to itself
            return self._launch("all_to_all", [Move(output, own, writes=self._world_size)], whole=[input])
        # Else what this rank sends, over and over. Its part of a link is the larger of both directions.
        row_bytes = math.prod(input.shape[1:]) * input.element_size()
        there, back = sum(sizes) - sizes[self._rank], sum(received) - received[self._rank]
        moves = [Move(part, input[: part.shape[0]]) for part in output.split(max(1, input.shape[0])) if input.numel()]
        return self._launch(
            "all_to_all", moves, outputs=[output], whole=[input], other_bytes=max(there, back) * row_bytes
        )

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        return self._launch("all_to_all", _spread([inputs[self._rank]], [outputs]), whole=inputs)

    def barrier(self, opts: Any = None) -> Work:
        return self._launch("barrier", [])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    allreduce_coalesced = allreduce
    alltoall_base = all_to_all_single

    send, recv, recv_anysource = _unsupported("send"), _unsupported("recv"), _unsupported("recv_anysource")
    monitored_barrier, gather_single = _unsupported("monitored_barrier"), _unsupported("gather_single")

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work | None:
        coalesced, self._coalesced = self._coalesced, None
        return coalesced[-1] if coalesced else None  # the link keeps the order: when it has arrived, all have

    # ---- what they do to tensors

    def _launch(
        self,
        op: str,
        moves: Sequence[Move],
        *,
        outputs: Sequence[Tensor] | None = None,
        whole: Sequence[Tensor] | None = None,
        other_bytes: int | None = None,
    ) -> Work:
        """Launch the moves; `outputs`, `whole` and `other_bytes` where they are not those of the moves."""
        outputs = [move.output for move in moves] if outputs is None else outputs
        whole = outputs if whole is None else whole
        others = sorted({tensor.device.type for tensor in whole} - set(self.engine.devices))
        if others:
            raise NotImplementedError(
                f"emulated_link: {op} of tensors on {', '.join(others)} is not implemented; "
                f"this link moves those on {', '.join(self.engine.devices)}."
            )
        nbytes = sum(tensor.nbytes for tensor in whole)
        if other_bytes is not None and self._world_size > 1:  # the engine takes away this rank's part
            nbytes = other_bytes * self._world_size // (self._world_size - 1)
        if op == "all_gather" and self.gathered is not None:
            self.gathered.add(outputs)
        work = self.engine.launch(op, nbytes, self._world_size, moves, outputs)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _reduction(self, opts: Any) -> tuple[float | Tensor, int]:
        """Return by what reducing equal values of all ranks scales a value, and to which power it raises it."""
        op = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
        kind, factor = cast(Any, op.__getstate__())  # the one way to the factor of PREMUL_SUM
        if kind in _AS_THEY_ARE:
            return 1, 1
        if kind == dist.ReduceOp.PRODUCT:
            return 1, self._world_size
        if kind == dist.ReduceOp.SUM:
            return self._world_size, 1
        if kind == dist.ReduceOp.PREMUL_SUM:
            return self._world_size * factor, 1
        raise NotImplementedError(f"emulated_link: reducing with {kind.name} is not implemented.")


def _pairs(
    outputs: Sequence[Tensor], values: Sequence[Tensor], reduction: tuple[float | Tensor, int] = (1, 1)
) -> list[Move]:
    return [Move(output, value, *reduction) for output, value in zip(outputs, values, strict=True)]


def _spread(values: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]]) -> list[Move]:
    return [Move(output, value) for value, pieces in zip(values, outputs, strict=True) for output in pieces]


def _listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
