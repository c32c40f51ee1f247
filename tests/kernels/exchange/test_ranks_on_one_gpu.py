"""Kernels of several ranks that store into each other's memory, at the same time on one GPU."""

import os
from typing import Any

import pytest
import torch
import triton
from expert_runs import products
from gpu_cases import covering_indices
from host_as_peer import DEVICE, DTYPE, PATIENCE_S, on_one_gpu
from ranks_on_one_gpu import ranks_of

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.plain import all_gather_gemm
from dist_autotune.kernels.configs import CANDIDATES
from dist_autotune.kernels.exchange.flags import ARRIVED, FLAGS, FREE, GIVEN, ROWS_SENT
from dist_autotune.kernels.gemm.pruning import prune_chunks
from dist_autotune.kernels.gemm_rs import GemmReduceScatter, specialized
from dist_autotune.kernels.gemm_rs.plain import gemm_reduce_scatter
from dist_autotune.kernels.moe.announcer import TOPK_SPAN
from dist_autotune.kernels.moe.moe_rs_kernel import GPU_CANDIDATES, moe_reduce_scatter
from dist_autotune.kernels.moe.plan import Routing, shared_plan
from dist_autotune.kernels.moe.routing import SHARED_DIGEST, digest_of
from dist_autotune.kernels.moe_rs import MoEReduceScatter
from dist_autotune.kernels.signals import as_patience
from dist_autotune.kernels.tensors import FP8

pytestmark = pytest.mark.gpu(alone=True, seconds=20)
ROWS, N, K = 333, 520, 272  # of a chunk, or the tokens of a rank; ragged
EXPERTS, TOPK = 5, 2
SCATTERING, IN_FP8 = "specialized scatter", "specialized scatter in fp8"
CHOSEN, SORTED = "experts", "experts, sorted before"
TUNERS = {"gather": all_gather_gemm, "scatter": gemm_reduce_scatter}
TUNERS |= dict.fromkeys((SCATTERING, IN_FP8), specialized.tuned)
TUNERS |= dict.fromkeys((CHOSEN, SORTED), moe_reduce_scatter)


