"""What a measurement has to say about where it was made."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import fxshard
from fxshard.cost.measured import processor


def facts() -> dict[str, Any]:
    """Processor, GPU, versions, and the commit if fxshard runs from a checkout."""
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fxshard_commit": _commit(),
    }


def _commit() -> str | None:
    """Short hash, with "+changes" if the sources differ from it; `None` outside a checkout of fxshard."""
    folder = Path(fxshard.__file__).parent
    if not (folder.parent / ".git").exists():
        return None
    try:
        commit = _git(folder, "rev-parse", "--short", "HEAD")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "--", ".", "../passes") else "")
    except (OSError, subprocess.CalledProcessError):  # no git, or not trusted with the folder
        return None


def _git(folder: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=True)
    return done.stdout.strip()
