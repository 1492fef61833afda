"""The `fxshard plan` command."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fxshard.tools.cli_common import at_least, in_folder, mesh_size
from fxshard.tools.launch.console import open_console, print_line

PLAN_TEXT = """\
Simulate training steps at any number of ranks on this machine, without GPUs and without memory for the weights: step
time, tokens/s, the share of the data sheet's FLOP/s (MFU), exposed communication and peak memory. Example:
  fxshard plan llama3-8b --world-size 8,64,512 --hardware h100-sxm --batch 1,2 --checkpointing selective"""


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of `fxshard plan`."""
    parser = commands.add_parser(
        "plan",
        help="simulate training at many ranks: step time, memory, exposed communication",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=PLAN_TEXT,
    )
    parser.set_defaults(command=_plan)

    def add(flag: str, text: str, **kwargs: Any) -> None:
        parser.add_argument(flag, help=text, **kwargs)

    add(
        "model",
        "MODULE:FUNCTION that returns (model, args) or (model, args, kwargs), called with batch=N if it takes that; a "
        "config.json of Hugging Face; or a built-in shape: llama3-8b, llama3-70b, llama3-405b, gpt-7b, moe-8x7b",
        metavar="MODEL",
    )
    ranks, counts, default = _list(mesh_size), _list(at_least(1)), "(default: %(default)s)"
    add("--world-size", "ranks, or replicas x shards (4x8)", metavar="N,...", type=ranks, required=True)
    add("--batch", "sequences of a rank in a microbatch (default: 1)", metavar="N,...", type=counts, default=[1])
    devices = f"a device of fxshard/devices, or a JSON file {default}"
    add("--hardware", devices, metavar="NAME", default="h100-sxm")
    add("--sequence", f"tokens of a sequence, 2 or more {default}", metavar="N", type=at_least(2), default=4096)
    again = f"what a built-in shape computes again {default}"
    add("--checkpointing", again, choices=("none", "selective", "full"), default="none")
    add("--accumulation", f"microbatches of a step {default}", metavar="N", type=at_least(1), default=1)
    add("--reduce-last", "reduce gradients in the last microbatch alone", action="store_true")
    schedules = f"of fxshard, FSDP2 and FSDP2 compiled {default}"
    add("--schedule", schedules, metavar="NAME,...", default="fxshard,FSDP2")
    add("--html", "write a page: what each stream does when, memory over time", metavar="FILE", type=Path)
    add("--trace", "write a trace for https://ui.perfetto.dev; FILE may end in .gz", metavar="FILE", type=Path)


def _list(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """What argparse turns values with commas between them into."""
    return lambda text: [item(part) for part in text.split(",")]


def _plan(args: argparse.Namespace) -> int:
    from fxshard.plan.plan import PlanSettings, plan
    from fxshard.tools.plan import page, trace
    from fxshard.tools.plan.targets import builder

    written = {save: in_folder(getattr(args, save)) for save in ("html", "trace") if getattr(args, save) is not None}
    console, errors = open_console(), open_console(stderr=True)
    found = plan(
        builder(args.model, sequence=args.sequence, checkpointing=args.checkpointing),
        world_sizes=args.world_size,
        batches=args.batch,
        hardware=args.hardware,
        settings=PlanSettings(
            accumulation=args.accumulation,
            reduces_each=not args.reduce_last,
            schedules=tuple(args.schedule.split(",")),
        ),
        name=args.model,
        progress=lambda line: print_line(errors, line, style="dim"),
    )
    if not console.is_terminal:
        console.width = 140
    console.print(found)
    for what, path in written.items():
        (page.save if what == "html" else trace.save)(found, path)
        print_line(errors, f"wrote {path}", style="dim")
    return 0 if any(run.cost.fits for run in found.runs) else 1
