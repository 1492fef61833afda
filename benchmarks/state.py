"""The full state of AdamW on rank 0, by every way there is: `python -m benchmarks.state --sizes 2,50 --ranks 2`.

All ways get the same sharded model and optimizer, in the same processes, and take turns: one call of each in every
round, in an order that rotates. The first round, in which memory is new to the process, is shown by itself.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxshard
from benchmarks.markdown import table
from fxshard.tools.bench import machine

Full = dict[Any, Any]
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Method = Callable[[nn.Module, torch.optim.Optimizer], Full]

SHAPES = {  # parameters in M -> (number of layers, width); "2" is many small tensors
    "2": (200, 56),
    "50": (16, 512),
    "200": (16, 1024),
    "500": (40, 1024),
}


class Layer(nn.Module):
    """The parameters of a transformer layer, without its code; a small one has only vectors and small matrices."""

    def __init__(self, width: int, is_small: bool) -> None:
        super().__init__()
        shapes = [(3 * width, width)] if is_small else [(3 * width, width), (width, width), (4 * width, width)]
        shapes += [] if is_small else [(width, 4 * width)]
        vectors = [(width,)] * 2 if is_small else [(width,)] * 4
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in [*shapes, *vectors, (3 * width,)])


def build(size: str, device: str, with_flats: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model of `size` million parameters, and its optimizer after a step."""
    layers, width = SHAPES[size]
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = nn.Module()
    model.layers = nn.ModuleList(Layer(width, size == "2") for _ in range(layers))
    for layer in model.layers:
        fxshard.fully_shard(layer, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), fused=device != "cpu")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optim.step()
    optim.zero_grad()
    cast(Any, model).flats = flat_state(model, optim) if with_flats else []
    return model, optim


# ---- the ways


