"""Eight emulated ranks train as torch's fully_shard on the same link."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.scenarios import (
    COMPILED_ON_LINK,
    ON_LINK,
    PRECISIONS,
    check_against_fsdp2,
    on_link,
    require_cuda,
)
from tests.gpu.scenarios_steady import STREAMS

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def link() -> Iterator[None]:
    require_cuda()
    with on_link("cuda"):
        yield


@pytest.mark.parametrize(
    ("precision", "name"), [(each, name) for each in PRECISIONS for name in COMPILED_ON_LINK[each]]
)
def test_compiled_code_trains_as_fsdp2(name: str, precision: str) -> None:
    check_against_fsdp2(name, "cuda", precision, lower="inductor")


@pytest.mark.parametrize("streams", STREAMS)
def test_compiled_code_trains_as_fsdp2_whatever_the_streams(streams: str) -> None:
    check_against_fsdp2("accumulation", "cuda", "bf16", lower="inductor", streams=streams)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ON_LINK)
def test_trains_as_fsdp2(name: str, precision: str) -> None:
    check_against_fsdp2(name, "cuda", precision)
