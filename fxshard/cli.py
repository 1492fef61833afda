"""The `fxshard` command."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxshard.bench.config import DEFAULT_SYSTEMS, GROUPS, SYSTEMS, BenchConfig, parse_entries
from fxshard.cli_state import add_state
from fxshard.demo.config import LOWERINGS, MAX_DIFFERENCE, MODELS, DemoConfig
from fxshard.errors import ConfigError, FxshardError, MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console

    from fxshard.inspect.explanation import Explanation

_EXIT_ERROR = 2  # as argparse
_EXIT_INTERRUPTED = 130  # as a shell, for SIGINT
_EXIT_PROBLEM = 1  # it ran to the end, but not well
_TABLE_WIDTH = 140  # characters that the table of a training step takes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own) and return its exit status."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except FxshardError as error:
        sys.stderr.write(f"fxshard: {error}\n")
        return _EXIT_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("fxshard: interrupted\n")
        return _EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxshard", description="Fully sharded data parallelism (FSDP, ZeRO-3) as a compiler backend for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"fxshard {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    _add_demo(
        commands.add_parser(
            "demo",
            help="train a small model sharded, on ranks started here, and compare it with unsharded training",
            description=(
                "Start a few ranks on this machine and train a byte-level language model of about 5M parameters on the "
                "Python sources of the standard library, with parameters, gradients and AdamW state sharded over the "
                "ranks. Then train the same model unsharded on the same batches and compare. Exits with 0 if the loss "
                f"fell and no step's losses differ by more than {MAX_DIFFERENCE:g}, with 1 if not, "
                f"with {_EXIT_ERROR} on an error."
            ),
        )
    )
    _add_explain(
        commands.add_parser(
            "explain",
            help="show what every pass does to the graphs of a model, without a cluster",
            description=(
                "Shard and compile a model on tensors without data, for any number of ranks, and print a table of all "
                "graphs, or the graphs after one pass. Needs no GPU, no process group and no memory for the weights."
            ),
        )
    )
    _add_bench(
        commands.add_parser(
            "bench",
            help="compare the step times of your model under fxshard, FSDP2, DDP and others",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            description=_BENCH_TEXT,
        )
    )
    add_state(commands.add_parser("state", help="work on checkpoints, without ranks", description=_STATE_TEXT))
    return parser


_STATE_TEXT = "Work on checkpoints in files. Needs no GPU, no process group and no memory for more than two tensors."

_BENCH_TEXT = f"""\
Train a model under several systems, step by step in turn, and print a table of step times, collectives and losses.

systems:
{chr(10).join(f"  {name:<20} {text}" for name, text in SYSTEMS.items())}

