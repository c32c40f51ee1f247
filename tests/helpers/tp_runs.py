"""What the tests of tensor parallelism do on a rank, and what plain torch makes of the same tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense_runs import GATHERING_ROWS, REDUCING
from expert_runs import GATHERING, SCATTERING
from operation_runs import on_ranks, seed_and_leave_one
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dist_autotune.kernels import tp

WIDTH = 16  # of the layers
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # float32, whose sums are added in another order


@contextmanager
def workspaces(rank: int, candidate: int | None = None) -> Iterator[int]:
    """Leave each kernel one candidate, by default another on each rank; yield how many ranks there are."""
    for runs in (GATHERING_ROWS, REDUCING[None]):  # the latter's product is GemmReduceScatter's
        runs.begin(rank, candidate)
    for runs in (GATHERING, SCATTERING):
        seed_and_leave_one(rank, runs.kernel, runs.candidates, candidate)
    yield dist.get_world_size()
    tp.release()


def in_workspaces(world: int | None = None, candidate: int | None = None) -> Any:
    """Return a decorator: the function is a test that runs on each of so many ranks, see `on_ranks`."""
    return on_ranks(world, within=lambda rank: workspaces(rank, candidate))


def tensor_of(rank: int, *shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    """Return a tensor of that rank, which every rank can compute."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


def tensors_of_all(world: int, *shape: int, seed: int = 0) -> list[Tensor]:
    return [tensor_of(rank, *shape, seed=seed) for rank in range(world)]


def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Run a pair of products, by columns and by rows, as a layer has it."""
    return tp.matmul_reduce_scatter(tp.all_gather_matmul(x, up).relu(), down)


class FeedForward(nn.Module):
    """The block of a Llama: a product of two projections, of which one is a gate, and one back."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Attention(nn.Module):
    """Grouped-query attention over as many heads as the projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 2
        self.wq = nn.Linear(WIDTH, WIDTH)
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        sequences, length, _ = q.shape
        heads = (each.view(sequences, length, -1, self.head_dim).transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.wo(attended.transpose(1, 2).reshape(sequences, length, -1))


def alike_on_all_ranks(kind, seed=0):
    """Return a module whose parameters are random, no norm's among them 1, and equal on all ranks."""
    torch.manual_seed(seed)
    module = kind()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def part_of(tensor: Tensor, mesh: dist.DeviceMesh, dim: int) -> Tensor:
    """Return this rank's part along a dimension."""
    return tensor.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(got: Tensor | None, wanted: Tensor | None) -> None:
    if got is None or wanted is None:
        assert got is wanted
        return
    torch.testing.assert_close(got, wanted, **TOLERANCE)
