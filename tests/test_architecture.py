"""docs/architecture.md agrees with the code: its layers, files, functions and ceilings; and names in the code."""

import ast
import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.pages import ROOT, assert_page
from tests.size_ceilings import CEILINGS
from tests.torch_attributes import TORCH_ATTRIBUTES

PAGE = ROOT / "docs/architecture.md"

PRIVATE = re.compile(r"^torch(?:\.\w+)*\._(?!_)\w+")
HOMES = ("torch_private.py", "torch_fsdp2.py", "compile/", "testing/")
"""Where torch's private names may be used."""

ALLOWED = ("torch.ops.", "torch._ops", "torch._foreach_", "torch.utils._pytree")
"""Private by name, but what every program that calls or registers ops, or walks containers, uses."""


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    """Each module of the package by its path in it, and what it parses to."""
    paths = [*sorted((ROOT / "fxshard").rglob("*.py")), *sorted((ROOT / "passes").glob("*.py"))]
    return [(str(path.relative_to(ROOT)).removeprefix("fxshard/"), ast.parse(path.read_text())) for path in paths]


def notes() -> dict[str, str]:
    """The file of each essay, `[Note: name]` on a line of its own in a docstring."""
    found: dict[str, str] = {}
    for name, module in sources():
        for node in ast.walk(module):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for note in re.findall(r"^\s*\[Note: ([^\]]+)\]\s*$", ast.get_docstring(node) or "", re.MULTILINE):
                    assert note not in found, f"[Note: {note}] stands in {found[note]} and in {name}"
                    found[note] = name
    return found


def section(name: str) -> str:
    """The part of the page between `<!-- name -->` and `<!-- end of name -->`."""
    _, begin, rest = PAGE.read_text().partition(f"<!-- {name} -->\n")
    found, end, _ = rest.partition(f"<!-- end of {name} -->")
    assert begin
    assert end
    return found


def test_the_page_has_a_row_for_each_layer_in_the_order_of_the_imports() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [name for row in contracts[0]["layers"] for name in row.split(" : ")]
    assert re.findall(r"^\| `(\w+)` \| \S", section("layers"), re.MULTILINE) == layers


def test_each_package_and_module_is_in_a_row_of_the_layers() -> None:
    """A package inside of another one is named in the row of the outer one."""
    rows = section("layers")
    parts = {name.removesuffix("/__init__.py") for name, _ in sources() if name.endswith("/__init__.py")}
    parts |= {name.removesuffix(".py") for name, _ in sources() if "/" not in name} - {"__init__"}
    assert {part for part in parts if f"`{part}`" not in rows} == set()


def test_the_page_shows_the_ceilings() -> None:
    rows = "\n".join(f"| {ceiling.what} | {ceiling.most:,} |" for ceiling in CEILINGS)
    begin, end = "<!-- sizes -->\n", "<!-- end of sizes -->"
    before, _, rest = PAGE.read_text().partition(begin)
    table = f"\n| what | at most |\n|---|---|\n{rows}\n\n"
    assert_page("docs/architecture.md", "".join([before, begin, table, end, rest.partition(end)[2]]))


def test_what_the_page_names_is_defined_in_the_files_of_its_row() -> None:
    _, _, rest = PAGE.read_text().partition("\n## Where do I look\n")
    rows = [row for row in rest.partition("\n## ")[0].splitlines() if ".py`" in row and row.startswith("|")]
    assert len(rows) > 20
    for row in rows:
        _, _, place = row.partition("? |")
        texts = [(ROOT / "fxshard" / file).read_text() for file in re.findall(r"`([\w/]+\.py)`", place)]
        for name in re.findall(r"`(\w+)`", place):
            definition = re.compile(rf"^\s*(?:def |class )?{name}\b", re.MULTILINE)
            assert any(definition.search(text) for text in texts), f"no `{name}` in the files of {row}"


OF_THE_WHOLE = ("attacks", "cross_cuda", "cross_cuda/numeric", "gpu", "gpu_dry", "mutation", "numerics", "typing")
"""Folders of tests of the package as a whole."""


def test_tests_follow_the_tree_of_the_package() -> None:
    folders = {str(path.parent.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("*.py")}
    elsewhere = {folder for folder in folders if not (ROOT / "fxshard" / folder).is_dir()}
    assert elsewhere == set(OF_THE_WHOLE)


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
    known = notes().keys()
    paths = [*(ROOT / "fxshard").rglob("*.py"), *(ROOT / "passes").glob("*.py"), *(ROOT / "docs").rglob("*.md")]
    named = {name for path in paths for name in re.findall(r"\[Note: ([^\]\n]+)\]", path.read_text())}
    assert named - known - {"name"} == set()


def test_every_file_that_the_pages_name_exists() -> None:
    pages = {path: path.read_text() for path in (ROOT / "docs").rglob("*.md") if "changelog.d" not in path.parts}
    for path, page in pages.items():
        named = {*re.findall(r"`([a-z_0-9/]+(?:\.py|/))`", page)}
        paths = {name for name in named if "/" in name.rstrip("/") or path == PAGE}  # a file alone may be torch's
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
    assert users == {"ranks/rendezvous.py", "torch_private.py"}


def test_what_torch_may_change_is_read_where_the_list_says() -> None:
    texts = {name: (ROOT / "fxshard" / name).read_text() for name, _ in sources()}
    for row in TORCH_ATTRIBUTES:
        names, files = row.names.split(), row.files.split()
        assert {file for file in files if not any(name in texts[file] for name in names)} == set()
        assert {name for name in names if not any(name in texts[file] for file in files)} == set()


def test_a_unit_has_at_most_twelve_attributes() -> None:
    module = ast.parse((ROOT / "fxshard/runtime/unit.py").read_text())
    (unit,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Unit")
    stored = [node for node in ast.walk(unit) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    found = {node.attr for node in stored if ast.unparse(node.value) == "self"}
    assert {"members", "settings", "plan", "model"} < found
    assert len(found) <= 12


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


def test_attributes_that_torch_may_change_are_in_the_list() -> None:
    listed = {(name, file) for row in TORCH_ATTRIBUTES for name in row.names.split() for file in row.files.split()}
    for file, module in sources():
        if not file.startswith((*HOMES, "tools/")):
            read = private_attributes(module) - defined(module) - OF_PYTHON
            assert {name for name in read if (name, file) not in listed} == set(), file
