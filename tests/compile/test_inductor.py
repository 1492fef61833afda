"""What Inductor is told, as far as that differs between releases of torch."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config

from fxshard.compile import inductor
from fxshard.options import KEEP_ORDER_FLAGS


def test_inductor_has_the_flags_that_keep_the_order() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    flags = ["reorder_for_peak_memory", "reorder_for_compute_comm_overlap", "reorder_for_locality"]
    if version >= (2, 15):
        flags += ["reorder_for_locality_in_training", "aten_distributed_optimizations.enable_simple_overlap"]
    assert inductor.order_patches(inductor_config.get_config_copy()) == dict.fromkeys(flags, False)


def test_a_flag_that_torch_should_have_is_missed_aloud_and_once(caplog: pytest.LogCaptureFixture) -> None:
    known = KEEP_ORDER_FLAGS.keys() - {"reorder_for_locality"}
    for _ in range(2):
        assert inductor.order_patches(known).keys() == known
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "has no torch._inductor.config.reorder_for_locality. " in record.getMessage()


def test_a_flag_of_a_later_torch_is_not_missed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KEEP_ORDER_FLAGS, "of_later", "99.0")
    assert "of_later" not in inductor.order_patches(inductor_config.get_config_copy())
    assert caplog.records == []
