"""All that is patched in torch and Triton for want of a GPU, with a reason each.

Each patch says what it replaces, or that torch built for the CPU lacks it. One that no longer applies is an error:
`apply` raises where what it replaces is gone, or is there by now; `test_patches.py` fails where nobody calls it.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._inductor.runtime.hints import DeviceProperties
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tests.cross_cuda.gpus import PRESENT, Gpu

_aten = torch.ops.aten


class Watcher(Protocol):
    """Who is told what is compiled and run."""

    def compiled(self, kernel: Any) -> None:
        """Take a kernel of Triton's instead of loading it."""

    def ran(self, kernel: Any, args: tuple[Any, ...]) -> None:
        """Take a launch of a kernel of Triton's instead of the GPU."""

    def graphed(self, model: Callable[[list[Any]], Any], inputs: list[Any], static: Sequence[int]) -> Any:
        """Run what would be a CUDA graph of a model whose `static` inputs stay where they are."""

    def generated(self, source: str) -> None:
        """Take the source of a wrapper."""


class Dead(AssertionError):
    """A patch does not apply to this torch any more."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One name of torch's that gets another value."""

    name: str  # with its module or class
    value: Any  # what it becomes
    why: str  # it must
    is_new: bool = False  # whether a torch built for the CPU lacks the name
    is_read: bool = False  # whether it is a value that is read, not a function that is called

    def apply(self, used: set[str]) -> None:
        """Set the value for as long as the process lives; `used` gets the name when it is called."""
        place, _, name = self.name.rpartition(".")
        owner = pkgutil.resolve_name(place)
        if hasattr(owner, name) is self.is_new:
            state = "has" if self.is_new else "lacks"
            raise Dead(f"torch {torch.__version__} {state} {self.name}, which is patched because {self.why}.")
        if self.is_read:
            setattr(owner, name, self.value)
            return
        function = cast("Callable[..., Any]", self.value)

        def called(*args: Any, **kwargs: Any) -> Any:
            used.add(self.name)
            return function(*args, **kwargs)

        is_static = isinstance(inspect.getattr_static(owner, name, None), staticmethod)
        setattr(owner, name, staticmethod(called) if is_static else called)


class Synchronised(AssertionError):
    """The host waited for the GPU."""


def _synchronise(*_: object) -> None:
    raise Synchronised("torch.cuda.synchronize() was called: the host waits for the GPU.")


def patches(watcher: Watcher) -> list[Patch]:
    """Return all of them."""
    return [*_device(), *_fake_tensors(), *_inductor(), *_triton(watcher)]


def _device() -> list[Patch]:
    there = "who compiles for CUDA asks whether it is there"
    return [
        Patch(name="torch.cuda.is_available", value=lambda: True, why=there),
        Patch(name="torch.cuda.device_count", value=lambda: 1, why=there),
        Patch(name="torch.cuda.current_device", value=lambda: 0, why=there),
        Patch(name="torch.cuda.is_initialized", value=lambda: True, why=there),
        Patch(name="torch.cuda._lazy_init", value=lambda: None, why="there is no driver to start"),
        Patch(name="torch.cuda.set_device", value=lambda device: None, why="there is but one device"),
        Patch(name="torch.cuda._exchange_device", value=lambda device: 0, why="there is but one device"),
        Patch(name="torch.cuda._maybe_exchange_device", value=lambda device: 0, why="there is but one device"),
        Patch(name="torch.cuda.synchronize", value=_synchronise, why="a synchronisation is what the lane looks for"),
        Patch(
            name="torch.cuda.get_device_properties",
            value=lambda device=None: PRESENT.gpu.properties,
            why="Inductor chooses by the number of SMs, Triton by the architecture",
        ),
        Patch(
            name="torch.cuda.get_device_capability",
            value=lambda device=None: (PRESENT.gpu.major, PRESENT.gpu.minor),
            why="Inductor chooses by the architecture",
        ),
        Patch(
            name="torch.cuda.get_rng_state",
            value=lambda device="cuda": torch.zeros(16, dtype=torch.uint8, device="cpu"),
            why="Dynamo saves and restores the state of random numbers, and there is none",
        ),
        Patch(name="torch.cuda.set_rng_state", value=lambda state, device="cuda": None, why="as get_rng_state"),
        Patch(
            name="torch._C._cuda_cudaCachingAllocator_is_enabled",
            value=lambda: True,
            why="CUDA graphs want torch's allocator",
            is_new=True,
        ),
        Patch(
            name="torch._C._cuda_getCurrentRawStream",
            value=lambda device: 0,
            why="wrappers name the stream of each kernel",
            is_new=True,
        ),
    ]


