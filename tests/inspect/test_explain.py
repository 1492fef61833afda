"""`fxshard.explain` and `fxshard.explanation_of`: what they show, where they stop and how they refuse."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

import fxshard
from fxshard import ConfigError, Explanation, UnsupportedGraph, explain, explanation_of
from fxshard.options import parse
from fxshard.passes.pipeline import DEFAULT, chosen, default
from fxshard.sharding.sharded_module import ShardedModule
from tests.graphs import Layer, TwoLayers
from tests.inspect.models import EAGER, Broken, Doing, X, add_decliner, compiled_by_us, explained, names, shard
from tests.pairwise import slow


def passes_of(explanation: Explanation, frame: int = 0) -> dict[str, list[str]]:
    return {stage: list(records) for stage, records in explanation.frames[frame].graphs.items()}


# ---- what it shows


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_shows_every_stage_and_pass_of_a_training_step(lower: str) -> None:
    explanation = explain(TwoLayers(), X, world_size=64, options={"lower": lower})
    pipeline = chosen(parse({"lower": lower}))
    last = {"forward_last": names(pipeline.last), "backward_last": names(pipeline.last)} if pipeline.last else {}
    assert passes_of(explanation) == {
        "dynamo": names(pipeline.dynamo),
        "joint": names(DEFAULT.joint),
        "forward": names(pipeline.split),
        "backward": names(pipeline.split),
        "forward_codegen": names(pipeline.codegen),
        "backward_codegen": names(pipeline.codegen),
        **last,
    }
    record = explanation.graphs["forward"]["insert_collectives"]
    assert isinstance(record.graph, fx.Graph)
    assert record.changed
    assert "c10d.all_gather_into_tensor(" in str(record)
    assert ", 64, 'fsdp')" in str(record)
    assert "fxshard.unshard" in str(explanation.graphs["forward"]["captured"])


@pytest.mark.parametrize("lower", ["eager", slow("inductor")])
def test_shows_what_compiling_for_real_makes(lower: str, mesh: DeviceMesh) -> None:
    model = shard(TwoLayers(), mesh)
    shown = explain(model, X, options={"lower": lower, "hardware": "cpu"})  # else it shows what GPUs would run
    compiled = compiled_by_us(model, lower=lower)
    compiled(X).sum().backward()
    real = explanation_of(model)
    assert passes_of(shown) == passes_of(real)
    group = next(iter(real.frames[0].plan.units.values())).group
    for stage, records in real.graphs.items():
        for name, record in records.items():
            text = str(record).replace(f"'{group}'", "'fsdp'").replace(f"of 2@{group} ", "of 2@fsdp ")
            assert str(shown.graphs[stage][name]) == text, (stage, name)


def test_without_gradients_shows_the_inference_graph() -> None:
    with torch.no_grad():
        explanation = explain(TwoLayers(), X, world_size=2, options=EAGER)
    codegen = names(default(lower="eager").codegen)
    assert passes_of(explanation) == {
        "dynamo": names(DEFAULT.dynamo),
        "inference": names(DEFAULT.split),
        "inference_codegen": codegen,
    }


def test_evaluation_mode_with_gradients_shows_the_training_graphs_that_torch_compiles() -> None:
    explanation = explain(TwoLayers().eval(), X, world_size=2, options=EAGER)
    assert [stage for stage in explanation.graphs if not stage.endswith("_codegen")] == [
        "dynamo",
        "joint",
        "forward",
        "backward",
    ]


def test_a_record_of_a_pass_that_changed_nothing_shares_its_graph() -> None:
    records = explained(TwoLayers, 2).graphs["forward"]
    assert not records["dedup_unshard"].changed
    assert records["dedup_unshard"].graph is records["captured"].graph


def test_later_passes_do_not_edit_the_graphs_of_earlier_ones() -> None:
    records = explained(TwoLayers, 2).graphs["backward"]
    assert "reduce_grad" in str(records["captured"])
    assert "reduce_grad" not in str(records["insert_collectives"])


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_shows_the_users_passes_and_what_they_declined(lower: str) -> None:
    explanation = explain(TwoLayers(), X, world_size=2, options={"lower": lower, "passes": add_decliner})
    assert passes_of(explanation)["forward"] == [*names(chosen(parse({"lower": lower})).split), "decliner"]
    assert passes_of(explanation)["backward_last"] == ["captured", "decliner"]
    (declined,) = explanation.graphs["forward"]["decliner"].declined
    assert declined.why == "it is only an input"
    assert explanation.frames[0].final_stages() == ["forward_last", "backward_last"]


def test_stops_before_code_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*_: Any) -> None:
        raise AssertionError("code was generated")

    monkeypatch.setattr("torch._inductor.graph.GraphLowering.codegen", generate)
    model = Doing(lambda x: cast(Tensor, torch._dynamo.graph_break() or x) * 2)
    explain(model, X, world_size=2, options={"passes": add_decliner})
    with pytest.raises(Exception, match="code was generated"):
        torch.compile(Layer())(X)


# ---- several frames


def test_a_graph_break_makes_a_frame() -> None:
    explanation = explained(Broken, 2)
    assert len(explanation.frames) == 2
    assert list(explanation.frames[0].plan.units) == ["layers.0"]
    assert "layers_1" in str(explanation.frames[1].graphs["forward"]["insert_collectives"])
    for attribute in ("graphs", "stats"):
        with pytest.raises(ConfigError, match=rf"captured in 2 frames.* Use \.frames\[i\]\.{attribute}"):
            getattr(explanation, attribute)


def test_a_graph_without_sharded_parameters_is_no_frame() -> None:
    model = Doing(lambda x: cast(Tensor, torch._dynamo.graph_break() or x) * 2)
    explanation = explain(model, X.clone().requires_grad_(), world_size=2)
    assert len(explanation.frames) == 1


# ---- the model and its surroundings


def test_leaves_the_model_and_the_process_as_they_were() -> None:
    model = TwoLayers()
    model(X).sum().backward()
    parameters = list(model.parameters())
    before = [(p, p.clone(), p.grad) for p in parameters]
    random = torch.get_rng_state()
    explain(model, X, world_size=64)
    assert [p is q for p, q in zip(model.parameters(), parameters, strict=True)] == [True] * 4
    assert all(torch.equal(p, value) and p.grad is grad for p, value, grad in before)
    assert type(model) is TwoLayers
    assert torch.equal(random, torch.get_rng_state())
    assert not dist.is_initialized()


def test_leaves_process_groups_alone(mesh: DeviceMesh) -> None:
    live = dist.group.WORLD
    explain(TwoLayers(), X, world_size=64, options={"passes": add_decliner})
    assert dist.group.WORLD is live
    assert dist.get_world_size() == 2
    with pytest.raises(RuntimeError, match="Could not resolve the process group"):
        torch._C._distributed_c10d._resolve_process_group(cast(Any, "fsdp"))


def test_an_explanation_keeps_no_module_alive() -> None:
    def modules() -> int:
        gc.collect()
        return sum(isinstance(found, nn.Module) for found in gc.get_objects())

    model = TwoLayers()
    before = modules()
    explanation = explain(model, X, world_size=2, options=EAGER)
    assert modules() == before
    assert explanation.frames


@pytest.mark.slow
@pytest.mark.usefixtures("thaws")
def test_a_compiled_model_goes_on_without_compiling_again(mesh: DeviceMesh) -> None:
    model = shard(TwoLayers(), mesh)
    compiled = compiled_by_us(model, lower="eager")
    compiled(X).sum().backward()
    for _ in range(10):  # more often than Dynamo's recompile limit
        explain(compiled, X, options=EAGER)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(X).sum().backward()
    assert len(explanation_of(compiled).frames) == 1


@pytest.mark.slow
def test_a_model_that_fits_in_no_memory_is_explained_in_little() -> None:
    class Block(nn.Module):  # of the shape of Llama 7B
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(4096, 4096, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(4096, 11008, bias=False) for _ in range(2))
            self.down = nn.Linear(11008, 4096, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (32, 128)).transpose(1, 2) for p in (self.q, self.k, self.v))
            x = x + self.o(
                nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
            return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(32000, 4096), *(Block() for _ in range(4)), nn.Linear(4096, 32000))
        tokens = torch.zeros(1, 4096, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    explanation = explain(model, tokens, world_size=512)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    assert explanation.stats["forward"]["insert_collectives"].evaluate().gathered_bytes > 2**32
    assert grown_mib < 500


# ---- refusals


def test_a_sharded_model_is_explained_on_its_own_ranks(mesh: DeviceMesh) -> None:
    model = shard(TwoLayers(), mesh)
    assert explain(model, X, options=EAGER).world_size == 2
    with pytest.raises(ConfigError, match="asked for 64 ranks, but the model is sharded over 2"):
        explain(model, X, world_size=64)
    with pytest.raises(
        ConfigError, match=r"options reshard_after_forward only act where torch.compile shards the model"
    ):
        explain(model, X, options={**EAGER, "reshard_after_forward": True})


def test_options_of_the_one_line_form_act_on_an_unsharded_model() -> None:
    explanation = explain(TwoLayers(), X, world_size=2, options={**EAGER, "param_dtype": torch.bfloat16})
    assert "bf16[20] = c10d.all_gather" in str(explanation.graphs["forward"]["insert_collectives"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loewr": "eager"}, "Did you mean 'lower'"),
        ({"hardware": "h10"}, "did you mean 'h100'"),
        ({"passes": lambda pipeline: None}, "must return a Pipeline"),
        ({"inductor": {"no_such_flag": True}}, "has no 'no_such_flag'"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        explain(TwoLayers(), X, world_size=2, options=options)


def test_errors_of_the_users_forward_surface_as_they_are() -> None:
    def refuse(x: Tensor) -> Tensor:
        raise LookupError("no such expert")

    with pytest.raises(LookupError, match=r"^'?no such expert'?$"):
        explain(Doing(refuse), X, world_size=2)
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        explain(Doing(lambda x: x @ torch.ones(3, 3)), X, world_size=2)


@pytest.mark.parametrize(
    "do", [lambda x: x * x.sum().item(), lambda x: x[x[:, 0] > 0], lambda x: x + 1 if x.sum() > 0 else x]
)
def test_a_forward_that_needs_values_is_refused_with_its_line(do: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        UnsupportedGraph, match=r"forward of Doing reads values of a tensor \(aten\..* at .*test_explain"
    ):
        explain(Doing(do), X, world_size=2)


def test_a_sharded_model_is_explained_with_its_prefetch_lists(mesh: DeviceMesh) -> None:
    model = shard(TwoLayers(), mesh)
    first, second = (cast(ShardedModule, model.get_submodule(f"layers.{i}")) for i in range(2))
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch(None)
    shown = explain(model, X, options=EAGER).frames[0].plan
    compiled_by_us(model, **EAGER)(X)
    real = explanation_of(model).frames[0].plan
    for plan in (shown, real):
        assert plan.units["layers.0"].forward_prefetch == ("layers.1",)
        assert plan.units["layers.1"].backward_prefetch is None
        assert plan.units["layers.1"].forward_prefetch == ()


# ---- explanation_of


def test_a_real_models_explanation_follows_what_is_compiled_later(mesh: DeviceMesh) -> None:
    model = shard(TwoLayers(), mesh)
    compiled = compiled_by_us(model, lower="eager", hardware="cpu")
    loss = compiled(X).sum()
    explanation = explanation_of(compiled)
    assert (explanation.model, explanation.world_size, explanation.units) == ("TwoLayers", 2, ("layers.0", "layers.1"))
    assert explanation.hardware.name == "cpu"
    loss.backward()
    assert "backward" in explanation.graphs
    with torch.no_grad():
        compiled(X)
    assert len(explanation_of(compiled).frames) == 2


def test_a_model_that_has_not_been_called_has_no_explanation_yet(mesh: DeviceMesh) -> None:
    model = shard(TwoLayers(), mesh)
    with pytest.raises(ConfigError, match="nothing has been compiled for TwoLayers yet"):
        explanation_of(compiled_by_us(model))


def test_the_public_names_are_those_of_the_package() -> None:
    assert {"Explanation", "explain", "explanation_of"} <= set(fxshard.__all__)
