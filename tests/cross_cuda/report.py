"""`python -m tests.cross_cuda.report`: what docs/gpu.md says was measured by the lane, as rows of its tables."""

from __future__ import annotations

import dataclasses
import sys
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


def _row(cells: tuple[object, ...]) -> None:
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def main() -> None:
    """Print the rows of the tables that are named, or of all."""
    tables: dict[str, Callable[[], None]] = {"modes": _modes, "copies": _copies, "kernels": _kernels}
    for name in sys.argv[1:] or tables:
        print(f"{name}:", flush=True)
        tables[name]()


if __name__ == "__main__":
    no_gpu.pytest_load_initial_conftests()
    main()
