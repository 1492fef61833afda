"""The `fxshard bench` command."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fxshard.errors import ConfigError, FxshardError
from fxshard.options import LauncherEnvironment, launched
from fxshard.tools.bench.config import (
    DEFAULT_CTAS,
    DEFAULT_SYSTEMS,
    DTYPES,
    GROUPS,
    SYSTEMS,
    BenchConfig,
    parse_entries,
)
from fxshard.tools.cli_common import (
    EXIT_ERROR,
    EXIT_PROBLEM,
    at_least,
    device_for,
    in_folder,
    mesh_size,
    num_ranks,
    output_folder,
    positive,
)
from fxshard.tools.launch.console import open_console

if TYPE_CHECKING:
    from rich.console import Console

    from fxshard.tools.bench.result import Report
    from fxshard.tools.launch.torchrun import Peers

BENCH_TEXT = f"""\
Train a model under several systems, step by step in turn, and print a table of step times, collectives and losses.

By itself it starts ranks on this machine. Under torchrun every process has one rank, on GPU LOCAL_RANK if there are
GPUs, and rank 0 prints:
  torchrun --nproc-per-node 8 -m fxshard bench MODULE:FUNCTION
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST -m fxshard bench MODULE:FUNCTION

systems:
{chr(10).join(f"  {name:<20} {text}" for name, text in SYSTEMS.items())}

Every system shards what stands in ModuleLists and Sequentials as one unit each, and the rest as another, and uses
AdamW(fused=True). Exits with 0 if all systems ran and their losses agree, with {EXIT_PROBLEM} if not, with {EXIT_ERROR}
on an error.
docs/benchmarks/README.md says what is measured, and how."""

_SYSTEMS_HELP = (
    "what to compare (default: all). Options of fxshard stand behind colons, and it may stand there several times: "
    "fsdp2,fxshard,fxshard:bucket=auto"
)


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to the parser of `fxshard bench`."""
    parser.set_defaults(command=_bench)
    add = parser.add_argument
    add(
        "target",
        metavar="MODULE:FUNCTION",
        help=(
            "a function without parameters that returns (model, batch) or (model, batch, loss_fn); with "
            "--tensor-parallel it takes the DeviceMesh that it is to split the layers over. The model is called "
            "as model(*batch), model(**batch) or model(batch), for a tuple, a dict and anything else; the loss is "
            "loss_fn(output, batch), or without it the output or its attribute loss. The function is called twice on "
            "every rank: with one seed for the weights of all ranks, then with the rank's own seed for its batch"
        ),
    )
    add("--systems", default=",".join(DEFAULT_SYSTEMS), metavar="A,B,...", help=_SYSTEMS_HELP)
    add("--options", nargs="+", default=[], metavar="NAME=VALUE", help="options for every fxshard in --systems")
    add("--dtype", choices=tuple(DTYPES), help="cast parameters and floating-point inputs (default: leave them)")
    add("--group", choices=GROUPS, help="what connects the ranks (default: nccl if there is a GPU, else gloo)")
    add("--ranks", type=at_least(1), metavar="N", help="processes to start; gloo: 2 by default; nccl: one per GPU")
    _add_link(parser)
    add("--microbatches", type=at_least(1), default=1, metavar="K", help="per step; the last one reduces (default: 1)")
    add("--rounds", type=at_least(1), default=10, metavar="N", help="timed steps per system (default: %(default)s)")
    add("--warm", type=at_least(0), default=0, metavar="N", help="steps of a system before each timed one (default: 0)")
    add("--processes", type=at_least(1), default=1, metavar="N", help="start everything anew N times (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write all measurements")
    add("--plot", type=Path, metavar="FILE", help="draw the medians into an .svg or .png; needs matplotlib")
    add("--timeout", type=positive, default=900.0, metavar="S", help="a silent system fails after S seconds (900)")
    add("--out", type=Path, metavar="DIR", help="keep logs and compiled code here (default: a temporary folder)")


