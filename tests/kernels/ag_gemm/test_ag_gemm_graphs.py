"""That AllGatherGemm may be captured in CUDA graphs and replayed among eager calls.

CPU ranks have no graphs: there what captured calls enqueue is called.
"""

from __future__ import annotations

import functools
import os
import signal

import pytest
import torch
from ag_gemm_runs import (
    begin,
    call_and_compare,
    call_as_captured,
    error_ratio,
    gathered_by_torch,
    operands_of,
    poison,
)
from operation_runs import (
    GPU_BACKENDS,
    assert_cases,
    cases_of,
    device,
    hold_launch,
    message_of,
    results,
)
from operations import HALF, factors

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.call import Product
from dist_autotune.kernels.epilogues import ONLY_SUMS
from dist_autotune.kernels.exchange.flags import ARRIVED
from dist_autotune.kernels.signals import as_patience
from ranks import assert_all_ok, assert_killed, meet

PATIENCE_S = 60.0  # less than a test has
as_captured = functools.partial(call_and_compare, call=call_as_captured)


def calls_as_captured(rank, m, n, k, capacity):
    begin(rank)
    with AllGatherGemm(capacity, k, HALF, timeout_s=PATIENCE_S) as op:
        poison(op)
        return [as_captured(op, m, n, in_place=call == 1) for call in range(3)]


def last_gathered(rank):
    begin(rank)
    right = []
    with AllGatherGemm(16, 16, HALF) as op:
        for call, m in (
            (call_as_captured, 16),
            (AllGatherGemm.__call__, 9),
            (call_as_captured, 5),
            (call_as_captured, 16),
        ):
            a_shard, weight = factors(m, 8, 16, HALF)
            call(op, a_shard, weight)
            right.append(torch.equal(op.gathered, gathered_by_torch(a_shard)))
    return all(right)


def in_the_lane_of_captured_calls(rank):
    cases = {
        f"{m} of {capacity} rows": lambda sizes=(m, 40, 32, capacity): calls_as_captured(rank, *sizes)
        for m, capacity in ((19, 24), (1, 1), (5, 64))
    }
    return cases | cases_of((last_gathered,), rank)


@pytest.mark.parametrize("world", [2, 3])
def test_captured_calls_are_right_whatever_candidates_ranks_run(world):
    assert_cases(in_the_lane_of_captured_calls, world)


# ---- what goes wrong between ranks


def dead_peer(rank, last):
    op = AllGatherGemm(8, 16, HALF)
    as_captured(op, 8, 16)
    meet()
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    op._patience_ticks = as_patience(1.0)
    # Chunks are pushed in order: a survivor's may be held up by the dead peer's slot until its own kernel has
    # given that up. Whose kernel is as impatient may give up the survivor too, and then these two would wait
    # for each other once more. So each begins when what can come has come: rank 0, rank 1, ...
    arrived = op._pusher.flags[ARRIVED.value]
    hold_launch(op, lambda: all(arrived[peer] for peer in range(last) if peer != rank))
    a_shard, weight = factors(8, 16, 16, HALF)
    message = message_of(lambda: op(a_shard, weight))
    del op._launch
    out = torch.empty(8 * op.world_size, 16, dtype=HALF)
    op._patience_ticks = as_patience(600.0)
    for _ in range(2):  # what graphs that are enqueued already would do
        operands = operands_of(op, weight, out, 8)
        op._run(Product(weight, out, ONLY_SUMS, operands), op._choose(operands), is_capturing=True)
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


class Captured:
    """A call in a graph, with the tensors that a replay reads and writes."""

    def __init__(self, op, m, n, *, in_place):
        k, dtype = op.shard.shape[1], op.shard.dtype
        self.op = op
        self.a_shard = op.shard[:m] if in_place else torch.empty(m, k, dtype=dtype, device=device())
        self.weight = torch.empty(n, k, dtype=dtype, device=device())
        self.out = torch.empty(m * op.world_size, n, dtype=dtype, device=device())
        self.refresh()
        self.call()  # loads the kernel

    def call(self):
        self.op(self.a_shard, self.weight, self.out)

    def capture(self):
        self.call()
        self.gathered = self.op.gathered.clone()  # in the graph: the next call overwrites these rows

    def refresh(self):
        """Enqueue new inputs and NaN for the output."""
        self.a_shard.normal_()
        self.weight.normal_()
        self.out.fill_(float("nan"))

    def results(self):
        """Return copies of the inputs and results of the last replay; waits for nothing."""
        return self.a_shard.clone(), self.weight.clone(), self.out.clone(), self.gathered.clone()


def graph_of(*calls):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call.capture()
    return graph


def errors_of(kept):
    errors = []
    for a_shard, weight, out, gathered in kept:
        full = gathered_by_torch(a_shard)
        errors.append(error_ratio(out, full, weight) if torch.equal(gathered, full) else float("inf"))
    return errors


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
                call.call()
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


def cases_on_gpus(rank, backend):
    return cases_of((gathered_from_outside, two_operations_in_one_graph), rank, backend)


@pytest.mark.gpu(devices=2, seconds=30)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_graphs_replay_right_products(backend):
    assert_cases(cases_on_gpus, 2, backend, timeout_s=200)
