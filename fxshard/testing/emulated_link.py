"""A process group whose other ranks are emulated, over a link that takes as long as the caller says.

[Note: emulated link]
One process plays rank 0 of `world_size`. Its peers are identical to it, so every collective is computed from this
rank's own tensors: all_gather repeats the shard, reduce_scatter keeps the own chunk (times the world size for SUM). A
transfer takes `latency + bytes * (W - 1) / W / bandwidth`, where bytes are those of the full, unsharded tensors (twice
for all_reduce). Transfers go one after the other, as on the stream of a communicator. What the peers send is copied in
this process all the same: on the CPU by a worker thread, on a GPU by a few thread blocks, see [Note: the link on a
GPU]. docs/emulated_link.md says what such numbers mean.

On the CPU the link is arithmetic: a transfer begins when it was launched or when the one before it has ended, whichever
is later, and ends after its duration, or after its copy if that takes longer. Only who waits for a transfer sleeps, so
threads that wake up late delay themselves, never the link.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    ReduceScatterOptions,
    _register_process_group,
    _register_work,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Work

from fxshard.cost import measured
from fxshard.errors import ConfigError
from fxshard.testing.cpu_engine import CpuEngine
from fxshard.testing.emulated_group import BACKEND, EmulatedGroup
from fxshard.testing.link_engine import Engine, Links, LinkTransfer, Speed

PROBE = "fxshard/emulated_link/probe"
"""Name of a group that is asked what torch can reach."""


@dataclass(frozen=True, kw_only=True)
class EmulatedLink:
    """What `emulated_link` yields."""

    mesh: DeviceMesh  # all ranks, on one axis
    links: Links  # what carries the transfers

    @property
    def engine(self) -> Engine:
        """What carries the transfers within a machine."""
        return self.links.within

    @property
    def transfers(self) -> list[LinkTransfer]:
        """The transfers, within this machine first; one is there once it has been waited for. On a GPU this waits."""
        within, *others = (engine.transfers for engine in self.links.engines)
        return within + others[0] if others else within

    @property
    def gathered_peak_bytes(self) -> int:
        """The most bytes that results of all_gathers took at once since the last `clear`, without copies of them."""
        return self.links.gathered.most

    def clear(self) -> None:
        """Forget the transfers so far, and how much was gathered at once."""
        self.links.gathered.most = 0
        for engine in self.links.engines:
            engine.clear()

    def set_speed(self, *, gigabytes_per_s: float = math.inf, latency_us: float = 0.0, ctas: int | None = None) -> None:
        """Change the speed of later launches within a machine, and of measurements; what is under way arrives first."""
        speed = Speed(gigabytes_per_s=gigabytes_per_s, latency_us=latency_us)
        _require_ctas(ctas, self.mesh.device_type)
        self.engine.set_speed(speed, ctas)
        measured.forget()


@contextmanager
def emulated_link(
    world_size: int,
    *,
    gigabytes_per_s: float = math.inf,
    latency_us: float = 0.0,
    device: str | torch.device | None = None,
    ctas: int | None = None,
    ranks_per_machine: int | None = None,
    between_machines: Speed | None = None,
) -> Iterator[EmulatedLink]:
    """Make a default process group whose other ranks are emulated, and destroy it at the end.

    This process is rank 0; see [Note: emulated link]. With nothing but `world_size` the link is instant: collectives
    copy, and wait for nothing.

    Args:
        world_size: how many ranks there seem to be.
        gigabytes_per_s: bandwidth of each rank's link, in 1e9 bytes.
        latency_us: of each collective.
        device: "cpu" (or `None`) or "cuda", of the tensors to communicate.
        ctas: how many thread blocks of a GPU copy, like the channels of NCCL; 16 if `None`. The CPU has none.
        ranks_per_machine: how many ranks in a row are on one machine; all of them if `None`. On the CPU alone.
        between_machines: speed of another link, for groups whose ranks are on several machines.

    Raises:
        ConfigError: an argument means nothing, or there is a default process group already, or "cuda" lacks something.
        NotImplementedError: another device.
    """
    speed = Speed(gigabytes_per_s=gigabytes_per_s, latency_us=latency_us)
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"emulated_link: world_size must be a positive int, got {world_size!r}.")
    kind = torch.device("cpu" if device is None else device)
    _require_ctas(ctas, kind.type)
    links = _links_for(kind, speed, ctas, _machines(world_size, ranks_per_machine, between_machines, kind.type))
    if dist.is_initialized():
        raise ConfigError(
            "emulated_link: there is a default process group already. Call torch.distributed.destroy_process_group() "
            "before, or leave the emulated_link around this one."
        )
    if BACKEND not in dist.Backend.backend_list:  # torch has no way to take a backend back
        dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"])
    # Nobody else can reach a HashStore, which tells fxshard that there is nobody to compare texts with.
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=world_size, pg_options=links)
    group = dist.group.WORLD
    try:
        with _python_groups_in_out_variants():
            mesh = init_device_mesh(kind.type, (world_size,))
            measured.agree(mesh)  # here, where what it sends is not yet counted
            link = EmulatedLink(mesh=mesh, links=links)
            link.clear()
            yield link
    finally:
        for engine in links.engines:
            engine.close()
        if dist.group.WORLD is group:
            dist.destroy_process_group()


def _require_ctas(ctas: int | None, device_type: str) -> None:
    if ctas is None:
        return
    if device_type != "cuda":
        raise ConfigError(
            f"emulated_link: ctas is for device='cuda', and the device of this link is {device_type!r}. Leave it out."
        )
    if not isinstance(ctas, int) or isinstance(ctas, bool) or ctas < 1:
        raise ConfigError(f"emulated_link: ctas must be a positive int, got {ctas!r}.")


def _machines(world_size: int, ranks: int | None, between: Speed | None, device_type: str) -> tuple[int, Speed] | None:
    if ranks is None and between is None:
        return None
    if ranks is None or between is None:
        raise ConfigError("emulated_link: ranks_per_machine and between_machines belong together; give both.")
    if device_type != "cpu":
        raise ConfigError(f"emulated_link: ranks_per_machine is for the CPU, and this link is on {device_type!r}.")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1 or world_size % ranks:
        raise ConfigError(f"emulated_link: ranks_per_machine must divide world_size={world_size}, got {ranks!r}.")
    return ranks, between


def _links_for(device: torch.device, speed: Speed, ctas: int | None, machines: tuple[int, Speed] | None) -> Links:
    within = _engine_for(device, speed, ctas)
    return Links(within) if machines is None else Links(within, CpuEngine(machines[1]), machines[0])


def _engine_for(device: torch.device, speed: Speed, ctas: int | None) -> Engine:
    if device.type == "cpu":
        return CpuEngine(speed)
    if device.type != "cuda":
        raise NotImplementedError(f"emulated_link: device={str(device)!r} is not implemented; the CPU and CUDA are.")
    if not torch.cuda.is_available():
        raise ConfigError(
            "emulated_link: device='cuda' needs a GPU and a torch built for CUDA, and torch.cuda.is_available() is "
            "False. Install them, or leave device out for a link between CPUs."
        )
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "emulated_link: device='cuda' needs triton, which is not installed. Install the version that this torch "
            "requires, or leave device out for a link between CPUs."
        )
    from fxshard.testing.cuda_engine import CTAS, CudaEngine  # only now, as it needs triton

    return CudaEngine(speed, device, CTAS if ctas is None else ctas)


def _make_group(options: Any, links: Links | None) -> EmulatedGroup:
    """Make the default group when torch calls, and without links groups of some of its ranks."""
    if links is not None:
        return EmulatedGroup(options.group_rank, options.group_size, links.of(range(options.group_size)), links)
    links = cast(EmulatedGroup, dist.group.WORLD).links
    assert links is not None
    engine = links.of(options.global_ranks_in_group)
    return EmulatedGroup(options.group_rank, options.group_size, engine, gathered=links.gathered)


@contextmanager
def _python_groups_in_out_variants() -> Iterator[None]:
    """Let the `_out` variants of functional collectives, which Inductor's bucketing uses, reach a group in Python."""
    # Before 2.15 they call methods that torch lets no Python class override. The only way in is to replace the two
    # operators for a while; what replaces them calls any group, so other groups work as before.
    library = torch.library.Library("_c10d_functional", "IMPL")
    try:
        for name, replacement in _OUT_VARIANTS.items():
            if not _reaches_python_groups(name):
                for key in ("CPU", "CUDA"):
                    library.impl(name, replacement, key)
        yield
    finally:
        library._destroy()


