"""Graphs of units whose collectives an object of the user's does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests import graphs
from tests.graphs import Traced


class Comm:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, **given: Any) -> None:
        pass


COMM = Comm()


def give_comm(unit: Any) -> None:
    """Let one object do both kinds of collectives of a unit."""
    unit.set_custom_all_gather(COMM)
    unit.set_custom_reduce_scatter(COMM)


def by_object(**kwargs: Any) -> Traced:
    """Two units whose collectives an object does."""
    return graphs.two_layers(then=give_comm, **kwargs)
