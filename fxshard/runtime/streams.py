"""The side streams of a device, and the ops that run on them.

[Note: side streams]
An op on a side stream *forks*: its stream first waits for what the current one has been given so far, so it may read
all that came before. What it makes is *joined* by `wait_tensor`, as a collective's result is: the current stream waits,
the host never does. Three rules keep memory safe, without a check at run time:

- What an op reads is kept until the join, by Inductor (`compile/inductor.py` lowers these ops as collectives) or by the
  work that the join waits for.
- What is allocated on a side stream is freed into that stream's pool, and handed out again to an op that has forked
  after the last reader was launched. So each stream that forks has side streams of its own.
- What is freed by another stream's wait, or has no work to hold it, is recorded with the allocator: a cast whose gather
  `copy_out` waits for, gradients, and the copy of a shard that is offloaded.

The CPU has no streams. There a cast runs at once, and a copy at its join, the last moment at which a stream could run
it: what is freed or overwritten too early shows as a wrong number.

As FSDP2's `all_gather_copy_in_stream` (`_fsdp_param_group.py`), and the works of `torch.distributed._symmetric_memory`.

[Note: offloaded shards]
The shards of an *offloaded* unit are in the host's memory; so are their gradients, and the optimizer's state, and there
it steps: FSDP2's `CPUOffloadPolicy`. What is gathered and reduced is on the device. So a shard is copied to the device
before it is sent, `fxshard::copy_to_device`, and the reduced gradient of a shard to the host, `fxshard::copy_to_host`.
Both are launches: they run on a stream of their own for each direction, and each has a wait. For a copy to the device
the current stream waits; for one to the host the host itself does, since a CPU reads the gradient next. So when a
backward has given a gradient, all copies that went before it are done, and the optimizer may write.

In graphs `passes/offload_shards.py` puts them; `passes/hoist_copies.py` and `passes/chain_reductions.py` say when they
run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fxshard import torch_private
from fxshard.ir import collectives, ops, tags
from fxshard.ir.plan import UnitPlan

_c10d = torch.ops._c10d_functional


@functools.cache
def stream_of(name: str, main: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream of that name beside a CUDA stream; made once, because each stream has memory of its own."""
    return torch.cuda.Stream(main.device, priority=-1)


