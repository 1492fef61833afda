"""Models whose matrices are updated as a whole, and optimizers that need that: bodies of two to eight ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

import fxshard
from tests.models import FeedForward
from tests.numerics import harness
from tests.numerics.harness import full

Make = Callable[[Iterable[Any]], Any]

WIDTH, EXPERTS = 8, 4


class Net(nn.Module):
    """Two feed-forward blocks: widths that no number of ranks divides, a matrix of two rows, vectors."""

    def __init__(self, hidden: int = 13) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(WIDTH, hidden, norm=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))


class Mixture(nn.Module):
    """Experts `[EXPERTS, m, n]`, all of which see every row, on each rank; and a projection of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, 4 * 3, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *sizes)) for sizes in ((12, 6), (6, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        up, down = (
            p.full_tensor(grad_placements=[Replicate()]) if isinstance(p, DTensor) else p for p in (self.up, self.down)
        )
        return torch.einsum("bd,edh,ehk->bk", self.heads(x), up, down)


def rows_of_mixture(parameter: Tensor) -> list[int]:
    """Return the matrices of its parameters."""
    return [1] * EXPERTS if parameter.dim() == 3 else [3] * 4


class Unstacked:
    """An optimizer of the unsharded mixture, which has each matrix as a parameter of its own."""

    def __init__(self, make: Make, params: Iterable[Any]) -> None:
        self.params = list(params)
        self.views = [[nn.Parameter(each) for each in self._parts(p.detach())] for p in self.params]
        self.inner = make([view for views in self.views for view in views])

    @staticmethod
    def _parts(whole: Tensor) -> Iterable[Tensor]:
        return whole.unbind() if whole.dim() == 3 else whole.split(rows_of_mixture(whole))

    def step(self) -> None:
        for p, views in zip(self.params, self.views, strict=True):
            for view, grad in zip(views, self._parts(p.grad), strict=True):
                view.grad = grad
        self.inner.step()

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


class Shampoo(Optimizer):
    """Multiplies a gradient with the inverse root of the sum of its squares, after momentum, and counts all it can.

    It keeps tensors of the shape of a matrix, others, numbers, and one in its groups.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float = 1.0) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if group.get("plain"):
                    self.state[p]["last"] = p.grad.clone()
                    p.sub_(p.grad, alpha=group["lr"])
                elif p.grad is not None:
                    self._update(p, group["lr"] * scale * getattr(p, "lr_factor", 1.0))

    def _update(self, p: Tensor, lr: float) -> None:
        grad, state = p.grad, self.state[p]
        assert grad is not None
        if not state:
            rows = p.shape[0]
            state |= {"step": torch.tensor(0.0), "count": 0, "momentum": torch.zeros_like(p)}
            state["factors"] = [torch.eye(rows, dtype=p.dtype) * 1e-3, torch.full((3,), 1.0, dtype=p.dtype)]
        state["step"] += 1
        state["count"] += 1
        left, bias = state["factors"]
        flat = grad.reshape(p.shape[0], -1)
        left += flat @ flat.T
        bias *= 0.5
        values, vectors = torch.linalg.eigh(left)
        root = vectors @ torch.diag(values.clamp(min=1e-12) ** -0.5) @ vectors.T
        state["momentum"].mul_(0.9).add_((root @ flat).view_as(p))
        p.mul_(1 - 0.1 * lr).sub_(state["momentum"], alpha=lr * float(bias[0] + 1))


def muon(params: Iterable[Any]) -> Optimizer:
    """Return torch's own, of parameters with any number of dimensions: it looks at them only when it is made."""
    params = list(params)
    made = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], lr=0.05)
    made.param_groups.clear()
    made.add_param_group({"params": params})
    return made


def muon_of_matrices(params: Iterable[Any]) -> Optimizer:
    """Return torch's own."""
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.05)