def _reaches_python_groups(name: str) -> bool:
    probe = EmulatedGroup(0, 1, CpuEngine(Speed()))
    probe.setGroupName(PROBE)
    _register_process_group(cast(Any, PROBE), probe)
    output, reduce = torch.zeros(1), ("sum",) if name.startswith("reduce") else ()
    operator = getattr(torch.ops._c10d_functional, name).default
    try:
        torch.ops._c10d_functional.wait_tensor(operator(torch.zeros(1), *reduce, 1, PROBE, out=output))
    except RuntimeError:
        return False
    finally:
        _unregister_process_group(cast(Any, PROBE))
    return True


def _all_gather_into_tensor_out(input: Tensor, group_size: int, group_name: Any, *, out: Tensor) -> Tensor:
    _register_work(out, _base(group_name, "all_gather_single", "_allgather_base")(out, input))
    return out


def _reduce_scatter_tensor_out(
    input: Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: Tensor
) -> Tensor:
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(getattr(dist.ReduceOp, reduce_op.upper()))
    _register_work(out, _base(group_name, "reduce_scatter_single", "_reduce_scatter_base")(out, input, options))
    return out


def _base(group: Any, *names: str) -> Callable[..., Work]:
    """Return the first of these methods, which may be given by name, that the group has."""
    found = group if isinstance(group, dist.ProcessGroup) else _resolve_process_group(group)
    methods: list[Callable[..., Work]] = [getattr(found, name) for name in names if hasattr(found, name)]
    return methods[0]


_OUT_VARIANTS = {
    "all_gather_into_tensor_out": _all_gather_into_tensor_out,
    "reduce_scatter_tensor_out": _reduce_scatter_tensor_out,
}
