"""The `fxshard calibrate` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fxshard.errors import ConfigError
from fxshard.options import launched
from fxshard.tools.cli_common import at_least, device_for, in_folder

CALIBRATE_TEXT = """\
Measure what the ranks and the link between them can do: matrix products by size and dtype, copies, collectives. Keep
the numbers that the cost model counts on beside torch's compile cache. Training that is started in the same way finds
them there; it measures by itself where it finds none and all ranks come to the first fully_shard together. Example:
  torchrun --nproc-per-node 8 -m fxshard calibrate"""


def add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of `fxshard calibrate`."""
    parser = commands.add_parser(
        "calibrate",
        help="measure what your ranks and their link can do",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=CALIBRATE_TEXT,
    )
    parser.set_defaults(command=_calibrate)
    parser.add_argument(
        "out",
        metavar="OUT",
        type=Path,
        nargs="?",
        help='also write them to this JSON file, for options["hardware"] and fxshard plan --hardware',
    )
    parser.add_argument(
        "--replicas",
        type=at_least(1),
        default=1,
        metavar="N",
        help="of hybrid sharding: measure the link between replicas, too (default: 1)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="cuda: NCCL between GPUs; cpu: gloo between processes; auto: cuda if there is a GPU (default: auto)",
    )


def _calibrate(args: argparse.Namespace) -> int:
    launch = launched()
    if launch is None or launch.world_size < 2:
        raise ConfigError(
            "fxshard calibrate measures the link between ranks, and there is one. Start it as you start training: "
            "torchrun --nproc-per-node N -m fxshard calibrate"
        )
    if launch.world_size % args.replicas:
        raise ConfigError(f"--replicas {args.replicas} does not divide the {launch.world_size} ranks.")
    out: Path | None = args.out and in_folder(args.out)
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from fxshard.cost import measured
    from fxshard.runtime import gloo

    device = torch.device("cpu")
    if device_for(args.device) == "cuda":
        device = torch.device("cuda", launch.local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else gloo.BACKEND)
    try:
        shards = launch.world_size // args.replicas
        shape, names = ((args.replicas, shards), ("replicate", "shard")) if args.replicas > 1 else ((shards,), None)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        spec, kept = measured.measure(mesh, _say if launch.rank == 0 else lambda line: None)
    finally:
        dist.destroy_process_group()
    if launch.rank == 0:
        if out is not None:
            out.write_text(spec.to_json())
        sys.stdout.write(f"{spec.to_json()}wrote {kept}{f' and {out}' if out else ''}\n")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
