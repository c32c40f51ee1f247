"""That a call is made by a collective on all ranks or on none, right either way.

Under pytest the ranks are CPU processes, whose collectives are gloo's; tests marked `gpu` repeat on GPUs.
"""

from __future__ import annotations

import functools
import random
import time
import types

import ag_gemm_runs
import gemm_rs_runs
import pytest
import torch
import torch.distributed as dist
from ag_gemm_graphs import Captured, errors_of, graph_of
from ag_gemm_runs import call_pushed, gathered_by_torch, tensors
from collective_runs import HALF, PATIENCE_S, begin, launches_of, note_agreements, prefer
from gemm_rs_runs import graph_call
from gpu_cases import kept_from_replays_among_eager_calls
from operation_runs import (
    GPU_BACKENDS,
    INTERPRETER,
    assert_cases,
    assert_right,
    cases_of,
    device,
    left_as_before,
    values,
)

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.plain import all_gather_gemm
from dist_autotune.kernels.exchange import collective
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.plain import gemm_reduce_scatter
from dist_autotune.launch.tunable import CHOICES

pytestmark = INTERPRETER


# ---- every call by the collective


def every_call(rank, backend="auto"):
    begin(rank)
    errors = []
    with (
        AllGatherGemm(24, 40, HALF, backend=backend, collective=True, timeout_s=PATIENCE_S) as gather,
        GemmReduceScatter(24 * dist.get_world_size(), 33, HALF, backend=backend, collective=True) as scatter,
    ):
        launched = launches_of(gather) + launches_of(scatter)
        for m in (24, 7, 1, 24):
            for in_place in (True, False):
                errors.append(ag_gemm_runs.call_and_compare(gather, m, 20 + 8 * rank, in_place=in_place))
            errors.append(gemm_rs_runs.call_and_compare(scatter, m * scatter.world_size, 16 + rank))
        errors += [in_odd_places(gather), *summed_in_odd_places(scatter)]
        for op in (gather, scatter):
            op.check()
    return [*errors, float(len(launched))]


def in_odd_places(op):
    """Multiply by a weight by columns, into columns of a matrix; return the error, 9 if beside them."""
    a_shard, weight = tensors(9, 24, 80, HALF)
    out = torch.full((9 * op.world_size, 50), float("nan"), dtype=HALF, device=device())
    op(a_shard[:, 3:43], weight[:, 5:45].T.contiguous().T, out[:, 1:25])
    if not (out[:, 0].isnan().all() and out[:, 25:].isnan().all()):
        return 9.0
    full = gathered_by_torch(a_shard[:, 3:43])
    return ag_gemm_runs.error_ratio(out[:, 1:25], full, weight[:, 5:45])


def summed_in_odd_places(op):
    """Do the same for sums, and once more with an addend."""
    m, n = 6 * op.world_size, 33
    a, weight = gemm_rs_runs.operands(m, n, 80, HALF)
    a, weight, addend = a[:, 3:43], weight[:, 5:45], torch.randn(m, n, device=device()).to(HALF)
    out = torch.full((6, 50), float("nan"), dtype=HALF, device=device())
    op(a, weight.T.contiguous().T, out[:, 1 : n + 1])
    beside = bool(out[:, 0].isnan().all() and out[:, n + 1 :].isnan().all())
    wide = torch.cat([a, addend], 1), torch.cat([weight, torch.eye(n, dtype=HALF, device=device())], 1)
    plain = gemm_rs_runs.error_ratio(out[:, 1 : n + 1], a, weight)
    return [plain if beside else 9.0, gemm_rs_runs.error_ratio(op(a, weight, addend=addend), *wide)]


def test_one_rank_needs_no_process_group():
    with left_as_before(all_gather_gemm), left_as_before(gemm_reduce_scatter):
        begin(0)
        with AllGatherGemm(20, 16, HALF, backend="shm", collective=True) as gather:
            a_shard, weight = tensors(9, 24, 16, HALF)
            assert ag_gemm_runs.error_ratio(gather(a_shard, weight), a_shard, weight) < 1
            assert torch.equal(gather.gathered, a_shard)
        with GemmReduceScatter(20, 24, HALF, backend="shm", collective=True) as scatter:
            assert gemm_rs_runs.call_and_compare(scatter, 20, 16) < 1


def other_types_and_groups(rank):
    begin(rank)
    group = dist.new_group([0, 2])
    if rank == 1:
        return [0.0]
    errors = []
    for dtype in (torch.bfloat16, torch.float32):
        with AllGatherGemm(8, 16, dtype, group, collective=True, timeout_s=PATIENCE_S) as gather:
            errors.append(ag_gemm_runs.call_and_compare(gather, 5, 24, group=group))
        with GemmReduceScatter(18, 16, dtype, group, collective=True, timeout_s=PATIENCE_S) as scatter:
            errors.append(gemm_rs_runs.call_and_compare(scatter, 18, 16, group=group))
    return errors


