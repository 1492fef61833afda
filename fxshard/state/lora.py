"""LoRA of PEFT as the base model has it: its names, and its weights with the active adapters added."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from fxshard.errors import ConfigError

_FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


class Merge(NamedTuple):
    """What is added to one base weight."""

    layer: Any  # PEFT's, around the layer that has the weight
    adapters: Sequence[str]  # that are active and not in the weight yet

    def factors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield name, adapter and parameter of each factor."""
        for name, adapter in itertools.product(_FACTORS, self.adapters):
            if adapter in (found := getattr(self.layer, name)):
                factor = found[adapter]
                yield name, adapter, factor.get_parameter("weight") if isinstance(factor, nn.Module) else factor

    def delta(self, factors: Sequence[Tensor]) -> Tensor:
        """Return the sum over the adapters, by PEFT's own formula; `factors` are whole, in the order of `factors()`."""
        layer = _WithFactors(self.layer)
        for (name, adapter, _), factor in zip(self.factors(), factors, strict=True):
            vars(layer)[name][adapter] = factor if "embedding" in name else SimpleNamespace(weight=factor)
        first, *others = (type(self.layer).get_delta_weight(layer, adapter) for adapter in self.adapters)
        return cast(Tensor, sum(others, first))


class _WithFactors:
    """A layer of PEFT with other factors: those of a sharded one are not whole."""

    def __init__(self, layer: Any) -> None:
        self.of_peft = layer
        vars(self).update({name: {} for name in _FACTORS})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_peft, name)


def base_name(model: nn.Module, name: str) -> tuple[str, Merge | None] | None:
    """Return what the base model calls a tensor of `model`, and what is added to it; `None` for what it lacks."""
    module: nn.Module | None = model
    kept, merge, steps = [], None, name.split(".")
    while steps:
        step = steps.pop(0)
        if module is None or not (kind := _kind_of(module)):
            kept.append(step)
        elif kind == "other":
            raise _refusal(".".join(kept), type(module), "no LoRA")
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
    """Return which part of PEFT a module is, empty for none: a "model" has another inside, whose name goes."""
    if (peft := sys.modules.get("peft")) is None:
        return ""
    tuners, wrappers = sys.modules["peft.tuners.tuners_utils"], sys.modules["peft.utils.other"]
    kinds = {"model": (peft.PeftModel, tuners.BaseTuner), "layer": sys.modules["peft.tuners.lora"].LoraLayer}
    kinds |= {"saved": wrappers.ModulesToSaveWrapper}
    kinds |= {"other": (tuners.BaseTunerLayer, wrappers.AuxiliaryTrainingWrapper)}
    return next((kind for kind, classes in kinds.items() if isinstance(module, classes)), "")


def _merge_of(layer: Any, name: str) -> Merge | None:
    """Return what the active adapters of a layer add to its weight; raise `ConfigError` if that is not simple."""
    active = () if layer.disable_adapters else layer.active_adapters
    adapters = [each for each in active if each in layer.scaling and each not in layer.merged_adapters]
    lora: Any = sys.modules["peft.tuners.lora.layer"]
    kinds = lora.Linear | lora.Embedding | lora.Conv1d | lora.Conv2d | lora.Conv3d
    variants = [each for each in adapters if each in layer.lora_variant or layer.lora_bias.get(each)]
    if adapters and (variants or not isinstance(layer, kinds)):
        raise _refusal(name, type(layer), "lora_bias, DoRA or another variant, or no Linear, Embedding or convolution")
    return Merge(layer, adapters) if adapters else None


def _refusal(name: str, kind: type, why: str) -> ConfigError:
    text = f"merge_lora cannot merge {name} ({kind.__name__}): {why}."
    return ConfigError(f"{text} Call model.merge_and_unload() before sharding.")
