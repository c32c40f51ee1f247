"""That AllGatherGemm may be captured in CUDA graphs and replayed among eager calls.

CPU ranks have no graphs: there what captured calls do (see `exchange.push`) is called eagerly.
"""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch
from ag_gemm_graphs import HALF, PATIENCE_S, Captured, errors_of, graph_of
from ag_gemm_runs import (
    begin,
    call_and_compare,
    call_pushed,
    error_ratio,
    gathered_by_torch,
    operands_of,
    poison,
    tensors,
)
from operation_runs import (
    GPU_BACKENDS,
    assert_cases,
    cases_of,
    hold_launch,
    message_of,
    results,
    run_cases,
    values,
)

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.call import Product
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm
from dist_autotune.kernels.epilogues import ONLY_SUMS
from dist_autotune.kernels.exchange.flags import ARRIVED
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed, meet

pushed = functools.partial(call_and_compare, call=call_pushed)


def pushed_calls(rank, m, n, k, capacity, backend="auto"):
    begin(rank)
    with AllGatherGemm(capacity, k, HALF, backend=backend, timeout_s=PATIENCE_S) as op:
        poison(op)
        return [pushed(op, m, n, in_place=call == 1) for call in range(3)]


def last_gathered(rank):
    begin(rank)
    right = []
    with AllGatherGemm(16, 16, HALF) as op:
        for call, m in (
            (call_pushed, 16),
            (AllGatherGemm.__call__, 9),
            (call_pushed, 5),
            (call_pushed, 16),
        ):
            a_shard, weight = tensors(m, 8, 16, HALF)
            call(op, a_shard, weight)
            right.append(torch.equal(op.gathered, gathered_by_torch(a_shard)))
    return all(right)


def in_the_lane_of_captured_calls(rank, world):
    cases = {"different candidates": lambda: pushed_calls(rank, 19, 24, 16, 24)}
    if world == 2:
        for m, capacity in ((64, 64), (1, 1), (5, 64)):
            sizes = m, 40, 32, capacity
            cases[f"{m} of {capacity} rows"] = lambda sizes=sizes: pushed_calls(rank, *sizes)
        return cases
    return cases | cases_of((last_gathered,), rank)


@pytest.mark.parametrize("world", [2, 3])
def test_captured_calls_are_right_whatever_candidates_ranks_run(world):
    assert_cases(in_the_lane_of_captured_calls, world, world)


def test_an_operation_without_graphs_needs_less_memory_and_refuses_captures():
    with AllGatherGemm(4, 8, HALF, backend="shm", graphs=False) as op:
        a_shard, weight = tensors(4, 6, 8, HALF)
        assert error_ratio(op(a_shard, weight), a_shard, weight) < 1
        with pytest.raises(RuntimeError, match="opened with graphs=False and cannot be captured"):
            call_pushed(op, a_shard, weight)


# ---- what goes wrong between ranks


def dead_peer(rank, last):
    op = AllGatherGemm(8, 16, HALF)
    pushed(op, 8, 16)
    meet()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    op._patience_ticks = as_patience(1.0)
    # Chunks are pushed in order: a survivor's may be held up by the dead peer's slot until its own kernel has
    # given that up. Whose kernel is as impatient may give up the survivor too, and then these two would wait
    # for each other once more. So each begins when what can come has come: rank 0, rank 1, ...
    arrived = op._pusher.flags[ARRIVED.value]
    hold_launch(op, lambda: all(arrived[peer] for peer in range(last) if peer != rank))
    a_shard, weight = tensors(8, 16, 16, HALF)
    message = message_of(lambda: call_pushed(op, a_shard, weight))
    del op._launch
    out = torch.empty(8 * op.world_size, 16, dtype=HALF)
    op._patience_ticks = as_patience(600.0)
    for _ in range(2):  # what graphs that are enqueued already would do
        operands = operands_of(op, weight, out, 8)
        op._run_pushed(Product(weight, out, ONLY_SUMS, operands), op._choose(operands))
    return message, message_of(op.check) == message