def test_products_and_sums_are_right_and_no_kernel_of_ours_is_launched():
    assert_cases(functools.partial(cases_of, (every_call, other_types_and_groups)), 3)


# ---- some calls by the collective


def some_calls(rank, seed, producer="pull", calls=14, backend="auto"):
    """Want it at random on each rank, mixed with captured calls' lane; results are looked at in the end."""
    begin(rank)
    order, own, kept = random.Random(seed), random.Random(f"{seed}, {rank}"), []
    with (
        AllGatherGemm(24, 16, HALF, backend=backend, producer=producer, timeout_s=PATIENCE_S) as gather,
        GemmReduceScatter(24 * dist.get_world_size(), 16, HALF, backend=backend) as scatter,
    ):
        made = []
        for op in (gather, scatter):
            prefer(op, lambda: shared or own.random() < 0.5)
            note_agreements(op, made)
        for _ in range(calls):
            shared, m, n = order.random() < 0.4, order.choice((24, 7, 16)), own.choice((16, 24, 33))
            kind, copied = order.choice((call_pushed, AllGatherGemm.__call__)), own.random() < 0.5
            if order.randrange(gather.world_size) == rank:
                time.sleep(own.random() / 20)
            a_shard, weight = tensors(m, n, 16, HALF)
            given = a_shard if copied else gather.shard[:m].copy_(a_shard)
            product = kind(gather, given, weight)
            a, b = gemm_rs_runs.operands(m * scatter.world_size, 16, 16, HALF)
            kept.append((product, gather.gathered.clone(), a_shard, weight, scatter(a, b), a, b))
        for op in (gather, scatter):
            op.check()
    errors = [0.0 if 0 < sum(made) < 2 * calls == len(made) else 9.0]
    for product, gathered, a_shard, weight, sums, a, b in kept:
        full = gathered_by_torch(a_shard)
        errors.append(0.0 if torch.equal(gathered, full) else 9.0)
        errors += [ag_gemm_runs.error_ratio(product, full, weight), gemm_rs_runs.error_ratio(sums, a, b)]
    return errors


@pytest.mark.parametrize(("world", "seed", "producer"), [(2, 1, "pull"), (3, 2, "push")])
def test_ranks_may_want_it_differently_in_each_call(world, seed, producer):
    assert_right(values(some_calls, world, seed, producer))


def captures(rank):
    """Pretend to capture; on the CPU that runs what a replay would."""
    begin(rank)
    found = []
    with AllGatherGemm(16, 16, HALF, timeout_s=PATIENCE_S) as op:
        launched = launches_of(op)
        for wanted, captured, m in (
            (True, False, 16),
            (False, True, 16),  # as the last eager call
            (True, True, 8),  # of which there was no eager call
            (False, False, 16),
            (True, True, 16),
            (True, False, 9),
            (True, True, 9),
        ):
            prefer(op, lambda wanted=wanted: wanted)
            op._is_capturing = lambda captured=captured: captured
            launched.clear()
            a_shard, weight = tensors(m, 24, 16, HALF)
            out, full = op(a_shard, weight), gathered_by_torch(a_shard)
            right = ag_gemm_runs.error_ratio(out, full, weight) < 1
            inside = torch.equal(op.gathered, full)
            op._is_capturing = lambda: False
            found.append((right and inside and torch.equal(op.gathered, full), not launched))
        return found


def test_a_captured_call_does_what_the_last_eager_one_with_as_many_rows_did():
    by_collective = [True, True, False, False, False, True, True]
    assert values(captures, 2) == [[(True, made) for made in by_collective]] * 2


# ---- who decides


def tuned(rank, columns_of_rank):
    from dist_autotune import contextual_autotune

    begin(rank, 0)
    errors, ways = [], []
    with (
        AllGatherGemm(16, 16, HALF, timeout_s=PATIENCE_S) as gather,
        GemmReduceScatter(32, 24, HALF, timeout_s=PATIENCE_S) as scatter,
    ):
        made = []
        for op in (gather, scatter):
            note_agreements(op, made)

        @contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1, cache=False, log_dir=None)
        def step():
            made.clear()
            errors.append(ag_gemm_runs.call_and_compare(gather, 16, columns_of_rank[rank]))
            errors.append(gemm_rs_runs.call_and_compare(scatter, 32, 16))
            ways.append(tuple(made))

        step()
        winners = {c.kernel: c.config for c in step.report.contexts if c.kernel.endswith(" way")}
        last = ways[-1]
        step()
        ways.append(ways.pop() == last)
        made.clear()
        ag_gemm_runs.call_and_compare(gather, 16, columns_of_rank[rank])
        gemm_rs_runs.call_and_compare(scatter, 32, 16)
    outside = tuple(made)
    return errors, winners, ways, last, outside


