"""What the commands share: values of flags, devices and folders."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from fxshard.errors import ConfigError

EXIT_PROBLEM = 1  # it ran to the end, but not well
EXIT_ERROR = 2  # as argparse


def at_least(least: int) -> Callable[[str], int]:
    """What argparse turns a whole number into, `least` or more."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, got {text!r}")
        return int(text)

    return parse


def mesh_size(text: str) -> int | tuple[int, int]:
    """What argparse turns `8`, or `4x8`, into."""
    numbers = text.split("x")
    if len(numbers) > 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"must be a number of ranks, or replicas x shards such as 4x8, got {text!r}")
    return int(text) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1]))


def positive(text: str) -> float:
    """What argparse turns a number above 0 into."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def device_for(wanted: str) -> str:
    """Turn --device cpu, cuda or auto into "cpu" or "cuda", or raise a ConfigError if there is no GPU."""
    import torch

    num_gpus = torch.cuda.device_count()
    if wanted == "cuda" and not num_gpus:
        raise ConfigError("--device cuda needs a GPU that torch can use, and found none; use --device cpu.")
    return "cuda" if num_gpus and wanted != "cpu" else "cpu"


def num_ranks(wanted: int | None, device: str, *, instead: str = "--device cpu") -> int:
    """How many ranks to start here: `wanted`, or one per GPU, or 2 on the CPU; `instead` is for too few GPUs."""
    import torch

    num_gpus = torch.cuda.device_count()
    if device == "cpu":
        return 2 if wanted is None else wanted
    if wanted is not None and wanted > num_gpus:
        raise ConfigError(f"--ranks {wanted} needs {wanted} GPUs, and there are {num_gpus}; use {instead}.")
    return num_gpus if wanted is None else wanted


def in_folder(path: Path) -> Path:
    """A file to write later, or a ConfigError if it has no folder or cannot be written."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write {path.name} to.")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: it is a folder, or you may not write there.")
    return path


def output_folder(wanted: Path | None, command: str) -> Path:
    """The folder `--out`, made if it is not there, or a ConfigError; by default a new temporary one."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix=f"fxshard-{command}-"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {wanted} cannot be used as a folder: {error.strerror}.") from error
    return wanted.resolve()
