"""Streams and groups of their own change no bit, on real ranks: against the same training without them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxshard
from fxshard import MixedPrecisionPolicy
from fxshard.errors import ConfigError
from fxshard.hardware import BUILTIN
from fxshard.testing import emulated_link
from tests import graphs
from tests.numerics.generated_code import Blocks, compiled
from tests.numerics.harness import (
    EAGER,
    FSDP2,
    Run,
    backward_of_one_loss,
    compare,
    compile_module,
    fxshard_system,
    shard_and_compile,
    sharded,
    train,
)
from tests.numerics.microbatches import with_no_sync
from tests.numerics.models import MLP, rows
from tests.numerics.scenarios import REGRESSION, SCENARIOS
from tests.pairwise import slow
from tests.ranks import two_ranks

BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
MODES = ("nccl", "side", "off")


def same_bits(ours: Run, reference: Run) -> None:
    compare(ours, reference, rtol=0, atol=0)


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("mode", ["side", slow("off")])
@pytest.mark.parametrize("shard_kwargs", [{}, BF16], ids=["fp32", "bf16"])
def test_interprets_as_fsdp2_does(shard_kwargs: dict[str, Any], mode: str) -> None:
    scenario = replace(REGRESSION, shard_kwargs=shard_kwargs, backward=with_no_sync)
    same_bits(train(scenario, fxshard_system(streams=mode)), train(scenario, FSDP2))


@pytest.mark.slow
@two_ranks(timeout=240)
@pytest.mark.parametrize(
    ("dtype", "bucket", "backward"),
    [
        (torch.float32, "auto", backward_of_one_loss),
        slow(torch.float32, "auto", with_no_sync),
        slow(torch.float32, "unit", with_no_sync),
        slow(torch.float64, "auto", with_no_sync),
        slow(torch.float64, "unit", with_no_sync),
    ],
)
def test_compiled_code_computes_the_same_with_any_streams(
    dtype: torch.dtype, bucket: str, backward: Callable[[Run, int], Tensor]
) -> None:
    """To the bit, or where Inductor fuses other things, to a rounding."""
    kwargs = BF16 if dtype is torch.float32 else {}
    scenario = replace(REGRESSION, shard_kwargs=kwargs, backward=backward)
    nccl, side, off = (
        train(scenario, fxshard_system(dtype=dtype, lower="inductor", streams=mode, bucket=bucket)) for mode in MODES
    )
    same_bits(off, nccl)
    tolerance = 1e-12 if dtype is torch.float64 else 2**-7  # a rounding of bfloat16
    compare(side, nccl, rtol=tolerance, atol=tolerance, params=False)


def groups_in(model: nn.Module) -> dict[str, set[str]]:
    """The groups on which the graphs of a model gather and reduce."""
    found: dict[str, set[str]] = {"all_gather": set(), "reduce_scatter": set()}
    for stage in fxshard.explanation_of(model).graphs.values():
        for node in list(stage.values())[-1].graph.nodes:
            name = str(node.target)
            for kind in found:
                if kind in name and "_c10d_functional" in name:
                    found[kind].add(str(node.args[-1]))
    return found


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("lower", ["eager", slow("inductor")])
def test_reductions_have_a_group_of_their_own(lower: str) -> None:
    scenario = replace(SCENARIOS["a group for reductions"], backward=with_no_sync)
    ours = train(scenario, fxshard_system(lower=lower))
    groups = groups_in(ours.model)
    assert groups["all_gather"].isdisjoint(groups["reduce_scatter"])
    assert all(len(names) == 1 for names in groups.values())
    expected = train(replace(scenario, prepare=shard_and_compile), fxshard_system(lower=lower))
    same_bits(ours, expected)


@two_ranks
def test_the_one_line_form_takes_the_group_as_an_option() -> None:
    torch.manual_seed(0)
    model = MLP()
    run = compile_module(model, {"lower": "eager", "separate_reduce_scatter_group": True})
    x, y = rows()(0, dist.get_rank())
    loss: Tensor = (run(x) - y).square().mean()
    loss.backward()
    groups = groups_in(run)
    assert groups["all_gather"].isdisjoint(groups["reduce_scatter"])


@two_ranks
def test_a_model_has_one_group_however_it_is_enabled() -> None:
    model = sharded(MLP())
    for module in (*model.blocks, model):
        cast(fxshard.ShardedModule, module).set_separate_reduce_scatter_group()
    units = fxshard.sharding.sharded_module.units_under(model)
    assert len(units) > 2
    assert len({unit.plan.reducing_group for unit in units}) == 1


@two_ranks
def test_the_group_has_the_timeout_of_the_meshs() -> None:
    model = MLP()
    fxshard.fully_shard(model)
    cast(fxshard.ShardedModule, model).set_separate_reduce_scatter_group()
    (unit,) = fxshard.sharding.sharded_module.units_under(model)
    groups: list[Any] = [unit.mesh.get_group(), unit.groups.reduce]
    own, twin = (group._get_backend(torch.device("cpu")).options._timeout for group in groups)
    assert twin == own


@two_ranks
def test_ranks_that_name_other_units_are_told_so() -> None:
    model = MLP()
    fxshard.fully_shard(model.blocks[0])
    fxshard.fully_shard(model)
    chosen = model if dist.get_rank() else model.blocks[0]
    with pytest.raises(ConfigError, match=r"makes a group for unit .* All ranks of the mesh must call it alike"):
        cast(fxshard.ShardedModule, chosen).set_separate_reduce_scatter_group(recurse=False)


def test_groups_without_a_backend_have_twins_too() -> None:
    with emulated_link(4) as link:
        model = nn.Linear(4, 4)
        fxshard.fully_shard(model, mesh=link.mesh)
        model.set_separate_reduce_scatter_group()  # type: ignore[operator]
        compile_module(model, EAGER)(torch.ones(2, 4)).sum().backward()
        assert [transfer.op for transfer in link.transfers] == ["all_gather", "reduce_scatter"]


@two_ranks
def test_a_group_of_one_rank_alone_does_not_stop_ranks_from_making_one_together() -> None:
    """A script may log in a group of rank 0: torch then names the next group of both ranks otherwise on each."""
    dist.new_group([0])
    model: Any = fxshard.fully_shard(nn.Linear(4, 4))
    model.set_separate_reduce_scatter_group(True)
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[2.0] * 4] * 4


@two_ranks
def test_enabling_twice_makes_one_group_and_disabling_takes_it_back() -> None:
    model = MLP()
    fxshard.fully_shard(model)
    assert isinstance(model, fxshard.ShardedModule)
    (unit,) = fxshard.sharding.sharded_module.units_under(model)
    shared = unit.plan.reducing_group
    model.set_separate_reduce_scatter_group()
    first = unit.plan.reduce_group
    model.set_separate_reduce_scatter_group()
    assert unit.plan.reduce_group == first
    model.set_separate_reduce_scatter_group(False)
    assert unit.plan.reducing_group == shared != first


def test_explain_shows_the_group_of_reductions() -> None:
    options = {"separate_reduce_scatter_group": True}
    stages = fxshard.explain(graphs.TwoLayers(), torch.ones(2, 4), world_size=4, options=options).graphs
    (reduce, *_) = [n for n in list(stages["backward"].values())[-1].graph.nodes if "reduce_scatter" in str(n.target)]
    (gather, *_) = [n for n in list(stages["forward"].values())[-1].graph.nodes if "all_gather" in str(n.target)]
    assert (gather.args[-1], reduce.args[-1]) == ("fsdp", "fsdp_reduce")


@pytest.fixture
def dear_copies(tmp_path: Path) -> str:
    """Hardware on which nothing is copied: gradients are sent as they are."""
    spec = replace(BUILTIN["cpu"], gather_tensor_overhead=1e-9, reduce_tensor_overhead=1e-9)
    path = tmp_path / "hardware.json"
    path.write_text(spec.to_json())
    return str(path)


@pytest.mark.slow
def test_compiled_code_has_the_ops_and_keeps_what_they_read(dear_copies: str) -> None:
    """Of the ops in Inductor's code no input is freed before the wait for the result of the same index."""
    policy = BF16["mp_policy"]
    codes, _ = compiled(Blocks(), torch.randn(8, 16), streams="side", hardware=dear_copies, policy=policy)
    assert "fxshard.all_gather_on_stream" in codes[0]
    assert "fxshard.reduce_scatter_on_stream" in codes[1]
    copied, _ = compiled(Blocks(), torch.randn(8, 16), streams="side")
    assert "fxshard.copy_out" in copied[0]
    assert all(assert_kept_until_the_wait(code) for code in (*codes, copied[0]))


