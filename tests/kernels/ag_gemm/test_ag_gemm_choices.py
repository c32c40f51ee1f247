"""That AllGatherGemm is right whatever each rank chooses for itself, and that the choices are tuned."""

from __future__ import annotations

import itertools
import random
import time
import types
from pathlib import Path

import pytest
import torch
from ag_gemm_runs import (
    begin,
    call_and_compare,
    call_as_captured,
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
from dist_autotune.kernels.exchange.flags import ARRIVED, DONE, FLAGS, FREE, TOLD
from dist_autotune.kernels.exchange.push import BLOCK_ROWS, ChunkPusher, piece_counts, piece_ends
from dist_autotune.kernels.symm import Copy, SymmetricTensor, Wait

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
    """See the table at the top of `exchange.push`."""
    rank, world, rows = 1, 3, 3 * BLOCK_ROWS
    chunks, words = torch.zeros(world, world, rows, 4), torch.zeros(world, FLAGS, world, dtype=torch.int32)
    gather, flags = (SymmetricTensor(of_ranks[rank], of_ranks) for of_ranks in (chunks, words))
    memory = types.SimpleNamespace(rank=rank, world_size=world, device=torch.device("cpu"))
    memory.side_stream, memory.hold = lambda: None, lambda tensor: tensor
    ran, forked = [], []
    memory.write_here = lambda word, value: forked.append((word.data_ptr(), value))
    memory.prepare = lambda steps, stream: lambda: ran.append(steps)
    places = {
        flags.peers[at][row.value, of].data_ptr(): f"{name} of {of}" if at == rank else f"{name} on {at}"
        for name, row in {"FREE": FREE, "TOLD": TOLD, "ARRIVED": ARRIVED, "DONE": DONE}.items()
        for at in range(world)
        for of in range(world)
    }
    pusher = ChunkPusher(memory, gather, flags)
    places[pusher._noted.data_ptr()] = "noted"

    def said(step):
        if isinstance(step, Copy):
            begin = (step.src.data_ptr() - gather.local[rank].data_ptr()) // 16
            (peer,) = (
                at for at in (0, 2) if step.dst.data_ptr() == gather.peers[at][rank, begin:].data_ptr()
            )
            assert step.dst.shape == step.src.shape
            return f"copy {begin}..{begin + len(step.src)} to {peer}"
        return f"{'wait ' if isinstance(step, Wait) else ''}{places[step.word.data_ptr()]}: {step.value}"

    ends = [BLOCK_ROWS * piece for piece in range(4)]
    wanted = ["wait DONE of 1: 1", "DONE of 1: 0", "FREE on 0: 1", "FREE on 2: 1"]
    for peer in (0, 2):
        wanted += [f"wait FREE of {peer}: 1", f"FREE of {peer}: 0", f"TOLD on {peer}: {rows}"]
        for first, end in itertools.pairwise(ends):
            wanted += [f"copy {first}..{end} to {peer}", f"ARRIVED on {peer}: {end}"]
    pusher.start(rows, 3, is_capturing=False)
    assert [said(step) for step in ran[0]] == [*wanted, "noted: 0", "ARRIVED of 1: 1"]
    assert [(places[word], value) for word, value in forked] == [("DONE of 1", 1)]


def in_pieces(rank, pieces_of_rank):
    """Call with m that changes and is no multiple of anything, candidates that differ, and N that differs."""
    begin(rank)
    with AllGatherGemm(77, 24, HALF, timeout_s=PATIENCE_S) as op:
        force(op, consumer="plain", pieces=pieces_of_rank[rank])
        poison(op)
        return [call_and_compare(op, m, 20 + 8 * rank, in_place=m == 61) for m in (77, 5, 61, 77)]


def late_pieces(rank, call):
    """Copy each piece late on rank 0, and note what the first tiles of its chunk can have found."""
    begin(rank)
    with AllGatherGemm(64, 16, HALF, timeout_s=PATIENCE_S) as op:
        force(op, consumer="plain", pieces=4)
        poison(op)
        if rank == 0:
            delay_copies(op, lambda: time.sleep(0.1))
        return [call_and_compare(op, 64, 16, call=call) for _ in range(2)]


def first_tiles_first(rank):
    """Hold the second half of each chunk back until the peer's kernel has written tiles of the first."""
    begin(rank, 0)  # tiles of 16 rows
    with AllGatherGemm(32, 16, HALF, timeout_s=PATIENCE_S) as op:
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


def pieces(rank, world):
    if world == 3:
        return {"numbers that differ": lambda: in_pieces(rank, (2, 1, 3))}
    cases = {"late": lambda: late_pieces(rank, AllGatherGemm.__call__)}
    cases["late, as captured"] = lambda: late_pieces(rank, call_as_captured)
    return cases | cases_of((first_tiles_first,), rank)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_may_copy_in_different_numbers_of_pieces_late_and_tiles_wait_for_their_own(world):
    assert_cases(pieces, world, world)


# ---- everything at once


def anything(rank, seed, calls=10, backend="auto"):
    """Choose at random on each rank, back to back, delayed at random; results are looked at in the end."""
    begin(rank)
    order, own, kept = random.Random(seed), random.Random(f"{seed}, {rank}"), []
    with AllGatherGemm(50, 16, HALF, backend=backend, timeout_s=PATIENCE_S) as op:
        choose_at_random(op, f"{seed}, {rank}")
        poison(op)
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
def test_ranks_may_choose_differently_in_each_call(world, seed):
    assert_right(values(anything, world, seed))


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
        with pytest.raises(
            ValueError, match="cannot take this call, plain and matmul can: it needs a Hopper"
        ):
            op(a_shard, weight)


# ---- on GPUs


def cases_on_gpus(rank, backend):
    cases = {
        f"anything, seed {seed}": lambda seed=seed: anything(rank, seed, 40, backend) for seed in range(4)
    }
    return cases | {"pieces": lambda: in_pieces(rank, (4, 2))}


@pytest.mark.gpu(devices=2, seconds=40)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_all_of_the_above_is_so_on_gpus(backend):
    assert_cases(cases_on_gpus, 2, backend, timeout_s=300)
