"""That AllGatherMoE computes the right products, whatever its ranks choose and do meanwhile.

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
from dist_autotune.kernels.ag_moe.candidates import CANDIDATES
from dist_autotune.kernels.ag_moe.kernel import all_gather_moe
from dist_autotune.kernels.signals import polls
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
HOST_PATIENCE_S = 3.0  # where a host waits for one that does not come, and for others that do


def begin(rank: int, candidate: int | None = None) -> None:
    """Seed this rank and leave its kernel one candidate: by default another one on each rank."""
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    all_gather_moe.configs = [CANDIDATES[(rank if candidate is None else candidate) % len(CANDIDATES)]]


def poison(op: AllGatherMoE) -> None:
    """Fill the gather buffer with NaN, so that whatever is read before it arrives shows."""
    op._gather.local.fill_(float("nan"))
    synchronize()


def error_ratio(out, x, weight, ids, group=None) -> float:
    """Return the relative error against float32 as a multiple of what the arithmetic explains."""
    rows = torch.cat(of_all_ranks(x, group)).repeat_interleave(ids.shape[1], dim=0)
    wanted = products(rows, weight, torch.cat(of_all_ranks(ids, group)).reshape(-1))
    assert out.shape == wanted.shape
    return relative_error(out, wanted) / explained_error(out.dtype, 1, x.shape[1])


def call_and_compare(
    op, tokens, columns, experts, topk, *, kind="any", told=False, in_place=False, group=None
) -> float:
    """Return the error of one call with fresh inputs and an output full of NaN."""
    count = tokens[op.rank]
    x = randoms(count, op._k, dtype=op._dtype)
    weight = randoms(experts, columns, op._k, dtype=op._dtype)
    ids = random_choices(count, experts, topk, kind)
    out = torch.full((sum(tokens) * topk, columns), float("nan"), dtype=op._dtype, device=x.device)
    if in_place:
        op.shard[:count].copy_(x)
    given = op.shard[:count] if in_place else x
    ids_given = ids.to(torch.int32) if told else ids
    assert op(given, weight, ids_given, out, tokens=tokens if told else None) is out
    return error_ratio(out, x, weight, ids, group)


def three_calls(rank, tokens, k, columns, experts, topk, dtype=HALF, kind="any"):
    begin(rank)
    with AllGatherMoE(max(*tokens, 1), k, dtype) as op:
        poison(op)
        return [
            call_and_compare(
                op, tokens_of_call(tokens, call), columns, experts, topk,
                kind=kind, told=call == 1, in_place=call == 2,
            )
            for call in range(3)
        ]  # fmt: skip


@pytest.mark.parametrize(("tokens", "k", "columns", "experts", "topk"), SHAPES.values(), ids=SHAPES)
def test_the_products_are_right(tokens, k, columns, experts, topk):
    for errors in values(three_calls, 2, tokens, k, columns, experts, topk):
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


def one_candidate(rank, index_of_rank):
    begin(rank, index_of_rank[rank])
    with AllGatherMoE(40, 40, HALF) as op:
        poison(op)
        tokens = [(40, 33, 5, 12)[p] for p in range(op.world_size)]
        return [call_and_compare(op, tokens_of_call(tokens, call), 72, 3, 2) for call in range(2)]


@pytest.mark.parametrize("index", range(len(CANDIDATES)), ids=[str(c.kwargs) for c in CANDIDATES])
def test_every_candidate_is_right(index):
    for errors in values(one_candidate, 2, [index] * 2):
        assert max(errors) < 1


def test_ranks_may_run_different_candidates_in_one_call():
    for errors in values(one_candidate, 4, range(4)):
        assert max(errors) < 1


def unequal_columns(rank):
    begin(rank)
    with AllGatherMoE(9, 16, HALF) as op:
        return [call_and_compare(op, [9, 4], 8 + 30 * rank, 3, 2) for _ in range(2)]


def test_ranks_may_have_unequal_numbers_of_columns():
    for errors in values(unequal_columns, 2):
        assert max(errors) < 1


def many_calls(rank, delays):
    """Keep every result until the end; no rank waits for another between calls, save the hosts for counts."""
    begin(rank)
    world, kept = dist.get_world_size(), []
    with AllGatherMoE(24, 16, HALF) as op:
        poison(op)
        for call in range(6):
            tokens = [(24, 7, 0, 16)[(p + call) % 4] for p in range(world)]
            experts, topk, columns = (3, 5)[call % 2], (2, 1, 3)[call % 3], (33, 16)[call % 2]
            x, ids = randoms(tokens[rank], 16), random_choices(tokens[rank], experts, topk)
            weight = randoms(experts, columns, 16)
            if delays == "one" and rank == call % world:
                time.sleep(0.1)
            if delays == "random":
                time.sleep(random.random() / 20)
            out = op(x, weight, ids, tokens=None if call == 3 else tokens)
            kept.append((out, x, weight, ids))
        op.check()
    return [error_ratio(*one) for one in kept]


@pytest.mark.parametrize(("delays", "world"), [("one", 3), ("random", 2)])
def test_calls_back_to_back_are_right_when_ranks_are_late(delays, world):
    for errors in values(many_calls, world, delays):
        assert max(errors) < 1


def late_pushes(rank):
    """Push late from rank 0: its peers' kernels are waiting for its ids and its tokens by then."""
    begin(rank)
    with AllGatherMoE(16, 16, torch.float32) as op:
        poison(op)
        if rank == 0:
            delay_copies(op, lambda: time.sleep(0.2))
        return [call_and_compare(op, [16, 9, 12], 16, 3, 2) for _ in range(2)]