def assert_kept_until_the_wait(code: str) -> int:
    """Read Inductor's code line by line: what side streams read, what is deleted and waited for; count their ops."""
    num_ops = 0
    read: dict[str, list[str]] = {}  # variable -> what the op that made it reads, tensor by tensor
    for line in map(str.strip, code.splitlines()):
        name, _, value = line.partition(" = ")
        if "fxshard.copy_out" in value or "_on_stream.default" in value:
            read[name] = [_variable(tensor) for tensor in _first_argument(value)]
            num_ops += 1
        elif value.partition("[")[0] in read and value.endswith("]"):
            source, _, index = value[:-1].partition("[")
            read[name] = [read[source][int(index)]]
        elif line.startswith("del "):
            read.pop(line[4:], None)  # a list, whose results have names of their own
            assert line[4:] not in {tensor for tensors in read.values() for tensor in tensors}, line
        elif "wait_tensor" in line:
            read.pop(_variable(_first_argument(line)[0]), None)
    return num_ops


def _first_argument(call: str) -> list[ast.expr]:
    node = ast.parse(call.partition(";")[0]).body[0]
    assert isinstance(node, ast.Expr)
    assert isinstance(node.value, ast.Call)
    first = node.value.args[0]
    return first.elts if isinstance(first, ast.List) else [first]


def _variable(expression: ast.expr) -> str:
    """The tensor in an expression, which may be a view of it."""
    return next(n.id for n in ast.walk(expression) if isinstance(n, ast.Name) and n.id != "reinterpret_tensor")
