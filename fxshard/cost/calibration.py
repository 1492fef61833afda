"""Measure what a rank and its link can do, together with the other ranks.

[Note: calibration]
The cost model asks how long the link is busy with a launch, not how long one who waits for it stands: so the latency is
what a launch takes in a row of launches under way, and the bandwidth what each further byte adds to one. Kernels are
timed on every rank by itself, and the median of a few tries counts, for a step has as many good moments as bad ones.
Collectives are timed on all ranks at once, and the shortest try counts, which nothing else on the machine has
disturbed. Of all ranks the slowest counts, for they wait for each other. Numbers have two digits, for the third one is
another one each time. `fxshard calibrate` also times products of several sizes, attention, and copies between host and
device.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxshard import hardware, torch_private
from fxshard.hardware import HardwareSpec
from fxshard.ir.text import dtype_text
from fxshard.runtime import gloo

_c10d = torch.ops._c10d_functional

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TRIES, _TRIES_OF_LARGE = 9, 3
_ROW = 16  # launches under way at a time
_KERNELS = 128  # that are launched in a row
_MANY = 16  # tensors of one launch
_SMALL = 16  # elements that each rank sends where only the latency counts
_LEAST_SHARE = 20  # latencies that a transfer takes which shows the bandwidth
_LEAST_SECONDS, _MOST_SECONDS = 0.01, 0.05  # that it takes
_SIDES = (128, 256, 512, 1024, 2048, 4096, 8192)  # of products, for `gemm_efficiency`
_HEADS = 8  # of attention
_ENOUGH = 0.05  # seconds of the largest products
_LONG = 2e-3  # seconds of one launch, where few tries must do


class _Probe(NamedTuple):
    """What is timed on one kind of device."""

    buffer_bytes: int  # of the largest whole tensor that is gathered, and of the largest that is copied
    side: int  # of the largest matrix that is multiplied
    seconds: float  # that a kernel must take to be believed


_ON_CPU, _ON_ACCELERATOR = _Probe(1 << 24, 512, 5e-4), _Probe(1 << 27, 4096, 2e-4)


class Calibration:
    """What this rank and its links can do: all ranks of a mesh measure it together, and all get the same numbers.

    It takes a fraction of a second, and memory for 128 MiB on an accelerator, 16 MiB on a CPU, three times. The memory
    is taken at once, so that `run` cannot fail on one rank.

    Args:
        groups: of this rank, one for each axis: that which shards, then those that `others` name. Nothing else may be
            under way on them.
        device: of this rank's tensors.
        others: "replica" for the axis between replicas, "tensor" for that of tensor parallelism.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], device: torch.device, others: Sequence[str] = ("replica",)
    ) -> None:
        """Take memory, or raise a RuntimeError if there is too little; other ranks take no part."""
        self._groups, self._device, self._others = groups, device, others
        self._group, self._tries = groups[0], _TRIES
        ranks = [dist.get_world_size(group) for group in groups]
        self._sizes = _ON_CPU if device.type == "cpu" else _ON_ACCELERATOR
        self._largest = max(2 * _SMALL, self._sizes.buffer_bytes // 4 // max(ranks))  # elements that each rank sends
        with torch_private.without_modes(), torch.inference_mode(False):
            numel = max(self._sizes.buffer_bytes // 4, 2 * _SMALL * max(ranks))
            self._buffers = [torch.zeros(numel, device=device) for _ in range(3)][:2]  # a gather will need the third
            self._row = [torch.zeros(_SMALL * ranks[0], device=device) for _ in range(_MANY)]

    def run(self, progress: Callable[[str], None] | None = None) -> HardwareSpec:
        """Measure, with all ranks; with `progress`, which gets a line before each part, products and copies too."""
        # The caller may trace, record or infer at the moment; none of it is to see this.
        plain = torch.autocast(self._device.type, enabled=False)
        with torch_private.without_modes(), torch.inference_mode(False), torch.no_grad(), plain:
            if progress:
                progress("kernels")
            kernels = self._kernels()
            more = self._products_and_copies(progress) if progress else {}
            if progress:
                progress("links")
            links = [self._link(), *(self._link_of(group) for group in self._groups[1:])]
            numbers = [_rounded(number) for number in (*self._slowest(kernels), *itertools.chain(*links))]
        ranks = " x ".join(str(dist.get_world_size(group)) for group in reversed(self._groups))
        peaks = {dtype_text(dtype): 1 / numbers[i] for i, dtype in enumerate(_DTYPES)}
        per_byte, overhead, latency, per_launch, per_sent, per_gathered, per_reduced, *beside = numbers[len(_DTYPES) :]
        links_beside: dict[str, Any] = {}
        for name, of_launch, of_byte in zip(self._others, beside[::2], beside[1::2], strict=False):
            links_beside |= {f"{name}_latency": of_launch, f"{name}_bandwidth": _rounded(1 / of_byte)}
        return HardwareSpec(
            name=self._device.type,
            peak_flops=more.pop("peak_flops", None) or {name: _rounded(peak) for name, peak in peaks.items()},
            memory_bandwidth=_rounded(1 / per_byte),
            link_latency=latency,
            link_bandwidth=_rounded(1 / per_sent),
            memory_gib=self._memory_gib(),
            kernel_overhead=overhead,
            gather_tensor_overhead=per_gathered,
            reduce_tensor_overhead=per_reduced,
            launch_overhead=per_launch,
            **links_beside,
            **more,
            source=f"measured on {ranks} ranks of {gloo.backend_of(self._group, self._device.type)}",
        )

    # ---- of this rank alone

    def _kernels(self) -> list[float]:
        """Seconds per FLOP of each dtype, per byte of a copy, and per kernel."""
        into, source = self._buffers
        small = source[:1]
        copy = self._median(lambda: into.copy_(source))
        row = self._median(lambda: [small.clone() for _ in range(_KERNELS)])
        return [*map(self._per_flop, _DTYPES), copy / (2 * source.nbytes), row / _KERNELS]

    def _per_flop(self, dtype: torch.dtype) -> float:
        """Seconds per FLOP of a matrix product, the smallest that takes long enough to be believed."""
        side = 64
        while True:
            matrix = torch.ones(side, side, dtype=dtype, device=self._device)
            seconds = self._median(partial(_products, matrix)) / 3
            if seconds >= self._sizes.seconds or side >= self._sizes.side:
                return seconds / (2 * side**3)
            side *= 2

    def _products_and_copies(self, progress: Callable[[str], None]) -> dict[str, Any]:
        """Share of the fastest product that those of other sizes reach, FLOP/s of it, and B/s between host and device.

        Side by side the ranks take the slowest; sizes count up to the first that takes 50 ms.
        """
        speeds: dict[str, list[float]] = {}
        for dtype in _DTYPES:
            progress(f"products, {dtype_text(dtype)}")
            found = speeds[dtype_text(dtype)] = []
            for side in _SIDES:
                matrix = torch.ones(side, side, dtype=dtype, device=self._device)
                (seconds,) = self._slowest([self._median(partial(_products, matrix)) / 3])
                found.append(2 * side**3 / seconds)
                if 3 * seconds > _ENOUGH:
                    break
        progress("copies")
        on_device = self._buffers[0]
        on_host = torch.empty(on_device.shape, pin_memory=self._device.type == "cuda")
        copies = (lambda: on_device.copy_(on_host), lambda: on_host.copy_(on_device))
        (slowest,) = self._slowest([max(map(self._median, copies))])
        progress("attention")
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        curve = speeds[dtype_text(dtype)]
        shares = ((side, _rounded(speed / max(curve))) for side, speed in zip(_SIDES, curve, strict=False))
        return {
            "peak_flops": {name: _rounded(max(found)) for name, found in speeds.items()},
            "gemm_efficiency": tuple(shares),
            "attention_efficiency": self._attention(dtype, max(curve)),
            "host_bandwidth": _rounded(on_device.nbytes / slowest),
        }

    def _attention(self, dtype: torch.dtype, peak: float) -> tuple[float, float]:
        """Share of `peak` that causal attention reaches: forward with 2 products, backward with 5."""
        query, key, value = (
            torch.ones(1, _HEADS, self._sizes.side, 64, dtype=dtype, device=self._device) for _ in "qkv"
        )
        run = partial(nn.functional.scaled_dot_product_attention, query, key, value, is_causal=True)
        forward = self._median(run)
        with torch.enable_grad():
            inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
            result = run()
            grad = partial(torch.autograd.grad, result, inputs, torch.ones_like(result), retain_graph=True)
            seconds = self._slowest([forward, self._median(grad)])
        product = _HEADS * 64 * self._sizes.side**2  # FLOPs, of which the mask leaves half
        return _rounded(2 * product / seconds[0] / peak), _rounded(5 * product / seconds[1] / peak)

    def _median(self, action: Callable[[], Any]) -> float:
        action()
        return statistics.median(self._seconds(action) for _ in range(_TRIES))

    def _memory_gib(self) -> float:
        if self._device.type == "cuda":
            return _rounded(torch.cuda.get_device_properties(self._device).total_memory / 2**30)
        return hardware.of_device(self._device).memory_gib

    # ---- of all ranks at once

    def _link_of(self, group: dist.ProcessGroup) -> list[float]:
        """Seconds per launch on another axis, and per byte that a rank moves."""
        self._group, self._tries = group, _TRIES
        _, latency, per_byte = self._speed()
        return [latency, per_byte]

    def _link(self) -> list[float]:
        """The same, what a lone launch adds, and each further tensor of a gather and of a reduction."""
        small = [row[:_SMALL] for row in self._row]
        one, latency, per_byte = self._speed()
        gathered = self._together(partial(self._gather, small))
        reduced, alone = (self._together(partial(self._reduce, self._row[:count])) for count in (_MANY, 1))
        tensors = (max(0.0, several - single) / (_MANY - 1) for several, single in ((gathered, one), (reduced, alone)))
        return [latency, one - latency, per_byte, *tensors]

    def _speed(self) -> tuple[float, float, float]:
        """Seconds of a lone launch, of one in a row of them, and per byte that a rank moves."""
        small = [self._row[0][:_SMALL]]
        if self._together(partial(self._gather, small), tries=1) > _LONG:
            self._tries = 2
        one = latency = self._together(partial(self._gather, small))
        if self._device.type != "cpu" or not gloo.has_two_threads(self._group):  # overlapping launches would break it
            latency = min(one, self._together(partial(self._gather, small, launches=_ROW)) / _ROW)
        sent, seconds = self._telling_transfer(latency)
        moved = (sent.nbytes - small[0].nbytes) * (dist.get_world_size(self._group) - 1)
        return one, latency, max(seconds - one, 0.1 * seconds) / moved

    def _telling_transfer(self, latency: float) -> tuple[Tensor, float]:
        """What each rank sends in a transfer that is long beside the latency, and how long it takes."""
        enough = min(max(_LEAST_SHARE * latency, _LEAST_SECONDS), _MOST_SECONDS)
        numel, tries = _SMALL, min(self._tries, _TRIES_OF_LARGE)
        while True:
            numel = min(2 * numel, self._largest)
            sent = self._buffers[0][:numel]
            seconds = self._together(partial(self._gather, [sent]), tries)
            if seconds >= enough or numel == self._largest:
                return sent, seconds

    def _gather(self, sent: Sequence[Tensor], launches: int = 1) -> None:
        ranks, name = dist.get_world_size(self._group), self._group.group_name
        _wait([_c10d.all_gather_into_tensor_coalesced(sent, ranks, name) for _ in range(launches)])

    def _reduce(self, sent: Sequence[Tensor]) -> None:
        ranks, name = dist.get_world_size(self._group), gloo.reducing(self._group, self._device.type)
        _wait([_c10d.reduce_scatter_tensor_coalesced(sent, "sum", ranks, name or self._group.group_name)])

    def _together(self, action: Callable[[], Any], tries: int | None = None) -> float:
        """The shortest of all tries, each as long as on the slowest rank: the same on all ranks."""
        action()
        return min(self._slowest([self._seconds(action) for _ in range(tries or self._tries)]))

    def _slowest(self, seconds: Sequence[float]) -> list[float]:
        """Of each of these times the longest that any rank has."""
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        for group in self._groups:  # along each axis in turn: of all ranks
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        found: list[float] = slowest.tolist()
        return found

    def _seconds(self, action: Callable[[], Any]) -> float:
        self._settle()
        begun = time.perf_counter()
        action()
        self._settle()
        return time.perf_counter() - begun

    def _settle(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)


def _products(matrix: Tensor) -> None:
    """The three products of a linear layer: its output, and the gradients of its input and of its weight."""
    torch.mm(matrix, matrix.t())
    torch.mm(matrix, matrix)
    torch.mm(matrix.t(), matrix)


def _wait(launched: Sequence[Sequence[Tensor]]) -> None:
    for tensors in launched:
        for tensor in tensors:
            _c10d.wait_tensor(tensor)


def _rounded(number: float) -> float:
    """To two significant digits."""
    return 0.0 if number == 0 else round(number, 1 - math.floor(math.log10(abs(number))))
