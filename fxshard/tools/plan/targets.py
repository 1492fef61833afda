"""The models that `fxshard plan` takes: a builder function, a built-in shape, a config file of Hugging Face."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fxshard.cost.optimizer_step import OptimizerBuilder
from fxshard.errors import ConfigError, MissingExtraError, nearest
from fxshard.inspect import target
from fxshard.plan.optimizers import OPTIMIZERS
from fxshard.tools.plan.shapes import SHAPES, decoder, inputs


def builder(name: str, *, sequence: int, checkpointing: str = "none") -> Callable[[int], Any]:
    """Return what builds the model that `name` means (`my_module:build`, a shape, a `config.json`) for a batch size."""
    if name in SHAPES:
        return lambda batch: (decoder(SHAPES[name], sequence, checkpointing), inputs(batch, sequence), {})
    if checkpointing != "none":
        raise ConfigError("--checkpointing is for built-in shapes; your model's code says what it computes again.")
    if name.endswith(".json"):
        return _hugging_face(Path(name), sequence)
    if ":" in name:
        return lambda batch: _built(name, batch)
    raise ConfigError(
        f"{name!r} is no model to plan: give MODULE:FUNCTION, a config.json of Hugging Face or one of "
        f"{', '.join(SHAPES)} (did you mean {nearest(name, SHAPES)!r}?)."
    )


def optimizers_of(name: str) -> OptimizerBuilder:
    """Return what makes the optimizers that `name` means of a sharded model: a key of `OPTIMIZERS`, or a function."""
    if ":" not in name and name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ConfigError(f"{name!r} is no optimizer to plan: give {known}, or MODULE:FUNCTION that takes the model.")
    return OPTIMIZERS.get(name) or target.function_of(name, "return optimizers of a model", gives=("model",))


def _built(name: str, batch: int) -> Any:
    function = target.function_of(name, "return (model, args)", gives=("batch",))
    return function(batch=batch) if "batch" in inspect.signature(function).parameters else function()


def _hugging_face(path: Path, sequence: int) -> Callable[[int], Any]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtraError("transformers", "hf") from error
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.")
    try:
        config = AutoConfig.for_model(**json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no config of a model that transformers knows: {error}.") from error
    config.use_cache = False
    if sequence > (most := getattr(config, "max_position_embeddings", None) or sequence):
        raise ConfigError(f"{path} has {most} positions (max_position_embeddings), and --sequence is {sequence}.")

    def build(batch: int) -> Any:
        with torch.device("meta"):
            try:
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
            except ValueError as error:
                raise ConfigError(
                    f"{path}: {str(error)[:200]}. Write a MODULE:FUNCTION that builds what is no causal language model."
                ) from error
        tokens, labels = inputs(batch, sequence)
        return model, (), {"input_ids": tokens, "labels": labels}

    return build
