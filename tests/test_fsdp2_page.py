"""docs/fsdp2.md has every public name of torch's FSDP2, and says of each what is true."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.fsdp2_names import Row, Table, tables
from tests.pages import assert_page

TABLES = list(tables())

HEAD = """# Beside FSDP2, name by name

Every public name of torch's FSDP2, and how ours stands to it. *same*: same arguments and meaning. *differs*: as said. \
*sets nothing*: a graph makes it meaningless, and it says so once. *refused*: an error that says what to do instead. \
*missing*: there is no such name. The table is generated from both packages, by `tests/test_fsdp2_page.py`.
"""

TAIL = """
## Ours alone

On a sharded module: `reduce_waiting_gradients`. Beside it: `adopt`, `release`, `no_sync`, `overlap_step`, \
`whole_matrices`, `release_accumulators`, checkpoints and full state, `explain` and the passes: \
[guides](guides/), [checkpoints](checkpoints.md), [explain](explain.md).
"""


def page() -> str:
    """The document."""
    parts = [HEAD]
    for table in TABLES:
        lines = [f"| `{name}`{_only(row)} | {row.status} | {row.how} |" for name, row in table.rows.items()]
        parts.append("\n".join([f"\n## {table.title}\n", "| FSDP2 | here | how |", "|---|---|---|", *lines]) + "\n")
    return "".join([*parts, TAIL])


def _only(row: Row) -> str:
    return f" (torch {row.torch})" if row.torch else ""


def test_the_page_is_current() -> None:
    assert_page("docs/fsdp2.md", page())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_every_name_of_the_installed_torch_has_a_row(table: Table) -> None:
    assert sorted(table.theirs.keys() - table.rows.keys()) == []
    if torch.__version__.startswith("2.13."):  # the one that the rows were written beside
        elsewhere = [name for name, row in table.rows.items() if name not in table.theirs and not row.torch]
        assert elsewhere == []


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_a_row_says_what_is_there(table: Table) -> None:
    for name, row in table.rows.items():
        others = ("FSDPModule", "UnshardHandle")  # said under another name
        has_ours = name in table.ours or name in others or name not in table.theirs
        assert has_ours == (row.status != "missing") or name not in table.theirs, name
        assert row.how or row.status == "same", f"{name}: say how"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_what_is_the_same_takes_the_same_arguments(table: Table) -> None:
    for name, row in table.rows.items():
        theirs, ours = table.theirs.get(name), table.ours.get(name)
        if row.status == "same" and inspect.isfunction(theirs):
            assert callable(ours)
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
