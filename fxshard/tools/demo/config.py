"""What one run of the demo is told to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fxshard.errors import ConfigError

MODELS: Final = ("gpt", "hf:llama")
LOWERINGS: Final = ("inductor", "eager")
MAX_DIFFERENCE: Final = 1e-3  # between the sharded and the unsharded loss of any step


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The options of `fxshard demo`; `fxshard demo --help` says what each does."""

    ranks: int
    device: str  # "cpu" (gloo) or "cuda" (NCCL, one GPU per rank)
    out: Path  # Folder that receives the graphs; it exists
    steps: int = 30
    model: str = "gpt"
    batch_size: int = 4
    seq_len: int = 128
    lower: str = "inductor"
    seed: int = 0
    compare: bool = True
    stall_s: float = 300.0  # Seconds without a message from any rank after which the demo gives up

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        for name, least in (("ranks", 1), ("steps", 2), ("batch_size", 1), ("seq_len", 2)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}.")
        for name, choices in (("model", MODELS), ("lower", LOWERINGS), ("device", ("cpu", "cuda"))):
            if (chosen := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {chosen!r}.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train on in one step."""
        return self.ranks * self.batch_size * self.seq_len
