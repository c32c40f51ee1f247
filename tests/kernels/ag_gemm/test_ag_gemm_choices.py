"""That AllGatherGemm is right whatever each rank chooses for itself, and that the choices are tuned.

What it promises as other operations do is in `exchange/test_every_operation.py`.
"""

import gc
import itertools
import math
import random
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dense_runs import (
    GATHERING_ROWS,
    call_as_captured,
    choose_at_random,
    error_ratio,
    force,
    gathered_by_torch,
    operands_of,
)
from operation_runs import GPU_BACKENDS, cases_of, device, message_of, on_ranks, tuned_in_context
from operations import ALWAYS, HALF, factors
from rank_programs import wait_for

from dist_autotune.kernels.ag_gemm import AllGatherGemm

PATIENCE_S = 60.0  # less than a test has


# ---- in pieces


def in_pieces(rank, pieces_of_rank):
    """Call with m that changes and is no multiple of anything, candidates that differ, and N that differs."""
    with GATHERING_ROWS.opened(rank, 77, 24, HALF, timeout_s=PATIENCE_S) as op:
        force(op, consumer="plain", pieces=pieces_of_rank[rank])
        of_call = 20 + 8 * rank
        return [GATHERING_ROWS.call_and_compare(op, [m], of_call, in_place=m == 61) for m in (77, 5, 61, 77)]


def first_tiles_first(rank):
    """Hold the second half of each chunk back until the peer's kernel has written tiles of the first."""
    of_16_rows = {"candidate": 0}  # tiles
    with GATHERING_ROWS.opened(rank, 32, 16, HALF, timeout_s=PATIENCE_S, **of_16_rows) as op:
        force(op, consumer="plain", pieces=2, programs=1)
        a_shard, weight = factors(32, 16, 16, HALF)
        out = torch.full((64, 16), float("nan"), dtype=HALF, device=device())
        written = out[32:48] if rank == 0 else out[:16]
        copy, copies = op._memory.copy, []

        def meet_at_half():
            wait_for(lambda: not written.isnan().any(), 60.0)
            Path(f"written on {rank}").touch()
            wait_for(Path(f"written on {1 - rank}").exists, 60.0)

        def copy_second_late(dst, src, stream):
            copies.append(dst)
            if len(copies) % 2 == 0:
                stream.enqueue(meet_at_half)
            copy(dst, src, stream)

        op._memory.copy = copy_second_late
        op(a_shard, weight, out)
        return [error_ratio(out, gathered_by_torch(a_shard), weight), 0.0 if len(copies) == 2 else 9.0]


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_ranks_may_copy_in_different_numbers_of_pieces_and_tiles_wait_for_their_own(rank, world):
    cases = {"numbers that differ": lambda: in_pieces(rank, (2, 1, 3))}
    return cases | (cases_of((first_tiles_first,), rank) if world == 2 else {})


# ---- everything at once


def anything(rank, seed, calls=10, backend="auto"):
    """Choose at random on each rank, back to back, delayed at random; results are looked at in the end."""
    order, own, kept = random.Random(seed), random.Random(f"{seed}, {rank}"), []
    with GATHERING_ROWS.opened(rank, 50, 16, HALF, backend=backend, timeout_s=PATIENCE_S) as op:
        choose_at_random(op, f"{seed}, {rank}")
        for _ in range(calls):
            m, n = order.choice((50, 33, 16, 7)), own.choice((16, 24, 33))
            kind, copied = order.choice((call_as_captured, AllGatherGemm.__call__)), own.random() < 0.5
            if order.randrange(op.world_size) == rank:
                time.sleep(own.random() / 20)
            a_shard, weight = factors(m, n, 16, HALF)
            given = a_shard if copied else op.shard[:m].copy_(a_shard)
            out = torch.full((m * op.world_size, n), float("nan"), dtype=HALF, device=device())
            kept.append((kind(op, given, weight, out), a_shard, weight))
        op.check()
    return [error_ratio(out, gathered_by_torch(a_shard), weight) for out, a_shard, weight in kept]


@pytest.mark.parametrize(("world", "seed"), [(1, 0), (2, 1), (3, 2)])
@on_ranks()
def test_ranks_may_choose_differently_in_each_call(rank, world, seed):
    return anything(rank, seed)


# ---- what the caller fixes


@on_ranks(2)
def test_what_is_fixed_is_not_tuned_and_ranks_may_fix_differently(rank):
    chosen = ({"consumer": "plain", "pieces": 3, "programs": 5}, {"consumer": "plain", "programs": 1})[rank]
    with GATHERING_ROWS.opened(rank, 64, 16, HALF, candidate=0, timeout_s=PATIENCE_S, **chosen) as op:
        step, errors = tuned_in_context(lambda: GATHERING_ROWS.call_and_compare(op, [64], 24))
        step()
        weight = factors(64, 24, 16, HALF)[1]
        choice = op._choose(operands_of(op, weight, weight.new_empty(128, 24), 64))
        found = {context.kernel for context in step.report.contexts if context.kernel.startswith("ag_gemm ")}
    assert found == (set(), {"ag_gemm pieces"})[rank]
    assert chosen.items() <= choice._asdict().items()
    return errors


