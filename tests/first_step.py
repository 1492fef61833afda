"""Train a step of a small model, for the server that forks ranks: they have what a first step loads and caches.

A process that is forked from one with threads may hang, and autograd has a thread for each GPU.
"""

from __future__ import annotations

import os

import torch
from torch import hub

from tests.fake_ranks import fake_ranks
from tests.numerics.harness import fxshard_system, start, train_step
from tests.numerics.scenarios import REGRESSION

if torch.cuda.device_count() == 0:
    torch.set_num_threads(1)
    vars(hub)["tqdm"].monitor_interval = 0  # FX's interpreter makes progress bars, and they a thread
    with fake_ranks(2):
        train_step(start(REGRESSION, fxshard_system(dtype=torch.float64)), 0)
    assert len(os.listdir("/proc/self/task")) == 1
