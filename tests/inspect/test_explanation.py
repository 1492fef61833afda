"""What an `Explanation` answers: its graphs as text, differences, costs, summaries, and wrong names."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from rich.console import Console

from fxshard import ConfigError, Explanation, explain
from fxshard.inspect.tables import schedule_rows, table_of_schedules
from fxshard.passes.pipeline import DEFAULT
from tests.graphs import TwoLayers
from tests.inspect.models import EAGER, Broken, X, explained, names

# ---- print and diff


def test_prints_the_graphs_after_a_pass(two_layers: Explanation, capsys: pytest.CaptureFixture[str]) -> None:
    two_layers.print("insert_collectives")
    graphs = two_layers.graphs
    assert capsys.readouterr().out == "".join(
        f"# {stage}, after InsertCollectives()\n{graphs[stage]['insert_collectives']}\n\n"
        for stage in ("forward", "backward")
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("insert_collective",),
            "there is no pass 'insert_collective'. Did you mean 'insert_collectives'? There are: captured, "
            "refuse_writes, bind_markers, outline_regions, dedup_unshard, reduce_unused, reshard_to_subgroup, "
            "reshard_policy, tag_parameter_views, call_regions, offload_shards, insert_collectives, "
            "bucket_collectives, coalesce_collectives, sink_waits, hoist_prefetch, hoist_copies, chain_reductions, "
            "assign_streams, hand_off_reductions, hand_off_prefetch, lower_streams.",
        ),
        (
            ("insert_collectives", "joint"),
            "there is no pass 'insert_collectives' in stage 'joint'. Did you mean 'tag_parameter_views'? There "
            "are: captured, dedup_unshard, reduce_unused, reshard_to_subgroup, reshard_policy, tag_parameter_views.",
        ),
        (
            ("captured", "forwards"),
            "there is no stage 'forwards'. Did you mean 'forward'? There are: dynamo, joint, forward, forward_codegen, "
            "backward, backward_codegen.",
        ),
        (("captured", None, 1), "there is no frame 1: there are 1, counted from 0."),
        (("captured", None, -1), "there is no frame -1: there are 1, counted from 0."),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_and_all(
    arguments: tuple[Any, ...], message: str, two_layers: Explanation
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        two_layers.print(*arguments)


def test_diffs_the_stages_that_have_both_passes(two_layers: Explanation) -> None:
    text = two_layers.diff("captured", "insert_collectives")
    assert [line for line in text.splitlines() if line.startswith(("---", "+++"))] == [
        "--- forward, captured",
        "+++ forward, insert_collectives",
        "--- backward, captured",
        "+++ backward, insert_collectives",
    ]
    assert re.search(r"^\+%unshard_layers_0: .*all_gather", text, re.MULTILINE)
    assert re.search(r"^-%unshard: .*fxshard.unshard", text, re.MULTILINE)
    assert "--- backward" not in two_layers.diff("captured", "insert_collectives", stage="forward")


def test_the_diff_of_equal_graphs_is_empty(two_layers: Explanation) -> None:
    assert two_layers.diff("captured", "dedup_unshard") == ""


def test_passes_that_share_no_stage_have_no_diff(two_layers: Explanation) -> None:
    with pytest.raises(ConfigError, match="'reshard_policy' is in joint, 'insert_collectives' in forward, backward"):
        two_layers.diff("reshard_policy", "insert_collectives")


def test_prints_one_frame_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    explanation = explained(Broken, 2)
    explanation.print("insert_collectives", stage="forward")
    assert re.findall(r"^# frame.*$", capsys.readouterr().out, re.MULTILINE) == [
        "# frame 0, forward, after InsertCollectives()",
        "# frame 1, forward, after InsertCollectives()",
    ]
    explanation.print("captured", frame=1)
    assert re.findall(r"^# frame (\d), (\w+)", capsys.readouterr().out, re.MULTILINE) == [
        ("1", stage) for stage in ("dynamo", "joint", "forward", "forward_codegen", "backward", "backward_codegen")
    ]


# ---- stats and summaries


def test_stats_are_expressions_in_the_world_size(two_layers: Explanation) -> None:
    assert list(two_layers.stats) == ["joint", "forward", "forward_codegen", "backward", "backward_codegen"]
    stats = two_layers.stats["backward"]["insert_collectives"]
    assert stats.collectives == {"all_gather": 1, "reduce_scatter": 2}
    assert "world_size" in stats.symbols
    # Shards are padded: 64 ranks hold a row of four each, 4 of which are not padding.
    assert (stats.evaluate().gathered_bytes, stats.evaluate(world_size=2).gathered_bytes) == (64 * 5 * 4, 20 * 4)
    assert two_layers.stats["backward"]["captured"].collectives == {}
    assert list(two_layers.stats["joint"]) == names(DEFAULT.joint)
    assert repr(two_layers.stats["joint"]).splitlines()[0].startswith("captured: ")


def test_stats_keep_the_symbols_of_dynamic_shapes() -> None:
    x = torch.ones(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    stats = explain(TwoLayers(), x, world_size=2, options=EAGER).stats["forward"]["insert_collectives"]
    (batch,) = set(stats.symbols) - {"world_size"}
    assert stats.evaluate(**{batch: 12}).flops == 2 * stats.evaluate().flops > 0


def test_estimates_are_for_the_hardware_of_the_options() -> None:
    def exposed(hardware: str) -> float:
        explanation = explain(TwoLayers(), X, world_size=2, options={**EAGER, "hardware": hardware})
        assert explanation.hardware.name == hardware
        return float(explanation.stats["forward"]["insert_collectives"].evaluate().exposed_seconds)

    assert exposed("cpu") > exposed("h100") > 0


def test_repr_is_a_short_summary(two_layers: Explanation) -> None:
    text = re.sub(r"^(  dynamo +)\d+", r"\1?", repr(two_layers), flags=re.MULTILINE)  # differs between torch versions
    assert_expected_inline(
        text,
        """\