@contextmanager
def on_side_stream(name: str, device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Run on the stream of that name, after what the current one has; yield `None` where there are no streams."""
    if not name or device.type != "cuda":
        yield None
        return
    main = torch.cuda.current_stream(device)
    side = stream_of(name, main)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield side


def _all_gather_on_stream(
    inputs: Sequence[Tensor], dtype: torch.dtype, group_size: int, group_name: str, stream: str
) -> list[Tensor]:
    joiner = copy_out_stream(stream, inputs[0].device)
    with on_side_stream(stream, inputs[0].device):
        return collectives.launch_gather(cast_to_send(inputs, dtype, joiner), group_size, group_name)


def copy_out_stream(name: str, device: torch.device) -> torch.cuda.Stream | None:
    """The stream that may wait for what is cast on a side stream now; `None` where nothing is."""
    return stream_of(tags.COPY_OUT, torch.cuda.current_stream(device)) if name and device.type == "cuda" else None


def cast_to_send(parts: Sequence[Tensor], dtype: torch.dtype, joiner: torch.cuda.Stream | None) -> list[Tensor]:
    """What a gather sends: `parts` of a shard in `dtype`; the stream `joiner` may wait for it and free the cast."""
    if all(part.dtype is dtype for part in parts):
        return list(parts)
    sent = [torch.empty_like(part, dtype=dtype) for part in parts]
    torch.ops.aten._foreach_copy_.default(sent, parts)  # one kernel
    if joiner is not None:
        for tensor in sent:
            tensor.record_stream(joiner)
    return sent


def _reduce_scatter_on_stream(
    inputs: Sequence[Tensor], dtype: torch.dtype, reduce_op: str, group_size: int, group_name: str, stream: str
) -> list[Tensor]:
    with on_side_stream(stream, inputs[0].device) as side:
        if side is not None:
            for tensor in inputs:
                tensor.record_stream(side)
        return collectives.reduce_scatter([tensor.to(dtype) for tensor in inputs], reduce_op, group_size, group_name)


def _copy_out(gathered: Tensor, size: Sequence[int], stride: Sequence[int], start: int, stream: str) -> Tensor:
    def copied() -> Tensor:
        _c10d.wait_tensor(gathered)  # the second copy of a buffer finds nothing to wait for, on the same stream
        return gathered.as_strided(size, stride, start).clone(memory_format=torch.contiguous_format)

    with on_side_stream(stream, gathered.device) as side:
        if side is None:
            copy = gathered.new_empty(size)
            torch_private.register_work(copy, _Late(lambda: copy.copy_(copied())))
            return copy
        copy = copied()
        torch_private.register_work(copy, _Joined(side.record_event(), gathered.device, gathered))
    return copy


def _copy_to_device(shard: Tensor, device: str, stream: str) -> Tensor:
    where = torch.device(device)
    main = torch.cuda.current_stream(where) if where.type == "cuda" else None
    with on_side_stream(stream, where) as side:
        copy = torch.empty_like(shard, device=device, requires_grad=False)
        if side is None:
            torch_private.register_work(copy, _Late(lambda: copy.copy_(shard.detach())))
            return copy
        for name in (tags.COPY_IN, tags.COPY_OUT) if main is not None else ():
            copy.record_stream(stream_of(name, main))  # a gather may read it there, or be waited for and free it
        copy.copy_(shard.detach(), non_blocking=True)
        torch_private.register_work(copy, _Joined(side.record_event(), copy.device, shard))
    return copy


def _copy_to_host(gradient: Tensor, pinned: bool, stream: str) -> Tensor:
    copy = torch.empty(gradient.shape, dtype=gradient.dtype, device="cpu", pin_memory=pinned)
    with on_side_stream(stream, gradient.device) as side:
        if side is None:
            torch_private.register_work(copy, _Late(lambda: copy.copy_(gradient)))
            return copy
        copy.copy_(gradient, non_blocking=pinned)
        torch_private.register_work(copy, _JoinedByHost(side.record_event(), gradient.device, gradient))
    return copy


def on_device(shards: Mapping[int, Tensor], plan: UnitPlan) -> dict[int, Tensor]:
    """Return the shards of a unit, by index, where they are gathered."""
    if plan.offload is None:
        return dict(shards)
    device = plan.offload.device
    copies = {i: ops.COPY_TO_DEVICE(shard.detach(), device, tags.TO_DEVICE) for i, shard in shards.items()}
    return {i: collectives.WAIT(copy) for i, copy in copies.items()}


def on_host(gradients: Mapping[int, Tensor], plan: UnitPlan) -> dict[int, Tensor]:
    """Return the reduced gradients of a unit's shards, by index, where the shards are."""
    if plan.offload is None:
        return dict(gradients)
    pinned = plan.offload.pinned
    copies = {i: ops.COPY_TO_HOST(gradient, pinned, tags.TO_HOST) for i, gradient in gradients.items()}
    return {i: collectives.WAIT(copy) for i, copy in copies.items()}


class _Joined(Work):
    """What has been given to a side stream up to an event; holds what is read there until somebody has waited."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, read: Tensor) -> None:
        super().__init__()
        self._event, self._device, self._read = event, device, read

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream(self._device).wait_event(self._event)
        return True


class _JoinedByHost(_Joined):
    """The same for what the host reads."""

    def wait(self, timeout: Any = None) -> bool:
        self._event.synchronize()
        return True


class _Late(Work):
    """Runs when it is waited for, once."""

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__()
        self._run: Callable[[], object] | None = run

    def wait(self, timeout: Any = None) -> bool:
        run, self._run = self._run, None
        if run is not None:
            run()
        return True


ops.implement(
    all_gather_on_stream=_all_gather_on_stream,
    reduce_scatter_on_stream=_reduce_scatter_on_stream,
    copy_out=_copy_out,
    copy_to_device=_copy_to_device,
    copy_to_host=_copy_to_host,
)
