"""What a test or a benchmark of sharded training needs: an emulated link between ranks."""

from __future__ import annotations

from fxshard.testing.emulated_link import EmulatedLink as EmulatedLink
from fxshard.testing.emulated_link import emulated_link as emulated_link
from fxshard.testing.link_engine import Transfer as Transfer
