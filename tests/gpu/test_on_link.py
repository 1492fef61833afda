"""Eight emulated ranks train as torch's fully_shard on the same link."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.checks import COMPILED_ON_LINK, PRECISIONS, check_against_fsdp2, in_each_precision, on_link
from tests.gpu.steady import STREAMS
from tests.numerics.scenarios import Lane, names

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def link() -> Iterator[None]:
    with on_link("cuda"):
        yield


@pytest.mark.parametrize(("precision", "name"), in_each_precision(COMPILED_ON_LINK))
def test_compiled_code_trains_as_fsdp2(name: str, precision: str) -> None:
    check_against_fsdp2(name, "cuda", precision, lower="inductor")


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("name", ["accumulation", "offloaded accumulation"])
def test_compiled_code_trains_as_fsdp2_whatever_the_streams(name: str, streams: str) -> None:
    check_against_fsdp2(name, "cuda", "bf16", lower="inductor", streams=streams)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", names(Lane.LINK))
def test_trains_as_fsdp2(name: str, precision: str) -> None:
    check_against_fsdp2(name, "cuda", precision)