def _add_link(parser: argparse.ArgumentParser) -> None:
    link = parser.add_argument_group("of --group emulated: one process, whose peers are identical to it")
    add = link.add_argument
    add("--world-size", type=mesh_size, metavar="N", help="ranks on the link, or machines x ranks: 2x4 (default: 8)")
    add("--tensor-parallel", type=at_least(1), metavar="N", help="ranks in a row that split each layer (default: 1)")
    add("--gigabytes-per-s", type=positive, metavar="X", help="bandwidth (default: unlimited)")
    add("--latency-us", type=positive, metavar="X", help="latency per transfer (default: none)")
    add("--between-gigabytes-per-s", type=positive, metavar="X", help="bandwidth between machines (default: the same)")
    add("--between-latency-us", type=positive, metavar="X", help="latency between machines (default: the same)")
    add("--device", choices=("cpu", "cuda"), help="where the model is; cuda: one GPU (default: cpu)")
    add(
        "--ctas",
        type=at_least(1),
        metavar="N",
        help=f"cuda: thread blocks that play the link (default: {DEFAULT_CTAS})",
    )


def _bench(args: argparse.Namespace) -> int:
    from fxshard.tools.launch.torchrun import PeerError, Peers, joined

    launch = launched()
    if launch is None:
        return _run(args, Peers())
    with joined(launch, args.timeout) as peers:
        try:
            return _run(args, peers)
        except PeerError:
            raise
        except FxshardError as error:  # all processes have one; the first to end takes the others along
            if peers.rank == 0:
                sys.stderr.write(f"fxshard: {error}\n")
            peers.gather(None)
            return EXIT_ERROR


def _run(args: argparse.Namespace, peers: Peers) -> int:
    from fxshard.tools.bench.run import run_bench
    from fxshard.tools.bench.show import BenchConsole

    terminal = peers.require(functools.partial(open_console, quiet=peers.rank != 0))
    peers.require(functools.partial(_require_files, args, peers))
    config = _config(args, peers)
    try:
        with BenchConsole(terminal, config) as show:
            report = run_bench(config, show, peers)
    except ConfigError:  # nothing has started, so there are no logs to keep
        _remove_temporary(args, config, peers)
        raise
    if peers.rank == 0:
        _tell(args, config, report, terminal)
    peers.gather(None)  # a process that ends before rank 0 has told everything, and not well, would take it along
    if not any(result.error for result in report.systems):
        _remove_temporary(args, config, peers)
    return EXIT_PROBLEM if report.problems() else 0


def _require_files(args: argparse.Namespace, peers: Peers) -> None:
    from fxshard.tools.bench.plot import require_plot

    if peers.rank != 0:
        return
    for path in (args.json, args.plot):
        if path is not None:
            in_folder(path)
    if args.plot is not None:
        require_plot(args.plot)


def _tell(args: argparse.Namespace, config: BenchConfig, report: Report, terminal: Console) -> None:
    from fxshard.tools.bench.plot import save_plot
    from fxshard.tools.bench.show import show_report

    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    show_report(terminal, report, config)
    if args.plot is not None:
        save_plot(report, config, args.plot)


def _remove_temporary(args: argparse.Namespace, config: BenchConfig, peers: Peers) -> None:
    if args.out is None and (peers.launched is None or peers.launched.local_rank == 0):
        shutil.rmtree(config.out, ignore_errors=peers.launched is not None)  # machines may share the folder


