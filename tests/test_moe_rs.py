"""That MoEReduceScatter computes the right sums, whatever its ranks choose and do meanwhile.

Under pytest the ranks are CPU processes in Triton's interpreter; tests marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.moe_rs import MoEReduceScatter
from dist_autotune.kernels.moe_rs.candidates import CANDIDATES
from dist_autotune.kernels.moe_rs.kernel import moe_reduce_scatter
from dist_autotune.kernels.signals import polls
from forked_programs import forked_programs, share_errors
from moe_runs import (
    GIVEN_OTHERS,
    HALF,
    SHAPES,
    delay_pushes,
    ends,
    explained_error,
    of_all_ranks,
    products,
    random_choices,
    randoms,
    relative_error,
    synchronize,
    tokens_of_call,
)
from operation_runs import (
    GPU_BACKENDS,
    INTERPRETER,
    TWO,
    delay_copies,
    device,
    message_of,
    results,
    run_cases,
    values,
)
from ranks import assert_all_ok, assert_killed, meet

pytestmark = INTERPRETER


def begin(rank: int, candidate: int | None = None) -> None:
    """Seed this rank and leave its kernel one candidate: by default another one on each rank.

    Memory that torch hands out is NaN from now on, so products that are read before they are stored show.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    moe_reduce_scatter.configs = [CANDIDATES[(rank if candidate is None else candidate) % len(CANDIDATES)]]


@pytest.fixture(autouse=True)
def memory_is_handed_out_as_before():
    yield
    torch.use_deterministic_algorithms(False)


def poison(op: MoEReduceScatter) -> None:
    """Fill the buffers with NaN, so that whatever is read before it arrives shows."""
    for buffer in (op._staged.local, op._partial, op._weights.local):
        buffer.fill_(float("nan"))
    synchronize()


def operands(op, tokens, inner, experts, topk, kind="any", group=None):
    """Return fresh y, weight, ids and weights; a dropped choice has NaN for its row and its weight."""
    ids = random_choices(tokens[op.rank], experts, topk, kind)
    weights = torch.randn(ids.shape, device=device())
    weights[ids < 0] = float("nan")
    y = randoms(sum(tokens) * topk, inner, dtype=op._dtype)
    y[torch.cat(of_all_ranks(ids, group)).reshape(-1) < 0] = float("nan")
    return y, randoms(experts, op._n, inner, dtype=op._dtype), ids, weights


def error_ratio(out, y, weight, ids, weights, group=None) -> float:
    """Return the relative error against float32 as a multiple of what the arithmetic explains.

    Three roundings: of each product, of each rank's part of a sum, of the sum.
    """
    counts, topk = of_all_ranks(len(ids), group), ids.shape[1]
    all_ids = torch.cat(of_all_ranks(ids, group))
    scale = torch.where(all_ids < 0, 0.0, torch.cat(of_all_ranks(weights, group)))
    parts = products(y, weight, all_ids.reshape(-1)) * scale.reshape(-1, 1)
    total = parts.reshape(-1, topk, weight.shape[1]).sum(dim=1)
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
    begin = sum(counts[: dist.get_rank(group)]) if dist.is_initialized() else 0
    inner = topk * sum(of_all_ranks(y.shape[1], group))
    wanted = total[begin : begin + len(ids)]
    assert out.shape == wanted.shape
    return relative_error(out, wanted) / explained_error(out.dtype, 3, inner)


def call_and_compare(op, tokens, inner, experts, topk, *, kind="any", told=False, group=None) -> float:
    """Return the error of one call with fresh inputs and an output full of NaN."""
    y, weight, ids, weights = operands(op, tokens, inner, experts, topk, kind, group)
    out = torch.full((len(ids), op._n), float("nan"), dtype=op._dtype, device=y.device)
    assert op(y, weight, ids, weights, out, tokens=tokens if told else None) is out
    return error_ratio(out, y, weight, ids, weights, group)


def three_calls(rank, tokens, inner, n, experts, topk, dtype=HALF, kind="any"):
    begin(rank)
    with MoEReduceScatter(max(*tokens, 1), n, dtype) as op:
        poison(op)
        return [
            call_and_compare(
                op, tokens_of_call(tokens, call), inner, experts, topk, kind=kind, told=call == 1
            )
            for call in range(3)
        ]


