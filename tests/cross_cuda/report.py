"""`python -m tests.cross_cuda.report`: what docs/gpu.md says was measured by the lane, as rows of its tables."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable

from tests.cross_cuda import no_gpu

SIZES = (256, 1024, 2048, 4096)


def _modes() -> None:
    from tests.cross_cuda.cases import MORE, OTHER_GPUS, QUICK
    from tests.cross_cuda.training import trained

    rows = [*QUICK.items(), *MORE.items()]
    for gpu in OTHER_GPUS:
        rows += [(name, dataclasses.replace(case, gpu=gpu)) for name, case in QUICK.items()]
    for name, case in rows:
        made = trained(case)
        kernels = made.compiled.kernels
        cells = (
            *(name, case.gpu.architecture, len(kernels), sum(kernel.num_configs for kernel in kernels)),
            *(len(made.compiled.failed), len(made.run.streams.races), len(made.compiled.order.problems)),
        )
        _row(cells)


def _copies() -> None:
    from tests.cross_cuda import reading
    from tests.cross_cuda.cases import FSDP2
    from tests.cross_cuda.training import Case, trained

    for dim in SIZES:
        for name, options in (("default", ()), ("one launch per unit", (FSDP2,))):
            steps = trained(Case(dim=dim, options=options, batch=4)).run.steps
            copied, gathered = reading.copied_bytes(steps), reading.gathered_bytes(steps)
            copies_in = max(reading.copies_in(steps))
            _row((dim, name, f"{copied:,}", f"{gathered:,}", f"{copied / gathered:.2%}", copies_in))


def _kernels() -> None:
    from tests.cross_cuda import reading
    from tests.cross_cuda.cases import FSDP2
    from tests.cross_cuda.training import Case, trained

    plain = Case(policy=None)
    cases = {
        "torch alone": plain,
        "nccl": Case(options=(FSDP2,)),
        "nccl, written out": Case(options=(FSDP2, ("regions", "off"))),
        "side": Case(options=(FSDP2, ("streams", "side"))),
    }
    for name, case in cases.items():
        for dim in (256, 2048):
            few, many = (trained(dataclasses.replace(case, dim=dim, num_layers=n, batch=4)).run.steps for n in (3, 4))
            of_block = [
                count(more) - count(less)
                for count in (reading.num_kernels, reading.num_launches, reading.num_python_calls)
                for less, more in zip(reading.by_direction(few), reading.by_direction(many), strict=True)
            ]
            _row((name, dim, *of_block, reading.num_python_calls(few), reading.num_launches(few)))


def _numbers() -> None:
    from tests.cross_cuda.numeric.cases import CORE, MORE
    from tests.cross_cuda.numeric.executor import drawn, unordered
    from tests.cross_cuda.numeric.faults import judged

    for name, case in (CORE | MORE).items():
        with judged(case) as judge:
            same = sum(judge.is_same(judge.clean, drawn(seed)) for seed in range(5))
            found = judge.computed.errors(judge.clean.computed(drawn(0)))
        errors = [error for value, error in found.items() if "loss" not in value]
        worst = [f"{max(column):.1e}" for column in zip(*errors, strict=True)]
        ratio = max(error.ours / error.cpu for error in errors if error.cpu)
        items = judge.clean.items
        _row((name, case.world_size, len(items), len(unordered(items)), same, *worst, f"{ratio:.2f}"))


def _faults() -> None:
    from tests.cross_cuda.numeric.cases import CORE, GRAPHED
    from tests.cross_cuda.numeric.faults import faults_of, judged

    for name, case in (CORE | GRAPHED).items():
        with judged(case) as judge:
            table = Counter[tuple[str, str]]()
            for fault in faults_of(judge.clean):
                table[f"{fault.forgets}{', moved' * fault.moved}", judge.seeded(fault).found_by] += 1
            for number in judge.ops:
                for kind, verdict in (("op", judge.without(number)), ("op, moved", judge.exchanged(number))):
                    table[kind, verdict.found_by if verdict else "no fault"] += 1
        for kind in dict.fromkeys(kind for kind, _ in table):
            by = ("no fault", "clocks and numbers", "clocks", "numbers", "neither")
            _row((name, kind, *(table[kind, found_by] for found_by in by)))


def _row(cells: tuple[object, ...]) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def main() -> None:
    """Print the rows of the tables that are named, or of all."""
    tables: dict[str, Callable[[], None]] = {"modes": _modes, "copies": _copies, "kernels": _kernels}
    tables |= {"numbers": _numbers, "faults": _faults}
    for name in sys.argv[1:] or tables:
        print(f"{name}:", flush=True)
        tables[name]()


if __name__ == "__main__":
    no_gpu.pytest_load_initial_conftests()
    main()
