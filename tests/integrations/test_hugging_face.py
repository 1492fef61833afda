"""What Hugging Face's models do besides training: `generate`, `save_pretrained`, peft's adapters."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import fxshard
from tests.integrations.llama import llama, sequences
from tests.numerics.harness import EAGER, compile_module
from tests.pairwise import slow
from tests.ranks import two_ranks
from tests.state.helpers import shared_folder


def shard(model: Any, blocks: list[Any], *, adopted: bool) -> Any:
    """Shard block by block: by ours, or by FSDP2 and taken over."""
    fully_shard: Any = fsdp2_fully_shard if adopted else fxshard.fully_shard
    for module in (*blocks, model):
        fully_shard(module)
    return fxshard.adopt(model) if adopted else model


@two_ranks
@pytest.mark.parametrize("adopted", [True, slow(False)])
@pytest.mark.parametrize("given", [True, False])
def test_saves_what_the_whole_model_would(given: bool, adopted: bool) -> None:
    with shared_folder() as folder:
        model = llama()
        if dist.get_rank() == 0:
            model.save_pretrained(folder / "whole")
        model = shard(model, list(model.model.layers), adopted=adopted)
        if given:
            weights = fxshard.full_state_dict(model)
            if dist.get_rank() == 0:
                model.save_pretrained(folder / "ours", state_dict=weights)
        else:
            model.save_pretrained(folder / "ours", is_main_process=dist.get_rank() == 0)
        dist.barrier()
        names = ("config.json", "generation_config.json")
        ours, whole = ([json.loads((folder / f / name).read_text()) for name in names] for f in ("ours", "whole"))
        assert ours == whole
        assert ours[0]["architectures"] == ["LlamaForCausalLM"]
        found, expected = (LlamaForCausalLM.from_pretrained(folder / f).state_dict() for f in ("ours", "whole"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@two_ranks
@pytest.mark.parametrize("adopted", [True, slow(False)])
def test_generates_what_the_whole_model_does(adopted: bool) -> None:
    """Before and after a compile."""
    model = llama()
    tokens = torch.stack(sequences(2))
    expected = model.generate(tokens, max_new_tokens=4, do_sample=False)
    model = shard(model, list(model.model.layers), adopted=adopted)
    assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), expected)
    compiled: Any = compile_module(model, options=EAGER)
    compiled(input_ids=tokens, labels=tokens).loss.backward()
    assert torch.equal(compiled.generate(tokens, max_new_tokens=4, do_sample=False), expected)


@two_ranks
@pytest.mark.parametrize("registered", ["ours", slow("torch's, then adopted")])
def test_an_encoder_generates_through_a_registered_method(registered: str) -> None:
    """T5 reads the embedding, which is in the root's unit, in its encoder, which `generate` calls by itself."""
    config = T5Config(vocab_size=64, d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, pad_token_id=0)
    torch.manual_seed(0)
    model: Any = T5ForConditionalGeneration(config)
    model.eval()
    model.generation_config.decoder_start_token_id = 0
    tokens = torch.stack(sequences(2))
    expected = model.generate(tokens, max_new_tokens=4, do_sample=False)
    adopted = registered != "ours"
    fully_shard: Any = fsdp2_fully_shard if adopted else fxshard.fully_shard
    for module in (*model.encoder.block, *model.decoder.block, model):
        fully_shard(module)
    if adopted:
        torch.distributed.fsdp.register_fsdp_forward_method(model, "generate")
        fxshard.adopt(model)
    else:
        fxshard.register_fsdp_forward_method(model, "generate")
    assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False), expected)


@two_ranks
@pytest.mark.parametrize("how", ["units", slow("one line"), "adopted"])
def test_adapters_of_peft_train_alone(how: str) -> None:
    def trained(how: str) -> list[float]:
        torch.manual_seed(3)
        model: Any = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
        if how in ("units", "adopted"):
            shard(model, list(model.base_model.model.model.layers), adopted=how == "adopted")
        elif how == "fsdp2":
            for module in (*model.base_model.model.model.layers, model):
                fsdp2_fully_shard(module)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        call: Any = model if how == "fsdp2" else compile_module(model, options=EAGER)
        losses = []
        for step in range(3):
            tokens = torch.stack(sequences(12)[4 * step + 2 * dist.get_rank() :][:2])
            loss = call(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = trained("fsdp2")
    assert trained(how) == pytest.approx(expected, rel=1e-6)
    assert expected[2] != expected[0]
