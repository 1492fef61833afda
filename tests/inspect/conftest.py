"""What tests of explanations share."""

from __future__ import annotations

import pytest

from fxshard import Explanation
from tests.graphs import TwoLayers
from tests.inspect.models import explained


@pytest.fixture
def two_layers() -> Explanation:
    """Of two layers on 64 ranks; to be read alone."""
    return explained(TwoLayers, 64)
