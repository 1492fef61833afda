"""Sharded training on one GPU over an emulated link: `PYTHONPATH=. python -m benchmarks.gpu_bench --out DIR`.

Writes DIR/gpu.json and DIR/gpu.md, anew after every setting, so that what was measured is there whatever happens.
Torch, triton, numpy and sympy are enough. How it measures: [Note: turns on one GPU] in benchmarks/gpu/turns.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.gpu import page, settings, stages
from benchmarks.gpu.result import GpuReport
from benchmarks.gpu.turns import Budget
from fxshard.tools.bench import machine
from fxshard.tools.bench.comparison import options_in_json

_CHECKPOINTING: Final = {"both": (False, True), "off": (False,), "on": (True,)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 if every system ran everywhere, 1 if something failed, 2 if nothing was measured."""
    start = time.time()
    args = _arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    plan = _plan(args)
    report = GpuReport(machine=_machine(args), options=_options(args, plan, argv), tokens=plan.model.tokens)
    budget = Budget(start=start, seconds=60 * args.minutes)

    def save() -> None:
        report.seconds = budget.spent()
        _write(args.out / "gpu.json", json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")
        _write(args.out / "gpu.md", page.page(report))

    save()
    stages.run(plan, report, budget, save)
    for problem in report.problems():
        print(f"PROBLEM: {problem}")
    for line in report.left_out:
        print(f"left out: {line}")
    return 2 if not report.steps else int(bool(report.problems()))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results, logs and compiled code")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which it ends")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=tuple(settings.MODELS), default="1b")
    parser.add_argument("--systems", default="", metavar="A,B,...", help="all if not given")
    parser.add_argument("--world-size", type=int, default=8, help="ranks that there seem to be")
    parser.add_argument(
        "--checkpointing",
        choices=tuple(_CHECKPOINTING),
        default="both",
        help="of activations; by default without, then with",
    )
    parser.add_argument("--microbatches", type=int, default=8, help="of the steps that accumulate; 1 for none")
    parser.add_argument("--commit", help="of the sources, where they are no checkout")
    args = parser.parse_args(argv)
    if args.device == "cuda":  # before the first call to CUDA; children inherit it
        os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; --device cpu --model tiny tries everything but the GPU")
    return args


def _plan(args: argparse.Namespace) -> stages.Plan:
    cores = len(os.sched_getaffinity(0))
    if args.device == "cuda":
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, min(4, cores // 5))))
    try:
        cases = settings.chosen(settings.all_cases(args.out, _device_name(args.device), args.world_size), args.systems)
    except ValueError as error:
        sys.exit(f"--systems: {error}")
    checkpointing = _CHECKPOINTING[args.checkpointing]
    if True in checkpointing and False not in checkpointing and not any(case.checkpointing for case in cases):
        sys.exit(f"--checkpointing on: {args.systems} run without activation checkpointing only")
    return stages.Plan(
        model=settings.MODELS[args.model],
        device=args.device,
        cases=cases,
        world_size=args.world_size,
        microbatches=args.microbatches,
        folder=args.out.resolve(),
        num_threads=2 if args.device == "cuda" else 1,
        checkpointing=checkpointing,
    )


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else ""


def _machine(args: argparse.Namespace) -> dict[str, Any]:
    facts = machine.facts()
    facts["fxshard_commit"] = args.commit or facts["fxshard_commit"]
    facts["gpus"] = facts["gpus"] if args.device == "cuda" else []
    return {**facts, "cuda": torch.version.cuda}


def _options(args: argparse.Namespace, plan: stages.Plan, argv: Sequence[str] | None) -> dict[str, Any]:
    given = shlex.join(sys.argv[1:] if argv is None else argv)
    return {
        "command": f"PYTHONPATH=. python -m benchmarks.gpu_bench {given}",
        "model": args.model,
        "batch": [plan.model.batch_size, plan.model.seq_len],
        "world_size": args.world_size,
        "microbatches": args.microbatches,
        "minutes": args.minutes,
        "checkpointing": args.checkpointing,
        "CUDA_SCALE_LAUNCH_QUEUES": os.environ.get("CUDA_SCALE_LAUNCH_QUEUES"),
        "systems": {
            case.name: {"system": case.entry.system, "options": options_in_json(case.entry.options)}
            for case in plan.cases
        },
    }


def _write(path: Path, text: str) -> None:
    """Replace a file at once: whoever reads it finds the old or the new one."""
    new = path.with_suffix(path.suffix + ".new")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
