"""That AllGatherGemm is right whatever each rank chooses for itself, and that the choices are tuned."""

from __future__ import annotations

import itertools
import random
import time
import types

import pytest
import torch
from ag_gemm_runs import (
    begin,
    call_and_compare,
    call_pushed,
    choose_at_random,
    error_ratio,
    force,
    gathered_by_torch,
    operands_of,
    poison,
)
from operation_runs import (
    GPU_BACKENDS,
    assert_cases,
    assert_right,
    cases_of,
    delay_copies,
    device,
    values,
)
from operations import HALF, factors
from rank_programs import wait_for

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.exchange.flags import ARRIVED, FETCHED, FLAGS, READY
from dist_autotune.kernels.exchange.pull import BLOCK_ROWS, ChunkProducer, piece_counts, piece_ends
from dist_autotune.kernels.symm import Copy, SymmetricTensor, Wait

PRODUCERS = ["pull", "push"]
PATIENCE_S = 60.0  # less than a test has


# ---- in pieces


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 48, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_pieces_end_at_whole_blocks_and_cover_the_chunk_once(rows, pieces):
    ends = piece_ends(rows, pieces)
    assert ends[-1] == rows
    assert list(ends) == sorted(set(ends))
    assert len(ends) <= pieces
    assert all(end % BLOCK_ROWS == 0 for end in ends[:-1])
    if pieces in piece_counts(rows):
        sizes = [end - begin for begin, end in zip((0, *ends[:-1]), ends, strict=True)]
        assert len(sizes) == pieces
        assert min(sizes) >= min(BLOCK_ROWS, rows)


def test_a_chunk_is_told_of_piece_by_piece_in_the_order_that_the_proof_is_about():
    """See the table at the top of `exchange.pull`."""
    rank, world, rows = 1, 3, 3 * BLOCK_ROWS
    chunks, words = torch.zeros(world, world, rows, 4), torch.zeros(world, FLAGS, world, dtype=torch.int32)
    gather, flags = (SymmetricTensor(of_ranks[rank], of_ranks) for of_ranks in (chunks, words))
    memory = types.SimpleNamespace(rank=rank, world_size=world, side_stream=lambda: None)
    places = {
        flags.peers[at][row.value, of].data_ptr(): f"{name} of {of}" if at == rank else f"{name} on {at}"
        for name, row in {"READY": READY, "ARRIVED": ARRIVED, "FETCHED": FETCHED}.items()
        for at in range(world)
        for of in range(world)
    }

    def said(step):
        if isinstance(step, Copy):
            begin = (step.src.data_ptr() - gather.peers[2].data_ptr()) // 16 % rows
            assert step.dst.shape == step.src.shape
            return f"copy {begin}..{begin + len(step.src)}"
        number = ("e", "b")[step.plus] + (f" + {step.value}" if step.value else "")
        return f"{'wait ' if isinstance(step, Wait) else ''}{places[step.word.data_ptr()]}: {number}"

    of_each = [[f"wait READY of {peer}: e", *pieces_of(peer), f"FETCHED on {peer}: e"] for peer in (2, 0)]
    steps = ChunkProducer(memory, gather, flags).steps(rows, 3)
    assert [said(step) for step in steps] == ["READY on 2: e", "READY on 0: e", *of_each[0], *of_each[1]]


def pieces_of(peer):
    ends = [BLOCK_ROWS * piece for piece in range(4)]
    return [
        text
        for begin, end in itertools.pairwise(ends)
        for text in (f"copy {begin}..{end}", f"ARRIVED of {peer}: b + {end}")
    ]


def in_pieces(rank, pieces_of_rank, producer):
    """Call with m that changes and is no multiple of anything, candidates that differ, and N that differs."""
    begin(rank)
    with AllGatherGemm(77, 24, HALF, producer=producer, timeout_s=PATIENCE_S) as op:
        force(op, consumer="plain", pieces=pieces_of_rank[rank])
        poison(op)
        return [call_and_compare(op, m, 20 + 8 * rank, in_place=m == 61) for m in (77, 5, 61, 77)]


def late_pieces(rank, call, producer):
    """Copy each piece late on rank 0, and note what the first tiles of its peer's chunk can have found."""
    begin(rank)
    with AllGatherGemm(64, 16, HALF, producer=producer, timeout_s=PATIENCE_S) as op:
        force(op, consumer="plain", pieces=4)
        poison(op)
        if rank == 0:
            delay_copies(op, lambda: time.sleep(0.1))
        return [call_and_compare(op, 64, 16, call=call) for _ in range(2)]


def first_tiles_first(rank):
    """Hold the second half of the peer's chunk back until the kernel has written tiles of the first."""
    begin(rank, 0)  # tiles of 16 rows
    with AllGatherGemm(32, 16, HALF, timeout_s=PATIENCE_S) as op:
        force(op, consumer="plain", pieces=2, programs=1)
        a_shard, weight = factors(32, 16, 16, HALF)
        out = torch.full((64, 16), float("nan"), dtype=HALF, device=device())
        written = out[32:48] if rank == 0 else out[:16]
        copy, copies = op._memory.copy, []

        def copy_second_late(dst, src, stream):
            copies.append(dst)
            if len(copies) % 2 == 0:
                stream.enqueue(lambda: wait_for(lambda: not written.isnan().any(), 60.0))
            copy(dst, src, stream)

        op._memory.copy = copy_second_late
        op(a_shard, weight, out)
        return [error_ratio(out, gathered_by_torch(a_shard), weight), 0.0 if len(copies) == 2 else 9.0]


