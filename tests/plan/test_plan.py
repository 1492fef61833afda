"""Plans of small models: what a step costs and holds, against numbers worked out by hand, and what is refused."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from fxshard.errors import ConfigError
from fxshard.hardware import HardwareSpec, load
from fxshard.plan.plan import FSDP2, SCHEDULES, Plan, PlanSettings, plan, require_whole_nodes
from fxshard.plan.run import PlannedSchedule, RunCost, cost_of
from fxshard.tools.plan import shapes
from fxshard.tools.plan.targets import builder
from tests.plan.models import LAYERS, ROWS, WIDTH, Stack, build
from tests.plan.traces import traced

WEIGHT = WIDTH * WIDTH
PARAMETERS = (LAYERS + 1) * WEIGHT + WIDTH
ACTIVATION = ROWS * WIDTH * 4
DEVICE = load("h100-sxm")


def cost(
    layers: int = LAYERS,
    schedule: PlannedSchedule = FSDP2,
    device: HardwareSpec = DEVICE,
    accumulation: int = 1,
    reduces_each: bool = True,
) -> RunCost:
    given = {"accumulation": accumulation, "reduces_each": reduces_each}
    return cost_of(traced(layers, schedule), device, schedule, tokens=ROWS, dtype=torch.float32, **given)  # type: ignore[arg-type]


def test_a_step_has_three_times_the_flops_of_its_forward() -> None:
    found = cost()
    assert found.flops == 3 * 2 * ROWS * PARAMETERS
    assert found.mfu == pytest.approx(found.flops / found.seconds / 67e12)
    assert found.tokens_per_second == pytest.approx(ROWS / found.seconds)


def test_shards_and_optimizer_state_are_counted_to_the_byte() -> None:
    rows_of_last = 1  # of one row, which is padded to one for each rank
    shard = 4 * ((LAYERS + 1) * WEIGHT // 8 + rows_of_last * WIDTH)
    assert {name: cost().memory[name] for name in ("parameters", "optimizer")} == {
        "parameters": shard,
        "optimizer": 2 * shard,
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_further_block_holds_its_input_until_backward(schedule: str) -> None:
    short, deep = (cost(layers, SCHEDULES[schedule]) for layers in (LAYERS, LAYERS + 4))
    mask = ROWS * WIDTH if schedule == "fxshard" else 0  # Inductor's decomposition of relu keeps where it was zero
    assert deep.memory["activations"] - short.memory["activations"] == 4 * (ACTIVATION + mask)


def test_the_allocator_reserves_at_least_what_is_held() -> None:
    found = cost()
    assert found.reserved >= found.peak_bytes
    assert found.reserved % 2**21 == 0


def test_gradients_are_held_from_the_first_of_several_microbatches_on() -> None:
    assert cost(accumulation=2).record.standing["gradients"] == cost().memory["parameters"]


def test_microbatches_take_their_time_and_the_optimizer_steps_once() -> None:
    one, three = cost(), cost(accumulation=3)
    assert three.optimizer == one.optimizer
    assert three.flops == 3 * one.flops
    assert three.tokens == 3 * one.tokens
    assert 2 * one.seconds < three.seconds < 3 * one.seconds


def test_reducing_once_exposes_less_than_reducing_in_each_microbatch() -> None:
    slow = dataclasses.replace(DEVICE, link_latency=1e-3)
    each, last = (cost(accumulation=4, reduces_each=each, device=slow) for each in (True, False))
    assert sum(last.exposed.values()) < sum(each.exposed.values())


def test_a_slow_link_is_what_limits_a_run() -> None:
    slow = cost(device=dataclasses.replace(DEVICE, link_bandwidth=1e6))
    assert slow.limit in slow.exposed
    assert slow.fits


def test_a_run_that_does_not_fit_says_what_takes_most() -> None:
    small = cost(device=dataclasses.replace(DEVICE, memory_gib=1e-3))
    assert not small.fits
    assert small.limit == max(small.memory, key=lambda name: small.memory[name])


def test_streams_of_their_own_share_no_memory() -> None:
    together = dataclasses.replace(FSDP2, is_fsdp2=False)
    apart, shared = (cost_of(traced(LAYERS, FSDP2), DEVICE, how, tokens=ROWS) for how in (FSDP2, together))
    assert apart.reserved > shared.reserved


@functools.cache
def planned() -> Plan:
    settings = PlanSettings(param_dtype=torch.float32, schedules=("FSDP2",))
    return plan(build, world_sizes=[8, (2, 8)], batches=[1], settings=settings)


def test_a_plan_has_a_run_for_each_batch_world_size_and_schedule() -> None:
    runs = [(run.world_size, run.batch, run.schedule, run.cost.tokens) for run in planned().runs]
    assert runs == [(8, 1, "FSDP2", ROWS), ((2, 8), 1, "FSDP2", ROWS)]


def test_replicas_are_averaged_over_the_network() -> None:
    alone, replicated = planned().runs
    assert replicated.cost.seconds > alone.cost.seconds
    streams = [{each.stream for each in run.cost.record.intervals} for run in (replicated, alone)]
    assert streams[0] > streams[1]


def test_the_table_has_a_line_for_each_run() -> None:
    console = Console(width=160, record=True)
    console.print(planned())
    text = console.export_text()
    assert "Stack on h100-sxm" in text
    assert text.count("FSDP2") == 2
    assert "2x8" in text


@pytest.mark.parametrize(
    ("world_size", "given", "message"),
    [
        (12, {}, "1 x 12 ranks do not divide into nodes of 8 ranks"),
        ((4, 6), {}, "4 x 6 ranks do not divide into nodes of 8 ranks"),
        (8, {"hardware": "h100-smx"}, "did you mean 'h100-sxm'"),
        (8, {"settings": PlanSettings(schedules=("fsdp3",))}, "there is no schedule fsdp3; there are fxshard, FSDP2"),
    ],
)
def test_what_cannot_be_planned_is_refused(world_size: int, given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(build, world_sizes=[world_size], batches=[1], **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [4, (2, 4), 16, (4, 2), (2, 8), 4096])
def test_a_mesh_that_fills_its_nodes_or_a_part_of_one_can_be_planned(ranks: int | tuple[int, int]) -> None:
    require_whole_nodes(ranks, DEVICE)


# ---- models by name


@pytest.mark.parametrize("name", sorted(shapes.SHAPES))
def test_a_built_in_shape_has_the_parameters_that_its_name_says(name: str) -> None:
    counts = {"llama3-8b": 8.03e9, "llama3-70b": 70.55e9, "llama3-405b": 405.85e9, "gpt-7b": 6.66e9, "moe-8x7b": 46.7e9}
    model = shapes.decoder(shapes.SHAPES[name], 2048)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(counts[name], rel=2e-3)


SMALL = {
    kind: shapes.DecoderShape(kind, 2, 64, 4, 4 if kind == "gpt" else 2, 128, 512, 4 * (kind == "moe"))
    for kind in ("llama", "gpt", "moe")
}


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("how", shapes.CHECKPOINTING)
def test_shapes_of_each_kind_train(kind: str, how: str) -> None:
    model = shapes.decoder(SMALL[kind], 16, how).to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.normal_(tensor.data, std=0.02)
    tokens = torch.randint(512, (2, 16))
    loss = model(tokens, tokens)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMALL)
def test_shapes_of_each_kind_are_planned(kind: str) -> None:
    found = plan(
        lambda batch: (shapes.decoder(SMALL[kind], 16), shapes.inputs(batch, 16), {}), world_sizes=[8], batches=[2]
    )
    assert all(run.cost.seconds > 0 for run in found.runs)


@pytest.mark.slow
def test_checkpointing_holds_less_and_computes_more() -> None:
    shape = SMALL["llama"]._replace(layers=4)
    found = {
        how: plan(
            lambda batch, how=how: (shapes.decoder(shape, 256, how), shapes.inputs(batch, 256), {}),  # type: ignore[misc]
            world_sizes=[8],
            batches=[2],
            settings=PlanSettings(schedules=("FSDP2",)),
        )
        .runs[0]
        .cost
        for how in shapes.CHECKPOINTING
    }
    assert found["full"].memory["activations"] < found["selective"].memory["activations"]
    assert found["selective"].memory["activations"] < found["none"].memory["activations"]
    assert found["full"].compute > found["selective"].compute > found["none"].compute
    assert len({each.flops for each in found.values()}) == 1


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A small Llama."""
    fields = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**fields, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}))
    return path


