"""Read a dry run: the order of launches, waits and kernels, what is copied, and what is called."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from torch import fx
from torch.utils.flop_counter import flop_registry

from fxshard.ir import collectives, launches, pins, regions
from tests.cross_cuda.dry_run import Step

KERNELS = {packet.__name__ for packet in flop_registry} | {"addmm_acc"}
"""What `launches.is_kernel` finds in a graph for CUDA."""


def scheduled(graphs: Iterable[fx.Graph]) -> list[str]:
    """Return the order that graphs say, one after the other: `gather`, `reduce`, `wait`, and names of kernels."""
    return list(itertools.chain.from_iterable(map(_tokens, graphs)))


def _tokens(graph: fx.Graph) -> Iterator[str]:
    for node in pins.inlined(graph).nodes:
        if node.target in collectives.LAUNCHES:
            yield "gather" if node.target in collectives.GATHERS else "reduce"
        elif collectives.is_wait(node):
            yield "wait"
        elif launches.is_kernel(node):
            yield _name(node.target.name())
        elif node.target is regions.INVOKE and (code := regions.code_of(node)) is not None:
            yield from _tokens(code.graph)


def ran(steps: Iterable[Step]) -> list[str]:
    """Return the order in which the main stream was given the same."""
    found = []
    for step in steps:
        if step.kind in ("gather", "reduce") or (step.kind == "wait" and step.stream == "main"):
            found.append(step.kind)
        elif step.kind == "kernel" and (name := _name(step.name)) in KERNELS:
            found.append(name)
    return found


def _name(op: str) -> str:
    """Return `mm` for `aten::mm.out`."""
    return op.rpartition("::")[2].partition(".")[0]


def by_collective(order: Sequence[str]) -> list[tuple[str, ...]]:
    """Cut an order at its collectives; kernels between two of them in the order of their names, which may swap."""
    spans: list[list[str]] = [[]]
    for name in order:
        if name in ("gather", "reduce", "wait"):
            spans += [[name], []]
        else:
            spans[-1].append(name)
    return [tuple(sorted(span)) for span in spans if span]


def copied_bytes(steps: Sequence[Step]) -> int:
    """Return how many bytes kernels of their own copy out of gathered buffers: they read nothing else."""
    gathered, copied = set[int](), 0
    for step in steps:
        if step.kind == "gather":
            gathered |= {*step.writes}
        elif step.kind in ("triton", "kernel"):
            if step.reads and gathered.issuperset(step.reads):
                copied += step.written_bytes
            gathered -= {*step.writes}  # from here on the memory is another tensor's
    return copied


def gathered_bytes(steps: Sequence[Step]) -> int:
    return sum(step.written_bytes for step in steps if step.kind == "gather")


def copies_in(steps: Sequence[Step], kind: str = "reduce") -> list[int]:
    """Return for each reduction, or gather, how many kernels write to what it sends."""
    found, writers = [], dict[int, set[int]]()
    for i, step in enumerate(steps):
        if step.kind == kind:
            found.append(len(set().union(*(writers.get(storage, set()) for storage in step.reads))))
        if step.kind != "wait":
            for storage in step.writes:
                writers.setdefault(storage, set()).add(i)
    return found


def by_direction(steps: Sequence[Step]) -> tuple[Sequence[Step], Sequence[Step]]:
    """Cut a step of one microbatch into forward and backward: between them is the loss, behind them the optimizer."""
    names = [step.name for step in steps]
    loss = next(i for i, name in enumerate(names) if name.startswith("aten::mean"))
    end = next((i for i, name in enumerate(names) if name.startswith(_OPTIMIZER)), len(steps))
    return steps[:loss], steps[loss:end]


_OPTIMIZER = ("aten::add_", "aten::_foreach_add_")


def num_kernels(steps: Sequence[Step]) -> int:
    return sum(step.kind in ("triton", "kernel") for step in steps)


def num_launches(steps: Sequence[Step]) -> int:
    return sum(step.kind in ("gather", "reduce") for step in steps)


def num_python_calls(steps: Sequence[Step]) -> int:
    """Return how many ops of ours Python runs."""
    return sum(step.kind == "python" for step in steps)
