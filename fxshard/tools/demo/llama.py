"""A small random-weight Llama from Hugging Face transformers."""

from __future__ import annotations

import importlib.util

from torch import Tensor, nn

from fxshard.errors import MissingExtraError
from fxshard.tools.demo.text import VOCAB_SIZE


def check_installed() -> None:
    """Raise MissingExtraError if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("transformers", "dev")


class Llama(nn.Module):
    """`transformers.LlamaForCausalLM` over bytes, about 5M parameters, giving logits alone."""

    def __init__(self, max_seq_len: int) -> None:
        super().__init__()
        check_installed()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB_SIZE,
                hidden_size=256,
                intermediate_size=688,
                num_hidden_layers=6,
                num_attention_heads=4,
                max_position_embeddings=max_seq_len,
                use_cache=False,
            )
        )

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers."""
        layers: nn.ModuleList = self.llama.model.layers
        return layers

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 `[batch, seq]` to logits `[batch, seq, 256]`."""
        logits: Tensor = self.llama(input_ids=tokens).logits
        return logits
