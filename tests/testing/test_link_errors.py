"""What a link between GPUs says where there is none, and to who asks it for the wrong thing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxshard.errors import ConfigError
from fxshard.testing import emulated_link

W = 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is missing here is there")
def test_a_link_between_gpus_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"needs a GPU and a torch built for CUDA.*Install them, or leave device out"):
        emulated_link(W, device="cuda", ctas=8).__enter__()
    assert not dist.is_initialized()


@pytest.mark.parametrize("ctas", [0, -1, 1.0, True, "16"])
def test_thread_blocks_are_counted_and_only_on_a_gpu(ctas: Any) -> None:
    with pytest.raises(ConfigError, match="ctas must be a positive int, got"):
        emulated_link(W, device="cuda", ctas=ctas).__enter__()
    with pytest.raises(ConfigError, match="ctas is for device='cuda', and the device of this link is 'cpu'"):
        emulated_link(W, ctas=16).__enter__()
