"""The top-level folder passes/ is installed as fxshard.passes, and as nothing else."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> set[str]:
    inits = [*(ROOT / "fxshard").rglob("__init__.py"), *(ROOT / "passes").rglob("__init__.py")]
    folders = {init.parent.relative_to(ROOT) for init in inits}
    names = {".".join(folder.parts) for folder in folders}
    return {name if name.startswith("fxshard") else f"fxshard.{name}" for name in names}


def test_passes_is_a_relative_link() -> None:
    link = ROOT / "fxshard" / "passes"
    assert link.is_symlink()
    assert os.readlink(link) == "../passes"


def test_declared_packages_are_those_on_disk() -> None:
    declared = pyproject()["tool"]["setuptools"]["packages"]
    assert declared == sorted(declared)
    assert set(declared) == packages_on_disk()


def test_a_second_copy_of_the_passes_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "import fxshard.passes, not passes" in done.stderr


@pytest.mark.parametrize(
    ("group", "name"), [("scripts", "fxshard"), ("entry-points", "torch_dynamo_backends")], ids=["script", "backend"]
)
def test_entry_points_lead_to_something_callable(group: str, name: str) -> None:
    found = pyproject()["project"][group][name]
    target = found if isinstance(found, str) else found["fxshard"]
    module, attribute = target.split(":")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_the_dev_extra_brings_all_other_extras_but_the_one_of_a_process_of_its_own() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    others = ",".join(sorted(extras.keys() - {"dev", "cuda-lane"}))
    assert f"fxshard[{others}]" in extras["dev"]


@pytest.mark.slow
@pytest.mark.parametrize("has_symlinks", [True, False], ids=["link", "checkout-without-links"])
def test_the_wheel_holds_every_pass_under_fxshard_alone(has_symlinks: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    unwanted = shutil.ignore_patterns(".git", ".*_cache", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=unwanted)
    if not has_symlinks:  # what git leaves with core.symlinks=false
        (source / "fxshard" / "passes").unlink()
        (source / "fxshard" / "passes").write_text("../passes")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = [Path(name) for name in zipfile.ZipFile(wheel).namelist()]
    modules = {name for name in names if not name.parts[0].endswith(".dist-info")}
    assert {name.parts[0] for name in modules} == {"fxshard"}
    assert {name.name for name in modules if name.parts[:2] == ("fxshard", "passes")} == {
        path.name for path in (ROOT / "passes").glob("*.py")
    }
    assert {path.relative_to(ROOT) for path in (ROOT / "fxshard").rglob("page.*") if path.suffix != ".py"} <= modules
    assert Path("fxshard/py.typed") in modules