@pytest.mark.parametrize(("tokens", "inner", "n", "experts", "topk"), SHAPES.values(), ids=SHAPES)
def test_the_sums_are_right(tokens, inner, n, experts, topk):
    for errors in values(three_calls, 2, tokens, inner, n, experts, topk):
        assert max(errors) < 1


@pytest.mark.parametrize("kind", ["one", "same", "none"])
def test_any_choices_are_right(kind):
    for errors in values(three_calls, 2, (17, 6), 16, 24, 4, 3, HALF, kind):
        assert max(errors) < 1


@pytest.mark.parametrize("tokens", [(5, 12, 0, 8)], ids=len)
def test_more_ranks_are_right_too(tokens):
    for errors in values(three_calls, len(tokens), tokens, 16, 24, 3, 2):
        assert max(errors) < 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_types_are_right(dtype):
    for errors in values(three_calls, 2, (13, 20), 48, 24, 3, 2, dtype):
        assert max(errors) < 1


def unequal_inner_parts(rank):
    begin(rank)
    with MoEReduceScatter(9, 24, HALF) as op:
        return [call_and_compare(op, [9, 4], 16 + 24 * rank, 3, 2) for _ in range(2)]


def test_ranks_may_hold_unequal_parts_of_the_inner_dimension():
    for errors in values(unequal_inner_parts, 2):
        assert max(errors) < 1


def one_candidate(rank, index_of_rank):
    begin(rank, index_of_rank[rank])
    with MoEReduceScatter(40, 72, HALF) as op:
        poison(op)
        tokens = [(40, 33, 5, 12)[p] for p in range(op.world_size)]
        return [call_and_compare(op, tokens_of_call(tokens, call), 40, 3, 2) for call in range(2)]


@pytest.mark.parametrize("index", range(len(CANDIDATES)), ids=[str(c.kwargs) for c in CANDIDATES])
def test_every_candidate_is_right(index):
    for errors in values(one_candidate, 2, [index] * 2):
        assert max(errors) < 1


def test_ranks_may_run_different_candidates_in_one_call():
    for errors in values(one_candidate, 4, range(4)):
        assert max(errors) < 1


def several_programs(rank, programs):
    begin(rank)
    world = dist.get_world_size() if dist.is_initialized() else 1
    tokens = [(33, 20, 0)[p] for p in range(world)]
    with MoEReduceScatter(40, 40, HALF, timeout_s=60.0) as op:
        poison(op)
        share_errors(op)
        mapped = [op._staged.local, op._words.local, op._weights.local, op._ids.local]
        with forked_programs(moe_reduce_scatter, programs, mapped):
            return [call_and_compare(op, tokens_of_call(tokens, call), 24, 3, 2) for call in range(3)]


@pytest.mark.parametrize(("world", "programs"), [(1, 3), (2, 2), (3, 3)])
def test_programs_of_a_launch_that_wait_for_each_other_are_right(world, programs):
    for errors in values(several_programs, world, programs):
        assert max(errors) < 1


def same_call_twice(rank):
    begin(rank)
    with MoEReduceScatter(40, 24, HALF) as op:
        given = operands(op, [40, 31], 16, 3, 3)
        first = op(*given)
        call_and_compare(op, [5, 40], 16, 3, 2)
        return torch.equal(first, op(*given))


def test_the_same_call_gives_the_same_bits():
    assert values(same_call_twice, 2) == [True, True]


def many_calls(rank, delays):
    """Keep every result until the end; no rank waits for another between calls, save the hosts for counts."""
    begin(rank)
    world, kept = dist.get_world_size(), []
    with MoEReduceScatter(24, 33, HALF) as op:
        poison(op)
        for call in range(6):
            tokens = [(24, 7, 0, 16)[(p + call) % 4] for p in range(world)]
            experts, topk, inner = (3, 5)[call % 2], (2, 1, 3)[call % 3], (24, 16)[call % 2]
            ids = random_choices(tokens[rank], experts, topk)
            weights = torch.randn(ids.shape, device=device())
            y, weight = randoms(sum(tokens) * topk, inner), randoms(experts, 33, inner)
            if delays == "one" and rank == call % world:
                time.sleep(0.1)
            if delays == "random":
                time.sleep(random.random() / 20)
            out = op(y, weight, ids, weights, tokens=None if call == 3 else tokens)
            kept.append((out, y, weight, ids, weights))
        op.check()
    return [error_ratio(*one) for one in kept]


