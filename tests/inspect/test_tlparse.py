"""The tools that PyTorch users have already: TORCH_LOGS prints what passes did, and tlparse shows every graph."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fxshard.passes.pipeline import DEFAULT, default

pytestmark = pytest.mark.commands

ROOT = Path(__file__).parents[2]
STEP = """
import torch
from fxshard import fully_shard
from tests.graphs import TwoLayers, fake_ranks, layers_of

with fake_ranks(2) as mesh:
    model = TwoLayers()
    for unit in layers_of(model):
        fully_shard(unit, mesh=mesh)
    compiled = torch.compile(model, backend="fxshard", options={"lower": "eager"})
    compiled(torch.ones(2, 4)).sum().backward()
"""


def train_a_step(**environment: str) -> str:
    """Compile and run a small model in a process of its own; return what it logged."""
    command = [sys.executable, "-c", STEP]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stderr


def tlparse() -> str:
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("tlparse", path=places)
    assert found, "tlparse is not installed; it comes with python -m pip install -e '.[dev]'"
    return found


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of each file that tlparse makes of a trace, without its number -> its text."""
    folder = tmp_path_factory.mktemp("trace")
    train_a_step(TORCH_TRACE=str(folder))
    (trace,) = folder.glob("*.log")
    out = folder / "out"
    subprocess.run([tlparse(), trace, "-o", out, "--no-browser"], capture_output=True, check=True)
    return {re.sub(r"_\d+$", "", path.stem): path.read_text() for path in out.rglob("*.txt")}


def test_tlparse_shows_the_graph_after_every_pass(artefacts: dict[str, str]) -> None:
    codegen = default(lower="eager").codegen
    stages = {"dynamo": DEFAULT.dynamo, "joint": DEFAULT.joint, "forward": DEFAULT.split, "backward": DEFAULT.split}
    stages |= {"forward_codegen": codegen, "backward_codegen": codegen}
    expected = {
        f"fxshard_{stage}_{place:02}_{name}"
        for stage, passes in stages.items()
        for place, name in enumerate(["captured", *(step.name for step in passes)])
    }
    assert {name for name in artefacts if name.startswith("fxshard_")} == expected


def test_tlparse_shows_graphs_as_the_printer_writes_them(artefacts: dict[str, str]) -> None:
    place = f"{[step.name for step in DEFAULT.split].index('insert_collectives') + 1:02}"
    forward = artefacts[f"fxshard_forward_{place}_insert_collectives"]
    backward = artefacts[f"fxshard_backward_{place}_insert_collectives"]
    assert "%unshard_layers_0: f32[20] = c10d.all_gather_into_tensor(" in forward
    assert "%reduce_layers_0: f32[10] = c10d.reduce_scatter_tensor(" in backward
    assert "fxshard.unshard" in artefacts["fxshard_joint_00_captured"]


def test_torch_logs_prints_passes_and_graphs() -> None:
    logged = train_a_step(TORCH_LOGS="+fxshard")
    assert re.search(r"\[forward \d\d/\d+\] InsertCollectives\(\)  nodes \d+ -> \d+", logged)
    assert "%unshard_layers_0: f32[20] = c10d.all_gather_into_tensor(" in logged


def test_torch_logs_at_info_prints_passes_alone() -> None:
    logged = train_a_step(TORCH_LOGS="fxshard")
    assert re.search(r"\[backward \d\d/\d+\] DedupUnshard\(\)", logged)
    assert "all_gather_into_tensor(" not in logged
