"""The lane's state in this process: the device that is not there, the kernels that were compiled for it, who runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from tests.cross_cuda import no_gpu, patches
from tests.cross_cuda.dry_run import DryRun
from tests.cross_cuda.gpus import PRESENT, Gpu
from tests.cross_cuda.scheduled import OrderCheck


class Kernel(NamedTuple):
    name: str  # that Inductor gave it
    architecture: str  # such as `sm_90`
    num_configs: int  # that were compiled of it


@dataclass
class Compiled:
    kernels: list[Kernel] = field(default_factory=list)  # of Triton's, that compiled
    failed: list[str] = field(default_factory=list)  # messages of those that did not
    wrappers: list[str] = field(default_factory=list)  # sources that Inductor generated
    order: OrderCheck = field(default_factory=OrderCheck)  # what Inductor's scheduler has moved ahead of launches


class Lane(Compiled):
    """What is compiled and run in this process; patches tell it.

    Attributes:
        used: names of patches that have been called.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: DryRun | None = None
        self._makes_machine_code = True
        self.used, self._library = patches.install(self)

    def compiled(self, kernel: Any) -> None:
        """Compile all configs of a kernel of Triton's, to machine code that nobody loads."""
        if not self._makes_machine_code:
            return
        wanted, name = len(kernel.configs), f"{kernel.fn.__name__} for {PRESENT.gpu.architecture}"
        try:
            kernel._precompile_worker()
        except Exception as error:  # of whatever kind: the test that asks says which kernel
            self.failed.append(f"{name}: {type(error).__name__}: {error}")
            return
        made = [result.kernel.asm.get("cubin") for result in kernel.compile_results]
        if len(made) != wanted or not all(made):
            self.failed.append(f"{name}: {len(made)} of {wanted} configs compiled")
            return
        self.kernels.append(Kernel(kernel.fn.__name__, PRESENT.gpu.architecture, wanted))

    def ran(self, kernel: Any, args: tuple[Any, ...]) -> None:
        """Note a launch of a generated kernel, if a dry run is on."""
        if self._running is not None:
            self._running.ran(kernel, args)

    def graphed(self, model: Callable[[list[Any]], Any], inputs: list[Any], static: Sequence[int]) -> Any:
        """Have a dry run decide how a CUDA graph runs; without one it runs as it is."""
        return model(inputs) if self._running is None else self._running.graphed(model, inputs, static)

    def generated(self, source: str) -> None:
        """Keep the source of a wrapper."""
        self.wrappers.append(source)

    @contextmanager
    def watching(self, run: DryRun) -> Iterator[None]:
        """Tell a dry run of the kernels that run."""
        self._running = run
        try:
            yield
        finally:
            self._running = None

    @contextmanager
    def compiling(self, gpu: Gpu, machine_code: bool = True) -> Iterator[Compiled]:
        """Compile for a GPU in this process, without caches; yields what has been compiled once it ends.

        Without `machine_code` the kernels stay what Inductor wrote.
        """
        self._makes_machine_code = machine_code
        found, before = Compiled(), (len(self.kernels), len(self.failed), len(self.wrappers))
        with (
            patches.pretending(gpu),
            inductor_config.patch(
                compile_threads=1,
                force_disable_caches=True,
                use_static_cuda_launcher=False,
                _post_fusion_custom_pass=found.order,
            ),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            yield found
        found.kernels, found.failed, found.wrappers = (
            self.kernels[before[0] :],
            self.failed[before[1] :],
            self.wrappers[before[2] :],
        )


@functools.cache
def installed() -> Lane:
    lane = Lane()
    if torch.accelerator.current_accelerator() != torch.device("cuda"):
        raise RuntimeError(f"torch sees no accelerator: tests.cross_cuda.no_gpu was not loaded. Run: {no_gpu.COMMAND}")
    return lane
