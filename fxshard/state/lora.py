"""LoRA of PEFT as the base model has it: its names, and its weights with the active adapters added."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor, nn

from fxshard.errors import ConfigError

_FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True, eq=False)
class Merge:
    """What is added to one base weight."""

    layer: Any  # PEFT's, around the layer that has the weight
    adapters: Sequence[str]  # that are active and not in the weight yet

    def factors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield name, adapter and parameter of each factor."""
        for name in _FACTORS:
            for adapter in self.adapters:
                if adapter in (found := getattr(self.layer, name)):
                    factor = found[adapter]
                    is_module = isinstance(factor, nn.Module)
                    yield name, adapter, cast(Tensor, factor._parameters["weight"] if is_module else factor)

    def delta(self, factors: Sequence[Tensor]) -> Tensor:
        """Return the sum over the adapters, by PEFT's own formula; `factors` are whole, in the order of `factors()`."""
        given: dict[str, dict[str, Any]] = {name: {} for name in _FACTORS}
        for (name, adapter, _), factor in zip(self.factors(), factors, strict=True):
            given[name][adapter] = factor if "embedding" in name else SimpleNamespace(weight=factor)
        formula, layer = type(self.layer).get_delta_weight, _WithFactors(self.layer, given)
        first, *others = (formula(layer, adapter) for adapter in self.adapters)
        return cast(Tensor, sum(others, first))


class _WithFactors:
    """A layer of PEFT with other factors: those of a sharded one are not whole."""

    def __init__(self, layer: Any, factors: Mapping[str, Any]) -> None:
        self.__dict__ |= {"_layer": layer, **factors}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def base_name(model: nn.Module, name: str) -> tuple[str, Merge | None] | None:
    """Return what the base model calls a tensor of `model`, and what is added to it; `None` for what it lacks.

    It lacks adapters, and what an active adapter has replaced (`modules_to_save`).
    """
    module: nn.Module | None = model
    kept, merge, steps = [], None, name.split(".")
    while steps:
        step = steps.pop(0)
        if module is None or not (kind := _kind_of(module)):
            kept.append(step)
        elif kind == "layer":
            if step != "base_layer":
                return None
            merge = _merge_of(module, ".".join(kept)) if steps == ["weight"] else merge
        elif kind == "saved":
            active = None if module.disable_adapters else next(iter(cast(Any, module).active_adapters), None)
            if (step == "modules_to_save") != (active is not None) or (active is not None and steps[0] != active):
                return None
            if active is not None:
                module = cast(nn.Module, module._modules[step])
                step = steps.pop(0)
        module = None if module is None else module._modules.get(step)
    return ".".join(kept), merge


def _kind_of(module: nn.Module) -> str:
    """Return which part of PEFT a module is, empty for none: "model" is inside by one name, which the base lacks."""
    if (peft := sys.modules.get("peft")) is None:
        return ""
    tuners: Any = sys.modules["peft.tuners.tuners_utils"]
    if isinstance(module, peft.PeftModel | tuners.BaseTuner):
        return "model"
    if isinstance(module, sys.modules["peft.tuners.lora"].LoraLayer):
        return "layer"
    if isinstance(module, sys.modules["peft.utils.other"].ModulesToSaveWrapper):
        return "saved"
    if isinstance(module, tuners.BaseTunerLayer | sys.modules["peft.utils.other"].AuxiliaryTrainingWrapper):
        raise _refusal(type(module).__name__, "adapters of another kind than LoRA")
    return ""


def _merge_of(layer: Any, name: str) -> Merge | None:
    """Return what the active adapters of a layer add to its weight; raise `ConfigError` if that is not simple."""
    active = () if layer.disable_adapters else layer.active_adapters
    known = {*layer.lora_A, *layer.lora_embedding_A}
    adapters = [each for each in active if each in known and each not in layer.merged_adapters]
    if not adapters:
        return None
    lora: Any = sys.modules["peft.tuners.lora.layer"]
    if not isinstance(layer, lora.Linear | lora.Embedding | lora._ConvNd):
        raise _refusal(f"{name} ({type(layer).__name__})", "another layer than Linear, Embedding or a convolution")
    if any(each in layer.lora_variant or layer.lora_bias.get(each) for each in adapters):
        raise _refusal(name, "lora_bias, DoRA or another variant")
    return Merge(layer, adapters)


def _refusal(what: str, why: str) -> ConfigError:
    return ConfigError(f"merge_lora cannot merge {what}: it has {why}. Call model.merge_and_unload() before sharding.")