Explanation of TwoLayers: 2 units, world size 64, 1 frame
  dynamo           ? nodes after bind_markers
  joint            29 nodes after reshard_policy, tag_parameter_views
  forward          14 -> 36 nodes after insert_collectives, coalesce_collectives, hoist_prefetch; 2 all_gather; 2.5 KiB gathered
  forward_codegen  36 -> 32 nodes after hand_off_prefetch; 2 all_gather; 2.5 KiB gathered
  backward         20 -> 27 nodes after insert_collectives, coalesce_collectives, sink_waits, hoist_prefetch; 1 all_gather, 2 reduce_scatter; 1 KiB gathered
  backward_codegen 27 nodes after hand_off_prefetch; 1 all_gather, 2 reduce_scatter; 1 KiB gathered
one graph: fewer than 8 units below the root are alike
captured for cpu: h100 may run other kernels""",  # noqa: E501
    )


def test_a_terminal_shows_a_table(two_layers: Explanation) -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))
    console.print(two_layers)
    text = console.export_text()
    assert text.startswith("Explanation of TwoLayers: 2 units, world size 64, 1 frame")
    row, *_ = (line for line in text.splitlines() if "reduce_scatter" in line)
    assert row.split()[:6] == ["insert_collectives", row.split()[1], "1", "all_gather,", "2", "reduce_scatter"]


def test_below_the_table_stand_the_schedules(two_layers: Explanation) -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))
    console.print(two_layers)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    forward = itertools.takewhile(lambda line: "backward" not in line, lines[lines.index("Schedules") + 1 :])
    assert_expected_inline(
        "\n".join(line for line in forward if line and line.isascii()),
        """\
  stage     schedule                time  exposed  unsharded
  forward   compiled               64 us    56 us    2.5 KiB
            no prefetch            68 us    60 us   1.25 KiB
            1 ahead                64 us    56 us    2.5 KiB
            auto                   64 us    56 us    2.5 KiB
            no schedule can beat   64 us""",
    )


def test_without_collectives_there_are_no_schedules_to_show() -> None:
    assert table_of_schedules(explained(TwoLayers, 1)) is None


def test_the_schedules_of_several_frames_say_which() -> None:
    rows = list(schedule_rows(explained(Broken, 2)))
    assert [(row.frame, row.stage) for row in rows if row.is_bound] == [
        (0, "forward"),
        (0, "backward"),
        (1, "forward"),
        (1, "backward"),
    ]


def test_a_notebook_shows_the_tables_as_html(two_layers: Explanation) -> None:
    bundle = two_layers._repr_mimebundle_()
    assert bundle["text/plain"] == repr(two_layers)
    assert bundle["text/html"].startswith("<pre")
    assert "insert_collectives" in bundle["text/html"]
    assert "no schedule can beat" in bundle["text/html"]