@pytest.mark.parametrize("columns", [(24, 24), (24, 40)], ids=["equal N", "N that differs"])
def test_a_session_tries_it_on_all_ranks_in_the_same_runs_and_the_winner_stands(columns):
    (errors, winners, ways, last, outside), other = values(tuned, 2, columns)
    assert max(errors + other[0]) < 1
    assert (winners, ways, last, outside) == other[1:]
    assert winners.keys() == {"ag_gemm way", "gemm_rs way"}
    assert {way[0] for way in ways[:-1]} == {way[1] for way in ways[:-1]} == {True, False}
    assert ways[-1] is True
    wanted = tuple(winners[name] == "collective" for name in ("ag_gemm way", "gemm_rs way"))
    assert last == outside == wanted


def tuned_alone(rank):
    """Tune on rank 0 alone, then have rank 0 alone know a result."""
    from dist_autotune import contextual_autotune

    begin(rank, 0)
    with GemmReduceScatter(32, 24, HALF, timeout_s=PATIENCE_S) as op:
        launched = launches_of(op)

        def step():
            return gemm_rs_runs.call_and_compare(op, 32, 16)

        alone = contextual_autotune(mode="online", cache=False, log_dir=None)(step) if rank == 0 else step
        errors = [alone() for _ in range(30)]
        if rank == 0:
            name, key = op._collective._choice, (32, 2, *op._key)
            from dist_autotune.triton_api.identity import key_text

            CHOICES.remember(name, key_text(key), '"collective"', (0, 1))
            errors.append(0.0 if op._collective.wants(32, op._key) else 9.0)
        errors += [step() for _ in range(3)]
    return errors, len(launched)


@pytest.mark.filterwarnings("ignore:.*is tuned without is_dist=True")
def test_where_one_rank_tunes_or_knows_a_result_alone_nobody_makes_it():
    for errors, launches in values(tuned_alone, 2):
        assert max(errors) < 1
        assert launches == 33


def test_it_is_tried_up_to_a_number_of_rows(monkeypatch):
    asked = []
    monkeypatch.setattr(
        collective, "tunable", lambda name, options, *, key, among: asked.append(key) or options[1]
    )
    with GemmReduceScatter(8, 8, HALF, backend="shm") as op:
        made = op._collective
        assert not made.wants(8, ())  # there is one rank
        made._ballots = types.SimpleNamespace(check=lambda: None)
        assert made.wants(collective.MOST_ROWS, ("k",))
        assert not made.wants(collective.MOST_ROWS + 1, ("k",))
    assert asked == [(collective.MOST_ROWS, 1, "k")]


# ---- on GPUs


def replayed_products(rank, backend, fixed):
    """Replay a collective among overlapped calls and replays of another shape; ranks are late by turns."""
    begin(rank)
    order, kept = random.Random(7), []
    with AllGatherGemm(136, 64, HALF, backend=backend, timeout_s=PATIENCE_S, collective=fixed) as op:
        calls = []
        for by_collective, m, in_place in ((True, 136, True), (True, 70, False), (False, 33, True)):
            if fixed is None:
                prefer(op, lambda by_collective=by_collective: by_collective)
            calls.append(Captured(op, m, 200, in_place=in_place))
        graphs = [graph_of(call) for call in calls]
        for _ in range(40):
            if order.randrange(4) == rank:
                torch.cuda._sleep(1_000_000)
            which, eager = order.randrange(3), order.random() < 0.5
            calls[which].refresh()
            if eager:
                op(calls[which].a_shard, calls[which].weight, calls[which].out)
                kept.append((*calls[which].results()[:3], op.gathered.clone()))
            else:
                graphs[which].replay()
                kept.append((*calls[which].results()[:3], op.gathered.clone()))
        op.check()
        return errors_of(kept)


def replayed_sums(rank, backend):
    begin(rank)
    with GemmReduceScatter(256, 200, HALF, backend=backend, timeout_s=PATIENCE_S, collective=True) as op:
        calls = [graph_call(op, m, k) for m, k in ((256, 128), (140, 72))]
        kept = kept_from_replays_among_eager_calls(rank, op, calls, lambda: gemm_rs_runs.poison(op))
        return [gemm_rs_runs.error_ratio(*one) for one in kept]


def cases_on_gpus(rank, backend):
    return {
        "every call": lambda: every_call(rank, backend),
        "some calls": lambda: some_calls(rank, 5, "pull", 40, backend),
        "some calls, pushed": lambda: some_calls(rank, 6, "push", 40, backend),
        "replayed products": lambda: replayed_products(rank, backend, True),
        "replayed beside overlapped ones": lambda: replayed_products(rank, backend, None),
        "replayed sums": lambda: replayed_sums(rank, backend),
    }


@pytest.mark.gpu(devices=2, seconds=25)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_all_of_the_above_is_so_on_gpus(backend):
    assert_cases(cases_on_gpus, 2, backend, timeout_s=240)


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("columns", [(24, 24), (24, 40)], ids=["equal N", "N that differs"])
def test_a_session_tries_it_on_gpus(columns):
    (errors, winners, ways, last, outside), other = values(tuned, 2, columns, timeout_s=240)
    assert max(errors + other[0]) < 1
    assert (winners, ways, last, outside) == other[1:]
