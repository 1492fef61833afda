"""The public names are those that are listed, and carry types and docstrings."""

from __future__ import annotations

import inspect
from pathlib import Path

import fxshard


def test_every_public_name_exists_and_is_listed_once() -> None:
    assert len(set(fxshard.__all__)) == len(fxshard.__all__)
    assert all(hasattr(fxshard, name) for name in fxshard.__all__)


def test_every_public_name_of_ours_has_a_docstring() -> None:
    ours = [getattr(fxshard, name) for name in fxshard.__all__]
    undocumented = [each for each in ours if each.__module__.startswith("fxshard") and not inspect.getdoc(each)]
    assert undocumented == []


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(fxshard.__file__).parent / "py.typed").exists()
