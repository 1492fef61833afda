"""What tests of the runtime share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fxshard.testing import EmulatedLink, emulated_link


@pytest.fixture
def link() -> Iterator[EmulatedLink]:
    """A link of two emulated ranks, to which nothing comes compiled, and which nothing compiled outlives."""
    torch._dynamo.reset()
    with emulated_link(2) as link:
        yield link
        torch._dynamo.reset()
