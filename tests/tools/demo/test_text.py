"""The demo's text: real, and the same batches wherever they are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxshard.errors import ConfigError
from fxshard.tools.demo.text import global_batch, read_corpus


def test_the_standard_library_is_enough_text() -> None:
    corpus = read_corpus(1)
    assert corpus.dtype == torch.uint8
    assert len(corpus) > 1 << 20
    assert b"import" in bytes(corpus[:100_000].tolist())


def test_sources_follow_each_other_by_name(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_bytes(b"world")
    (tmp_path / "a.py").write_bytes(b"hello ")
    (tmp_path / "c.txt").write_bytes(b"!")
    assert bytes(read_corpus(11, tmp_path).tolist()) == b"hello world"


def test_a_folder_with_too_little_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"hello")
    with pytest.raises(ConfigError, match=rf"sources in {tmp_path} are 5 bytes of text, need at least 6\."):
        read_corpus(6, tmp_path)


def test_targets_are_the_bytes_that_follow() -> None:
    corpus = torch.arange(200, dtype=torch.uint8)
    tokens, targets = global_batch(corpus, step=3, seed=1, num_rows=4, seq_len=16)
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens + 1, targets)


def test_batches_depend_on_step_and_seed_alone() -> None:
    corpus = read_corpus(1)
    first, again = (global_batch(corpus, step=5, seed=0, num_rows=4, seq_len=16)[0] for _ in range(2))
    assert torch.equal(first, again)
    for step, seed in ((6, 0), (5, 1)):
        assert not torch.equal(first, global_batch(corpus, step=step, seed=seed, num_rows=4, seq_len=16)[0])
