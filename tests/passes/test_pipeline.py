"""The pipeline: every pass has its place, its test and its page, and none depends on another's module."""

from __future__ import annotations

import ast
import importlib
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from fxshard.compile.cache import digest
from fxshard.hardware import BUILTIN
from fxshard.ir.plan import FramePlan
from fxshard.ir.variant import PLAIN
from fxshard.options import Options
from fxshard.passes._base import GraphPass
from fxshard.passes.dedup_unshard import DedupUnshard
from fxshard.passes.pipeline import DEFAULT, Pipeline, default, of_variant

ROOT = Path(__file__).parents[2]
NOT_PASSES = ("__init__", "_base", "_manager", "pipeline")
MODULES = sorted(path.stem for path in (ROOT / "passes").glob("*.py") if path.stem not in NOT_PASSES)


def pass_of(module: str) -> type[GraphPass]:
    """The one pass of a module."""
    name = f"fxshard.passes.{module}"
    found = [
        cls
        for _, cls in inspect.getmembers(importlib.import_module(name), inspect.isclass)
        if issubclass(cls, GraphPass) and cls.__module__ == name
    ]
    (cls,) = found
    return cls


@pytest.mark.parametrize("module", MODULES)
def test_finds_every_pass_in_a_pipeline_or_a_variant(module: str) -> None:
    pipelines = (DEFAULT, default(regions="auto", prefetch="auto"))
    used = [step for each in pipelines for stage in fields(each) for step in getattr(each, stage.name)]
    assert pass_of(module) in map(type, [*used, *of_variant(DEFAULT.split, PLAIN, "inductor")])


@pytest.mark.parametrize("module", MODULES)
def test_finds_every_pass_by_one_name(module: str) -> None:
    assert pass_of(module).__name__ == "".join(word.title() for word in module.split("_"))
    assert (ROOT / f"tests/passes/test_{module}.py").is_file()
    assert (ROOT / f"docs/passes/{module}.md").is_file()


@pytest.mark.parametrize("module", MODULES)
def test_describes_every_pass_alike(module: str) -> None:
    text = inspect.getdoc(pass_of(module)) or ""
    missing = [word for word in ("Before ", "After ", "Numerics: ", "Memory: ", "No-op: ") if word not in text]
    assert not missing


@pytest.mark.parametrize("module", MODULES)
def test_finds_no_pass_that_imports_another(module: str) -> None:
    tree = ast.parse((ROOT / f"passes/{module}.py").read_text())
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in imported if name.rpartition(".")[2] in MODULES]


class Newer(DedupUnshard):
    """A pass whose result has changed."""

    version = 2


Newer.__qualname__ = DedupUnshard.__qualname__


def test_tells_compile_caches_apart_by_the_versions_of_passes() -> None:
    assert repr(Newer()) == repr(DedupUnshard())
    keys = {
        digest(Options(), FramePlan(units={}, shard_inputs={}), Pipeline(joint=(step,), split=()), BUILTIN["cpu"])
        for step in (DedupUnshard(), Newer())
    }
    assert len(keys) == 2