def test_the_kernels_wait_for_what_comes_late():
    for errors in values(late_pushes, 3):
        assert max(errors) < 1


def pushes_that_no_tile_needs(rank):
    """Push late from rank 1, whose chunk nobody needs in the first call, and everybody in the second."""
    begin(rank)
    with AllGatherMoE(16, 16, HALF) as op:
        poison(op)
        if rank == 1:
            delay_pushes(op, op._chunks[0][1], 1.0)
        return [call_and_compare(op, tokens, 16, 3, 2) for tokens in ([9, 0], [9, 12])]


def test_a_push_that_no_tile_needs_is_not_taken_for_that_of_the_next_call():
    for errors in values(pushes_that_no_tile_needs, 2):
        assert max(errors) < 1


def two_operations(rank):
    begin(rank)
    errors = []
    with AllGatherMoE(12, 24, HALF) as first, AllGatherMoE(20, 16, torch.bfloat16) as second:
        for _ in range(2):
            errors += [
                call_and_compare(first, [12, 5], 16, 3, 2),
                call_and_compare(second, [3, 20], 24, 2, 4),
            ]
    return errors


def test_two_operations_do_not_disturb_each_other():
    for errors in values(two_operations, 2):
        assert max(errors) < 1


def strided_operands(rank):
    begin(rank)
    with AllGatherMoE(8, 32, HALF) as op:
        x, weight = randoms(8, 50)[:, 3:35], randoms(3, 24, 50)[:, 2:22, 5:37]  # rows at odd addresses
        ids = random_choices(8, 3, 4)[:, 1:3]
        out = torch.full((32, 50), float("nan"), dtype=HALF, device=device())
        op(x, weight, ids, out[:, 1:21])
        untouched = out[:, 0].isnan().all() and out[:, 21:].isnan().all()
        return error_ratio(out[:, 1:21], x, weight, ids), bool(untouched)


def test_operands_may_be_slices_and_nothing_beside_them_is_written():
    for error, untouched in values(strided_operands, 2):
        assert error < 1
        assert untouched


def in_a_subset(rank):
    begin(rank)
    group = dist.new_group([0, 2])
    if rank == 1:
        return 0.0
    with AllGatherMoE(9, 16, HALF, group) as op:
        return call_and_compare(op, [9, 4], 16, 3, 2, group=group)


