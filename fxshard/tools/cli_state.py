"""The `fxshard state` commands."""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path

_MOST_KEYS = 20  # that a line lists one by one


def add_state(parser: argparse.ArgumentParser) -> None:
    """Add the commands to the parser of `fxshard state`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    merge = commands.add_parser(
        "merge",
        help="turn a sharded checkpoint into one safetensors file",
        description=(
            "Write the tensors of a sharded checkpoint, whole, to one safetensors file; one of them is in memory at a "
            "time. The model's stand there under the names that they have in it, so that "
            "model.load_state_dict(safetensors.torch.load_file(OUT)) takes them. docs/checkpoints.md has more."
        ),
    )
    merge.set_defaults(command=_merge)
    add = merge.add_argument
    add(
        "checkpoint",
        metavar="CKPT",
        type=Path,
        help="folder written by fxshard.save_checkpoint or torch.distributed.checkpoint.save",
    )
    add("out", metavar="OUT", type=Path, help="the file to write; a name beside it is used until it is complete")
    add(
        "--all",
        action="store_true",
        dest="everything",
        help="also write what stands beside the model, such as optim.state.<parameter>.exp_avg",
    )
    add("--overwrite", action="store_true", help="replace OUT if it exists")


def _merge(args: argparse.Namespace) -> int:
    from fxshard.state.merge import merge
    from fxshard.state.progress import bytes_bar

    with bytes_bar() as progress:
        task = progress.add_task(f"writing {args.out.name}", total=None)
        merged = merge(
            args.checkpoint,
            args.out,
            everything=args.everything,
            overwrite=args.overwrite,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    sys.stdout.write(f"wrote {args.out}: {merged.tensors} tensors, {merged.size / 2**20:.1f} MiB\n")
    for why in dict.fromkeys(merged.left_out.values()):
        keys = [key for key, each in merged.left_out.items() if each == why]
        sys.stdout.write(f"left out {_listed(keys)}: {why}\n")
    return 0


def _listed(keys: list[str]) -> str:
    if len(keys) <= _MOST_KEYS:
        return ", ".join(keys)
    entries = collections.Counter(key.partition(".")[0] for key in keys)
    return ", ".join(f"{entry} ({count} values)" for entry, count in entries.items())
