"""Models that accelerate prepares: with its FSDP2 plugin and `adopt`, or sharded before."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

import fxshard
from tests.integrations.llama import accelerate_state, accelerator_with_fsdp2, llama, sequences
from tests.numerics.harness import EAGER, compile_module
from tests.pairwise import slow
from tests.ranks import two_ranks
from tests.state.helpers import shared_folder

STEPS = 3


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any, call: Any) -> list[float]:
    """Train for two epochs as accelerate's users do; return this rank's losses and norms."""
    told = []
    for _ in range(2):
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = call(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    told.append(getattr(norm, "full_tensor", lambda norm=norm: norm)().item())
                optimizer.step()
                optimizer.zero_grad()
                told.append(loss.item())
    return told


def prepared(accelerator: Any) -> tuple[Any, Any, Any]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(sequences(16), batch_size=2)  # type: ignore[arg-type]
    return tuple(accelerator.prepare(model, optimizer, loader))


def eagerly() -> list[float]:
    with accelerator_with_fsdp2(gradient_accumulation_steps=2) as accelerator:
        model, optimizer, loader = prepared(accelerator)
        assert isinstance(model, FSDPModule)
        return train(accelerator, model, optimizer, loader, model)


@two_ranks
@pytest.mark.parametrize(("regional", "options"), [(False, {}), slow(True, {}), slow(False, {"regional": True})])
def test_an_adopted_model_trains_like_the_plugins(regional: bool, options: dict[str, Any]) -> None:
    """With accumulation and clipping; also where accelerate has compiled its blocks, and where we compile them."""
    dynamo = TorchDynamoPlugin(backend="eager", use_regional_compilation=True) if regional else None
    with accelerator_with_fsdp2(gradient_accumulation_steps=2, dynamo_plugin=dynamo) as accelerator:
        model, optimizer, loader = prepared(accelerator)
        assert isinstance(model, FSDPModule)
        model = fxshard.adopt(model)
        ours = train(accelerator, model, optimizer, loader, compile_module(model, options=EAGER | options))
        assert not isinstance(model, FSDPModule)
    assert ours == pytest.approx(eagerly(), rel=1e-6 if options else 0, abs=0)  # around blocks sums have another order


@two_ranks
def test_an_adopted_model_is_saved_and_loaded_by_accelerate() -> None:
    with accelerator_with_fsdp2() as accelerator, shared_folder() as folder:
        model, optimizer, loader = prepared(accelerator)
        model = fxshard.adopt(model)
        compiled = compile_module(model, options=EAGER)
        train(accelerator, model, optimizer, loader, compiled)
        accelerator.save_state(str(folder))
        expected = train(accelerator, model, optimizer, loader, compiled)
        accelerator.load_state(str(folder))
        assert train(accelerator, model, optimizer, loader, compiled) == expected
        whole = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            assert whole.keys() == llama().state_dict().keys()
            assert all(type(value) is torch.Tensor for value in whole.values())


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("sharded", [True, False])
def test_accelerate_prepares_what_belongs_to_a_model_of_ours(sharded: bool) -> None:
    """Sharded by `fully_shard`, or by its first call; the model itself is not given to `prepare`."""
    reference = eagerly()
    with accelerate_state():
        accelerator = Accelerator(cpu=True)
        model = llama()
        if sharded:
            for block in model.model.layers:
                fxshard.fully_shard(block)
            fxshard.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader: Any = DataLoader(sequences(16), batch_size=2)  # type: ignore[arg-type]
        optimizer, loader = accelerator.prepare(optimizer, loader)
        compiled: Any = compile_module(model, options=EAGER)
        tokens = next(iter(loader))
        loss = compiled(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
    assert loss.item() == pytest.approx(reference[0], rel=1e-6)
