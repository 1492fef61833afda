"""docs/architecture.md and the code say the same: the tree, the essays, and which names mean what."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fxshard
from tests.pages import ROOT, assert_page

PRIVATE = re.compile(r"^torch(?:\.\w+)*\._(?!_)\w+")
HOMES = ("torch_private.py", "torch_fsdp2.py", "compile/", "testing/")
"""Where torch's private names may be used."""

ALLOWED = ("torch.ops.", "torch._ops", "torch._foreach_", "torch.utils._pytree")
"""Private by name, but what every program that calls or registers ops, or walks containers, uses."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Each module of the package by its path in it, and what it parses to."""
    for path in sorted((ROOT / "fxshard").rglob("*.py")) + sorted((ROOT / "passes").glob("*.py")):
        yield str(path.relative_to(ROOT)).removeprefix("fxshard/"), ast.parse(path.read_text())


def first_line(module: ast.Module) -> str:
    return (ast.get_docstring(module) or "").partition("\n")[0]


def tree() -> str:
    folders: dict[str, list[str]] = {}
    titles: dict[str, str] = {}
    for name, module in sources():
        folder, _, file = name.rpartition("/")
        if file == "__init__.py":
            titles[folder] = first_line(module)
        else:
            folders.setdefault(folder, []).append(f"| `{file}` | {first_line(module)} |")
    order = [
        "",
        "sharding",
        "compile",
        "passes",
        "cost",
        "ir",
        "ir/verify",
        "ranks",
        "runtime",
        "state",
        "inspect",
        "testing",
        "integrations",
    ]
    order += sorted(folders.keys() - set(order))
    blocks = []
    for folder in order:
        title = f"**`{folder}/`** {titles[folder]}" if folder else "**`fxshard/`**"
        blocks.append("\n".join([title, "", "| file | what is in it |", "|---|---|", *folders[folder]]))
    return "\n\n".join(blocks)


def notes() -> str:
    found: dict[str, str] = {}
    for name, module in sources():
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for note in re.findall(r"^\s*\[Note: ([^\]]+)\]\s*$", ast.get_docstring(node) or "", re.MULTILINE):
                    assert note not in found, f"[Note: {note}] stands in {found[note]} and in {name}"
                    found[note] = name
    return "\n".join(["| note | where |", "|---|---|", *(f"| {note} | `{found[note]}` |" for note in sorted(found))])


CORE = ("sharding", "compile", "ir", "passes", "ranks", "runtime")


def lines_of(paths: list[Path]) -> list[int]:
    return [len(path.read_text().splitlines()) for path in paths]


def sizes() -> str:
    package = sorted((ROOT / "fxshard").rglob("*.py")) + sorted((ROOT / "passes").glob("*.py"))
    core = [path for path in package if path.parent == ROOT / "fxshard" or {*path.relative_to(ROOT).parts} & {*CORE}]
    rows = {
        "source": package,
        "of it the core: top level, sharding, compile, ir, passes, ranks, runtime": core,
        "tests": sorted((ROOT / "tests").rglob("*.py")),
    }
    table = ["| what | files | lines | median file | largest file |", "|---|---|---|---|---|"]
    for name, paths in rows.items():
        lines = lines_of(paths)
        cells = (len(lines), sum(lines), round(statistics.median(lines)), max(lines))
        # To the hundred: the table is to show the size of the house, not each edit.
        shown = (f"{cells[0]}", f"{round(cells[1], -2):,}", f"{round(cells[2], -1)}", f"{round(cells[3], -2)}")
        table.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(table)


def test_the_page_shows_the_tree_as_it_is() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    for name, part in {"tree": tree(), "notes": notes(), "sizes": sizes()}.items():
        begin, end = f"<!-- {name} -->\n\n", f"\n\n<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = "".join([before, begin, part, end, rest.partition(end)[2]])
    assert_page("docs/architecture.md", page)


OF_THE_WHOLE = ("attacks", "cross_cuda", "gpu", "gpu_dry", "mutation", "numerics", "typing")
"""Folders of tests of the package as a whole."""

HARNESSES = ("tools/bench/gpu",)


