"""docs/fsdp2.md has every public name of torch's FSDP2, and says of each what is true."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch.distributed.fsdp import _fully_shard

import fxshard
from tests.pages import ROOT

PAGE = (ROOT / "docs/fsdp2.md").read_text()
STATUSES = ("same", "differs", "sets nothing", "refused", "missing")


class Row(NamedTuple):
    """How one name stands: in words where it is not the same; `torch` is where only some versions have it."""

    name: str
    torch: str
    status: str
    how: str


class Table(NamedTuple):
    """One table of the page: its title, and what torch and we have of the names."""

    title: str
    theirs: Mapping[str, Any]
    ours: Mapping[str, Any]

    @property
    def rows(self) -> dict[str, Row]:
        _, _, rest = PAGE.partition(f"\n## {self.title}\n")
        table = rest.partition("\n## ")[0]
        found = re.findall(r"^\| `(\w+)`(?: \(torch ([\d., ]+)\))? \| (.*?) \| (.*?) \|$", table, re.MULTILINE)
        rows = {row[0]: Row(*row) for row in found}
        assert len(rows) == table.count("\n| `"), "a row is not read, or two have one name"
        return rows


def _public(cls: type) -> dict[str, Callable[..., Any]]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_") and callable(value)}


def _arguments(function: Callable[..., Any]) -> dict[str, Any]:
    return dict(inspect.signature(function).parameters)


def tables() -> Iterator[Table]:
    """Both packages, name by name."""
    theirs = {name: getattr(fsdp2, name) for name in _fully_shard.__all__}
    yield Table("Functions and classes", theirs, {name: getattr(fxshard, name) for name in fxshard.__all__})
    yield Table("Arguments of `fully_shard`", _arguments(fsdp2.fully_shard), _arguments(fxshard.fully_shard))
    fields = {field.name: field for field in dataclasses.fields(fsdp2.MixedPrecisionPolicy)}
    yield Table("Fields of `MixedPrecisionPolicy`", fields, fields)
    yield Table("Methods of a sharded module", _public(fsdp2.FSDPModule), _public(fxshard.ShardedModule))


each_table = pytest.mark.parametrize("table", list(tables()), ids=lambda table: table.title)


@each_table
def test_every_name_of_the_installed_torch_has_a_row(table: Table) -> None:
    assert sorted(table.theirs.keys() - table.rows.keys()) == []
    if torch.__version__.startswith("2.13."):  # the one that the rows were written beside
        elsewhere = [name for name, row in table.rows.items() if name not in table.theirs and not row.torch]
        assert elsewhere == []


@each_table
def test_a_row_says_what_is_there(table: Table) -> None:
    for name, row in table.rows.items():
        others = ("FSDPModule", "UnshardHandle")  # said under another name
        has_ours = name in table.ours or name in others or name not in table.theirs
        assert row.status in STATUSES, name
        assert has_ours == (row.status != "missing") or name not in table.theirs, name
        assert row.how or row.status == "same", f"{name}: say how"


@each_table
def test_what_is_the_same_takes_the_same_arguments(table: Table) -> None:
    for name, row in table.rows.items():
        theirs, ours = table.theirs.get(name), table.ours.get(name)
        if row.status == "same" and inspect.isfunction(theirs):
            assert callable(ours)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
