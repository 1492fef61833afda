"""What one run of the demo is told to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODELS: Final = ("gpt", "hf:llama")
LOWERINGS: Final = ("inductor", "eager")
MAX_DIFFERENCE: Final = 1e-3  # between the sharded and the unsharded loss of any step


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The options of `fxshard demo`; `fxshard demo --help` says what each does."""

    ranks: int
    device: str  # "cpu" (gloo) or "cuda" (NCCL, one GPU per rank)
    out: Path  # Folder that receives the graphs; it exists
    steps: int = 20
    model: str = "gpt"
    batch_size: int = 2
    seq_len: int = 128
    lower: str = "inductor"
    seed: int = 0
    compare: bool = True
    stall_s: float = 300.0  # Seconds without a message from any rank after which the demo gives up

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train on in one step."""
        return self.ranks * self.batch_size * self.seq_len