def test_a_consumer_that_cannot_run_here_says_what_it_needs():
    with AllGatherGemm(8, 16, HALF, backend="shm", consumer="specialized") as op:
        a_shard, weight = factors(8, 24, 16, HALF)
        with pytest.raises(ValueError, match="cannot take this call, plain can: it needs a Hopper"):
            op(a_shard, weight)


# ---- shards in place, what was gathered last


def copies_of_a_shard_in_place(rank):
    """Return whether a call whose shard lies elsewhere makes one copy more, of 16 rows and of 3."""
    with GATHERING_ROWS.opened(rank, 16, 32, HALF) as op:
        versions = [op.shard._version]  # counts the writes to the gather buffer
        for m in (16, 3):
            a_shard, weight = factors(m, 8, 32, HALF)
            for given in (op.shard[:m], a_shard):
                op(given, weight)
                versions.append(op.shard._version)
        of_itself, copied, *of_fewer = (after - before for before, after in itertools.pairwise(versions))
        return copied - of_itself == of_fewer[1] - of_fewer[0] == 1


def last_gathered(rank):
    with GATHERING_ROWS.opened(rank, 16, 16, HALF) as op:
        for m in (16, 9, 5, 16):
            call = AllGatherGemm.__call__ if m == 9 else call_as_captured
            a_shard, weight = factors(m, 8, 16, HALF)
            call(op, a_shard, weight)
            assert torch.equal(op.gathered, gathered_by_torch(a_shard))
    return True


@on_ranks(2)
def test_shards_in_place_and_what_was_gathered_last_are_right(rank):
    return cases_of((copies_of_a_shard_in_place, last_gathered), rank)


@pytest.mark.parametrize(
    "options", [{}, ALWAYS, {"low_latency": True}], ids=["overlapped", "collective", "mail"]
)
@on_ranks(2)
def test_rows_that_are_gathered_into_a_tensor_of_the_caller_s_stay(rank, options):
    with GATHERING_ROWS.opened(rank, 16, 16, HALF, **options) as op:
        for m in (16, 5):
            a_shard, weight = factors(m, 8, 16, HALF)
            wanted, kept = gathered_by_torch(a_shard), torch.empty(2 * m, 16, dtype=HALF)
            op.shard.fill_(math.nan)
            product, gathered = op.with_gathered(a_shard, weight, gathered=kept)
            assert gathered is kept
            assert op.shard.isnan().all() == (options == ALWAYS)  # a collective reads rows where they are
            assert message_of(lambda: op.gathered).startswith(
                "RuntimeError: the last call wrote its rows to the"
            )
            assert torch.equal(product, op(a_shard.neg(), weight).neg())
            assert torch.equal(kept, wanted)
        told = "ValueError: gathered has shape [3, 16] and strides (16, 1); contiguous [10, 16] is needed"
        assert message_of(lambda: op.with_gathered(a_shard, weight, gathered=kept[:3])) == told
        within = torch.empty(15, 16, dtype=HALF)
        told = "ValueError: gathered overlaps a_shard"
        assert message_of(lambda: op.with_gathered(within[:5], weight, gathered=within[:10])).startswith(told)


@on_ranks(1)
def test_a_lone_rank_s_collective_writes_its_rows_to_a_tensor_of_the_caller_s(rank):
    a_shard, weight = factors(5, 8, 16, HALF)
    kept = torch.full((5, 16), math.nan, dtype=HALF)
    with GATHERING_ROWS.opened(rank, 16, 16, HALF, **ALWAYS) as op:
        product, _ = op.with_gathered(a_shard, weight, gathered=kept)
        assert torch.equal(kept, a_shard)
        return [error_ratio(product, a_shard, weight)]


# ---- on GPUs


@pytest.mark.gpu(devices=2, seconds=40)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@on_ranks(2, timeout_s=300)
def test_all_of_the_above_is_so_on_gpus(rank, backend):
    cases = {
        f"anything, seed {seed}": lambda seed=seed: anything(rank, seed, 40, backend) for seed in range(4)
    }
    return cases | {"pieces": lambda: in_pieces(rank, (4, 2))}


# ---- what a call takes for known


CAPACITY, K, N = 16, 32, 24


@pytest.fixture
def op() -> Iterator[AllGatherGemm]:
    """An operation of this process alone."""
    with AllGatherGemm(CAPACITY, K, torch.float32, collective=True) as opened:
        yield opened


CHANGES = {
    "other strides": (
        lambda tensor: tensor.as_strided((N // 4, K), (2, N)),
        ValueError,
        "neither the rows nor",
    ),
    "no tensor": (lambda tensor: tensor.tolist(), TypeError, "weight is a list; a tensor is needed"),
}


@pytest.mark.parametrize(("change", "error", "text"), CHANGES.values(), ids=CHANGES)
def test_what_lies_in_the_same_place_in_another_way_is_checked(op, change, error, text):
    a_shard, weight = torch.randn(8, K), torch.randn(N, K)
    for _ in range(2):
        assert error_ratio(op(a_shard, weight), a_shard, weight) < 1
        with pytest.raises(error, match=text):
            op(a_shard, change(weight))


def test_no_tensor_of_a_caller_is_kept(op):
    tensors = [torch.randn(8, K), torch.randn(N, K), torch.empty(8, N)]
    for _ in range(2):
        op(*tensors)
    kept = [weakref.ref(tensor) for tensor in tensors]
    tensors.clear()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