def test_a_config_of_hugging_face_makes_a_model_that_returns_its_loss(config: Path) -> None:
    model, args, kwargs = builder(str(config), sequence=16)(2)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (args, {name: tuple(each.shape) for name, each in kwargs.items()}) == (
        (),
        {"input_ids": (2, 16), "labels": (2, 16)},
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_config_that_cannot_take_the_sequence_or_is_no_language_model_is_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 2048 positions \(max_position_embeddings\), and --sequence is 4096"):
        builder(str(config), sequence=4096)
    config.write_text('{"model_type": "vit", "hidden_size": 64}')
    with pytest.raises(ConfigError, match=r"Write a MODULE:FUNCTION that builds what is no causal language model"):
        builder(str(config), sequence=16)(1)


@pytest.mark.slow
def test_a_config_of_hugging_face_is_planned(config: Path) -> None:
    found = plan(builder(str(config), sequence=16), world_sizes=[8], batches=[2])
    assert found.model == "LlamaForCausalLM"
    assert [run.cost.tokens for run in found.runs] == [32, 32]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama3-8", "'llama3-8' is no model to plan: .*did you mean 'llama3-8b'"),
        ("nowhere/config.json", "there is no file nowhere/config.json"),
        ("tests.plan.models:Stacks", "tests.plan.models has no 'Stacks'"),
    ],
)
def test_a_model_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        builder(name, sequence=16)(1)


def test_a_config_that_no_model_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "lama"}')
    with pytest.raises(ConfigError, match="is no config of a model that transformers knows"):
        builder(str(path), sequence=16)


def test_a_builder_that_takes_the_batch_size_is_given_it() -> None:
    _, (x,) = builder("tests.plan.models:build", sequence=16)(3)
    assert x.shape == (3 * ROWS, WIDTH)
    assert isinstance(Stack(0), nn.Module)
    with pytest.raises(ConfigError, match="--checkpointing is for built-in shapes"):
        builder("tests.plan.models:build", sequence=16, checkpointing="full")


def test_an_unknown_kind_of_checkpointing_is_refused() -> None:
    with pytest.raises(ConfigError, match="checkpointing must be one of none, full, selective, got 'some'"):
        shapes.decoder(SMALL["llama"], 16, "some")


def test_inputs_without_tensors_have_no_tokens() -> None:
    with pytest.raises(ConfigError, match="the model's inputs have no tensor"):
        plan(lambda batch: (Stack(0), (), {}), world_sizes=[8], batches=[1])
