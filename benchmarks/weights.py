"""Compare ways to hand whole weights to an engine: TRL's loop over FSDP2, torch's full state_dict, `full_weights`.

    python -m benchmarks.weights --ranks 2 --sizes 50,200 --rounds 5

All ways take turns in the same processes, after a barrier. The engine on rank 0 stands in for vLLM: it copies each
tensor into its own.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor

import fxshard
from benchmarks.markdown import table
from benchmarks.state import SHAPES, Layer, link_gigabytes_per_s, start
from tests.peak_memory import PeakMemory

MIB = 2**20
SIZES = {**SHAPES, "200 wide": (4, 2048)}  # parameters in M -> (number of layers, width)
Pairs = Iterator[tuple[str, Tensor]]


def build(size: str, shard: Any) -> nn.Module:
    """Return a sharded model of `size` million parameters; its values are the same on every rank."""
    layers, width = SIZES[size]
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList(Layer(width, size == "2") for _ in range(layers))
    for layer in model.layers:
        nn.init.normal_(next(layer.parameters()))
        shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def trl(model: nn.Module, args: argparse.Namespace, _: int | None) -> Pairs:
    """TRL's loop (its pull request 6386): `full_tensor()` into a bucket, which is then pushed; all ranks gather."""
    bucket: list[tuple[str, Tensor]] = []
    nbytes = 0
    for name, parameter in model.state_dict().items():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        full = full.to(args.dtype)
        bucket.append((name, full))
        nbytes += full.nbytes
        if nbytes >= args.bucket_mib * MIB:
            yield from bucket
            bucket, nbytes = [], 0
        del full
    yield from bucket


def torch_full(model: nn.Module, args: argparse.Namespace, _: int | None) -> Pairs:
    """`get_model_state_dict(full_state_dict=True)`."""
    state: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, full in state.items():
        yield name, full.to(args.dtype)


def ours(model: nn.Module, args: argparse.Namespace, ranks: int | None) -> Pairs:
    """`fxshard.full_weights`."""
    return fxshard.full_weights(model, bucket_mib=args.bucket_mib, dtype=args.dtype, ranks=ranks)


METHODS: dict[str, tuple[Callable[[nn.Module, argparse.Namespace, int | None], Pairs], bool, int | None]] = {
    "TRL's loop": (trl, False, None),
    "get_model_state_dict": (torch_full, False, None),
    "full_weights, rank 0": (ours, True, 0),
    "full_weights, all ranks": (ours, True, None),
}


class Engine:
    """Stands in for an inference engine."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        """Take memory for whole weights."""
        self.weights = {name: torch.zeros(p.shape, dtype=args.dtype) for name, p in model.named_parameters()}


def call(name: str, model: nn.Module, engine: Engine | None, args: argparse.Namespace) -> float:
    """One update that all ranks begin together: its seconds until all are done."""
    way, _, ranks = METHODS[name]
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    for weight_name, weight in way(model, args, ranks):
        if engine is not None:
            engine.weights[weight_name].copy_(weight)
        del weight
    dist.barrier()
    return time.perf_counter() - start


def peak_of(name: str, model: nn.Module, args: argparse.Namespace) -> int:
    """The most bytes that new tensors take at a time in one update, counted, apart from the engine's."""
    with PeakMemory() as memory:
        call(name, model, None, args)
    return memory.peak


def measure(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Run all rounds as `rank`; rank 0 prints."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", args.ranks)
    dist.init_process_group(args.backend, store=store, rank=rank, world_size=args.ranks)
    for size in args.sizes.split(","):
        models = {False: build(size, fsdp2_fully_shard), True: build(size, fxshard.fully_shard)}
        engines = {name: Engine(models[is_ours], args) for name, (_, is_ours, _) in METHODS.items()} if not rank else {}
        nbytes = sum(p.numel() * args.dtype.itemsize for p in models[True].parameters())
        names = list(METHODS)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        links = [link_gigabytes_per_s(False)]
        for number in range(args.rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seconds[name].append(call(name, models[METHODS[name][1]], engines.get(name), args))
            links.append(link_gigabytes_per_s(False))
        everyone: list[Any] = [None] * args.ranks
        dist.all_gather_object(everyone, {name: peak_of(name, models[METHODS[name][1]], args) for name in names})
        if rank == 0:
            for name, engine in engines.items():
                if any(not torch.equal(w, engine.weights[n]) for n, w in engines["TRL's loop"].weights.items()):
                    raise AssertionError(f"{name}: other weights than those of TRL's loop")
            show(size, nbytes, seconds, everyone, statistics.median(links))
    dist.destroy_process_group()


def show(size: str, nbytes: int, seconds: dict[str, list[float]], peaks: list[dict[str, int]], link: float) -> None:
    """Print one size as a table."""
    print(f"\n{size}M parameters, {nbytes / MIB:.0f} MiB as they arrive; the link moves {link:.2f} GB/s.\n")
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    base = seconds["TRL's loop"]
    rows = []
    for name, values in seconds.items():
        ratio = statistics.median(own / other for own, other in zip(values[1:], base[1:], strict=True))
        others = max(each[name] for each in peaks[1:]) / MIB
        spread = f"{medians[name]:.3f} ({min(values[1:]):.3f}-{max(values[1:]):.3f})"
        rows.append([name, spread, f"{nbytes / medians[name] / 1e9:.2f}", f"{ratio:.2f}"])
        rows[-1] += [f"{peaks[0][name] / MIB:.0f}", f"{others:.0f}"]
    print(
        table(["way", "s, median (min-max)", "GB/s", "/ TRL's", "peak of rank 0, MiB", "of others"], rows), flush=True
    )


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--bucket-mib", type=float, default=256)
    flags.add_argument("--dtype", default="float32", type=lambda name: getattr(torch, name))
    flags.add_argument("--backend", default="fxshard_gloo")
    start(flags, measure, sizes="50")