def test_the_group_may_be_a_subset():
    assert max(values(in_a_subset, 3)) < 1


def test_one_rank_needs_no_process_group():
    begin(0)
    with AllGatherMoE(20, 16, HALF, backend="shm") as op:
        poison(op)
        assert call_and_compare(op, [20], 24, 3, 2) < 1
        assert call_and_compare(op, [7], 24, 3, 2, told=True) < 1


def tuned_in_context(rank):
    from dist_autotune import contextual_autotune

    begin(rank)
    all_gather_moe.configs = CANDIDATES
    errors, tokens = [], [40, 31]
    with AllGatherMoE(64, 32, HALF) as op:

        @contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1, cache=False, log_dir=None)
        def step():
            errors.append(call_and_compare(op, tokens, 48, 3, 2))

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
    with AllGatherMoE(8, 6, HALF, backend="shm", max_topk=3) as op:
        yield op


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


IDS = torch.zeros(4, 2, dtype=torch.int64)
X, W = zeros(4, 6), zeros(3, 5, 6)
WRONG = {
    "dtype": (lambda op: op(X.float(), W, IDS), ValueError, "x_shard is torch.float32 on cpu"),
    "K": (lambda op: op(zeros(4, 7), W, IDS), ValueError, r"x_shard has shape \[4, 7\]; .* K=6"),
    "too many tokens": (
        lambda op: op(zeros(9, 6), W, IDS.new_zeros(9, 2)), ValueError, "9 tokens; .* tokens_per_rank=8"
    ),
    "weight [N, K]": (lambda op: op(X, W[0], IDS), ValueError, r"weight has shape \[5, 6\]; \[E, N, K\] is"),
    "K of weight": (lambda op: op(X, zeros(3, 5, 4), IDS), ValueError, "its rows must have K=6 elements"),
    "no experts": (lambda op: op(X, W[:0], IDS), ValueError, r"shape \[0, 5, 6\]; .* each at least 1"),
    "columns of weight apart": (lambda op: op(X, zeros(3, 6, 5).mT, IDS), ValueError, "rows of weight are n"),
    "dtype of weight": (lambda op: op(X, W.float(), IDS), ValueError, "weight is torch.float32 on cpu"),
    "no tensor": (lambda op: op(X, W.tolist(), IDS), TypeError, "weight is a list"),
    "ids of others": (lambda op: op(X, W, IDS[:3]), ValueError, r"x_shard \[4, 6\] and topk_ids \[3, 2\]"),
    "ids are floats": (lambda op: op(X, W, IDS.float()), ValueError, "topk_ids is torch.float32"),
    "ids are no tensor": (lambda op: op(X, W, IDS.tolist()), TypeError, "topk_ids is a list"),
    "one dimension": (lambda op: op(X, W, IDS[:, 0]), ValueError, r"topk_ids has shape \[4\]"),
    "too many choices": (
        lambda op: op(X, W, IDS.new_zeros(4, 4)), ValueError, "4 choices a token; .* max_topk=3"
    ),
    "no choices": (lambda op: op(X, W, IDS[:, :0]), ValueError, "0 choices a token"),
    "rows of out": (lambda op: op(X, W, IDS, zeros(9, 5)), ValueError, r"out has shape \[9, 5\]; .* 8 rows"),
    "columns of out": (lambda op: op(X, W, IDS, zeros(8, 4)), ValueError, "the result has 5 columns"),
    "too few counts": (lambda op: op(X, W, IDS, tokens=[]), ValueError, r"tokens=\[\] has 0 numbers"),
    "own count": (lambda op: op(X, W, IDS, tokens=[3]), ValueError, r"rank 0, this one, passes 4 tokens"),
    "count above": (lambda op: op(X, W, IDS, tokens=[9]), ValueError, "each must be 0 to tokens_per_rank=8"),
    "middle of op.shard": (lambda op: op(op.shard[2:6], W, IDS), ValueError, r"pass op.shard\[:T_r\]"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_raises_with_its_values_and_the_operation_stays_usable(alone, call, kind, text):
    with pytest.raises(kind, match=text):
        call(alone)
    assert call_and_compare(alone, [4], 5, 3, 2) < 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tokens_per_rank": 0}, "tokens_per_rank=0; it must be 1 to 16777215"),
        ({"tokens_per_rank": 2**24}, "tokens_per_rank=16777216"),
        ({"max_topk": 64}, "max_topk=64; it must be 1 to 63"),
        ({"dtype": torch.float64}, "torch.float64 is not supported on cpu"),
    ],
    ids=str,
)
def test_an_operation_that_cannot_be_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        AllGatherMoE(**{"tokens_per_rank": 4, "k": 4, "dtype": HALF, "backend": "shm", **arguments})