def test_tests_follow_the_tree_of_the_package() -> None:
    folders = {str(path.parent.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("*.py")}
    elsewhere = {folder for folder in folders if not (ROOT / "fxshard" / folder).is_dir()}
    assert elsewhere == {*OF_THE_WHOLE, *HARNESSES}


def imported(module: ast.Module) -> Iterator[str]:
    """Modules that a module imports, and names that may be modules."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("line", ["from tests.ir import test_plan", "from tests.ir.test_plan import x"])
def test_imports_of_test_modules_are_found(line: str) -> None:
    assert any(".test_plan" in name for name in imported(ast.parse(line)))


def test_no_test_module_is_imported() -> None:
    """What several tests need stands in a helper module or in a conftest.py."""
    paths = [path for path in (ROOT / "tests").rglob("*.py")]
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.stem.startswith("test_")
    }
    for path in paths:
        names = {prefix for name in imported(ast.parse(path.read_text())) for prefix in (name, name.rpartition(".")[0])}
        assert names & modules == set(), path


def test_every_essay_that_is_referred_to_exists() -> None:
    known = set(re.findall(r"^\| ([^|]+) \| `", notes(), re.MULTILINE))
    paths = [*(ROOT / "fxshard").rglob("*.py"), *(ROOT / "passes").glob("*.py"), *(ROOT / "docs").rglob("*.md")]
    named = {name for path in paths for name in re.findall(r"\[Note: ([^\]\n]+)\]", path.read_text())}
    assert named - known - {"name"} == set()


def test_every_file_that_the_pages_name_exists() -> None:
    pages = {path: path.read_text() for path in (ROOT / "docs").rglob("*.md") if "changelog.d" not in path.parts}
    main = ROOT / "docs/architecture.md"
    pages[main] = pages[main].partition("## The tree")[0]
    for path, page in pages.items():
        named = {*re.findall(r"`([a-z_0-9/]+(?:\.py|/))`", page)}
        paths = {name for name in named if "/" in name.rstrip("/") or path == main}  # a file alone may be torch's
        missing = {name for name in paths if not any((ROOT / top / name).exists() for top in ("fxshard", "."))}
        assert missing == set(), path


def types(module: ast.Module) -> Iterator[str]:
    """The classes of a module, and other names for types: `Slots = Mapping[str, Sequence[int]]`."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            names = [target.id.lstrip("_") for target in node.targets if isinstance(target, ast.Name)]
            yield from (name for name in names if re.match(r"[A-Z]\w*[a-z]", name))


def test_the_name_of_a_type_means_one_thing() -> None:
    found = Counter(name for _, module in sources() for name in types(module))
    assert {name: count for name, count in found.items() if count > 1} == {}
    assert {"Slots", "Unit", "Waiting"} <= found.keys()


def private_names(module: ast.Module) -> set[str]:
    """Private names of torch that a module imports or reads."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return {name for name in found if PRIVATE.match(name) and not name.startswith(ALLOWED)}


@pytest.mark.parametrize("name", ["torch._dynamo.config", "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"])
def test_private_names_are_found(name: str) -> None:
    module, _, what = name.rpartition(".")
    assert private_names(ast.parse(f"from {module} import {what}")) == {name}
    assert name in private_names(ast.parse(f"x = {name}"))


def test_torch_is_private_where_it_is_said_to_be() -> None:
    users = {name for name, module in sources() if private_names(module) and not name.startswith(HOMES)}
    assert not users


def test_only_one_module_talks_to_the_store() -> None:
    users = {name for name, module in sources() if "default_store" in ast.unparse(module)}
    assert users <= {"ranks/rendezvous.py", "torch_private.py", "compile/shared_code.py"}


def attributes() -> list[tuple[set[str], set[str]]]:
    """Rows of "What torch may change": attributes, and the files that read them."""
    table = (ROOT / "docs/architecture.md").read_text().partition("<!-- attributes -->")[2]
    rows = [line.split("|") for line in table.partition("<!-- end of attributes -->")[0].splitlines() if "`" in line]
    return [(set(re.findall(r"`([^`]+)`", row[1])), set(re.findall(r"`([^`]+)`", row[3]))) for row in rows]


def test_what_torch_may_change_is_read_where_the_page_says() -> None:
    texts = {name: (ROOT / "fxshard" / name).read_text() for name, _ in sources()}
    rows = attributes()
    assert len(rows) > 15
    for names, files in rows:
        assert {file for file in files if not any(name in texts[file] for name in names)} == set()
        assert {name for name in names if not any(name in texts[file] for file in files)} == set()


OF_PYTHON = {"_replace", "_fields", "_getframe", "_exit"}
READS_BY_NAME = ("attrgetter", "getattr", "hasattr")


def private_attributes(module: ast.Module) -> set[str]:
    """Names with one underscore that a module reads of an object."""
    reads = [node for node in ast.walk(module) if isinstance(node, ast.Attribute)]
    found = {read.attr for read in reads if not re.search(r"\b_?(ops|_ops|aten)\b", ast.unparse(read))}
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in READS_BY_NAME:
            found |= {str(arg.value).partition(".")[0] for arg in node.args if isinstance(arg, ast.Constant)}
    return {name for name in found if re.match(r"_(?!_|fxshard|foreach)", name)}


def defined(module: ast.Module) -> set[str]:
    """Functions and classes of a module, and attributes of its classes."""
    found = {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = [node for node in ast.walk(module) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    found |= {node.attr for node in stored if ast.unparse(node.value) == "self"}
    targets = [node.target for node in ast.walk(module) if isinstance(node, ast.AnnAssign)]
    return found | {target.id for target in targets if isinstance(target, ast.Name)}


def test_attributes_that_torch_may_change_are_on_the_page() -> None:
    listed = {(name, file) for names, files in attributes() for name in names for file in files}
    for file, module in sources():
        if not file.startswith((*HOMES, "tools/")):
            read = private_attributes(module) - defined(module) - OF_PYTHON
            assert {name for name in read if (name, file) not in listed} == set(), file


@pytest.mark.parametrize(("old", "new"), [("Record", "PassResult"), ("Fact", "Property"), ("Decline", "Remark")])
def test_public_names_of_before_work_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"fxshard.{old} is now fxshard.{new}"):
        assert getattr(fxshard, old) is getattr(fxshard, new)


def test_a_misspelt_public_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Recrod'"):
        fxshard.Recrod  # type: ignore[attr-defined]  # noqa: B018