@pytest.mark.parametrize(("delays", "world"), [("one", 3), ("random", 2)])
def test_calls_back_to_back_are_right_when_ranks_are_late(delays, world):
    for errors in values(many_calls, world, delays):
        assert max(errors) < 1


def late_pushes(rank):
    """Push late from rank 0: its peers' kernels are waiting for its choices and its sums by then."""
    begin(rank)
    with MoEReduceScatter(16, 16, torch.float32) as op:
        poison(op)
        if rank == 0:
            delay_copies(op, lambda: time.sleep(0.2))
        return [call_and_compare(op, [16, 9, 12], 16, 3, 2) for _ in range(2)]


def test_the_kernels_wait_for_what_comes_late():
    for errors in values(late_pushes, 3):
        assert max(errors) < 1


def pushes_that_nobody_needs(rank):
    """Push late from rank 1 sums for no token of rank 0 in the first call, and for some in the second."""
    begin(rank)
    with MoEReduceScatter(16, 16, HALF) as op:
        poison(op)
        if rank == 1:
            delay_pushes(op, op._pusher._peers[0].our_arrived, 1.0)
        return [call_and_compare(op, tokens, 16, 3, 2) for tokens in ([0, 9], [12, 9])]


def test_a_push_that_nobody_needs_is_not_taken_for_that_of_the_next_call():
    for errors in values(pushes_that_nobody_needs, 2):
        assert max(errors) < 1


def a_layer(rank):
    """Gather, multiply, apply, multiply, scatter: what the two operations are for, two layers at once."""
    begin(rank)
    tokens, k, inner, experts, topk = [11, 6], 16, 24, 4, 2
    errors = []
    with AllGatherMoE(12, k, torch.float32) as up, MoEReduceScatter(12, k, torch.float32) as down:
        for _ in range(2):
            x, ids = (
                randoms(tokens[rank], k, dtype=torch.float32),
                random_choices(tokens[rank], experts, topk),
            )
            first = randoms(experts, inner, k, dtype=torch.float32)
            second = randoms(experts, k, inner, dtype=torch.float32)
            weights = torch.rand(ids.shape, device=device())
            hidden = torch.relu(up(x, first, ids))
            errors.append(error_ratio(down(hidden, second, ids, weights), hidden, second, ids, weights))
    return errors


def test_the_result_of_the_gather_is_what_the_scatter_takes():
    for errors in values(a_layer, 2):
        assert max(errors) < 1


def strided_operands(rank):
    begin(rank)
    with MoEReduceScatter(8, 20, HALF) as op:
        y, weight = randoms(32, 50)[:, 3:35], randoms(3, 24, 50)[:, 2:22, 5:37]  # rows at odd addresses
        ids = random_choices(8, 3, 4)[:, 1:3]
        weights = torch.randn(8, 5, device=device(), dtype=torch.float64)[:, 2:4]
        out = torch.full((8, 50), float("nan"), dtype=HALF, device=device())
        op(y, weight, ids, weights, out[:, 1:21])
        untouched = out[:, 0].isnan().all() and out[:, 21:].isnan().all()
        return error_ratio(out[:, 1:21], y, weight, ids, weights.float()), bool(untouched)


def test_operands_may_be_slices_and_nothing_beside_them_is_written():
    for error, untouched in values(strided_operands, 2):
        assert error < 1
        assert untouched


def in_a_subset(rank):
    begin(rank)
    group = dist.new_group([0, 2])
    if rank == 1:
        return 0.0
    with MoEReduceScatter(9, 16, HALF, group) as op:
        return call_and_compare(op, [9, 4], 16, 3, 2, group=group)


def test_the_group_may_be_a_subset():
    assert max(values(in_a_subset, 3)) < 1


def test_one_rank_needs_no_process_group():
    begin(0)
    with MoEReduceScatter(20, 16, HALF, backend="shm") as op:
        poison(op)
        assert call_and_compare(op, [20], 24, 3, 2) < 1
        assert call_and_compare(op, [7], 24, 3, 2, told=True) < 1


