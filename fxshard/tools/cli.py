"""The `fxshard` command."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxshard.errors import ConfigError, FxshardError
from fxshard.options import launched
from fxshard.tools.cli_bench import BENCH_TEXT, add_bench
from fxshard.tools.cli_calibrate import add_calibrate
from fxshard.tools.cli_common import EXIT_ERROR, at_least, device_for, mesh_size, num_ranks, output_folder
from fxshard.tools.cli_plan import add_plan
from fxshard.tools.cli_state import add_state
from fxshard.tools.demo.config import LOWERINGS, MAX_DIFFERENCE, MODELS, DemoConfig
from fxshard.tools.launch.console import open_console, print_line

if TYPE_CHECKING:
    from rich.console import Console

    from fxshard.inspect.explanation import Explanation

_EXIT_INTERRUPTED = 130  # as a shell, for SIGINT
_TABLE_WIDTH = 140  # characters that the table of a training step takes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own) and return its exit status."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except FxshardError as error:
        sys.stderr.write(f"fxshard: {error}\n")
        return EXIT_ERROR
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
                f"with {EXIT_ERROR} on an error."
            ),
        )
    )
    _add_explain(
        commands.add_parser(
            "explain",
            help="show what every pass does to the graphs of a model, without a cluster",
            description=_EXPLAIN_TEXT,
        )
    )
    add_bench(
        commands.add_parser(
            "bench",
            help="compare the step times of your model under fxshard, FSDP2, DDP and others",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            description=BENCH_TEXT,
        )
    )
    add_calibrate(commands)
    add_plan(commands)
    add_state(commands.add_parser("state", help="work on checkpoints, without ranks", description=_STATE_TEXT))
    return parser


_EXPLAIN_TEXT = (
    "Shard and compile a model on tensors without data, for any number of ranks, and print a table of all graphs, or "
    "the graphs after one pass. Needs no GPU, no process group and no memory for the weights."
)
_STATE_TEXT = "Work on checkpoints in files. Needs no GPU, no process group and no memory for more than two tensors."


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
    add(
        "--world-size",
        type=mesh_size,
        metavar="N",
        help="ranks, or replicas x shards (4x8); not needed for a model that is sharded already",
    )
    add("--pass", dest="pass_name", metavar="NAME", help='print the graphs after this pass; "captured" is before any')
    add("--stage", metavar="NAME", help="with --pass: only this stage (joint, forward, backward, inference, ...)")
    add("--frame", type=at_least(0), metavar="N", help="with --pass: only this captured graph, counted from 0")
    add("--html", type=Path, metavar="FILE", help="write a page with all graphs, their differences and collectives")
    add("--lower", choices=LOWERINGS, default="inductor", help="what would run the graphs (default: %(default)s)")
    add(
        "--hardware",
        metavar="NAME",
        help="what to estimate for: h100, h200, cpu, another of fxshard/devices or a JSON file (default: h100)",
    )


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_demo)
    default = "(default: %(default)s)"

    def add(flag: str, text: str, **kwargs: Any) -> None:
        parser.add_argument(flag, help=text, **kwargs)

    def number(flag: str, least: int, start: int | None, text: str) -> None:
        add(flag, text, type=at_least(least), default=start, metavar="N")

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
        _print_tables(explanation, open_console())
    if args.html is not None:
        explanation.save_html(args.html)
        sys.stderr.write(f"wrote {args.html}\n")
    return 0


def _print_tables(explanation: Explanation, console: Console) -> None:
    from fxshard.inspect import tables

    if not console.is_terminal:
        console.width = _TABLE_WIDTH
    if console.width >= _TABLE_WIDTH:
        console.print(explanation, highlight=False, soft_wrap=True)
        return
    print_line(console, repr(explanation))
    if (schedules := tables.table_of_schedules(explanation)) is not None:
        console.print("", schedules, sep="\n", soft_wrap=True)


def _demo(args: argparse.Namespace) -> int:
    if (launch := launched()) is not None and launch.world_size > 1:
        raise ConfigError("fxshard demo starts its ranks itself; run it without torchrun.")
    device = device_for(args.device)
    config = DemoConfig(
        steps=args.steps,
        ranks=num_ranks(args.ranks, device),
        device=device,
        model=args.model,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        lower=args.lower,
        out=output_folder(args.out, "demo"),
        seed=args.seed,
        compare=not args.no_compare,
    )
    from fxshard.tools.demo.run import run_demo

    return run_demo(config, open_console())


def _version() -> str:
    try:
        return importlib.metadata.version("fxshard")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: running from the source tree)"


if __name__ == "__main__":
    sys.exit(main())
