"""The optimizers of planned runs, by the names that the command line has for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from fxshard.compile.one_line.units import blocks_of
from fxshard.cost.optimizer_step import OptimizerBuilder
from fxshard.runtime.whole_matrices import WholeMatrices


def adamw(model: nn.Module) -> list[Optimizer]:
    """AdamW for all, fused."""
    return _fused_adamw(model.parameters())


def _fused_adamw(parameters: Iterable[nn.Parameter]) -> list[Optimizer]:
    """Return one, or none where no parameter is trained."""
    if not (given := [parameter for parameter in parameters if parameter.requires_grad]):
        return []
    made = torch.optim.AdamW(given)
    made.param_groups[0]["fused"] = True  # a new one would refuse parameters on the meta device
    return [made]


def muon(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices of blocks, each of stacked experts alone, and a fused AdamW for the rest."""
    matrices = [p for block in blocks_of(model) for p in block.parameters() if p.requires_grad and p.dim() > 1]
    taken = {*matrices}
    made = torch.optim.Muon([nn.Parameter(torch.empty(1, 1))])
    made.param_groups.clear()  # a new one refuses what has three dimensions
    made.add_param_group({"params": matrices})
    whole = WholeMatrices(made, rows=lambda p: [1] * len(p) if p.dim() > 2 else None)
    return [whole, *_fused_adamw(p for p in model.parameters() if p not in taken)]


OPTIMIZERS: Mapping[str, OptimizerBuilder] = {"AdamW": adamw, "Muon": muon}
"""Name -> what makes them of a sharded model."""
