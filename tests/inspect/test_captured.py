"""Estimates for a device that the graphs were not captured for say so, and name the kernels that may differ."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fxshard import Explanation, explain, explanation_of, fully_shard, hardware
from fxshard.inspect import html
from fxshard.inspect.captured import remark
from tests.inspect.models import EAGER, compiled_by_us

KERNEL = "aten._scaled_dot_product_flash_attention_for_cpu"
REMARK = f"captured for cpu: h100 may run other kernels than {KERNEL}, {KERNEL}_backward"
TOKENS = torch.ones(2, 8, 16)


class Attention(nn.Module):
    """Attention of which the kernel depends on the device, and on `dropout`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(16, 16), dropout

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=self.dropout)


def explained(dropout: float = 0.0, **options: str) -> Explanation:
    return explain(Attention(dropout), TOKENS, world_size=2, options={**EAGER, **options})


def shown(explanation: Explanation) -> str:
    """The tables, without their lines' ends and spaces."""
    console = Console(width=300, record=True, file=open("/dev/null", "w"))
    console.print(explanation)
    return " ".join(console.export_text().split())


def test_every_view_names_the_kernels_of_another_device() -> None:
    explanation = explained()
    assert repr(explanation).splitlines()[-1] == REMARK
    numbers = f"times are estimates for h100 (assumed); {explanation.choice}; {REMARK}"
    assert f"{numbers} Schedules" in shown(explanation)
    page = html.page(explanation)
    assert f"{numbers}." in page
    assert "<dt>captured for</dt><dd>cpu</dd>" in page


def test_printed_graphs_name_the_kernels_that_they_have(capsys: pytest.CaptureFixture[str]) -> None:
    explained().print("insert_collectives")
    assert re.findall(r"^# captured for cpu: .*", capsys.readouterr().out, re.MULTILINE) == [
        f"# captured for cpu: h100 may run other kernels than {KERNEL}",
        f"# captured for cpu: h100 may run other kernels than {KERNEL}_backward",
    ]


def test_says_so_where_attention_has_become_products(capsys: pytest.CaptureFixture[str]) -> None:
    explanation = explained(dropout=0.1)
    assert repr(explanation).splitlines()[-1] == "captured for cpu: h100 may run other kernels"
    explanation.print("insert_collectives")
    assert "captured for" not in capsys.readouterr().out


def test_says_nothing_where_the_estimates_are_for_that_device(capsys: pytest.CaptureFixture[str]) -> None:
    explanation = explained(hardware="cpu")
    explanation.print("insert_collectives")
    assert "may run other kernels" not in repr(explanation) + shown(explanation) + capsys.readouterr().out
    assert explanation.device == "cpu"


def test_a_model_that_trains_was_captured_for_where_it_is(mesh: DeviceMesh) -> None:
    model = Attention()
    fully_shard(model, mesh=mesh)
    compiled = compiled_by_us(model, **EAGER)
    compiled(TOKENS)
    assert explanation_of(compiled).device == "cpu"
    assert "may run other kernels" not in repr(explanation_of(compiled))


@pytest.mark.parametrize(
    ("device", "name", "text"),
    [
        ("cuda", "h100", ""),
        ("cuda", "cpu", "captured for cuda: cpu may run other kernels"),
        ("cpu", "h200", "captured for cpu: h200 may run other kernels"),
    ],
)
def test_takes_hardware_called_cpu_for_one_and_all_else_for_none(device: str, name: str, text: str) -> None:
    assert remark(device, hardware.BUILTIN[name], []) == text