Every system shards what stands in ModuleLists and Sequentials as one unit each, and the rest as another, and uses
AdamW(fused=True). Exits with 0 if all systems ran and their losses agree, with 1 if not, with {_EXIT_ERROR} on an
error.
docs/benchmarks/README.md says what is measured, and how."""


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_bench)
    add = parser.add_argument
    add(
        "target",
        metavar="MODULE:FUNCTION",
        help=(
            "a function without parameters that returns (model, batch) or (model, batch, loss_fn). The model is called "
            "as model(*batch), model(**batch) or model(batch), for a tuple, a dict and anything else; the loss is "
            "loss_fn(output, batch), or without it the output or its attribute loss. The function is called twice on "
            "every rank: with one seed for the weights of all ranks, then with the rank's own seed for its batch"
        ),
    )
    add("--systems", default=",".join(DEFAULT_SYSTEMS), metavar="A,B,...", help=_SYSTEMS_HELP)
    add("--options", nargs="+", default=[], metavar="NAME=VALUE", help="options for every fxshard in --systems")
    add("--group", choices=GROUPS, help="what connects the ranks (default: nccl if there is a GPU, else gloo)")
    add("--ranks", type=_at_least(1), metavar="N", help="processes; gloo: 2 by default; nccl: one per GPU")
    add("--world-size", type=_at_least(1), metavar="N", help="--group emulated: ranks on the link (default: 8)")
    add("--gigabytes-per-s", type=_positive, metavar="X", help="--group emulated: bandwidth (default: unlimited)")
    add("--latency-us", type=_positive, metavar="X", help="--group emulated: latency per transfer (default: none)")
    add("--microbatches", type=_at_least(1), default=1, metavar="K", help="per step; the last one reduces (default: 1)")
    add("--rounds", type=_at_least(1), default=10, metavar="N", help="timed steps per system (default: %(default)s)")
    add("--processes", type=_at_least(1), default=1, metavar="N", help="start everything anew N times (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write all measurements")
    add("--plot", type=Path, metavar="FILE", help="draw the medians into an .svg or .png; needs matplotlib")
    add("--timeout", type=_positive, default=900.0, metavar="S", help="a silent system fails after S seconds (900)")
    add("--out", type=Path, metavar="DIR", help="keep logs and compiled code here (default: a temporary folder)")


_SYSTEMS_HELP = (
    "what to compare (default: all). Options of fxshard stand behind colons, and it may stand there several times: "
    "fsdp2,fxshard,fxshard:bucket=auto"
)


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_explain)
    add = parser.add_argument
    add(
        "target",
        metavar="MODULE:FUNCTION",
        help=(
            "a function without parameters that returns the model with its inputs: (model, args) or "
            "(model, args, kwargs), or the model alone if its forward needs none. Build it under "
            "torch.device('meta') if it is large. The current directory is importable"
        ),
    )
    add("--world-size", type=_at_least(1), metavar="N", help="ranks; not needed for a model that is sharded already")
    add("--pass", dest="pass_name", metavar="NAME", help='print the graphs after this pass; "captured" is before any')
    add("--stage", metavar="NAME", help="with --pass: only this stage (joint, forward, backward, inference, ...)")
    add("--frame", type=_at_least(0), metavar="N", help="with --pass: only this captured graph, counted from 0")
    add("--html", type=Path, metavar="FILE", help="write a page with all graphs, their differences and collectives")
    add("--lower", choices=LOWERINGS, default="inductor", help="what would run the graphs (default: %(default)s)")
    add("--hardware", metavar="NAME", help="what to estimate for: h100, h200, cpu or a JSON file (default: h100)")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_demo)
    default = "(default: %(default)s)"

    def add(flag: str, text: str, **kwargs: Any) -> None:
        parser.add_argument(flag, help=text, **kwargs)

    def number(flag: str, least: int, start: int | None, text: str) -> None:
        add(flag, text, type=_at_least(least), default=start, metavar="N")

    number("--steps", 2, DemoConfig.steps, f"optimizer steps, 2 or more {default}")
    number("--ranks", 1, None, "processes that share the model (default: one per GPU, or 2 on CPU)")
    add(
        "--device",
        f"cpu: gloo ranks on this machine's cores; cuda: one NCCL rank per GPU; auto: cuda if there is a GPU {default}",
        choices=("auto", "cpu", "cuda"),
        default="auto",
    )
    add(
        "--model",
        "gpt: a GPT written for the demo; hf:llama: a Llama with random weights from transformers, if that is "
        f"installed {default}",
        choices=MODELS,
        default=DemoConfig.model,
    )
    number("--batch-size", 1, DemoConfig.batch_size, f"sequences per rank and step {default}")
    number("--seq-len", 2, DemoConfig.seq_len, f"bytes per sequence; a byte is a token {default}")
    add(
        "--lower",
        "what runs the transformed graphs. inductor: generated code, needs a C++ compiler; eager: node by node, "
        f"starts faster and runs slower {default}",
        choices=LOWERINGS,
        default=DemoConfig.lower,
    )
    add("--out", "folder for the graphs and the ranks' logs (default: a new temporary one)", type=Path, metavar="DIR")
    number("--seed", 0, DemoConfig.seed, f"seed of the initial weights and of the batches {default}")
    add("--no-compare", "leave out the unsharded training", action="store_true")


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, got {text!r}")
        return int(text)

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _explain(args: argparse.Namespace) -> int:
    if args.pass_name is None and (args.stage is not None or args.frame is not None):
        raise ConfigError("--stage and --frame choose among the graphs that --pass NAME prints; add it.")
    from fxshard.inspect.explain import explain
    from fxshard.inspect.target import build

    model, inputs, named_inputs = build(args.target)
    options = {"lower": args.lower} | ({"hardware": args.hardware} if args.hardware is not None else {})
    explanation = explain(model, *inputs, world_size=args.world_size, options=options, **named_inputs)
    if args.pass_name is not None:
        explanation.print(args.pass_name, stage=args.stage, frame=args.frame)
    else:
        _print_tables(explanation, _console())
    if args.html is not None:
        explanation.save_html(args.html)
        sys.stderr.write(f"wrote {args.html}\n")
    return 0


def _print_tables(explanation: Explanation, console: Console) -> None:
    from fxshard.inspect import summary

    if not console.is_terminal:
        console.width = _TABLE_WIDTH
    if console.width >= _TABLE_WIDTH:
        console.print(explanation, highlight=False, soft_wrap=True)
        return
    console.print(repr(explanation), highlight=False, markup=False, soft_wrap=True)
    if (schedules := summary.table_of_schedules(explanation)) is not None:
        console.print("", schedules, sep="\n", soft_wrap=True)


def _demo(args: argparse.Namespace) -> int:
    device = _device(args.device)
    config = DemoConfig(
        steps=args.steps,
        ranks=_num_ranks(args.ranks, device),
        device=device,
        model=args.model,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        lower=args.lower,
        out=_output_folder(args.out, "demo"),
        seed=args.seed,
        compare=not args.no_compare,
    )
    from fxshard.demo.run import run_demo

    return run_demo(config, _console())


def _bench(args: argparse.Namespace) -> int:
    from fxshard.bench.plot import require_plot, save_plot
    from fxshard.bench.run import run_bench
    from fxshard.bench.show import Show, show_report

    for path in (args.json, args.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent} to write {path.name} to.")
    if args.plot is not None:
        require_plot(args.plot)
    config, console = _bench_config(args), _console()
    try:
        with Show(console, config) as show:
            report = run_bench(config, show)
    except ConfigError:  # nothing has started, so there are no logs to keep
        if args.out is None:
            shutil.rmtree(config.out)
        raise
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    show_report(console, report, config)
    if args.plot is not None:
        save_plot(report, config, args.plot)
    if args.out is None and not any(result.error for result in report.systems):
        shutil.rmtree(config.out)
    return _EXIT_PROBLEM if report.problems() else 0


def _bench_config(args: argparse.Namespace) -> BenchConfig:
    group = args.group or ("nccl" if _device("auto") == "cuda" else "gloo")
    link = {"--world-size": args.world_size, "--gigabytes-per-s": args.gigabytes_per_s, "--latency-us": args.latency_us}
    if group != "emulated" and (given := [flag for flag, value in link.items() if value is not None]):
        raise ConfigError(f"{', '.join(given)} needs --group emulated, and the group is {group}.")
    if group == "emulated" and args.ranks is not None:
        raise ConfigError("--group emulated is one process; say with --world-size how many ranks are on the link.")
    ranks = 1 if group == "emulated" else _num_ranks(args.ranks, _device("cuda" if group == "nccl" else "cpu"))
    return BenchConfig(
        target=args.target,
        entries=parse_entries([text for text in args.systems.split(",") if text], args.options),
        out=_output_folder(args.out, "bench"),
        group=group,
        ranks=ranks,
        world_size=args.world_size or 8 if group == "emulated" else ranks,
        gigabytes_per_s=args.gigabytes_per_s or math.inf,
        latency_us=args.latency_us or 0.0,
        microbatches=args.microbatches,
        rounds=args.rounds,
        processes=args.processes,
        num_threads=int(os.environ.get("OMP_NUM_THREADS", "1")),
        stall_s=args.timeout,
    )


def _device(wanted: str) -> str:
    import torch

    num_gpus = torch.cuda.device_count()
    if wanted == "cuda" and not num_gpus:
        raise ConfigError("--device cuda needs a GPU that torch can use, and found none; use --device cpu.")
    return "cuda" if num_gpus and wanted != "cpu" else "cpu"


def _num_ranks(wanted: int | None, device: str) -> int:
    import torch

    num_gpus = torch.cuda.device_count()
    if device == "cpu":
        return 2 if wanted is None else wanted
    if wanted is not None and wanted > num_gpus:
        raise ConfigError(f"--ranks {wanted} needs {wanted} GPUs, and there are {num_gpus}; use --device cpu.")
    return num_gpus if wanted is None else wanted


def _output_folder(wanted: Path | None, command: str) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix=f"fxshard-{command}-"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {wanted} cannot be used as a folder: {error.strerror}.") from error
    return wanted.resolve()


def _console() -> Console:
    try:
        from rich.console import Console
    except ImportError as error:
        raise MissingExtraError("rich", "dev") from error
    return Console()


def _version() -> str:
    try:
        return importlib.metadata.version("fxshard")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: running from the source tree)"


if __name__ == "__main__":
    sys.exit(main())
