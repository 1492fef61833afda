"""The demo GPT on four ranks: all its graphs, after every pass.

On the torch that the goldens were written with, the whole text is compared. On others the names of nodes may differ,
and what is compared is the order of what takes time: launches, waits, matrix products.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import pytest
import torch

from fxshard.ir.history import PassResult
from tests import graphs
from tests.graphs import GOLDEN, Traced, assert_golden

WRITTEN_WITH = "2.13."
TIMED = re.compile(
    r"^%(?P<name>\w+): (?P<type>.*) = "
    r"(?P<op>c10d\.\w+|aten\.(?:mm|addmm|bmm|baddbmm|_scaled_dot_product_\w+)(?:\.\w+)?)\(",
)


@functools.cache
def traced(lowering: str, train: bool) -> Traced:
    """The graphs in one dialect of aten."""
    return graphs.gpt(world_size=4, lowering=lowering, train=train)


def story(traced: Traced, stage: str) -> str:
    """The graphs of a stage, one after another; of passes that changed nothing only the name."""
    return "\n".join(part for record in traced.history.stages[stage].values() for part in _parts(record))


def _parts(record: PassResult) -> Iterator[str]:
    yield f"== {record.name}" if record.changed else f"== {record.name}: unchanged"
    if record.changed:
        yield f"{record}\n"


def schedule(text: str) -> list[str]:
    """The launches, waits and matrix products of a text, in order; names of ours are kept, names of torch's are not."""
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith("== "):
            found.append(line)
        elif match := TIMED.match(line):
            name = f"%{match['name']}: " if match["op"].startswith("c10d.") else ""
            found.append(f"{name}{match['op']} -> {match['type']}")
    return found


def assert_golden_story(actual: str, name: str) -> None:
    """Compare with `tests/golden/<name>.txt`, as closely as this torch allows."""
    if torch.__version__.startswith(WRITTEN_WITH):
        assert_golden(actual, name)
    assert schedule(actual) == schedule((GOLDEN / f"{name}.txt").read_text())


@pytest.mark.parametrize("stage", ["dynamo", "joint", "forward", "backward"])
def test_takes_the_gpt_through_every_pass(stage: str) -> None:
    assert_golden_story(story(traced("eager", True), stage), f"gpt/{stage}")


def test_takes_the_gpt_through_every_pass_without_backward() -> None:
    assert_golden_story(story(traced("eager", False), "inference"), "gpt/inference")


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_gives_inductor_the_gpt_in_its_own_dialect(stage: str) -> None:
    last = str(traced("inductor", True).history.last(stage))
    assert_golden_story(last, f"gpt/inductor_{stage}")


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_moves_the_same_bytes_in_both_dialects(stage: str) -> None:
    moved = [
        [line for line in schedule(str(traced(lowering, True).history.last(stage))) if "c10d." in line]
        for lowering in ("eager", "inductor")
    ]
    assert moved[0] == moved[1]
    assert len(moved[0]) == {"forward": 6, "backward": 10}[stage]


def test_finds_launches_waits_and_products_in_a_text() -> None:
    text = "\n".join(
        (
            "== insert_collectives",
            "%shard_root: f32[8] = input  # flat of root",
            "%unshard_root: f32[32] = c10d.all_gather_into_tensor(%shard_root, 4, '0')  # unit=@0",
            "# head",
            "%t: f32[4, 4] = aten.t(%weight)",
            "%mm_3: f32[2, 4] = aten.mm(%x, %t)",
            "return %mm_3",
        )
    )
    assert schedule(text) == [
        "== insert_collectives",
        "%unshard_root: c10d.all_gather_into_tensor -> f32[32]",
        "aten.mm -> f32[2, 4]",
    ]
