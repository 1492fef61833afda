"""A fake process group of two ranks, in this process: enough for every error that comes before a collective.

Imports torch and pytest alone, as everything that a GPU machine runs.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import guards, trace_rules
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxshard import live_objects
from tests.drawn import is_drawn

THAW = vars(live_objects)["_thaw"]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know `--draw`, and `timeout` of pyproject.toml where pytest-timeout is not installed, as on a GPU machine."""
    parser.addoption("--draw", type=int, default=1, metavar="N", help="run one test in N, others at each commit")
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take; without pytest-timeout nobody looks")


def pytest_configure() -> None:
    """Have tests, and what they start, count on fxshard's table: graphs must not depend on the machine's noise.

    And keep pytest from listening to torch's structured trace: every graph would be printed for it.

    It listens to each logger that does not propagate, and torch prints for whoever listens to this one. With no other
    listener (TORCH_TRACE) nothing is printed, so nothing propagates.
    """
    os.environ["FXSHARD_CALIBRATE"] = "0"
    os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"  # read by the processes that a test starts
    torch._dynamo.config.run_gc_after_compile = False  # `settle` and `fake_group` collect after each test
    vars(guards)["profile_guard_manager"] = lambda *_: 0.0  # for a log, and it flushes the caches of the processor
    # `destroy_process_group` has Dynamo forget its tables of torch's functions, which it builds in a tenth of a second.
    vars(trace_rules)["clear_lru_cache"] = lambda: None
    logging.getLogger("torch.__trace").propagate = True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--draw` does not draw, of those that `-m` and `-k` have left."""
    one_in = config.getoption("--draw")
    if one_in < 1:
        raise pytest.UsageError(f"--draw must be at least 1, got {one_in}: it runs one test in so many.")
    left_out = [item for item in items if one_in > 1 and not is_drawn(item.nodeid, one_in=one_in)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking through what importing all tests has made, again and again.

    Nor is fxshard to look through it for what a test has made, as it does where a program has frozen its objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # objects; to compile makes many that stay
    vars(live_objects)["_thaw"] = lambda: None


@pytest.fixture
def thaws() -> Iterator[None]:
    """Have fxshard find frozen objects, too, as it does in programs: the functions of a test's module are frozen."""
    vars(live_objects)["_thaw"] = THAW
    yield
    pytest_collection_finish()


@pytest.fixture
def fake_group() -> Iterator[None]:
    """Pretend to be rank 0 of 2; collectives return at once and move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()
    pytest_collection_finish()


@pytest.fixture
def mesh(fake_group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (2,))