@pytest.mark.parametrize("world", [2, 3])
def test_a_dead_peer_is_named_and_later_replays_do_not_wait_for_it(world):
    *survivors, dead = results(dead_peer, world, world - 1)
    assert_killed(dead)
    for rank, (message, again) in enumerate(assert_all_ok(survivors)):
        assert message.startswith(f"PeerTimeout: AllGatherGemm, rank {rank}: ")
        assert f"did not push chunk {world - 1} in time" in message
        assert message.count("did not push") == 1
        assert again


# ---- graphs


def replays(rank, backend, *, in_place):
    """Replay back to back with new inputs each; the ranks are late by turns, and run different candidates."""
    begin(rank)
    kept = []
    with AllGatherGemm(136, 64, HALF, backend=backend, timeout_s=PATIENCE_S) as op:
        call = Captured(op, 130, 200, in_place=in_place)
        poison(op)
        graph = graph_of(call)
        for replay in range(20):
            if replay % 3 == rank:
                torch.cuda._sleep(2_000_000)
            call.refresh()
            graph.replay()
            kept.append(call.results())
        op.check()
        return errors_of(kept)


def gathered_from_outside(rank, backend):
    begin(rank)
    with AllGatherGemm(136, 64, HALF, backend=backend, timeout_s=PATIENCE_S) as op:
        call = Captured(op, 130, 200, in_place=False)
        graph, right = graph_of(call), []
        for replayed in (False, True, True, False, True):
            call.refresh()
            if replayed:
                graph.replay()
            else:
                call.call(call.a_shard, call.weight, call.out)
            right.append(torch.equal(op.gathered, gathered_by_torch(call.a_shard)))
        return all(right)


def two_operations_in_one_graph(rank, backend):
    begin(rank)
    kept = []
    with (
        AllGatherGemm(64, 64, HALF, backend=backend, timeout_s=PATIENCE_S) as first,
        AllGatherGemm(40, 32, torch.bfloat16, backend=backend, timeout_s=PATIENCE_S) as second,
    ):
        calls = [
            Captured(first, 64, 96, in_place=True),
            Captured(second, 33, 40, in_place=False),
            Captured(first, 17, 96, in_place=False),  # writes the shard of the one above
        ]
        for op in (first, second):
            poison(op)
        graph = graph_of(*calls)
        for replay in range(10):
            if replay % 2 == rank:
                torch.cuda._sleep(1_000_000)
            for call in calls:
                call.refresh()
            shard = calls[0].a_shard.clone()
            graph.replay()
            kept += [(shard, *calls[0].results()[1:]), calls[1].results(), calls[2].results()]
        return errors_of(kept)


def settled_and_captured(rank, backend):
    from dist_autotune import contextual_autotune

    begin(rank)
    all_gather_gemm.configs = CANDIDATES[:4] + CANDIDATES[-3:]
    kept = []
    with AllGatherGemm(64, 64, HALF, backend=backend, timeout_s=PATIENCE_S) as op:

        @contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1, cache=False, log_dir=None)
        def thunk(a_shard, weight, out):
            return op(a_shard, weight, out)

        call = Captured(op, 64, 128, in_place=False, call=thunk)
        for _ in range(5):
            if thunk.settled:
                break
            thunk(call.a_shard, call.weight, call.out)
        assert thunk.settled
        graph = graph_of(call)
        for _ in range(10):
            call.refresh()
            graph.replay()
            kept.append(call.results())
        return errors_of(kept)


def cases_on_gpus(rank, backend):
    return run_cases(
        {
            "pushed, called eagerly": lambda: pushed_calls(rank, 19, 24, 16, 24, backend),
            "replays in place": lambda: replays(rank, backend, in_place=True),
            "replays, copied": lambda: replays(rank, backend, in_place=False),
            "gathered": lambda: gathered_from_outside(rank, backend),
            "two operations in one graph": lambda: two_operations_in_one_graph(rank, backend),
            "settled and captured": lambda: settled_and_captured(rank, backend),
        }
    )


@pytest.mark.gpu(devices=2, seconds=30)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_graphs_replay_right_products(backend):
    assert values(cases_on_gpus, 2, backend, timeout_s=200) == [[], []]
