"""Whether a refusal leaves a model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Check that the model keeps its classes and its parameters."""
    classes = [type(module) for module in model.modules()]
    parameters = dict(model.named_parameters())
    yield
    assert [type(module) for module in model.modules()] == classes
    found = dict(model.named_parameters())
    assert found.keys() == parameters.keys()
    assert all(found[name] is p for name, p in parameters.items())