def test_a_closed_operation_says_so():
    op = AllGatherMoE(4, 6, HALF, backend="shm")
    op.close()
    op.close()
    for use in (lambda: op(X, W, IDS), lambda: op.shard, op.check):
        with pytest.raises(RuntimeError, match="this AllGatherMoE is closed; open another on all ranks"):
            use()


# ---- what goes wrong between ranks


def fresh_call(op, *, tokens=None, count=4, experts=3, topk=2, ids=None):
    ids = random_choices(count, experts, topk) if ids is None else ids.to(device())
    op(randoms(count, op._k), randoms(experts, 16, op._k), ids, tokens=tokens)


def invalid_expert(rank):
    begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    wrong = torch.tensor([[0, 1], [-1, 3], [2, 2], [-2, 0]]) if rank == 1 else None
    return ends(op, lambda: fresh_call(op, ids=wrong))


@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_an_expert_that_there_is_not_is_named_with_its_rank_on_every_rank(world):
    for rank, (message, again, at_close) in enumerate(values(invalid_expert, world)):
        wanted = f"ValueError: AllGatherMoE, rank {rank}: rank 1 chose expert 3, which weight does not have"
        assert message.startswith(wanted)
        assert again
        assert at_close


def huge_expert(rank):
    begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    wrong = torch.full((4, 2), 2**32 + 1) if rank == 1 else None  # as int32 it would be expert 1
    return ends(op, lambda: fresh_call(op, ids=wrong))[0]


def test_a_huge_expert_is_not_taken_for_another_one():
    for message in values(huge_expert, 2):
        assert "rank 1 chose expert 2147483647, which weight does not have" in message


def wrong_tokens(rank, told):
    """Let rank 0 be told wrong numbers, all others the right ones."""
    begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    count = (4, 6, 5)[rank]
    first = message_of(lambda: fresh_call(op, tokens=told if rank == 0 else [4, 6, 5], count=count))
    return first, message_of(op.close)


@pytest.mark.parametrize("told", [(4, 5, 5), (4, 8, 5), (4, 5, 6)], ids=["fewer", "more", "as many together"])
def test_wrong_tokens_are_reported_by_name_on_every_rank(told):
    zero, *others = values(wrong_tokens, 3, told)
    also = ", rank 2 has 5" if told[2] != 5 else ""
    wanted = f"ValueError: AllGatherMoE, rank 0: tokens={list(told)} here, but rank 1 has 6{also}. Close it"
    assert zero[0].startswith(wanted)
    assert zero[1] == zero[0]
    for rank, (message, at_close) in enumerate(others, 1):
        assert message.startswith(f"ValueError: AllGatherMoE, rank {rank}: {GIVEN_OTHERS}")
        assert at_close == message


def different_topk(rank):
    begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    return ends(op, lambda: fresh_call(op, topk=2 + rank))


