"""What a test or a benchmark of sharded training needs: an emulated link between ranks."""

from __future__ import annotations

from fxshard.testing.emulated_link import EmulatedLink, emulated_link
from fxshard.testing.link_engine import LinkTransfer as Transfer
from fxshard.testing.link_engine import Speed

__all__ = ["EmulatedLink", "Speed", "Transfer", "emulated_link"]