def _fake_tensors() -> list[Patch]:
    return [
        Patch(
            name="torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init",
            value=True,
            why="a fake tensor on CUDA would start the driver",
            is_read=True,
        ),
        Patch(
            name="torch._C._dynamo.guards._empty_strided_cuda",
            value=lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda:0"),
            why="wrappers allocate in C++, past every dispatch mode",
        ),
        Patch(
            name="torch._C._dynamo.guards._reinterpret_tensor",
            value=_reinterpreted,
            why="wrappers make views in C++, past every dispatch mode",
        ),
    ]


def _reinterpreted(tensor: Tensor, size: list[int], stride: list[int], offset: int = 0) -> Tensor:
    return tensor.as_strided(size, stride, int(tensor.storage_offset()) + offset)


def _inductor() -> list[Patch]:
    interface = "torch._dynamo.device_interface.CudaInterface"
    why = "Dynamo's and Inductor's interface of the device has bound the functions of torch.cuda"
    fold = "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._deduce_value"
    deduce = pkgutil.resolve_name(fold)

    def on_the_cpu(folder: Any, node: Any) -> Any:
        with _OnTheCpu():  # type: ignore[no-untyped-call] # of torch
            return deduce(folder, node)

    return [
        Patch(name=f"{interface}.get_device_properties", value=lambda device=None: PRESENT.gpu.properties, why=why),
        Patch(
            name=f"{interface}.Worker.get_device_properties",
            value=lambda device=None: PRESENT.gpu.properties,
            why=why,
        ),
        Patch(name=fold, value=on_the_cpu, why="Inductor folds constants by running ops of one element on the device"),
    ]


class _OnTheCpu(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _triton(watcher: Watcher) -> list[Patch]:
    autotuner = "torch._inductor.runtime.triton_heuristics.CachingAutotuner"

    def run(kernel: Any, *args: Any, stream: int, **_: object) -> None:
        watcher.ran(kernel, args)

    return [
        Patch(
            name=f"{autotuner}.precompile",
            value=lambda kernel, *args, **kwargs: watcher.compiled(kernel),
            why="it loads what it has compiled",
        ),
        Patch(name=f"{autotuner}.run", value=run, why="there is nothing to run a kernel on"),
        Patch(
            name="torch._inductor.compile_fx.cudagraphify",
            value=lambda model, static_input_idxs=(), **_: (
                lambda inputs: watcher.graphed(model, inputs, static_input_idxs)
            ),
            why="there is nothing to record on",
        ),
        Patch(
            name="torch._inductor.graph.GraphLowering.save_output_code",
            value=watcher.generated,
            why="torch leaves it empty for tests to look at generated code",
        ),
        Patch(
            name="torch._inductor.runtime.triton_helpers.set_driver_to_gpu",
            value=lambda: None,
            why="it looks for a driver",
        ),
    ]


class _NoDriver:
    """What Triton asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * PRESENT.gpu.major + PRESENT.gpu.minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Return what `scaled_dot_product_attention` is on these GPUs, as far as a model of the lane asks."""
    dropout, is_causal, scale = *(*args, 0.0, False)[:2], kwargs.get("scale")
    if mask is None and query.dtype in (torch.bfloat16, torch.float16):
        found = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, scale=scale)
    else:
        needs_logsumexp = query.requires_grad
        found = _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_logsumexp, dropout, is_causal, scale=scale
        )
    return cast(Tensor, found[0])


def install(watcher: Watcher) -> tuple[set[str], torch.library.Library]:
    """Apply all patches; return the names of those that have been called, filled as they are, and what to keep alive.

    Beside the patches, through registries that torch and Triton have for it: a driver for Triton, and attention, whose
    kernels torch registers in its CUDA library.
    """
    used: set[str] = set()
    for patch in patches(watcher):
        patch.apply(used)
    driver.set_active(_NoDriver())
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", _attention, key)
    return used, library


@contextmanager
def pretending(gpu: Gpu) -> Iterator[None]:
    """Compile for a GPU."""
    before, PRESENT.gpu = PRESENT.gpu, gpu
    DeviceProperties.create.cache_clear()
    try:
        yield
    finally:
        PRESENT.gpu = before
        DeviceProperties.create.cache_clear()
