"""One rank of NCCL trains as unsharded training and as torch's fully_shard, with every feature."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.checkpoint import CHECKPOINTS, check_checkpoint
from tests.gpu.checks import (
    COMPILED,
    accumulating_graph,
    check_against_fsdp2,
    check_collectives,
    check_in_float64,
    in_each_precision,
    one_rank,
)
from tests.numerics.scenarios import NOT_IN_FSDP2, OWN_PRECISION, Lane, names

pytestmark = pytest.mark.gpu

AS_FSDP2 = names(Lane.ONE_RANK, but=NOT_IN_FSDP2)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank("cuda"):
        yield


@pytest.mark.parametrize(("precision", "name"), in_each_precision(COMPILED))
def test_compiled_code_trains_as_fsdp2(name: str, precision: str) -> None:
    check_against_fsdp2(name, "cuda", precision, lower="inductor")


@pytest.mark.parametrize("name", ["plain training", "accumulation"])
def test_compiled_code_trains_as_unsharded(name: str) -> None:
    check_in_float64(name, "cuda", lower="inductor")


@pytest.mark.parametrize("name", AS_FSDP2)
def test_trains_as_fsdp2(name: str) -> None:
    check_against_fsdp2(name, "cuda", "fp32")


@pytest.mark.parametrize("name", names(Lane.ONE_RANK, but=NOT_IN_FSDP2 + OWN_PRECISION))
def test_trains_in_bf16_as_fsdp2(name: str) -> None:
    check_against_fsdp2(name, "cuda", "bf16")


@pytest.mark.parametrize("name", names(Lane.ONE_RANK, but=OWN_PRECISION))
def test_trains_as_unsharded(name: str) -> None:
    check_in_float64(name, "cuda")


@pytest.mark.parametrize("through", CHECKPOINTS)
def test_goes_on_from_a_checkpoint(through: str, tmp_path: Path) -> None:
    check_checkpoint(through, "cuda", tmp_path)


def test_the_backend_takes_what_graphs_launch() -> None:
    check_collectives("cuda")


def test_accumulates_inside_the_matrix_product() -> None:
    assert "addmm_acc" in accumulating_graph("cuda", "fp32")
    assert "addmm_acc" not in accumulating_graph("cuda", "bf16")  # products in bf16 are cast before they are added
