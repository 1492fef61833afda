"""What a test or a benchmark of sharded training needs: an emulated link between ranks, and one to the host."""

from __future__ import annotations

from fxshard.testing.emulated_host import EmulatedHost, emulated_host
from fxshard.testing.emulated_link import EmulatedLink, emulated_link
from fxshard.testing.link_engine import LinkTransfer as Transfer
from fxshard.testing.link_engine import Speed

__all__ = ["EmulatedHost", "EmulatedLink", "Speed", "Transfer", "emulated_host", "emulated_link"]
