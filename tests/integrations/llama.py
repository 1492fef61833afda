"""A small Llama of Hugging Face, its batches, and accelerate on the CPU, for the tests of this folder."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 64
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    tie_word_embeddings=True,
    use_cache=False,
    pad_token_id=0,
)


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def sequences(count: int, length: int = 8) -> list[Tensor]:
    """Return sequences of tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(1, VOCAB, (count, length), generator=generator))


@contextmanager
def accelerate_state() -> Iterator[None]:
    """Let accelerate begin anew, and forget."""
    before = dict(os.environ)
    # As torchrun says it.
    os.environ.update(LOCAL_WORLD_SIZE=str(dist.get_world_size()), MASTER_ADDR="localhost")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Tokens, and what is to be predicted, as the Trainer takes them."""

    def __init__(self, tokens: Sequence[Tensor] | Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def use_fsdp2(accelerator: Any, **kwargs: Any) -> None:
    """Have accelerate use its FSDP2 plugin, which it would not on the CPU by itself."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **kwargs,
    )
    for state in (accelerator.state, PartialState()):
        vars(state).update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)


@contextmanager
def accelerator_with_fsdp2(**kwargs: Any) -> Iterator[Any]:
    with accelerate_state():
        accelerator = Accelerator(cpu=True, **kwargs)
        use_fsdp2(accelerator, state_dict_type="SHARDED_STATE_DICT")
        yield accelerator