def test_different_numbers_of_choices_raise_on_every_rank():
    for rank, (message, again, at_close) in enumerate(values(different_topk, 2)):
        peer, theirs = (1, 3) if rank == 0 else (0, 2)
        wanted = (
            f"ValueError: AllGatherMoE, rank {rank}: rank {peer} has {theirs} choices a token, not as many"
        )
        assert message.startswith(wanted)
        assert again
        assert at_close


def dead_peer(rank, last, told):
    begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    tokens = [4] * op.world_size
    fresh_call(op, tokens=tokens)
    op.check()
    meet()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    op._budget = polls(1.0, op.device.type)
    op._board._timeout_s = HOST_PATIENCE_S
    return ends(op, lambda: fresh_call(op, tokens=tokens if told else None))


@pytest.mark.parametrize("world", [3, *TWO[1:]])
def test_a_dead_peer_is_named_and_the_wait_ends(world):
    *survivors, dead = results(dead_peer, world, world - 1, True)
    assert_killed(dead)
    for rank, (message, again, at_close) in enumerate(assert_all_ok(survivors)):
        assert message.startswith(f"PeerTimeout: AllGatherMoE, rank {rank}: ")
        assert f"rank {world - 1}, or one that it waits for, did not tell its choices in time" in message
        assert again
        assert at_close


def test_a_dead_peer_is_named_where_hosts_wait_for_its_number_of_tokens():
    *survivors, dead = results(dead_peer, 3, 2, False)
    assert_killed(dead)
    for rank, (message, *_) in enumerate(assert_all_ok(survivors)):
        assert message.startswith(f"PeerTimeout: rank 2 did not tell rank {rank} within 3 s how many tokens")


def tokens_on_one_rank(rank):
    begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    op._budget = polls(1.0, op.device.type)
    op._board._timeout_s = HOST_PATIENCE_S
    first = message_of(lambda: fresh_call(op, tokens=[4, 4] if rank == 0 else None))
    return first, message_of(op.close)


def test_tokens_on_one_rank_only_are_told_on_both():
    given, asked = values(tokens_on_one_rank, 2)
    assert given[0].startswith("PeerTimeout: AllGatherMoE, rank 0: rank 1, or one that it waits for")
    assert given[1] == given[0]
    assert asked[0].startswith("PeerTimeout: rank 0 did not tell rank 1 within 3 s how many tokens it passes")
    assert "pass it on all ranks or on none" in asked[0]
    assert asked[1].startswith("RuntimeError: AllGatherMoE, rank 1: call 1 was not carried out: PeerTimeout")


def dies_before_its_push(rank):
    """End rank 1 when it has told its choices, at the copy that follows those of the choices."""
    begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    copies = itertools.count()

    def die_behind_the_choices():
        if next(copies) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        delay_copies(op, die_behind_the_choices)
    op._budget = polls(3.0, op.device.type)
    return ends(op, lambda: fresh_call(op, tokens=[4, 4]))


def test_a_peer_that_dies_between_its_choices_and_its_push_is_named():
    survivor, dead = results(dies_before_its_push, 2)
    assert_killed(dead)
    ((message, again, at_close),) = assert_all_ok([survivor])
    assert message.startswith("PeerTimeout: AllGatherMoE, rank 0: rank 1, or one that it waits for, ")
    assert "did not push its tokens in time" in message
    assert again
    assert at_close


def failing_launch(rank):
    """Break rank 1's launch: its peers have its tokens by then, and wait for the next call."""
    begin(rank)
    op = AllGatherMoE(8, 16, HALF)
    op._budget = polls(1.0, op.device.type)
    if rank == 1:
        all_gather_moe.configs = []
    first = message_of(lambda: fresh_call(op, tokens=[4, 4]))
    return first, message_of(lambda: fresh_call(op, tokens=[4, 4])), message_of(op.close)


