"""AllGatherGemm's warp-specialised family on GPUs; without one, see test_ag_gemm_model and tests/aot."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from ag_gemm_runs import call_and_compare, call_pushed, force, gathered_by_torch, poison, tensors
from gpu_cases import covering_indices
from operation_runs import GPU_BACKENDS, run_cases, values

from dist_autotune import contextual_autotune
from dist_autotune.kernels.ag_gemm import AllGatherGemm, specialized
from dist_autotune.kernels.ag_gemm.specialized import CANDIDATES
from dist_autotune.kernels.gemm.pruning import fewest_rows, prune_chunks

pytestmark = pytest.mark.gpu(devices=2, seconds=40)

DTYPE = torch.bfloat16
# m, N, K: whole tiles; a ragged chunk; the fewest rows; ragged everywhere; K below a k block; one tile.
SHAPES = [
    (512, 1024, 1024),
    (200, 1792, 512),
    (64, 512, 256),
    (333, 1000, 520),
    (128, 256, 8),
    (128, 128, 4096),
]


def opened(m: int, k: int, backend: str = "auto", **options: object) -> AllGatherGemm:
    return AllGatherGemm(m, k, DTYPE, backend=backend, timeout_s=20.0, consumer="specialized", **options)


def one_shape(
    rank: int, m: int, n: int, k: int, backend: str = "auto", producer: str = "pull"
) -> list[float]:
    """Return the errors of eager calls, pushed calls, shards in place and fewer rows."""
    torch.manual_seed(rank)
    specialized.tuned.configs = CANDIDATES
    rows = max(fewest_rows(CANDIDATES, tensor_memory=False), m - 37)
    with opened(m, k, backend, producer=producer) as op:
        poison(op)
        errors = [call_and_compare(op, m, n), call_and_compare(op, m, n, in_place=True)]
        for pieces in (1, 2, 4):
            force(op, pieces=pieces)
            errors += [call_and_compare(op, rows, n), call_and_compare(op, m, n, call=call_pushed)]
    return errors


def one_candidate(rank: int, index: int) -> list[float]:
    torch.manual_seed(rank)
    config = CANDIDATES[index]
    specialized.tuned.configs, specialized.tuned.cache = [config], {}
    args = {"M": 2 * 700, "N": 1104, "K": 640, "WORLD": 2, "TENSOR_MEMORY": False}
    if not prune_chunks([config], args):  # the same on both ranks; too many registers for Hopper
        return [0.0]
    with opened(700, 640) as op:
        poison(op)
        return [call_and_compare(op, 700, 1104) for _ in range(3)]


def late_peers(rank: int, calls: int) -> list[float]:
    """Let a rank be late, at random, in calls back to back with no synchronisation of the host."""
    torch.manual_seed(rank)
    order, late = random.Random(5), random.Random(rank)
    specialized.tuned.configs = CANDIDATES[:1]
    worst = 0.0
    with opened(512, 512) as op:
        poison(op)
        outs = []
        for _ in range(calls):
            m = order.choice((512, 300, 128))
            force(op, pieces=late.choice((1, 2, 4)), programs=late.choice((132, 100, 3)))
            a_shard, weight = tensors(m, 768, 512, DTYPE)
            full = gathered_by_torch(a_shard)
            if late.random() < 0.5:
                torch.cuda._sleep(late.randrange(1, 3_000_000))
            outs.append((op(a_shard, weight), full, weight))
        op.check()
        for out, full, weight in outs:
            wanted = full.float() @ weight.float().T
            worst = max(worst, float((out.float() - wanted).norm() / wanted.norm()))
    return [worst / 0.01]


def tuned_in_context(rank: int) -> bool:
    torch.manual_seed(rank)
    specialized.tuned.configs = CANDIDATES
    errors: list[float] = []
    with opened(512, 1024) as op:
        options = {"cache": False, "log_dir": None, "n_warmup": 0, "n_repeat": 2}
        step = contextual_autotune(
            lambda: errors.append(call_and_compare(op, 512, 1792)), is_dist=True, **options
        )
        step()
        op.check()
    found = {context.kernel for context in step.report.contexts}
    winners = [None] * 2
    dist.all_gather_object(winners, str(specialized.tuned.best_config))
    return max(errors) < 1 and "specialized_all_gather_gemm" in found and winners[0] == winners[1]


def traced(rank: int) -> bool:
    """Stamp a call whose peer is late: all tiles of the own chunk are stored before the peer's are here."""
    torch.manual_seed(rank)
    specialized.tuned.configs = CANDIDATES[:1]
    m, n, k = 512, 1024, 512
    with opened(m, k) as op:
        errors = [call_and_compare(op, m, n)]
        a_shard, weight = tensors(m, n, k, DTYPE)
        op.trace(a_shard, weight)  # compiles the traced kernel, which takes longer than the peer is late
        dist.barrier()
        torch.cuda.synchronize()
        if rank == 1:
            torch.cuda._sleep(20_000_000)  # about 10 ms
        _, trace = op.trace(a_shard, weight)
        op.check()
    tiles = trace[: 2 * (m // 128) * (n // 256)].cpu()
    assert (tiles >= 0).all()
    before, after, stored, _ = tiles.T
    assert (before <= after).all()
    assert (after < stored).all()
    waited_ms = float((after - before).max()) / 1e6
    half = len(tiles) // 2
    own_first = bool(stored[:half].max() < after[half:].min())
    return max(errors) < 1 and (rank == 1 or (waited_ms > 1 and own_first))


def cases(rank: int) -> list[str]:
    by_shape = {f"shape {shape}": lambda shape=shape: one_shape(rank, *shape) for shape in SHAPES}
    backends = {
        f"backend {name}": lambda name=name: one_shape(rank, *SHAPES[1], name) for name in GPU_BACKENDS
    }
    pushes = {"pushed": lambda: one_shape(rank, *SHAPES[1], producer="push")}
    rest = {
        "late peers": lambda: late_peers(rank, 60),
        "tuned in context": lambda: tuned_in_context(rank),
        "traced": lambda: traced(rank),
    }
    return run_cases({**by_shape, **backends, **pushes, **rest})


def candidates(rank: int) -> list[str]:
    indices = covering_indices(CANDIDATES)
    return run_cases({f"{CANDIDATES[i]}": lambda i=i: one_candidate(rank, i) for i in indices})


def test_the_sums_are_right_for_all_shapes_lanes_and_delays():
    assert values(cases, 2, timeout_s=300) == [[], []]


def test_every_candidate_is_right():
    assert values(candidates, 2, timeout_s=300) == [[], []]