def _config(args: argparse.Namespace, peers: Peers) -> BenchConfig:
    auto = "nccl" if device_for("auto") == "cuda" else "gloo"
    group = peers.gather(args.group or auto)[0]  # machines may differ
    ranks = peers.require(functools.partial(_num_ranks, args, group, peers.launched))
    entries = peers.require(lambda: parse_entries([text for text in args.systems.split(",") if text], args.options))
    size = args.world_size or 8
    shape = size if isinstance(size, tuple) else (1, size)
    return BenchConfig(
        target=args.target,
        entries=entries,
        out=_output_folder(args.out, peers),
        group=group,
        ranks=ranks,
        world_size=math.prod(shape) if group == "emulated" else ranks,
        replicas=shape[0],
        tensor_parallel=args.tensor_parallel or 1,
        gigabytes_per_s=args.gigabytes_per_s or math.inf,
        latency_us=args.latency_us or 0.0,
        between_gigabytes_per_s=args.between_gigabytes_per_s or args.gigabytes_per_s or math.inf,
        between_latency_us=args.between_latency_us or args.latency_us or 0.0,
        link_device=args.device or "cpu",
        ctas=args.ctas or DEFAULT_CTAS,
        machines=len(set(peers.gather(socket.gethostname()))),
        dtype=args.dtype,
        microbatches=args.microbatches,
        rounds=args.rounds,
        warm=args.warm,
        processes=args.processes,
        num_threads=int(os.environ.get("OMP_NUM_THREADS", "1")),
        stall_s=args.timeout,
    )


def _output_folder(wanted: Path | None, peers: Peers) -> Path:
    """The folder, of the same name everywhere: machines may share it or not."""
    if wanted is None:
        wanted = peers.gather(output_folder(None, "bench") if peers.rank == 0 else Path())[0]
    return peers.require(functools.partial(output_folder, wanted, "bench"))


def _num_ranks(args: argparse.Namespace, group: str, launch: LauncherEnvironment | None) -> int:
    """How many ranks train together, or a ConfigError if flags do not fit or there are too few GPUs."""
    _check_link(args, group)
    if launch is not None and args.ranks is not None:
        raise ConfigError(
            f"--ranks is the number of processes that fxshard bench starts, and the launcher has started "
            f"{launch.world_size} already. Leave out --ranks, and give torchrun --nproc-per-node, or run it by itself."
        )
    if group == "emulated":
        if args.ranks is not None:
            raise ConfigError("--group emulated is one process; say with --world-size how many ranks are on the link.")
        if launch is not None and launch.world_size > 1:
            raise ConfigError("--group emulated is one process; run it without torchrun.")
        return 1
    if group == "nccl" and device_for("auto") != "cuda":
        raise ConfigError("--group nccl needs a GPU that torch can use, and found none; use --group gloo.")
    if launch is None:
        return num_ranks(args.ranks, "cuda" if group == "nccl" else "cpu", instead="--group gloo")
    if group == "nccl":
        _require_gpu(launch)
    return launch.world_size


def _check_link(args: argparse.Namespace, group: str) -> None:
    between = ("between_gigabytes_per_s", "between_latency_us")
    names = ("world_size", "tensor_parallel", "gigabytes_per_s", "latency_us", *between, "device", "ctas")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given and group != "emulated":
        raise ConfigError(f"{', '.join(given)} needs --group emulated, and the group is {group}.")
    if not isinstance(args.world_size, tuple) and any(getattr(args, name) is not None for name in between):
        raise ConfigError("--between-... needs several machines: --world-size MACHINESxRANKS, such as 2x4.")
    size = args.world_size or 8
    if (math.prod(size) if isinstance(size, tuple) else size) % (args.tensor_parallel or 1):
        raise ConfigError(f"--tensor-parallel {args.tensor_parallel} does not divide the ranks of --world-size.")
    if args.device == "cuda":
        device_for("cuda")
    elif args.ctas is not None:
        raise ConfigError("--ctas needs --device cuda: on the CPU no kernel plays the link.")


def _require_gpu(launch: LauncherEnvironment) -> None:
    import torch

    num_gpus = torch.cuda.device_count()
    if launch.local_rank >= num_gpus:
        raise ConfigError(
            f"LOCAL_RANK is {launch.local_rank}, and there are {num_gpus} GPUs on {socket.gethostname()}: NCCL needs "
            "one per process. Start no more (torchrun --nproc-per-node), or use --group gloo."
        )