def tuned_in_context(rank):
    from dist_autotune import contextual_autotune

    begin(rank)
    moe_reduce_scatter.configs = CANDIDATES
    errors, tokens = [], [40, 31]
    with MoEReduceScatter(64, 48, HALF) as op:

        @contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1, cache=False, log_dir=None)
        def step():
            errors.append(call_and_compare(op, tokens, 32, 3, 2))

        step()
        (context,) = step.report.contexts
        runs = step.report.runs
        tokens[1] += 1  # another number of rows, to be run as it was tuned
        step()
        return errors, str(context.config), runs, step.settled, len(step.report.contexts)


def test_tuned_in_context_every_run_is_right_ranks_agree_and_other_token_counts_are_no_new_context():
    (errors, config, runs, *settled), *others = values(tuned_in_context, 2)
    assert len(errors) == runs + 1 == len(CANDIDATES) + 2
    assert max(errors) < 1
    assert settled == [True, 1]
    for other_errors, *other in others:
        assert max(other_errors) < 1
        assert other == [config, runs, *settled]


# ---- wrong arguments


@pytest.fixture
def alone():
    begin(0)
    with MoEReduceScatter(8, 6, HALF, backend="shm", max_topk=3) as op:
        yield op


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


IDS, WEIGHTS = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
Y, W = zeros(8, 5), zeros(3, 6, 5)
WRONG = {
    "dtype": (lambda op: op(Y.float(), W, IDS, WEIGHTS), ValueError, "y is torch.float32 on cpu"),
    "K": (lambda op: op(zeros(8, 4), W, IDS, WEIGHTS), ValueError, "its rows must have K=4 elements"),
    "N": (lambda op: op(Y, W[:, :5], IDS, WEIGHTS), ValueError, r"\[3, 5, 5\]; \[E, n=6, K\] is needed"),
    "rows of y": (lambda op: op(Y[:7], W, IDS, WEIGHTS), ValueError, r"y has 7 rows; .* topk=2 are 8 rows"),
    "too many tokens": (
        lambda op: op(zeros(18, 5), W, IDS.new_zeros(9, 2), torch.ones(9, 2)), ValueError, "9 tokens; "
    ),
    "too many choices": (
        lambda op: op(zeros(16, 5), W, IDS.new_zeros(4, 4), torch.ones(4, 4)), ValueError, "max_topk=3"
    ),
    "ids are floats": (lambda op: op(Y, W, WEIGHTS, WEIGHTS), ValueError, "topk_ids is torch.float32"),
    "weights are integers": (lambda op: op(Y, W, IDS, IDS), ValueError, "topk_weights is torch.int64"),
    "weights of others": (
        lambda op: op(Y, W, IDS, WEIGHTS[:3]), ValueError, r"topk_ids \[4, 2\] and topk_weights \[3, 2\]"
    ),
    "out": (lambda op: op(Y, W, IDS, WEIGHTS, zeros(3, 6)), ValueError, r"out has .* \[4, 6\]"),
    "own count": (lambda op: op(Y, W, IDS, WEIGHTS, tokens=[3]), ValueError, "this one, passes 4 tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_raises_with_its_values_and_the_operation_stays_usable(alone, call, kind, text):
    with pytest.raises(kind, match=text):
        call(alone)
    assert call_and_compare(alone, [4], 5, 3, 2) < 1


def test_an_empty_operation_is_refused():
    with pytest.raises(ValueError, match="n=0 columns; it must be at least 1"):
        MoEReduceScatter(4, 0, HALF, backend="shm")


def test_a_closed_operation_says_so():
    op = MoEReduceScatter(4, 6, HALF, backend="shm")
    op.close()
    op.close()
    with pytest.raises(RuntimeError, match="this MoEReduceScatter is closed; open another on all ranks"):
        op(Y, W, IDS, WEIGHTS)


# ---- what goes wrong between ranks


def fresh_call(op, tokens, *, told=True, topk=2, ids=None, rows=None):
    count = tokens[op.rank]
    ids = random_choices(count, 3, topk) if ids is None else ids.to(device())
    y = randoms(sum(tokens) * topk if rows is None else rows, 16)
    weights = torch.ones(ids.shape, device=device())
    op(y, randoms(3, op._n, 16), ids, weights, tokens=tokens if told else None)


def invalid_expert(rank):
    begin(rank)
    op = MoEReduceScatter(8, 16, HALF)
    wrong = torch.tensor([[0, 1], [-1, 3], [2, 2], [-2, 0]]) if rank == 1 else None
    return ends(op, lambda: fresh_call(op, [4] * op.world_size, ids=wrong))


@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_an_expert_that_there_is_not_is_named_with_its_rank_on_every_rank(world):
    for rank, (message, again, at_close) in enumerate(values(invalid_expert, world)):
        wanted = (
            f"ValueError: MoEReduceScatter, rank {rank}: rank 1 chose expert 3, which weight does not have"
        )
        assert message.startswith(wanted)
        assert again
        assert at_close


def wrong_tokens(rank, told):
    """Let rank 0 be told wrong numbers, all others the right ones."""
    begin(rank)
    op = MoEReduceScatter(8, 16, HALF)
    given = told if rank == 0 else (4, 6, 5)
    ids = random_choices((4, 6, 5)[rank], 3, 2)
    first = message_of(lambda: fresh_call(op, list(given), ids=ids))
    return first, message_of(op.close)


@pytest.mark.parametrize("told", [(4, 5, 5), (4, 8, 5), (4, 5, 6)], ids=["fewer", "more", "as many together"])
def test_wrong_tokens_are_reported_by_name_on_every_rank(told):
    zero, *others = values(wrong_tokens, 3, told)
    also = ", rank 2 has 5" if told[2] != 5 else ""
    wanted = (
        f"ValueError: MoEReduceScatter, rank 0: tokens={list(told)} here, but rank 1 has 6{also}. Close it"
    )
    assert zero[0].startswith(wanted)
    assert zero[1] == zero[0]
    for rank, (message, at_close) in enumerate(others, 1):
        assert message.startswith(f"ValueError: MoEReduceScatter, rank {rank}: {GIVEN_OTHERS}")
        assert at_close == message


def wrong_rows(rank):
    """Let rank 1 find, when the hosts have told each other their numbers, that its y has not as many rows."""
    begin(rank)
    op = MoEReduceScatter(8, 16, HALF)
    op._budget = polls(1.0, op.device.type)
    first = message_of(lambda: fresh_call(op, [4, 4], told=False, rows=14 if rank == 1 else None))
    return first, message_of(op.close)


def test_rows_that_do_not_fit_the_tokens_of_all_ranks_end_on_both():
    peer, wrong = values(wrong_rows, 2)
    assert wrong[0] == "ValueError: y has 14 rows; tokens [4, 4] of the ranks with topk=2 are 16 rows"
    assert wrong[1].startswith(
        "RuntimeError: MoEReduceScatter, rank 1: call 1 was not carried out: ValueError"
    )
    assert peer[0].startswith(
        "PeerTimeout: MoEReduceScatter, rank 0: rank 1, or one that it waits for, did not"
    )
    assert peer[1] == peer[0]


def dead_peer(rank, last):
    begin(rank)
    op = MoEReduceScatter(8, 16, HALF)
    tokens = [4] * op.world_size
    fresh_call(op, tokens)
    op.check()
    meet()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    op._budget = polls(1.0, op.device.type)
    return ends(op, lambda: fresh_call(op, tokens))


@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_a_dead_peer_is_named_and_the_wait_ends(world):
    *survivors, dead = results(dead_peer, world, world - 1)
    assert_killed(dead)
    for rank, (message, again, at_close) in enumerate(assert_all_ok(survivors)):
        assert message.startswith(f"PeerTimeout: MoEReduceScatter, rank {rank}: ")
        assert f"rank {world - 1}, or one that it waits for, did not tell its choices in time" in message
        assert again
        assert at_close


def dies_before_its_push(rank):
    """End rank 1 when it has told its choices, at the copy that follows those of the choices."""
    begin(rank)
    op = MoEReduceScatter(8, 16, HALF)
    copies = itertools.count()

    def die_behind_the_choices():
        if next(copies) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        delay_copies(op, die_behind_the_choices)
    op._budget = polls(3.0, op.device.type)
    return ends(op, lambda: fresh_call(op, [4, 4]))


def test_a_peer_that_dies_between_its_choices_and_its_push_is_named():
    survivor, dead = results(dies_before_its_push, 2)
    assert_killed(dead)
    ((message, again, at_close),) = assert_all_ok([survivor])
    assert message.startswith("PeerTimeout: MoEReduceScatter, rank 0: rank 1, or one that it waits for, ")
    assert "did not push its sums for chunk 0 in time" in message
    assert again
    assert at_close


def failing_launch(rank):
    """Break rank 1's launch after it has told its peer its choices."""
    begin(rank)
    op = MoEReduceScatter(8, 16, HALF)
    op._budget = polls(1.0, op.device.type)
    if rank == 1:
        moe_reduce_scatter.configs = []
    return message_of(lambda: fresh_call(op, [4, 4])), message_of(op.close)


def test_a_launch_that_fails_breaks_the_operation_and_nobody_hangs():
    peer, failed = values(failing_launch, 2)
    assert failed[0].startswith("IndexError")
    assert failed[1].startswith(
        "RuntimeError: MoEReduceScatter, rank 1: call 1 was not carried out: IndexError"
    )
    wanted = "rank 1, or one that it waits for, did not push its sums for chunk 0 in time"
    assert peer[0].startswith(f"PeerTimeout: MoEReduceScatter, rank 0: {wanted}")
    assert peer[1] == peer[0]


# ---- on GPUs


def replays_among_eager_calls(rank, backend):
    begin(rank)
    order, kept = random.Random(7), []
    with MoEReduceScatter(256, 200, HALF, backend=backend, timeout_s=60.0) as op:
        cases = []
        for tokens, topk in (([256, 200], 2), ([70, 0], 3)):
            ids = random_choices(tokens[rank], 8, topk)
            weights = torch.randn(ids.shape, device=device())
            y, weight = randoms(sum(tokens) * topk, 128), randoms(8, 200, 128)
            out = torch.empty(tokens[rank], 200, dtype=HALF, device=device())
            op(y, weight, ids, weights, out, tokens=tokens)  # loads the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                op(y, weight, ids, weights, out, tokens=tokens)
            cases.append((y, weight, ids, weights, out, graph, tokens))
        poison(op)
        for _ in range(40):
            if order.randrange(4) == rank:
                torch.cuda._sleep(1_000_000)
            y, weight, ids, weights, out, graph, tokens = cases[order.randrange(2)]
            eager = order.random() < 0.5
            for tensor in (y, weight, weights):
                tensor.normal_()
            ids.random_(-1, 8)
            out.fill_(float("nan"))
            op(y, weight, ids, weights, out, tokens=tokens) if eager else graph.replay()
            kept.append([tensor.clone() for tensor in (out, y, weight, ids, weights)])
        op.check()
        return [error_ratio(*one) for one in kept]


def cases_on_gpus(rank, backend):
    def shapes(tokens, inner, n, experts, topk, dtype):
        begin(rank)
        with MoEReduceScatter(max(*tokens, 1), n, dtype, backend=backend, timeout_s=60.0) as op:
            poison(op)
            return [
                call_and_compare(op, tokens_of_call(tokens, call), inner, experts, topk, told=call == 1)
                for call in range(3)
            ]

    def candidate(index):
        begin(rank, index)
        with MoEReduceScatter(700, 520, HALF, backend=backend, timeout_s=60.0) as op:
            poison(op)
            return [call_and_compare(op, [700, 333][:: 1 - 2 * call], 256, 8, 2) for call in range(2)]

    large = {"large": ((1000, 900), 512, 1024, 60, 4)}
    cases = {
        f"{name}, {dtype}": lambda shape=shape, dtype=dtype: shapes(*shape, dtype)
        for name, shape in {**SHAPES, **large}.items()
        for dtype in (HALF, torch.bfloat16)
    }
    cases |= {f"candidate {index}": lambda index=index: candidate(index) for index in range(len(CANDIDATES))}
    cases["different candidates"] = lambda: candidate(rank)
    cases["same bits"] = lambda: same_call_twice(rank)
    cases["late ranks"] = lambda: many_calls(rank, "random")
    cases["graphs among eager calls"] = lambda: replays_among_eager_calls(rank, backend)
    cases["tuned in context"] = lambda: tuned_in_context(rank)[0]
    return run_cases(cases)


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_sums_are_right_on_gpus(backend):
    assert values(cases_on_gpus, 2, backend, timeout_s=300) == [[], []]
