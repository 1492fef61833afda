"""What collectives do among identical ranks; see [Note: emulated link]."""
# ruff: noqa: D102 (most methods are those of torch's ProcessGroup)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fxshard.testing.link_engine import Engine

BACKEND = "emulated"
"""Name of the groups' backend in torch.distributed."""

_AS_THEY_ARE = (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX)  # of equal values


def _unsupported(name: str) -> Callable[..., Work]:
    def refuse(*args: Any, **kwargs: Any) -> Work:
        raise NotImplementedError(f"emulated_link: {name} is not implemented.")

    return refuse


_ProcessGroup: Any = dist.ProcessGroup  # its stubs ask for every overload of a method; torch calls one


class EmulatedGroup(_ProcessGroup):  # type: ignore[misc] # see above
    """Rank 0 of identical ranks; see [Note: emulated link].

    Methods have the names by which torch calls them, old and new: 2.11 knows the `_base` and `_tensor_coalesced` ones.
    """

    def __init__(self, rank: int, world_size: int, engine: Engine) -> None:
        super().__init__(rank, world_size)
        self.engine = engine
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
        return self._launch("all_gather", [output], lambda: self._gather(output, input))

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return self._launch("all_gather", outputs, lambda: _each(self._gather, outputs, inputs))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        pieces, sources = _flat(outputs), [input for input in inputs for _ in range(self._world_size)]
        return self._launch("all_gather", pieces, lambda: _each(_copy, pieces, sources))

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        return self.allgather(list(zip(*outputs, strict=True)), inputs)  # one list per rank

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        reduce = self._reduction(opts)
        return self._launch("reduce_scatter", [output], lambda: reduce(output, self._chunk(input)), whole=[input])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        reduce = self._reduction(opts)
        return self._launch(
            "reduce_scatter",
            outputs,
            lambda: _each(reduce, outputs, [self._chunk(input) for input in inputs]),
            whole=inputs,
        )

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        reduce, own = self._reduction(opts), [pieces[self._rank] for pieces in inputs]
        return self._launch("reduce_scatter", outputs, lambda: _each(reduce, outputs, own), whole=_flat(inputs))

    def allreduce(self, tensors: Tensor | Sequence[Tensor], opts: Any = None) -> Work:
        values, reduce = _listed(tensors), self._reduction(opts)
        return self._launch("all_reduce", values, lambda: _each(reduce, values, values))

    def reduce(self, tensors: Tensor | Sequence[Tensor], opts: Any = None) -> Work:
        values, reduce = _listed(tensors), self._reduction(opts)
        results = values if opts is None or opts.rootRank == self._rank else []
        return self._launch("reduce", values, lambda: _each(reduce, results, results))

    def broadcast(self, tensors: Tensor | Sequence[Tensor], opts: Any = None) -> Work:
        return self._launch("broadcast", _listed(tensors), lambda: None)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        if not inputs:
            raise NotImplementedError("emulated_link: scatter from another rank than 0 is not implemented.")
        own = [pieces[self._rank] for pieces in inputs]
        return self._launch("scatter", outputs, lambda: _each(_copy, outputs, own), whole=_flat(inputs))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        pieces = _flat(outputs)  # none if another rank is the root
        sources = [input for input in inputs for _ in pieces]
        return self._launch("gather", pieces, lambda: _each(_copy, pieces, sources))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Work:
        def move() -> None:
            # Every peer sends what this rank would send to itself.
            sizes = list(input_splits) or [input.shape[0] // self._world_size] * self._world_size
            own = input.split(sizes)[self._rank]
            _copy(output, torch.cat([own] * self._world_size))

        return self._launch("all_to_all", [output], move, whole=[input])

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        sources = [inputs[self._rank]] * self._world_size
        return self._launch("all_to_all", outputs, lambda: _each(_copy, outputs, sources), whole=inputs)

    def barrier(self, opts: Any = None) -> Work:
        return self._launch("barrier", [], lambda: None)

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
        self, op: str, outputs: Sequence[Tensor], move: Callable[[], None], *, whole: Sequence[Tensor] | None = None
    ) -> Work:
        """Launch `move`; `whole` are the tensors that count, where they are not the outputs."""
        whole = outputs if whole is None else whole
        if not all(tensor.is_cpu for tensor in whole):
            raise NotImplementedError(f"emulated_link: {op} of tensors that are not on the CPU is not implemented yet.")
        work = self.engine.launch(op, sum(tensor.nbytes for tensor in whole), self._world_size, move, outputs)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _gather(self, output: Tensor, input: Tensor) -> None:
        output.view(self._world_size, input.numel()).copy_(input.reshape(1, -1).expand(self._world_size, -1))

    def _chunk(self, input: Tensor) -> Tensor:
        return input.reshape(self._world_size, -1)[self._rank]

    def _reduction(self, opts: Any) -> Callable[[Tensor, Tensor], None]:
        """What reducing equal values of all ranks writes, given where to write and the value."""
        op = dist.ReduceOp(dist.ReduceOp.SUM) if opts is None else opts.reduceOp
        kind, factor = cast(Any, op.__getstate__())  # the one way to the factor of PREMUL_SUM
        if kind in _AS_THEY_ARE:
            return _copy
        if kind == dist.ReduceOp.PRODUCT:
            return lambda output, value: _write(torch.pow, output, value, self._world_size)
        if kind == dist.ReduceOp.SUM:
            return lambda output, value: _write(torch.mul, output, value, self._world_size)
        if kind == dist.ReduceOp.PREMUL_SUM:
            return lambda output, value: _write(torch.mul, output, value, self._world_size * factor)
        raise NotImplementedError(f"emulated_link: reducing with {kind.name} is not implemented.")


def _copy(output: Tensor, value: Tensor) -> None:
    output.copy_(value.reshape(output.shape))  # no broadcasting


def _write(function: Callable[..., Any], output: Tensor, value: Tensor, operand: Any) -> None:
    function(value.reshape(output.shape), operand, out=output)


def _each(function: Callable[[Tensor, Tensor], None], outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for output, value in zip(outputs, values, strict=True):
        function(output, value)


def _flat(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in lists for tensor in tensors]


def _listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)
