"""The page of `Explanation.save_html`: what is in it, that it needs nothing else, and that names cannot break it."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxshard import ConfigError, Explanation, MissingExtraError, explain
from fxshard.inspect import html, tables
from tests.graphs import CalledTwice, Layer, TwoLayers, in_split
from tests.inspect.models import EAGER, Decliner, X, explained

EVIL = """<img src="x" onerror='alert(1)'>&amp;</script>"""


class Page(HTMLParser):
    """Tags, cells of the tables, and the content of the scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._open.append(tag)
        self.text.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in self._open[-1:]:
            self.text[tag][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.text["script"][0])


class Evil(nn.Module):
    """Its units have names that would break a page which does not escape them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({EVIL.replace(".", ""): nn.Sequential(Layer())})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


def test_the_page_holds_every_graph_to_the_letter(two_layers: Explanation) -> None:
    data = Page(html.page(two_layers)).data
    (stages,) = data["frames"]
    assert [stage["name"] for stage in stages] == list(two_layers.graphs)
    for stage in stages:
        for shown, record in zip(stage["records"], two_layers.graphs[stage["name"]].values(), strict=True):
            assert shown["name"] == record.name
            assert "\n".join(data["lines"][line] for line in data["texts"][shown["text"]]) == str(record)


def test_the_page_holds_equal_lines_and_unchanged_graphs_once(two_layers: Explanation) -> None:
    data = Page(html.page(two_layers)).data
    assert len(set(data["lines"])) == len(data["lines"])
    graphs = {id(record.graph) for records in two_layers.graphs.values() for record in records.values()}
    assert len(data["texts"]) == len(graphs) < sum(len(records) for records in two_layers.graphs.values())


def test_the_page_needs_no_network(two_layers: Explanation) -> None:
    text = html.page(two_layers)
    page = Page(text)
    assert not [
        tag for tag, attributes in page.tags if tag in ("link", "iframe", "img", "object") or "src" in attributes
    ]
    assert [a["href"] for tag, a in page.tags if tag == "a" and not (a["href"] or "").startswith("#")] == []
    assert "@import" not in text
    assert "url(" not in text
    assert "//" not in text.replace("// ", "")  # comments of the script


def test_every_pass_links_to_its_difference(two_layers: Explanation) -> None:
    links = [a["href"] for tag, a in Page(html.page(two_layers)).tags if tag == "a"]
    assert "#0/forward/offload_shards/insert_collectives" in links
    assert "#0/joint/captured/captured" in links
    assert len(links) == 1 + sum(len(records) for records in two_layers.graphs.values())


def test_the_tables_say_what_the_passes_did_and_each_unit_moves(two_layers: Explanation) -> None:
    page = Page(html.page(two_layers))
    assert page.text["h1"] == ["TwoLayers"]
    cells = page.text["td"]
    assert "2 all_gather" in cells
    assert "1 all_gather, 2 reduce_scatter" in cells
    rows = list(html.launches_by_unit(two_layers))
    assert [(row.stage, row.unit, row.op, row.count) for row in rows] == [
        ("forward", "layers.0", "all_gather", 1),
        ("forward", "layers.1", "all_gather", 1),
        ("backward", "layers.1", "all_gather", 1),
        ("backward", "layers.1", "reduce_scatter", 1),
        ("backward", "layers.0", "reduce_scatter", 1),
    ]
    assert [row.nbytes for row in rows] == [64 * n * 4 for n in (5, 5, 4, 5, 5)]  # backward reads no bias
    exposed = sum(row.exposed for row in rows if row.stage == "backward")
    stats = two_layers.stats["backward"]["hoist_prefetch"].evaluate()
    assert exposed == pytest.approx(stats.exposed_seconds)


def test_the_page_shows_the_schedules_of_every_graph_that_runs(two_layers: Explanation) -> None:
    page = Page(html.page(two_layers))
    assert page.text["td"].count("no schedule can beat") == page.text["td"].count("auto") == 2
    (frame,) = two_layers.frames
    assert tables.duration(frame.lower_bound("forward")) in page.text["td"]
    assert tables.duration(frame.schedules("forward")[1].exposed_seconds) in page.text["td"]


def test_the_table_of_collectives_says_why_each_is_there(two_layers: Explanation) -> None:
    rows = list(html.launches_by_unit(two_layers))
    assert rows[1].why == (
        "coalesce_collectives: layers.1: 2 tensors, 4 us of copies less for 1 us more on the link",
        "hoist_prefetch: 1 ahead, before layers.0 is needed",
    )
    cells = Page(html.page(two_layers)).text["div"]
    assert all(why in cells for row in rows for why in row.why)


def test_repeated_launches_of_a_unit_are_added_up() -> None:
    with torch.no_grad():
        (row,) = html.launches_by_unit(explain(CalledTwice(), X, world_size=2, options=EAGER))
    assert (row.count, row.nbytes) == (2, 2 * 20 * 4)
    assert row.why == (
        "coalesce_collectives: layers.0: 2 tensors, 4 us of copies less for 1 us more on the link",
        "hoist_prefetch: first of the graph",
        "hoist_prefetch: 1 ahead, before layers.0 is needed",
    )


def test_no_name_can_break_out_of_the_page() -> None:
    model = Evil()
    type(model).__name__ = EVIL
    try:
        explanation = explain(model, X, world_size=2, options={**EAGER, "passes": in_split(Decliner(why=EVIL))})
    finally:
        type(model).__name__ = "Evil"
    text = html.page(explanation)
    page = Page(text)
    assert page.text["h1"] == [EVIL]
    assert [tag for tag, _ in page.tags if tag == "img"] == []
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert text.count("</script>") == 2
    assert any(EVIL in cell for cell in page.text["th"])
    assert any(EVIL in line for line in page.data["lines"])
    reasons = [
        reason for stage in page.data["frames"][0] for record in stage["records"] for reason in record["reasons"]
    ]
    assert {reason.partition(" alone: ")[2] for reason in reasons if reason.startswith("left ")} == {EVIL}


def test_a_model_without_collectives_has_a_page_too() -> None:
    text = html.page(explained(TwoLayers, 1))
    assert "None of the graphs launches a collective." in text
    assert "Schedules" not in text


def test_saves_the_page(two_layers: Explanation, tmp_path: Path) -> None:
    two_layers.save_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == html.page(two_layers)


def test_a_page_that_cannot_be_written_is_a_clear_error(two_layers: Explanation, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the page cannot be written to .*: No such file or directory"):
        two_layers.save_html(tmp_path / "missing" / "page.html")


def test_without_jinja2_says_what_to_install(two_layers: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"fxshard\[report\]"):
        two_layers.save_html("page.html")
