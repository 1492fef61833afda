"""What importing fxshard costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPTIONAL = {"rich", "matplotlib", "plotly", "scipy", "safetensors", "transformers", "pytest", "hypothesis"}


def imported_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.commands
@pytest.mark.parametrize("module", ["fxshard", "fxshard.compile.backend", "fxshard.tools.cli"])
def test_importing_needs_nothing_optional(module: str) -> None:
    assert imported_by(module) & OPTIONAL == set()


GPU_MACHINE = ("torch", "triton", "numpy", "sympy", "pytest", "matplotlib")
"""What docs/gpu.md says is enough to run tests/gpu and gpu_bench, with what these need themselves."""

FOR_A_GPU = [
    *("fxshard", "fxshard.compile.backend", "fxshard.testing.cuda_engine", "benchmarks.gpu_bench"),
    *(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("tests/gpu", "benchmarks/gpu")
        for path in sorted((ROOT / folder).glob("*.py"))
    ),
]

WITHOUT_THE_REST = """
import importlib, re, sys
from importlib import metadata

def named(text):
    return re.match(r"[\\w.-]+", text)[0].lower().replace("_", "-")

def with_needs(wanted):
    found, todo = set(), list(wanted)
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            try:
                todo += [named(each) for each in metadata.requires(name) or () if "extra ==" not in each]
            except metadata.PackageNotFoundError:
                pass
    return found

class Without:
    def __init__(self, finder):
        self.find = finder.find_spec

    def find_spec(self, name, *given):
        return None if name.partition(".")[0] in hidden else self.find(name, *given)

allowed, modules = [text.split(",") for text in sys.argv[1:]]
there = (with_needs(allowed) - {"jinja2", "markupsafe"}) | {"fxshard"}
packages = metadata.packages_distributions()
hidden = {name for name, makers in packages.items() if there.isdisjoint(map(named, makers))}
assert {"rich", "jinja2"} & packages.keys() <= hidden
sys.meta_path[:] = map(Without, sys.meta_path)
for module in modules:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "triton" or "triton" in packages:
            print(f"{module} needs {error.name}")
"""
"""Imports modules where only some packages are; prints what they lack besides triton, which is not everywhere."""


@pytest.mark.commands
def test_what_runs_on_a_gpu_needs_no_more_than_the_page_says() -> None:
    command = [sys.executable, "-c", WITHOUT_THE_REST, ",".join(GPU_MACHINE), ",".join(FOR_A_GPU)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
