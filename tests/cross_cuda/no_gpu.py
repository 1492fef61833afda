"""A CUDA device that is not there: `python -m pytest -p tests.cross_cuda.no_gpu tests/cross_cuda -m cuda_lane`.

[Note: no GPU]
torch asks once, while it is imported, whether it has an accelerator. So this plugin loads `no_gpu.cpp` before torch: a
device guard and hooks that do nothing. Fake tensors on "cuda" can then be traced and differentiated by a torch that
was built without CUDA. The rest is in `patches.py`. All of it changes the whole process, which therefore runs nothing
else.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("no_gpu.cpp")
COMMAND = "python -m pytest -p tests.cross_cuda.no_gpu tests/cross_cuda -m cuda_lane"

loaded: list[ctypes.CDLL] = []
"""The library, once it is loaded."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Load the device before a conftest imports torch."""
    if "torch" in sys.modules:
        raise pytest.UsageError(f"tests.cross_cuda.no_gpu comes too late: torch is imported. Run: {COMMAND}")
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise pytest.UsageError("tests.cross_cuda.no_gpu needs torch.")
    root = Path(found.origin).parent
    if (root / "lib" / "libc10_cuda.so").exists():
        raise pytest.UsageError("tests.cross_cuda.no_gpu needs a torch that was built for the CPU; this one has CUDA.")
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(root / "lib" / name), ctypes.RTLD_GLOBAL)
    loaded.append(ctypes.CDLL(str(_built(root)), ctypes.RTLD_GLOBAL))


def _built(root: Path) -> Path:
    """Return the library, made with `g++` unless it is there from an earlier run."""
    flags = ["-O0", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"]
    made_of = SOURCE.read_bytes() + repr(flags).encode() + str((root / "version.py").stat().st_mtime_ns).encode()
    library = Path(tempfile.gettempdir()) / f"fxshard_no_gpu_{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / library.name
            subprocess.run(["g++", str(SOURCE), *flags, "-lc10", "-ltorch_cpu", "-o", str(made)], check=True)
            part = library.with_suffix(f".{os.getpid()}")
            part.write_bytes(made.read_bytes())
            part.replace(library)  # another worker may have been faster
    return library
