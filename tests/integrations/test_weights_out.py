"""LoRA of peft comes out merged, and a server of TRL gets what was trained."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from transformers.pytorch_utils import Conv1D

import fxshard
from tests.integrations.llama import llama
from tests.pairwise import slow
from tests.ranks import two_ranks
from tests.state.helpers import refused
from tests.state.states import assert_same


class GPT2Like(nn.Module):
    """A transposed linear layer, as GPT-2 has it, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        transposed: Any = Conv1D
        self.table, self.transposed, self.conv = nn.Embedding(10, 6), transposed(9, 6), nn.Conv1d(6, 8, 3)
        self.head = nn.Linear(9, 4)


LORA: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "saved modules": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["norm"], "use_rslora": True}),
    "other layers": (GPT2Like, {"target_modules": ["table", "transposed", "conv"], "fan_in_fan_out": True}),
}


def adapted(name: str, **options: Any) -> Any:
    """Return the same model on every rank, with adapters that change something."""
    build, given = LORA[name]
    torch.manual_seed(1)
    model = get_peft_model(build(), LoraConfig(r=2, lora_alpha=8, **(given | options)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    return model


def merged(model: Any) -> dict[str, Tensor]:
    """Return what peft makes of it: a tied weight once."""
    state = dict(model.merge_and_unload().state_dict())
    state.pop("lm_head.weight", None)
    return state


@two_ranks
@pytest.mark.parametrize("name", list(LORA))
@pytest.mark.parametrize("system", ["ours", slow("fsdp2"), "unsharded"])
def test_lora_comes_out_merged(name: str, system: str) -> None:
    model = adapted(name)
    names = list(adapted(name).state_dict())
    if system != "unsharded":
        shard: Any = fxshard.fully_shard if system == "ours" else fsdp2_fully_shard
        for layer in model.base_model.model.model.layers if name != "other layers" else ():
            shard(layer)
        shard(model)
    weights = fxshard.full_weights(model, merge_lora=True, bucket_mib=0.01, ranks=0)
    expected = merged(adapted(name))
    assert weights.names == tuple(expected)
    found = {each: weight.clone() for each, weight in weights}
    assert found.keys() == (expected.keys() if dist.get_rank() == 0 else set())
    for each, weight in found.items():
        torch.testing.assert_close(weight, expected[each])
    as_it_is = dict(fxshard.full_weights(model))
    assert list(as_it_is) == [each for each in names if not each.endswith("lm_head.weight")]


@two_ranks
def test_merges_active_adapters_only() -> None:
    model = adapted("llama")
    model.add_adapter("second", LoraConfig(r=1, target_modules=["q_proj"], init_lora_weights=False))
    fxshard.fully_shard(model)

    def weight(*adapters: str) -> Tensor:
        model.base_model.set_adapter(list(adapters))
        return dict(fxshard.full_weights(model, merge_lora=True))["model.layers.0.self_attn.q_proj.weight"]

    first, second, both = weight("default"), weight("second"), weight("default", "second")
    with model.disable_adapter():
        base = weight("default")
    torch.testing.assert_close(both - base, first - base + second - base)
    assert not torch.equal(first, base)
    assert not torch.equal(second, base)


@two_ranks
def test_refuses_what_it_cannot_merge() -> None:
    with_dora = fxshard.fully_shard(adapted("llama", use_dora=True))
    assert "lora_bias, DoRA or another variant" in refused(fxshard.full_weights, with_dora, merge_lora=True)
    other = fxshard.fully_shard(adapted("llama", target_modules=[], target_parameters=["down_proj.weight"]))
    assert "no Linear, Embedding or convolution" in refused(fxshard.full_weights, other, merge_lora=True)


class Client:
    """Stands in for TRL's `VLLMClient`: it sends weights, and the server's model loads them."""

    def __init__(self) -> None:
        self.model = llama()
        nn.init.zeros_(self.model.lm_head.weight)
        self.requests = 0

    def update_named_params(self, params: list[tuple[str, Tensor]]) -> None:
        self.requests += 1
        self.model.load_state_dict({name: weight.clone() for name, weight in params}, strict=False)


@two_ranks
def test_a_server_of_trl_gets_the_weights_of_a_step() -> None:
    """As in `docs/guides/weights_out.md`."""
    model = llama()
    for module in (*model.model.layers, model):
        fxshard.fully_shard(module)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    client = Client() if dist.get_rank() == 0 else None
    for bucket in fxshard.full_weights(model, bucket_mib=0.03, ranks=0).buckets():
        assert client is not None
        client.update_named_params(list(bucket))
    if client is not None:
        assert client.requests > 2
        assert_same({n: 2 * w for n, w in client.model.state_dict().items()}, dict(llama().state_dict()))
