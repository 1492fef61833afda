"""The demo's models and its text: real, and the same batches wherever they are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fxshard.errors import ConfigError, MissingExtraError
from fxshard.tools.demo.config import DemoConfig
from fxshard.tools.demo.gpt import GPT
from fxshard.tools.demo.llama import Llama
from fxshard.tools.demo.text import global_batch, read_corpus
from fxshard.tools.demo.train import build_model, state_bytes, unsharded_state_bytes


def test_gpt_has_about_five_million_parameters() -> None:
    assert 4.5e6 < sum(parameter.numel() for parameter in GPT(max_seq_len=128).parameters()) < 5.5e6


def test_gpt_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = GPT(max_seq_len=16, dim=32, num_layers=2)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 8:] = 0
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    first, again, other = (
        build_model(DemoConfig(ranks=2, device="cpu", out=tmp_path, seed=seed)).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[fqn], again[fqn]) for fqn in first)
    assert not all(torch.equal(first[fqn], other[fqn]) for fqn in first)


def test_state_is_counted_by_storage() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    assert state_bytes(model, optimizer) == model.weight.nbytes + model.bias.nbytes
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    step_counters = 2 * 4
    assert state_bytes(model, optimizer) == unsharded_state_bytes(model) + step_counters


def test_llama_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"transformers is not installed\. Type: python -m pip install"):
        Llama(max_seq_len=16)


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
