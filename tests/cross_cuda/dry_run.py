"""Run what was compiled on fake tensors and mock streams, and note every launch, wait, kernel and copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from fxshard import torch_private
from fxshard.ir import collectives, ops
from fxshard.runtime import prefetcher, streams
from tests.cross_cuda.clocks import MockEvent, MockStream, Streams, Work

_IMPLEMENTED: Mapping[Any, Callable[..., Any]] = {
    ops.ALL_GATHER_ON_STREAM: streams._all_gather_on_stream,
    ops.REDUCE_SCATTER_ON_STREAM: streams._reduce_scatter_on_stream,
    ops.COPY_OUT: streams._copy_out,
    ops.COPY_TO_DEVICE: streams._copy_to_device,
    ops.COPY_TO_HOST: streams._copy_to_host,
    ops.PREFETCHED_ALL_GATHER: prefetcher._prefetched_all_gather,
}
"""Ops of ours that Python runs, and what it runs: on fake tensors torch would not."""

_SYNCHRONISING = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal")
_NO_OP = ("aten::empty", "aten::new_empty")


class Step(NamedTuple):
    """Something that the device was given."""

    # "gather", "reduce", "exchange" (DTensor's, which is waited for where it is launched), "wait", "triton" (a
    # generated kernel), "kernel" (one of a library) or "python" (an op of ours that Python runs)
    kind: str
    name: str  # of the op or the generated kernel
    stream: str  # on which
    reads: tuple[int, ...] = ()  # storages, by number
    writes: tuple[int, ...] = ()  # storages, by number
    read_bytes: int = 0  # of the tensors that are read
    written_bytes: int = 0  # of the tensors that are written


class Call(NamedTuple):
    """What the device was given, as it was called."""

    function: Any  # an op, or a kernel of Inductor's
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 # nobody changes it
    results: Any = ()  # what the op gave


@dataclass
class _Work:
    """What a collective of NCCL's leaves: an event, and what it holds until somebody has waited."""

    streams: Streams
    event: MockEvent
    held: Sequence[Tensor]

    def wait(self) -> None:
        self.streams.current.wait_event(self.event)