def across_the_wrap(rank):
    """Let the count of rows pass 2**31 in the middle of a chunk."""
    begin(rank)
    with AllGatherGemm(40, 16, torch.float32, timeout_s=PATIENCE_S) as op:
        force(op, pieces=2 - rank)
        op._fetched_rows = 2**31 - 60
        poison(op)
        return [call_and_compare(op, m, 16) for m in (40, 40, 7, 40)]


def pieces(rank, world):
    if world == 3:
        return {"numbers that differ": lambda: in_pieces(rank, (2, 1, 3), "pull")}
    cases = {"pushed": lambda: in_pieces(rank, (4, 4), "push")}
    cases["late"] = lambda: late_pieces(rank, AllGatherGemm.__call__, "pull")
    cases["late, as captured"] = lambda: late_pieces(rank, call_pushed, "pull")
    return cases | cases_of((first_tiles_first, across_the_wrap), rank)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_copy_in_different_numbers_of_pieces_late_and_tiles_wait_for_their_own(world):
    assert_cases(pieces, world, world)


# ---- what is asked for


# ---- everything at once


def anything(rank, producer, seed, calls=10, backend="auto"):
    """Choose at random on each rank, back to back, delayed at random; results are looked at in the end."""
    begin(rank)
    order, own, kept = random.Random(seed), random.Random(f"{seed}, {rank}"), []
    with AllGatherGemm(50, 16, HALF, backend=backend, producer=producer, timeout_s=PATIENCE_S) as op:
        choose_at_random(op, f"{seed}, {rank}")
        poison(op)
        for _ in range(calls):
            m, n = order.choice((50, 33, 16, 7)), own.choice((16, 24, 33))
            kind, copied = order.choice((call_pushed, AllGatherGemm.__call__)), own.random() < 0.5
            if order.randrange(op.world_size) == rank:
                time.sleep(own.random() / 20)
            a_shard, weight = factors(m, n, 16, HALF)
            given = a_shard if copied else op.shard[:m].copy_(a_shard)
            out = torch.full((m * op.world_size, n), float("nan"), dtype=HALF, device=device())
            kept.append((kind(op, given, weight, out), a_shard, weight))
        op.check()
    return [error_ratio(out, gathered_by_torch(a_shard), weight) for out, a_shard, weight in kept]


@pytest.mark.parametrize(
    ("world", "seed", "producer"),
    [(1, 0, "pull"), (2, 1, "push"), (3, 2, "pull"), (3, 2, "push")],
)
def test_ranks_may_choose_differently_in_each_call(world, seed, producer):
    assert_right(values(anything, world, producer, seed))


# ---- what the caller fixes


def fixed(rank):
    """Fix other choices on each rank, in a tuned function: there is nothing left to tune but the kernel."""
    from dist_autotune import contextual_autotune

    begin(rank)
    chosen = ({"consumer": "matmul", "pieces": 3, "programs": 5}, {"consumer": "plain", "programs": 1})[rank]
    with AllGatherGemm(64, 16, HALF, timeout_s=PATIENCE_S, **chosen) as op:
        errors = []

        @contextual_autotune(is_dist=True, cache=False, log_dir=None)
        def step():
            errors.append(call_and_compare(op, 64, 24))

        step()
        weight = factors(64, 24, 16, HALF)[1]
        choice = op._choose(operands_of(op, weight, weight.new_empty(128, 24), 64))
        found = {context.kernel for context in step.report.contexts if context.kernel.startswith("ag_gemm ")}
    return errors, found, (choice.consumer, choice.pieces, choice.programs)


def test_what_is_fixed_is_not_tuned_and_ranks_may_fix_differently():
    (errors, found, choice), (other_errors, other_found, other_choice) = values(fixed, 2)
    assert max(errors + other_errors) < 1
    assert (found, choice) == (set(), ("matmul", 3, 5))
    assert other_found == {"ag_gemm pieces"}
    assert (other_choice[0], other_choice[2]) == ("plain", 1)


def test_a_consumer_that_cannot_run_here_says_what_it_needs():
    with AllGatherGemm(8, 16, HALF, backend="shm", consumer="specialized") as op:
        a_shard, weight = factors(8, 24, 16, HALF)
        for call in (op, op.trace):
            with pytest.raises(
                ValueError, match="cannot take this call, plain and matmul can: it needs a Hopper"
            ):
                call(a_shard, weight)


# ---- tuned


# ---- on GPUs


def cases_on_gpus(rank, backend):
    cases = {
        f"{producer}, anything, seed {seed}": lambda producer=producer, seed=seed: anything(
            rank, producer, seed, 40, backend
        )
        for producer in PRODUCERS
        for seed in (1, 2)
    }
    for producer in PRODUCERS:
        cases[f"{producer}, pieces"] = lambda producer=producer: in_pieces(rank, (4, 2), producer)
    return cases


@pytest.mark.gpu(devices=2, seconds=40)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_all_of_the_above_is_so_on_gpus(backend):
    assert_cases(cases_on_gpus, 2, backend, timeout_s=300)
