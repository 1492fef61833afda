"""Hugging Face models with random weights train as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import fxshard
from tests.numerics.harness import (
    EAGER,
    Run,
    Scenario,
    Tools,
    check,
    check_against_unsharded,
    check_bitwise,
    check_close,
    check_inductor,
    compile_module,
)
from tests.numerics.models import VOCAB, tokens
from tests.pairwise import slow
from tests.ranks import two_ranks


def llama(key_value_heads: int = 4) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=52,
        num_attention_heads=4,
        num_key_value_heads=key_value_heads,
        vocab_size=VOCAB,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def llama_in_double(key_value_heads: int = 2) -> nn.Module:
    """Return a Llama whose norms compute in the dtype of their input; the original's go through fp32."""
    model = llama(key_value_heads)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(name, nn.RMSNorm(module.weight.shape, eps=1e-6))
    return model


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=32,
        n_head=4,
        vocab_size=VOCAB,
        n_positions=32,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)


def loss_of_logits(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_of_labels(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return model(input_ids=inputs, labels=inputs).loss


def shard_layers(model: nn.Module, tools: Tools) -> nn.Module:
    layers = model.get_submodule("model.layers" if "Llama" in type(model).__name__ else "transformer.h")
    for layer in layers.children():
        tools.shard(layer)
    tools.shard(model)
    return tools.compile(model)


def shard_layers_only(model: nn.Module, tools: Tools) -> nn.Module:
    uncompiled = replace(tools, system=replace(tools.system, backend=None))
    return shard_layers(model, uncompiled)


LLAMA = Scenario(model=llama, batch=tokens(), loss=loss_of_logits, prepare=shard_layers)
GPT2 = replace(LLAMA, model=gpt2)


@pytest.mark.slow
@two_ranks
def test_trains_llama() -> None:
    check_bitwise(LLAMA)
    check_against_unsharded(replace(LLAMA, model=llama_in_double))


@pytest.mark.slow
@two_ranks
def test_trains_llama_with_grouped_queries() -> None:
    # AOTAutograd takes the attention of grouped queries apart, also for torch's own "aot_eager".
    check_close(replace(LLAMA, model=llama_in_double))


@two_ranks
def test_trains_gpt2() -> None:
    check(GPT2)


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("model", [llama, slow(gpt2)])
def test_trains_on_the_loss_that_the_model_computes(model: type) -> None:
    check_bitwise(replace(LLAMA, model=model, loss=loss_of_labels))


@two_ranks
def test_trains_llama_in_eager_mode() -> None:
    check_bitwise(replace(LLAMA, prepare=shard_layers_only))


def checkpointed_llama() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model


@pytest.mark.slow
@two_ranks
def test_trains_llama_with_its_own_gradient_checkpointing() -> None:
    check_bitwise(replace(LLAMA, model=checkpointed_llama))


def generate(run: Run, step: int) -> None:
    run.model.eval()
    prompt = torch.arange(1, 7).view(2, 3)
    mask = torch.ones_like(prompt)
    generated = run.model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    assert generated.shape == (2, 7)
    run.extra.append(generated)
    run.model.train()


@pytest.mark.slow
@two_ranks
def test_generates_between_training_steps() -> None:
    check_bitwise(replace(LLAMA, before_step=generate))
    check_against_unsharded(replace(LLAMA, model=llama_in_double, before_step=generate))


@two_ranks
def test_generates_between_training_steps_in_eager_mode() -> None:
    check_bitwise(replace(LLAMA, before_step=generate, prepare=shard_layers_only))


@pytest.mark.slow
@two_ranks
def test_trains_llama_from_one_line() -> None:
    def one_line(model: nn.Module, tools: Tools) -> nn.Module:
        return tools.compile(model) if tools.system.ours else shard_layers(model, tools)

    check_bitwise(replace(LLAMA, prepare=one_line))


@pytest.mark.slow
@two_ranks(timeout=240)
def test_trains_llama_through_inductor() -> None:
    check_inductor(LLAMA)


@pytest.mark.slow
@two_ranks(timeout=240)
def test_trains_gpt2_through_inductor() -> None:
    check_inductor(GPT2)


def as_it_is(model: nn.Module) -> nn.Module:
    return model


class Wrapper(nn.Module):
    """As of adapters: it has the model's methods, and no parameter of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Any:
        return self.model(input_ids=input_ids, use_cache=False)


@two_ranks
@pytest.mark.parametrize("one_line", [False, True])
@pytest.mark.parametrize("wrap", [slow(as_it_is), Wrapper])
def test_refuses_to_resize_sharded_embeddings(wrap: Callable[[nn.Module], nn.Module], one_line: bool) -> None:
    """After a forward that leaves them unsharded it would resize a copy, and lose it."""
    ids = torch.arange(1, 7).view(1, 6)
    model: Any = gpt2()
    around: Any = wrap(model)
    around = compile_module(around, options=EAGER) if one_line else fxshard.fully_shard(around)
    with torch.no_grad():
        before = around(input_ids=ids).logits
        for asked in ((VOCAB + 8,), (VOCAB - 8,), (None, VOCAB - 1)):
            for each in (model, model.transformer):
                with pytest.raises(fxshard.ConfigError, match=r"resize.*: .*\.wte\.weight is sharded.*before"):
                    each.resize_token_embeddings(*asked)
        for same in ((), (VOCAB,), (VOCAB - 1, VOCAB)):
            assert model.resize_token_embeddings(*same) is model.transformer.wte
        torch.testing.assert_close(around(input_ids=ids).logits, before)


@two_ranks
def test_resizes_embeddings_that_are_not_sharded() -> None:
    model: Any = gpt2()
    fxshard.fully_shard(model, ignored_params={model.transformer.wte.weight})
    model.resize_token_embeddings(VOCAB + 8)
    assert model(input_ids=torch.arange(1, 7).view(1, 6)).logits.shape == (1, 6, VOCAB + 8)
