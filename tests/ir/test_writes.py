"""A forward that writes into a parameter is refused, however it writes: the write would go to the gathered copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from fxshard import explain, fully_shard
from fxshard.errors import UnsupportedGraph
from fxshard.ir import writes
from tests.numerics.harness import EAGER, compile_module
from tests.ranks import two_ranks

REFUSED = r"(?s)changed in place.*weight.*after the optimizer's step"


@torch.library.custom_op("fxshard_tests::halve", mutates_args=("weight",))
def halve(weight: Tensor) -> None:
    weight.mul_(0.5)


@halve.register_fake
def _(weight: Tensor) -> None:
    return None


def sets_a_row(w: Tensor) -> None:
    with torch.no_grad():
        w[0] = 0


def assigns_data(w: Tensor) -> None:
    w.data = w.data * 2


def writes_after_a_graph_break(w: Tensor) -> None:
    torch._dynamo.graph_break()
    with torch.no_grad():
        w.mul_(2)


def writes_data_after_a_graph_break(w: Tensor) -> None:
    torch._dynamo.graph_break()
    w.data.mul_(2)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def writes_outside_of_any_graph(w: Tensor) -> None:
    with torch.no_grad():
        w.mul_(2)


WITHOUT_GRADIENTS: dict[str, Callable[[Tensor], object]] = {
    "zeroes_a_view": lambda w: w[0].zero_(),
    "scales_a_flat_view": lambda w: w.view(-1).mul_(2),
    "scales_with_foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "writes_to_out": lambda w: torch.clamp(w, -1, 1, out=w),
    "scales_rows_one_by_one": lambda w: [row.mul_(2) for row in w.unbind(0)],
    "fills_by_index": lambda w: w.index_put_((torch.tensor([0]),), torch.tensor(0.0)),
    "applies_an_activation": lambda w: nn.functional.relu(w, inplace=True),
    "calls_a_custom_op": lambda w: halve(w),
}
WAYS: dict[str, Callable[[Tensor], object]] = {
    "clamps_data": lambda w: w.data.clamp_(-1, 1),
    "copies_into_a_detached_one": lambda w: w.detach().copy_(torch.ones_like(w)),
    "replaces_the_storage": lambda w: w.detach().set_(torch.zeros(8, 8)),  # type: ignore[call-overload] # its stubs know storages alone
    "initialises": nn.init.zeros_,
    **{name: torch.no_grad()(write) for name, write in WITHOUT_GRADIENTS.items()},
    **{
        write.__name__: write
        for write in (
            sets_a_row,
            assigns_data,
            writes_after_a_graph_break,
            writes_data_after_a_graph_break,
            writes_outside_of_any_graph,
        )
    },
}


class Writes(nn.Module):
    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner, self.write = nn.Linear(8, 8), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.inner.weight)
        return self.inner(x)


class Checkpointed(Writes):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def run(model: nn.Module, mesh: DeviceMesh) -> None:
    compile_module(fully_shard(model, mesh=mesh), options=EAGER)(torch.ones(2, 8))


@pytest.mark.parametrize("write", WAYS)
def test_refuses_a_compiled_forward_that(write: str, mesh: DeviceMesh) -> None:
    with pytest.raises(UnsupportedGraph, match=REFUSED):
        run(Writes(WAYS[write]), mesh)


def test_refuses_a_write_in_a_checkpointed_part(mesh: DeviceMesh) -> None:
    with pytest.raises(UnsupportedGraph, match=REFUSED):
        run(Checkpointed(WAYS["clamps_data"]), mesh)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_refuses_embeddings_that_renormalise_their_rows(kind: Any, mesh: DeviceMesh) -> None:
    model = fully_shard(nn.Sequential(kind(8, 8, max_norm=1.0)), mesh=mesh)
    with pytest.raises(UnsupportedGraph, match=r"(?s)in place during forward: 0.weight \(aten.embedding_renorm_"):
        compile_module(model, options=EAGER)(torch.zeros(2, 3, dtype=torch.long))


def test_refuses_a_write_in_a_block_that_is_compiled_alone(mesh: DeviceMesh) -> None:
    model = nn.Sequential(Writes(WAYS["clamps_data"]), Writes(WAYS["clamps_data"]))
    for block in model:
        fully_shard(block, mesh=mesh)
        block.compile(backend="fxshard", options=EAGER)
    fully_shard(model, mesh=mesh)
    with pytest.raises(UnsupportedGraph, match=r"in place during forward: 0.inner.weight"):
        model(torch.ones(2, 8))


@two_ranks
def test_refuses_a_write_where_torch_compile_shards_the_model() -> None:
    with pytest.raises(UnsupportedGraph, match=REFUSED):
        compile_module(Writes(WAYS["scales_with_foreach"]), options=EAGER)(torch.ones(2, 8))


def test_refuses_a_write_in_what_is_explained() -> None:
    with pytest.raises(UnsupportedGraph, match=REFUSED):
        explain(Writes(WAYS["scales_with_foreach"]), torch.ones(2, 8), world_size=2)


def test_names_each_parameter_and_the_line_that_writes(mesh: DeviceMesh) -> None:
    def both(model: Writes) -> None:
        with torch.no_grad():
            model.inner.weight.t().mul_(2)
            model.inner.bias[0] = 1

    class WritesBoth(Writes):
        def forward(self, x: Tensor) -> Tensor:
            both(self)
            return self.inner(x)

    with pytest.raises(UnsupportedGraph) as error:
        run(WritesBoth(sets_a_row), mesh)
    text = str(error.value)
    assert "inner.weight (aten.mul_.Tensor, " in text
    assert "in both: model.inner.weight.t().mul_(2)); inner.bias (" in text
    assert "in both: model.inner.bias[0] = 1)" in text


def test_lets_a_forward_write_into_what_it_made_of_a_parameter(mesh: DeviceMesh) -> None:
    def writes_into_copies(w: Tensor) -> None:
        w.clone().mul_(2)
        (w + 1)[0].zero_()
        torch._foreach_mul_([w.detach().clone()], 2.0)

    model = Writes(writes_into_copies)
    model.register_buffer("seen", torch.zeros(8, 8))
    run(model, mesh)


def test_a_vmapped_function_that_reads_a_parameter_is_let_be(mesh: DeviceMesh) -> None:
    class Mapped(Writes):
        def forward(self, x: Tensor) -> Any:
            weight = self.inner.weight
            return torch.vmap(partial(torch.mv, weight))(x)

    run(Mapped(sets_a_row), mesh)


def test_where_a_node_cannot_be_run_again_its_version_tells(mesh: DeviceMesh) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    parameter = graph.call_function(torch.ones_like, (x,))
    written = graph.call_function(fails, (parameter,))
    graph.output((written,))
    with torch._subclasses.FakeTensorMode():
        x.meta["example_value"], parameter.meta["example_value"] = torch.empty(2), torch.empty(2).mul_(2)
    (found,) = writes.writes_of(torch.fx.GraphModule(nn.Module(), graph), [parameter])
    assert found == writes.Write(parameter, parameter, "")


def fails(w: Tensor) -> Tensor:
    raise RuntimeError("not here")