def test_a_launch_that_fails_breaks_the_operation_and_nobody_hangs():
    peer, failed = values(failing_launch, 2)
    assert failed[0].startswith("IndexError")
    broken = "RuntimeError: AllGatherMoE, rank 1: call 1 was not carried out: IndexError"
    assert failed[1].startswith(broken)
    assert failed[2].startswith(broken)
    assert peer[0] == "nothing was raised"
    assert peer[1].startswith("PeerTimeout: AllGatherMoE, rank 0: rank 1, or one that it waits for")
    assert peer[2] == peer[1]


# ---- on GPUs


def replays_among_eager_calls(rank, backend):
    begin(rank)
    order, kept = random.Random(7), []
    with AllGatherMoE(256, 128, HALF, backend=backend, timeout_s=60.0) as op:
        cases = []
        for tokens, topk in (([256, 200], 2), ([70, 0], 3)):
            x, ids = randoms(tokens[rank], 128), random_choices(tokens[rank], 8, topk)
            weight = randoms(8, 200, 128)
            out = torch.empty(sum(tokens) * topk, 200, dtype=HALF, device=device())
            op(x, weight, ids, out, tokens=tokens)  # loads the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                op(x, weight, ids, out, tokens=tokens)
            cases.append((x, weight, ids, out, graph, tokens))
        poison(op)
        for _ in range(40):
            if order.randrange(4) == rank:
                torch.cuda._sleep(1_000_000)
            x, weight, ids, out, graph, tokens = cases[order.randrange(2)]
            eager = order.random() < 0.5
            for tensor in (x, weight):
                tensor.normal_()
            ids.random_(-1, 8)
            out.fill_(float("nan"))
            op(x, weight, ids, out, tokens=tokens) if eager else graph.replay()
            kept.append((out.clone(), x.clone(), weight.clone(), ids.clone()))
        op.check()
        return [error_ratio(*one) for one in kept]


def capture_without_tokens(rank, backend):
    with AllGatherMoE(8, 16, HALF, backend=backend) as op:
        fresh_call(op)
        x, weight, ids = randoms(4, 16), randoms(3, 16, 16), random_choices(4, 3, 2)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            message = message_of(lambda: op(x, weight, ids))
            x.add_(0)  # an empty capture warns
        fresh_call(op)
        return message == (
            "RuntimeError: a captured call of AllGatherMoE needs tokens=, the number of tokens of each rank"
        )


def cases_on_gpus(rank, backend):
    def shapes(tokens, k, columns, experts, topk, dtype):
        begin(rank)
        with AllGatherMoE(max(*tokens, 1), k, dtype, backend=backend, timeout_s=60.0) as op:
            poison(op)
            return [
                call_and_compare(
                    op,
                    tokens_of_call(tokens, call),
                    columns,
                    experts,
                    topk,
                    told=call == 1,
                    in_place=call == 2,
                )
                for call in range(3)
            ]

    def candidate(index):
        begin(rank, index)
        with AllGatherMoE(700, 256, HALF, backend=backend, timeout_s=60.0) as op:
            poison(op)
            return [call_and_compare(op, [700, 333][:: 1 - 2 * call], 520, 8, 2) for call in range(2)]

    large = {"large": ((1000, 900), 512, 1024, 60, 4)}
    cases = {
        f"{name}, {dtype}": lambda shape=shape, dtype=dtype: shapes(*shape, dtype)
        for name, shape in {**SHAPES, **large}.items()
        for dtype in (HALF, torch.bfloat16)
    }
    cases |= {f"candidate {index}": lambda index=index: candidate(index) for index in range(len(CANDIDATES))}
    cases["different candidates"] = lambda: candidate(rank)
    cases["late ranks"] = lambda: many_calls(rank, "random")
    cases["a capture without tokens="] = lambda: capture_without_tokens(rank, backend)
    cases["graphs among eager calls"] = lambda: replays_among_eager_calls(rank, backend)
    cases["tuned in context"] = lambda: tuned_in_context(rank)[0]
    return run_cases(cases)


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_products_are_right_on_gpus(backend):
    assert values(cases_on_gpus, 2, backend, timeout_s=300) == [[], []]
