"""The `fxshard plan` command."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxshard.errors import ConfigError
from fxshard.tools.cli_common import at_least, in_folder, mesh_size, positive
from fxshard.tools.launch.console import open_console, print_line

if TYPE_CHECKING:
    from rich.console import Console

    from fxshard.plan.plan import Plan, PlanSettings
    from fxshard.plan.recommend import Recommendation

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
    add("--hardware", f"a device of fxshard/devices, or a JSON file {default}", metavar="NAME", default="h100-sxm")
    add("--sequence", f"tokens of a sequence, 2 or more {default}", metavar="N", type=at_least(2), default=4096)
    again = f"what a built-in shape computes again {default}"
    add("--checkpointing", again, choices=("none", "selective", "full"), default="none")
    add("--accumulation", f"microbatches of a step {default}", metavar="N", type=at_least(1), default=1)
    add("--reduce-last", "reduce gradients in the last microbatch alone", action="store_true")
    schedules = f"of fxshard, FSDP2 and FSDP2 compiled {default}"
    add("--schedule", schedules, metavar="NAME,...", default="fxshard,FSDP2")
    steps = f"AdamW for all, Muon for matrices of blocks, or MODULE:FUNCTION of yours {default}"
    add("--optimizer", steps, metavar="NAME,...", default="AdamW")
    budget = "also recommend what each block does within so much memory of a rank, on the first schedule; needs scipy"
    add("--memory-budget-gib", budget, metavar="X", type=positive)
    answers = "also say from which batch, sequence and world size on things change; simulates five runs more for each"
    add("--answers", answers, action="store_true")
    kinds = "of reshard, keep, subgroup, resident, offload and checkpoint: what may be recommended (default: all)"
    add("--policies", kinds, metavar="NAME,...")
    add("--write", "write what is recommended first, for fxshard.apply_policies", metavar="FILE", type=Path)
    add("--html", "write a page: what each stream does when, memory over time", metavar="FILE", type=Path)
    add("--trace", "write a trace for https://ui.perfetto.dev; FILE may end in .gz", metavar="FILE", type=Path)


def _list(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [item(part) for part in text.split(",")]


def _kinds(args: argparse.Namespace) -> list[str]:
    """What may be recommended: all, but for what a built-in shape computes again by itself; wrong ones are refused."""
    from fxshard.plan.policies import KINDS, policies_of

    if args.policies and not (args.memory_budget_gib or args.write):
        raise ConfigError("--policies says what may be recommended, and needs --memory-budget-gib or --write.")
    some = [kind for kind in KINDS if kind != "checkpoint" or args.checkpointing == "none"]
    given: list[str] = args.policies.split(",") if args.policies else some
    policies_of(given, shards=1, ranks_per_node=0, accumulation=1)
    return given


def _plan(args: argparse.Namespace) -> int:
    from fxshard.inspect.target import Target, checked
    from fxshard.plan.plan import PlanSettings, plan
    from fxshard.tools.plan.targets import builder, optimizers_of

    written = {
        save: in_folder(getattr(args, save)) for save in ("html", "trace", "write") if getattr(args, save) is not None
    }
    console, errors = open_console(), open_console(stderr=True)
    args.policies = _kinds(args)

    def build_at(batch: int, sequence: int) -> Target:
        return checked(builder(args.model, sequence=sequence, checkpointing=args.checkpointing)(batch), "the builder")

    settings = PlanSettings(
        accumulation=args.accumulation,
        reduces_each=not args.reduce_last,
        schedules=tuple(args.schedule.split(",")),
        optimizers={name: optimizers_of(name) for name in args.optimizer.split(",")},
    )
    found = plan(
        lambda batch: build_at(batch, args.sequence),
        world_sizes=args.world_size,
        batches=args.batch,
        hardware=args.hardware,
        settings=settings,
        name=args.model,
        progress=lambda line: print_line(errors, line, style="dim"),
    )
    _print_runs(found, console, with_steps=args.optimizer != "AdamW")
    advised: list[Recommendation] = []
    for world_size, batch in itertools.product(args.world_size, args.batch):
        if args.memory_budget_gib or args.write:
            advised.append(_recommend(args, build_at, world_size, batch, settings, console))
        if args.answers:
            _answer(args, build_at, world_size, batch, settings, console)
    for what, path in written.items():
        _save(what, path, found, advised)
        print_line(errors, f"wrote {path}", style="dim")
    return 0 if any(run.cost.fits for run in found.runs) else 1


def _print_runs(found: Plan, console: Console, *, with_steps: bool) -> None:
    from fxshard.inspect.tables import step_text

    if not console.is_terminal:
        console.width = 140
    console.print(found)
    for run in found.runs if with_steps else ():
        for step in run.cost.steps:
            print_line(console, f"{run.name}: {step_text(step)}")


def _save(what: str, path: Path, found: Plan, advised: Sequence[Recommendation]) -> None:
    from fxshard.tools.plan import page, trace

    if what == "html":
        page.save(
            found, path, [(mix.cost.peak_bytes, mix.cost.seconds) for mix in advised[0].pareto] if advised else ()
        )
    elif what == "trace":
        trace.save(found, path)
    else:
        policies = {name: policy.fields for name, policy in advised[0].policies.items()}
        path.write_text(json.dumps(policies, indent=2) + "\n")


def _recommend(
    args: argparse.Namespace, build_at: Any, world_size: Any, batch: int, settings: PlanSettings, console: Console
) -> Recommendation:
    from fxshard.plan.recommend import recommend
    from fxshard.tools.plan.recommendation import advice, table_of

    advised = recommend(
        lambda batch: build_at(batch, args.sequence),
        world_size=world_size,
        batch=batch,
        budget_gib=args.memory_budget_gib,
        hardware=args.hardware,
        settings=settings,
        kinds=args.policies,
        name=args.model,
    )
    console.print(table_of(advised))
    for line in advice(advised):
        print_line(console, line)
    return advised


def _answer(
    args: argparse.Namespace, build_at: Any, world_size: Any, batch: int, settings: PlanSettings, console: Console
) -> None:
    from fxshard.hardware import load
    from fxshard.plan.plan import ranks_text
    from fxshard.tools.plan.answers import answers

    print_line(console, f"{ranks_text(world_size)} ranks, batch {batch}, {settings.schedules[0]}:")
    if not isinstance(world_size, int):
        print_line(console, "  answers are of runs without replicas")
        return
    for line in answers(build_at, world_size, batch, args.sequence, load(args.hardware), settings):
        print_line(console, f"  {line}")