def _sharded_state(optim: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return dict(optim.state_dict()["state"])


def fxshards(model: nn.Module, optim: torch.optim.Optimizer) -> Full:
    """`fxshard.full_optim_state_dict`."""
    return dict(fxshard.full_optim_state_dict(model, optim).get("state", {}))


def torchs(model: nn.Module, optim: torch.optim.Optimizer) -> Full:
    """`get_optimizer_state_dict` with `full_state_dict` and `cpu_offload`."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: Any = get_optimizer_state_dict(model, optim, options=options)
    return dict(enumerate(state["state"].values())) if state else {}


def all_gather_each(model: nn.Module, optim: torch.optim.Optimizer) -> Full:
    """An all_gather of every tensor, by DTensor's `full_tensor`."""
    full: Full = {}
    for i, state in _sharded_state(optim).items():
        full[i] = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
        if dist.get_rank():
            full[i] = {}
    return full if dist.get_rank() == 0 else {}


def flat_state(model: nn.Module, optim: torch.optim.Optimizer) -> list[Any]:
    """The state as fairscale kept it: per layer and key one flat tensor of this rank's rows, padded."""
    ids = {id(p): i for i, p in enumerate(model.parameters())}
    flats = []
    for layer in cast(nn.ModuleList, model.layers):
        for key in ("exp_avg", "exp_avg_sq"):
            rows, slots = [], []
            for parameter in layer.parameters():
                local = optim.state[parameter][key].to_local().reshape(-1)
                padded = -(-parameter.shape[0] // dist.get_world_size()) * parameter[:1].numel()
                rows.append(nn.functional.pad(local, (0, padded - local.numel())))
                slots.append((ids[id(parameter)], padded, parameter.shape))
            flats.append((key, torch.cat(rows), slots))
    return flats


def all_gather_flat(model: nn.Module, optim: torch.optim.Optimizer) -> Full:
    """An all_gather per layer and key of what was flat before the clock started; fairscale after #595."""
    full: Full = {i: {"step": state["step"]} for i, state in _sharded_state(optim).items()}
    world_size = dist.get_world_size()
    for key, flat, slots in cast(Any, model).flats:
        gathered = flat.new_empty(world_size * flat.numel())
        ALL_GATHER(gathered, flat)
        offset = 0
        for i, numel, shape in slots if dist.get_rank() == 0 else ():
            block = gathered.view(world_size, -1)[:, offset : offset + numel].reshape(-1)
            full[i][key] = block[: shape.numel()].view(shape)
            offset += numel
    return full if dist.get_rank() == 0 else {}


def broadcast_each(model: nn.Module, optim: torch.optim.Optimizer) -> Full:
    """A broadcast of every rank's rows of every tensor."""
    full: Full = {}
    for i, state in _sharded_state(optim).items():
        full[i] = {key: _broadcast(value) if isinstance(value, DTensor) else value for key, value in state.items()}
        if dist.get_rank():
            full[i] = {}
    return full if dist.get_rank() == 0 else {}


def _broadcast(value: DTensor) -> Tensor | None:
    local, rank, world_size = value.to_local(), dist.get_rank(), dist.get_world_size()
    parts = list(torch.empty(value.shape, dtype=value.dtype).chunk(world_size)) if rank == 0 else []
    for source in range(world_size):
        if rank == source:
            part = local
        elif rank == 0:
            part = parts[source]
        else:
            rows = -(-value.shape[0] // world_size)
            count = max(0, min(value.shape[0] - source * rows, rows))
            part = local.new_empty((count, *value.shape[1:]))
        dist.broadcast(part, source)
        if rank == source == 0:
            parts[0].copy_(local)
    return parts[0]._base if rank == 0 else None


def broadcast_pickled(model: nn.Module, optim: torch.optim.Optimizer) -> Full:
    """A broadcast of every rank's pickled state; what fairscale did before #595."""
    own = {
        i: {key: value.to_local() if isinstance(value, DTensor) else value for key, value in state.items()}
        for i, state in _sharded_state(optim).items()
    }
    parts = []
    for source in range(dist.get_world_size()):
        buffer = io.BytesIO()
        if dist.get_rank() == source:
            torch.save(own, buffer)
        length = torch.tensor([buffer.tell()])
        dist.broadcast(length, source)
        data = torch.empty(int(length), dtype=torch.uint8)
        if dist.get_rank() == source:
            data = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        dist.broadcast(data, source)
        if dist.get_rank() == 0:
            parts.append(torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=False))
    if dist.get_rank():
        return {}
    return {
        i: {key: torch.cat([part[i][key] for part in parts]) if value.dim() else value for key, value in state.items()}
        for i, state in parts[0].items()
    }


def send_each(model: nn.Module, optim: torch.optim.Optimizer) -> Full:
    """A send of every tensor into its place, nothing else: no checks, no buckets."""
    full: Full = {}
    works = []
    for i, state in _sharded_state(optim).items():
        full[i] = {}
        for key, value in state.items():
            if not isinstance(value, DTensor):
                full[i][key] = value
            elif dist.get_rank():
                works.append(dist.isend(value.to_local(), 0))
            else:
                whole = full[i][key] = torch.empty(value.shape, dtype=value.dtype)
                chunks = whole.chunk(dist.get_world_size())
                works += [dist.irecv(chunk, source) for source, chunk in enumerate(chunks) if source]
                chunks[0].copy_(value.to_local())
    for work in works:
        if work is not None:
            work.wait()
    return full if dist.get_rank() == 0 else {}


METHODS: dict[str, Method] = {
    "broadcast_pickled": broadcast_pickled,
    "all_gather_flat": all_gather_flat,
    "all_gather_each": all_gather_each,
    "torch_full": torchs,
    "broadcast_each": broadcast_each,
    "send_each": send_each,
    "fxshard": fxshards,
}


# ---- measuring


def link_gigabytes_per_s(is_new: bool, nbytes: int = 256 * 2**20, repeats: int = 3) -> float:
    """What one rank can send to another in large sends, into new memory or such that was used before: the median."""
    data = torch.ones(nbytes, dtype=torch.uint8)
    seconds = []
    for _ in range(repeats + 1):
        into = torch.empty_like(data) if is_new else data
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.recv(into, 1)
        elif dist.get_rank() == 1:
            dist.send(data, 0)
        seconds.append(time.perf_counter() - start)
    return nbytes / statistics.median(seconds[1:]) / 1e9


def reset_peak() -> int:
    """Forget the peak of resident memory so far; what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)]
    return int(line.split()[1]) * 1024


def call(name: str, model: nn.Module, optim: torch.optim.Optimizer) -> tuple[float, int, Full]:
    """One call of one way that all ranks begin together: its seconds, what it added to the peak, its result."""
    gc.collect()
    before = reset_peak()
    dist.barrier()
    start = time.perf_counter()
    full = METHODS[name](model, optim)
    seconds = time.perf_counter() - start
    return seconds, _status("VmHWM") - before, full


def require_same(first: Full, other: Full, name: str) -> None:
    """Raise unless two ways gave the same bits."""
    for i, state in first.items():
        for key, value in state.items():
            if not torch.equal(value, other[i][key]):
                raise AssertionError(f"{name}: {key} of parameter {i} differs")


def measure(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Run all rounds as `rank`; rank 0 writes what it found."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", args.ranks)
    dist.init_process_group("fxshard_gloo", store=store, rank=rank, world_size=args.ranks)
    found: dict[str, Any] = {}
    for size in args.sizes.split(","):
        model, optim = build(size, "cpu", with_flats="all_gather_flat" in args.methods)
        nbytes = sum(2 * p.numel() * p.element_size() for p in model.parameters())
        names = [name for name in METHODS if name in args.methods.split(",")]
        seconds: dict[str, list[float]] = {name: [] for name in names}
        peaks: dict[str, list[int]] = {name: [] for name in names}
        links = {"used": [link_gigabytes_per_s(False)], "new": [link_gigabytes_per_s(True)]}
        reference: Full | None = None
        for number in range(args.rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                took, peak, full = call(name, model, optim)
                seconds[name].append(took)
                peaks[name].append(peak)
                if number == 0 and size == "2" and rank == 0:
                    reference = reference or full
                    require_same(reference, full, name)
                del full
            links["used"].append(link_gigabytes_per_s(False))
            links["new"].append(link_gigabytes_per_s(True))
        reference = None
        everyone: list[Any] = [None] * args.ranks
        dist.all_gather_object(everyone, {name: max(values[1:]) for name, values in peaks.items()})
        found[size] = {
            "tensors": sum(1 for _ in model.parameters()),
            "parameters": sum(p.numel() for p in model.parameters()),
            "bytes": nbytes,
            "link_gigabytes_per_s": links,
            "seconds": seconds,
            "peaks": everyone,
        }
        if rank == 0:
            show(size, found[size], args.ranks)
        del model, optim
    if rank == 0 and args.json:
        options = {"ranks": args.ranks, "rounds": args.rounds}
        args.json.write_text(json.dumps({"machine": machine.facts(), **options, "sizes": found}, indent=1) + "\n")
    dist.destroy_process_group()


def show(size: str, found: dict[str, Any], ranks: int) -> None:
    """Print one size as a table."""
    used, new = (statistics.median(found["link_gigabytes_per_s"][memory]) for memory in ("used", "new"))
    gigabytes = found["bytes"] * (ranks - 1) / ranks / 1e9
    medians = {name: statistics.median(values[1:]) for name, values in found["seconds"].items()}
    own = medians.get("fxshard", min(medians.values()))
    millions, megabytes = found["parameters"] / 1e6, found["bytes"] / 1e6
    print(f"\n{millions:.1f}M parameters in {found['tensors']} tensors, {ranks} ranks; state of {megabytes:.0f} MB.")
    print(
        f"What arrives takes {gigabytes / used:.4f} s on the link ({used:.2f} GB/s) into memory that was used before,"
    )
    print(f"{gigabytes / new:.4f} s ({new:.2f} GB/s) into new memory.\n")
    heads = [
        "way",
        "s, median (min-max)",
        "first",
        "/ fxshard",
        "share of link, used",
        "new",
        "rank 0 / state",
        "others MB",
    ]
    rows = []
    for name, values in found["seconds"].items():
        peak = found["peaks"][0][name] / found["bytes"]
        others = max(each[name] for each in found["peaks"][1:]) / 1e6
        rows.append(
            [
                name,
                f"{medians[name]:.4f} ({min(values[1:]):.4f}-{max(values[1:]):.4f})",
                f"{values[0]:.4f}",
                f"{medians[name] / own:.2f}",
                *(f"{gigabytes / speed / medians[name]:.0%}" for speed in (used, new)),
                f"{peak:.2f}",
                f"{others:.1f}",
            ]
        )
    print(table(heads, rows))


def start(parser: argparse.ArgumentParser, run: Callable[[int, argparse.Namespace, str], None], sizes: str) -> None:
    """Read the command line, with the flags that all benchmarks of state have, and start the ranks."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default=sizes, help="of 2, 50, 200, 500 (million parameters)")
    parser.add_argument("--rounds", type=int, default=5, help="counted ones, after a first")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(run, (args, folder), nprocs=args.ranks, start_method="spawn")


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--methods", default=",".join(METHODS))
    flags.add_argument("--json", type=Path)
    start(flags, measure, sizes="2")