def sharded(model: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    return harness.sharded(model, mesh=mesh, **kwargs)


def batch(step: int, dtype: torch.dtype) -> Tensor:
    """Return the same rows on all ranks, so that the mean of their gradients is exact."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def take_steps(model: nn.Module, optimizer: Optimizer, steps: Iterable[int], **options: Any) -> None:
    """Train on the same rows on all ranks."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        model(batch(step, dtype)).square().sum().backward()
        optimizer.step(**options)
        optimizer.zero_grad()


def net(kind: Callable[[], nn.Module] = Net, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the same model on all ranks."""
    torch.manual_seed(0)
    return kind().to(dtype)


def assert_equal(found: nn.Module, expected: nn.Module, *, exactly: bool = True) -> None:
    """Compare all parameters."""
    for (name, p), q in zip(found.named_parameters(), expected.parameters(), strict=True):
        whole = full(p) if isinstance(p, DTensor) else p
        same = torch.equal(whole, q) if exactly else torch.allclose(whole, q, rtol=1e-9, atol=1e-11)
        assert same, f"{name}: {(whole - q).abs().max()}"


def check(
    mesh: DeviceMesh,
    make: Make,
    *,
    kind: Callable[[], nn.Module] = Net,
    dtype: torch.dtype = torch.float64,
    exactly: bool = True,
    shard: Callable[..., nn.Module] = sharded,
    reference: Make | None = None,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Train three steps, a save and a load of the state between them; all must be as without sharding."""
    plain, model = net(kind, dtype), shard(net(kind, dtype), mesh)
    expected, optimizer = (
        (reference or make)(plain.parameters()),
        fxshard.whole_matrices(make(model.parameters()), **options),
    )
    take_steps(plain, expected, range(3))
    take_steps(model, optimizer, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(model, optimizer, [2])
    assert_equal(model, plain, exactly=exactly)
    return model, optimizer


def without_other_axes(*shape: int) -> None:
    """All ranks share all parameters, or there are replicas."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    check(mesh, muon_of_matrices, dtype=torch.float32)
    for make in (Shampoo, functools.partial(torch.optim.Adafactor, lr=0.1, foreach=False)):
        check(mesh, make)


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, mesh["dp"])


def beside_tensor_parallelism() -> None:
    """Matrices are cut along both axes, in rows twice or in rows and columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check(mesh, Shampoo, kind=functools.partial(Net, 14), shard=_tensor_parallel, exactly=False)


def _expert_parallel(model: Any, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    """Make DTensors of the experts, which all ranks read whole, so that no tokens have to travel."""
    for name in ("up", "down"):
        part = distribute_tensor(getattr(model, name).detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
        setattr(model, name, nn.Parameter(part))
    return sharded(model, mesh["dp"], **kwargs)


@contextmanager
def counting_bytes() -> Iterator[list[int]]:
    """Collect how many bytes this rank gets in each all_to_all."""
    counts: list[int] = []
    launch = dist.all_to_all_single

    def counted(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        counts.append(output.numel())
        return launch(output, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        yield counts


def experts() -> None:
    """An expert that lies on one rank is updated there, and nothing moves; one that is cut comes together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    options: Any = {"kind": Mixture, "dtype": torch.float32, "rows": rows_of_mixture}
    options["reference"] = functools.partial(Unstacked, muon)
    for dim in (0, 2):
        shard = functools.partial(_expert_parallel, shard_placement_fn=lambda p, d=dim: Shard(d if p.dim() == 3 else 0))
        model, optimizer = check(mesh, muon, shard=shard, **options)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.dim() == 3 else None
        optimizer.step()  # with the state that it has taken back
        with counting_bytes() as counts:
            optimizer.step()
        assert bool(counts) == (dim == 2)


def replicas() -> None:
    """Replicas share matrices, or each computes all; what arrives is what `explain` says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    received = []
    for over in (True, False):
        for make in (muon_of_matrices, Shampoo):
            model, optimizer = check(mesh, make, dtype=torch.float32, exactly=make is not Shampoo, over_replicas=over)
            with counting_bytes() as counts:
                take_steps(model, optimizer, [3])
            owners = optimizer.explain().owners
            assert sum(counts) == owners[dist.get_rank()].received
            assert len(owners) == (4 if over else 2)
        received.append(sum(counts))
    assert received[0] < received[1]


def every_mesh() -> None:
    """Run what needs several axes, and more ranks than rows."""
    without_other_axes(4)
    without_other_axes(2, 2)
    replicas()
    beside_tensor_parallelism()
    experts()