def empty(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.empty(*shape, device=DEVICE, dtype=dtype)


class Calls:
    """The same call on all ranks, each on its stream, and its tensors, by rank."""

    def __init__(self, ops: list[Any], kind: str) -> None:
        world, self.ops = len(ops), ops
        self.streams = [torch.cuda.Stream() for _ in ops]
        self.wanted = gathered if kind == "gather" else scattered
        rows, results = (ROWS, world * ROWS) if kind == "gather" else (world * ROWS, ROWS)
        dtype, self.out = FP8 if kind == IN_FP8 else DTYPE, empty(world, results, N)
        self.a, self.weight = empty(world, rows, K, dtype=dtype), empty(world, N, K, dtype=dtype)
        scaled = {"scale_a": rows, "scale_weight": N} if kind == IN_FP8 else {}
        self.scales = {name: empty(world, count, dtype=torch.float32) for name, count in scaled.items()}

    def refresh(self) -> None:
        """Take new random inputs."""
        for tensor in (self.a, self.weight):
            tensor.copy_(torch.randn(tensor.shape, device=DEVICE))
        for scale in self.scales.values():
            scale.uniform_(0.5, 2.0)

    def call(self, rank: int) -> None:
        scales = {name: scale[rank] for name, scale in self.scales.items()}
        self.ops[rank](self.a[rank], self.weight[rank], self.out[rank], **scales)

    def right(self) -> torch.Tensor:
        return self.wanted(self.a, self.weight, *self.scales.values())

    def error(self) -> float:
        """Return the relative error of what is in `out`."""
        right = self.right()
        return float((self.out.float() - right).norm() / right.norm())

    def again_and_again(self, *, captured: bool) -> list[float]:
        """Return the error of each of some calls; inputs are new, and ranks launch in turns."""
        world, errors = len(self.ops), []
        graphs = [torch.cuda.CUDAGraph() for _ in self.ops]
        for turn in range(4):
            self.refresh()
            self.out.fill_(float("nan"))
            torch.cuda.synchronize()
            for rank in range(world):
                rank = (rank + turn) % world
                with torch.cuda.stream(self.streams[rank]):
                    graphs[rank].replay() if captured and turn else self.call(rank)
            for op in self.ops:
                op.check()
            errors.append(self.error())
            for rank in range(world) if captured and not turn else ():
                options = {"stream": self.streams[rank], "capture_error_mode": "thread_local"}
                with torch.cuda.graph(graphs[rank], **options):
                    self.call(rank)
        return errors


def gathered(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return a.flatten(0, 1).float() @ weight.float().mT


def scattered(a: torch.Tensor, weight: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
    products = a.float() @ weight.float().mT
    if scales:
        products *= scales[0][:, :, None] * scales[1][:, None]
    return products.sum(0).unflatten(0, (len(a), -1))


class CallsOfExperts(Calls):
    """Some experts are popular. SORTED: the choices of all ranks are sorted on each before its call."""

    def __init__(self, ops: list[Any], kind: str) -> None:
        super().__init__(ops, kind)
        world, self.told = len(ops), (ROWS,) * len(ops)
        self.a, self.weight = empty(world, world * ROWS * TOPK, K), empty(world, EXPERTS, N, K)
        self.ids = empty(world, ROWS, TOPK, dtype=torch.int64)
        self.factors = empty(world, ROWS, TOPK, dtype=torch.float32)
        plans = [shared_plan(world, EXPERTS, self.a.shape[1], self.a.device) for _ in ops]
        self.routings = [Routing(plan, self.told, TOPK) for plan in plans] if kind == SORTED else []
        self.sorted = torch.empty_like(self.a)
        self._load()

    def refresh(self) -> None:
        super().refresh()
        self.factors.normal_()
        popular = torch.rand(self.ids.shape, device=DEVICE) ** 3
        self.ids.copy_(EXPERTS - 1 - (popular * (EXPERTS + 1)).long())
        told = digest_of(self.told) + SHARED_DIGEST.value
        flags = self._announced(torch.zeros(FLAGS, len(self.ops), dtype=torch.int32, device=DEVICE), told)
        for rank, routing in enumerate(self.routings):
            routing.plan.sort(
                *(self.ids, flags, self.ops[rank]._failures.words),
                pairs=self.a.shape[1],
                topk=TOPK,
                stride=ROWS * TOPK,
                tokens=ROWS,
                told=told,
                rank=rank,
                first=rank,
                patience_ticks=as_patience(PATIENCE_S),
                weights=self.factors,
            )
            torch.index_select(self.a[rank], 0, routing.rows, out=self.sorted[rank])

    def call(self, rank: int) -> None:
        op, weight, out = self.ops[rank], self.weight[rank], self.out[rank]
        if self.routings:
            op.by_expert(self.sorted[rank], weight, self.routings[rank], out=out)
        else:
            op(self.a[rank], weight, self.ids[rank], self.factors[rank], out, tokens=self.told)

    def right(self) -> torch.Tensor:
        ids, factors = self.ids.reshape(-1), self.factors.reshape(-1, 1)
        each = zip(self.a, self.weight, strict=True)
        parts = (products(rows, weight, ids) * factors for rows, weight in each)
        sums = torch.stack([part.unflatten(0, (-1, TOPK)).sum(1) for part in parts]).sum(0)
        return sums.view(self.out.shape)

    def _announced(self, flags: torch.Tensor, told: int) -> torch.Tensor:
        """Return the flags, as if all ranks had announced their choices."""
        flags[ROWS_SENT.value], flags[GIVEN.value] = ROWS * TOPK_SPAN.value + TOPK, told
        return flags

    def _load(self) -> None:
        """Load all kernels, and take memory, in calls that wait for nobody: either waits for what runs."""
        self.refresh()
        for op in self.ops:
            flags = self._announced(op._flags.local, digest_of(self.told))
            flags[[FREE.value, ARRIVED.value]] = 1
        torch.cuda.synchronize()
        for rank, op in enumerate(self.ops):
            with torch.cuda.stream(self.streams[rank]):
                self.call(rank)
            op.check()
        for op in self.ops:
            op._flags.local.zero_()


def candidates_of(kind: str) -> list[triton.Config]:
    """Return those that calls of these sizes can take."""
    if kind not in (SCATTERING, IN_FP8):
        return GPU_CANDIDATES if TUNERS[kind] is moe_reduce_scatter else CANDIDATES
    args = {"M": 2 * ROWS, "N": N, "K": K, "WORLD": 2, "TENSOR_MEMORY": False, "TRANS_B": True}
    return prune_chunks(specialized.CANDIDATES, args)


def errors(kind: str, world: int, index: int, *, captured: bool) -> list[float]:
    """Return the relative errors of some calls, with one of the candidates."""
    tuner = TUNERS[kind]
    tuner.configs, tuner.cache = [candidates_of(kind)[index]], {}
    if kind == "scatter":
        specialized.can_run = lambda *_: False
    of_experts = tuner is moe_reduce_scatter
    operation = MoEReduceScatter if of_experts else GemmReduceScatter
    size, dtype = (ROWS if of_experts else world * ROWS, N), FP8 if kind == IN_FP8 else DTYPE
    if kind == "gather":
        operation, size = AllGatherGemm, (ROWS, K)
    with ranks_of(world, operation, *size, dtype, by_stores=True, collective=False) as ops:
        calls = (CallsOfExperts if of_experts else Calls)(ops, kind)
        found = calls.again_and_again(captured=captured)
        assert not any(op._pushes.here(peer, 0).any() for op in ops for peer in range(world))
    return found


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", TUNERS)
@on_one_gpu
def test_ranks_that_store_to_each_other_get_all_of_it(
    rank: int, kind: str, world: int, captured: bool
) -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # a side stream waits for another's permit
    candidates = candidates_of(kind)
    is_short = captured or TUNERS[kind] is moe_reduce_scatter
    indices = (0, len(candidates) // 2) if is_short else covering_indices(candidates)
    found = {str(candidates[index]): errors(kind, world, index, captured=captured) for index in indices}
    wrong = {which: each for which, each in found.items() if not all(error < 0.01 for error in each)}
    assert wrong == {}
