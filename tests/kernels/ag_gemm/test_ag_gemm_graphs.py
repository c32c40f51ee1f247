"""That AllGatherGemm may be captured in CUDA graphs and replayed among eager calls.

CPU ranks have no graphs: there what captured calls enqueue is called.
"""

from __future__ import annotations

import functools

import pytest
import torch
from dense_runs import call_and_compare, call_as_captured, operands_of
from operation_runs import die, hold_launch, message_of, on_ranks
from operations import HALF, factors

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm.call import Product
from dist_autotune.kernels.epilogues import ONLY_SUMS
from dist_autotune.kernels.exchange.flags import ARRIVED
from dist_autotune.kernels.signals import as_patience
from ranks import meet

PATIENCE_S = 60.0  # less than a test has
as_captured = functools.partial(call_and_compare, call=call_as_captured)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks(the_last_is_killed=True)
def test_a_dead_peer_is_named_and_later_replays_do_not_wait_for_it(rank, world):
    op = AllGatherGemm(8, 16, HALF)
    as_captured(op, 8, 16)
    meet()
    if rank == world - 1:
        die()
    op._patience_ticks = as_patience(1.0)
    # Chunks are pushed in order: a survivor's may be held up by the dead peer's slot until its own kernel has
    # given that up. Whose kernel is as impatient may give up the survivor too, and then these two would wait
    # for each other once more. So each begins when what can come has come: rank 0, rank 1, ...
    arrived = op._pusher.flags[ARRIVED.value]
    hold_launch(op, lambda: all(arrived[peer] for peer in range(world - 1) if peer != rank))
    a_shard, weight = factors(8, 16, 16, HALF)
    message = message_of(lambda: op(a_shard, weight))
    del op._launch
    out = torch.empty(8 * op.world_size, 16, dtype=HALF)
    op._patience_ticks = as_patience(600.0)
    for _ in range(2):  # what graphs that are enqueued already would do
        operands = operands_of(op, weight, out, 8)
        op._exchange(operands, Product(a_shard, weight, out, ONLY_SUMS, operands), False, True)
    assert message_of(op.check) == message
    assert message.startswith(f"PeerTimeout: AllGatherGemm, rank {rank}: ")
    assert f"did not push chunk {world - 1} in time" in message
    assert message.count("did not push") == 1
