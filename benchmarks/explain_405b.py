"""What it costs to explain Llama 3 405B at 512 ranks: `taskset -c 0 python -m benchmarks.explain_405b`.

The process does nothing else, so that its peak memory is that of `explain`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fxshard
from benchmarks.clock import clocked, table
from benchmarks.llama import Llama, Shape

WORLD_SIZE, SEQ_LEN, BATCH = 512, 8192, 1
MAX_SECONDS, MAX_GIB = 300, 8


def peak_gib() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux


def measure(num_layers: int, lowering: str) -> dict[str, Any]:
    """Explain the model and write the page; seconds, peaks and counts."""
    with torch.device("meta"):
        model = Llama(Shape(num_layers=num_layers)).bfloat16()
        tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
    found: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "before_gib": peak_gib()}
    with clocked() as clock:
        start = time.perf_counter()
        explanation = fxshard.explain(model, tokens, world_size=WORLD_SIZE, options={"lower": lowering})
        found |= {"explain_s": time.perf_counter() - start, "explain_gib": peak_gib()}
    found |= {"nodes": clock.num_nodes, "units": len(explanation.units), "frames": len(explanation.frames)}
    found["parts"] = table(clock, found["explain_s"])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        start = time.perf_counter()
        explanation.save_html(page)
        found |= {"html_s": time.perf_counter() - start, "html_gib": peak_gib()}
        found["html_mib"] = page.stat().st_size / 2**20
    return found


def main() -> None:
    """Print the measurement; the last line is JSON."""
    logging.getLogger("torch").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--lower", default="inductor", choices=("eager", "inductor"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args.layers, args.lower)
    print(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} core(s), lower={args.lower}")
    print(found.pop("parts"))
    print(f"explain: {found['explain_s']:.1f} s, {found['explain_gib']:.2f} GiB; target {MAX_SECONDS} s, {MAX_GIB} GiB")
    print(f"save_html: {found['html_s']:.1f} s, {found['html_gib']:.2f} GiB, {found['html_mib']:.1f} MiB of page")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