class DryRun(TorchDispatchMode):
    """Runs on mock streams all that is dispatched in it, on top of a fake mode."""

    def __init__(self, streams: Streams) -> None:
        """`streams` note what is done on them."""
        super().__init__()  # type: ignore[no-untyped-call] # of torch
        self.streams = streams
        self.steps: list[Step] = []
        self.unwaited: dict[int, Any] = {}  # storage -> work
        self._links: dict[str, str] = {}  # process group -> stream

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run in this mode; torch would run the model's own code instead."""
        return True

    def ran(self, kernel: Any, args: tuple[Any, ...]) -> None:
        """Note a generated kernel."""
        given = [(n, a) for n, a in zip(kernel.fn.arg_names, args, strict=False) if isinstance(a, Tensor)]
        reads = [a for name, a in given if not name.startswith("out_ptr")]
        changed = {*kernel.mutated_arg_names}
        writes = [a for name, a in given if name in changed or name.startswith(("out_ptr", "in_out_ptr"))]
        self._run("triton", kernel.fn.__name__, reads, writes, Call(kernel, args))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # it comes again with the tensors inside, in whose memory the op reads and writes
        kwargs, name = kwargs or {}, func.name()
        if name.startswith(_SYNCHRONISING) or _leaves_the_device(func, args, kwargs):
            raise AssertionError(f"{name} makes the host wait for the device")
        if func in _IMPLEMENTED:
            self.steps.append(Step("python", name, self.streams.current.name))
            with self:
                return _IMPLEMENTED[func](*args, **kwargs)
        if func is collectives.WAIT:
            return self._wait(args[0])
        if name.startswith("aten::record_stream"):
            raise AssertionError("record_stream comes through Tensor.record_stream alone")
        results = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        call = Call(func, args, kwargs, results)
        if name.startswith("_c10d_functional::"):
            self._launch("reduce" if "reduce" in name else "gather", name, given, made, call)
        elif name.startswith("_dtensor::shard_dim_alltoall"):
            self._launch("exchange", name, given, made, call)
            self._wait(*made)
        elif name.startswith(_NO_OP):
            self.streams.allocate(made, name)
        elif not _is_new_memory(func, given, made):
            pass
        else:
            written = _written(func, args, kwargs)
            self._run("kernel", name, [t for t in given if not any(t is w for w in written)], [*made, *written], call)
        return results

    def register_work(self, tensor: Tensor, work: Any) -> None:
        """Do what torch's function of that name does."""
        if hasattr(work, "_read") and self.streams.forgets("free"):
            work._read = None
        self.unwaited[tensor.untyped_storage()._cdata] = work

    def graphed(self, model: Callable[[list[Any]], Any], inputs: list[Any], static: Sequence[int]) -> Any:
        """Run what would be replayed of a CUDA graph as it is."""
        return model(inputs)

    def work_of(self, call: Call) -> Work | None:
        """Return what computes a call, where somebody computes."""
        return None

    def _launch(self, kind: str, name: str, sent: list[Tensor], received: list[Tensor], call: Call) -> None:
        self.streams.allocate(received, name)
        caller, link = self.streams.current, self._link_of(call)
        link.follow(caller.clock)  # not a fork of ours, so no fault is seeded here
        caller.tick()
        with self.streams.using(link):
            self._run(kind, name, sent, received, call)
        event = MockEvent(link.clock, self.streams)  # NCCL's, so no fault is seeded here either
        link.tick()
        for tensor in received:
            self.register_work(tensor, _Work(self.streams, event, sent))

    def _link_of(self, call: Call) -> MockStream:
        """Return the stream of a collective's process group: NCCL has one for each."""
        *_, group = (value for value in (*call.args, *call.kwargs.values()) if isinstance(value, str))
        return self.streams.named(self._links.setdefault(group, f"nccl{len(self._links) or ''}"))

    def _wait(self, tensor: Tensor) -> Tensor:
        work = self.unwaited.pop(tensor.untyped_storage()._cdata, None)
        if work is not None:
            with self:  # on the CPU it copies
                work.wait()
            self._note("wait", "wait_tensor", [tensor], [])
        return tensor

    def _run(self, kind: str, name: str, reads: list[Tensor], writes: list[Tensor], call: Call) -> None:
        if not any(tensor.is_cuda for tensor in (*reads, *writes)):
            with self.streams.using(self.streams.host):
                return self.streams.run(name, reads, writes, self.work_of(call))
        self.streams.run(name, reads, writes, self.work_of(call))
        self._note(kind, name, reads, writes)

    def _note(self, kind: str, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        numbers = [tuple(dict.fromkeys(map(self.streams.number_of, tensors))) for tensors in (reads, writes)]
        sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in (reads, writes)]
        self.steps.append(Step(kind, name, self.streams.current.name, *numbers, *sizes))  # type: ignore[arg-type]


def _leaves_the_device(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op copies from the device to the host, and waits for it."""
    sources = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    if not any(source.is_cuda for source in sources):
        return False
    wanted = kwargs.get("device")
    to_host = wanted is not None and torch.device(wanted).type == "cpu"
    into_host = func.name().startswith("aten::copy_") and not sources[0].is_cuda
    waits = args[2:3] != (True,) and not kwargs.get("non_blocking") if into_host else True
    return (to_host or into_host) and waits


def _is_new_memory(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an op computes anything: it writes, or what it gives is none of what it was given."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    return func._schema.is_mutable or any(tensor.untyped_storage()._cdata not in known for tensor in made)


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    named = [*zip(func._schema.arguments, args, strict=False)]
    named += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    changed = [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]


@contextmanager
def dry_run(mode: Any) -> Iterator[DryRun]:
    """Run on fakes of `mode` and on mock streams what is called in this context; nothing may be compiled in it."""
    run = DryRun(Streams())
    with running(run, mode):
        yield run


@contextmanager
def running(run: DryRun, mode: Any) -> Iterator[None]:
    """Do the same with a run of the caller's."""
    made = run.streams
    streams.stream_of.cache_clear()
    patched: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "Stream", made.made),
        (torch.cuda, "stream", made.using),
        (torch.cuda, "current_stream", lambda device=None: made.current),
        (torch_private, "register_work", run.register_work),
        (torch_private, "is_fake", lambda tensor: False),  # shards with hooks are encoded in real ones alone
        (Tensor, "record_stream", lambda tensor, stream: made.record(tensor, stream)),  # bound, as a method is
    ]
    with ExitStack() as stack:
        stack.callback(streams.stream_of.cache_clear)
        for owner, name, value in patched:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mode)
        stack.enter_context(run)
        yield
