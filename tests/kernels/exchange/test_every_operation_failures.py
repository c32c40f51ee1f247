"""What each operation tells when ranks differ or one dies, that every wait ends, and what results are then.

Cases marked `gpu` repeat on GPUs.
"""

import contextlib
import functools
import itertools
import re
import time
import types

import pytest
import torch
import torch.distributed as dist
from dense_runs import (
    GATHERING_BY_MAIL,
    GATHERING_BY_STORES,
    GATHERING_ROWS,
    REDUCING,
    SCATTERING_SUMS,
    STORING_SUMS,
    GatheringRows,
    OneSum,
)
from every_operation import EVERY, EXPERTS, OF_ONE_WAY, each
from expert_runs import STORING_CHOSEN
from operation_runs import TWO, die, end_of, hold_launch, message_of, on_ranks
from rank_programs import wait_for

from dist_autotune.kernels.agreement.errors import PeerTimeout
from dist_autotune.kernels.exchange import absence
from dist_autotune.kernels.exchange.flags import ARRIVED, ROWS_SENT
from dist_autotune.kernels.gemm_ar.ways import LOW_LATENCY, ONE_SHOT, OVERLAPPED, TWO_SHOT
from dist_autotune.kernels.signals import as_patience
from dist_autotune.kernels.symm import Write
from dist_autotune.kernels.symm.shm import HostStream
from ranks import meet

OF_KERNELS = {way: REDUCING[way] for way in (ONE_SHOT, TWO_SHOT, LOW_LATENCY)}


# ---- ranks that differ


@on_ranks(2)
def test_operations_opened_differently_raise_on_every_rank(rank):
    for ways in ((ONE_SHOT, TWO_SHOT), (None, ONE_SHOT)):  # the latter allocate other memory
        message = message_of(lambda way=ways[rank]: REDUCING[way].open(4, 4, timeout_s=20.0))
        assert message.startswith("ValueError: the ranks pass different values of way: ")
        assert f"rank 0: '{ways[0]}'; rank 1: '{ways[1]}'" in message


@on_ranks(2)
def test_what_one_rank_raises_as_it_opens_ends_the_wait_of_its_peer(rank):
    told = "ValueError: " if rank else "PeerFailed: rank 0 of 2: rank 1 opens nothing .* ValueError: "
    for runs, wrong in itertools.product(EVERY.values(), ({"size": 0}, {"dtype": torch.int8})):
        named = {"size": 16, "timeout_s": 60.0} | (wrong if rank else {})
        assert re.match(told, message_of(lambda runs=runs, named=named: runs.open(4, **named)))
        runs.open(4, 16).close()


ROWS_OF_REDUCE = "rank {peer} has {rows} rows, not as many as this rank. Every rank must pass as many rows."
ROWS_OF_SCATTER = "rank {peer} has {rows} rows for each rank"
ROWS_OF_GATHER = "rank {peer} pushed {rows} rows"
OTHER_ROWS = {
    "AllGatherGemm": (GATHERING_ROWS, {}, ROWS_OF_GATHER),
    "AllGatherGemm, by a collective": (GATHERING_ROWS, {"collective": True}, ROWS_OF_GATHER),
    "AllGatherGemm, low-latency": (GATHERING_BY_MAIL, {}, ROWS_OF_GATHER),
    "AllGatherGemm, by stores": (GATHERING_BY_STORES, {}, ROWS_OF_GATHER),
    "GemmReduceScatter": (SCATTERING_SUMS, {}, ROWS_OF_SCATTER),
    "GemmReduceScatter, by a collective": (SCATTERING_SUMS, {"collective": True}, ROWS_OF_SCATTER),
    "GemmReduceScatter, by stores": (STORING_SUMS, {}, ROWS_OF_SCATTER),
    "GemmAllReduce": (OneSum(), {}, ROWS_OF_REDUCE),
} | {f"GemmAllReduce, {way}": (OneSum(way), {}, ROWS_OF_REDUCE) for way in OF_KERNELS}


IN_CALLS = [  # a collective that all have agreed on is for gloo or NCCL to end
    pytest.param(case, settled, id=f"{case}, {'settled' if settled else 'first call'}")
    for case in OTHER_ROWS
    for settled in (False, True)
    if not (settled and case.endswith("a collective"))
]


@pytest.mark.parametrize(("case", "settled"), IN_CALLS)
@pytest.mark.parametrize("world", TWO)
@on_ranks()
def test_different_rows_raise_on_every_rank(rank, world, case, settled):
    runs, options, told = OTHER_ROWS[case]
    runs.begin(rank, 0)
    op = runs.open(8, 16, **options)
    if settled:  # for all rows of their class
        runs.fresh_call(op, [6] * world)
    rows = [(4, 8)[rank]] * world
    operands = runs.operands(op, rows, 16)
    out = runs.new_out(op, rows, operands).zero_()
    message = end_of(op, lambda: runs.call(op, operands, out, rows))
    told = told.format(peer=1 - rank, rows=(8, 4)[rank])
    assert message.startswith(f"ValueError: {runs.name}, rank {rank}: {told}")
    # The first launch of two has raised on the CPU.
    is_nan = bool(out[runs.result_of_peer].isnan().all())
    assert is_nan or runs.name != "GemmAllReduce" or runs.way == TWO_SHOT


@pytest.mark.parametrize(
    "runs", [OneSum(LOW_LATENCY), GATHERING_ROWS], ids=["GemmAllReduce", "AllGatherGemm"]
)
@on_ranks(2)
def test_so_do_rows_of_another_class_that_has_no_way_yet(rank, runs):
    """Settle the way of up to 16 rows; rank 1 then calls with 20, whose class goes another way."""
    runs.begin(rank, 0)
    by_a_collective = {} if runs.name == "GemmAllReduce" else {"collective": True}
    op = runs.open(40, 16, **by_a_collective, timeout_s=1.0)
    runs.fresh_call(op, [4, 4])
    op._patience_ticks = as_patience(0.1)
    call = functools.partial(runs.fresh_call, op, [(4, 20)[rank]] * 2)
    if by_a_collective and rank == 0:
        assert "all ranks agreed on a collective, and one did not take part" in message_of(call)
        return
    message = end_of(op, call)
    assert message.startswith(f"ValueError: {runs.name}, rank {rank}: rank {1 - rank}, or one that it ")
    assert "In an eager call rank 0 has 4 rows, rank 1 has 20 rows. Every rank must pass as many" in message


# ---- ranks that die or stay away


OR_ANOTHER = "rank {0}, or one that it waits for, did not "
LOST = {"AllGatherGemm": OR_ANOTHER + "push chunk {0} in time"}
LOST |= {"AllGatherGemm, low-latency": OR_ANOTHER + "send its rows in time"}
LOST |= {"AllGatherGemm, by stores": OR_ANOTHER + "push chunk {0} in time"}
LOST |= {"GemmReduceScatter": OR_ANOTHER + "push its sums"}
LOST |= {"GemmReduceScatter, by stores": OR_ANOTHER + "come to the call in time"}
LOST |= {f"GemmAllReduce, {way}": OR_ANOTHER + "offer its rows in time" for way in OF_KERNELS}
LOST |= {f"GemmAllReduce, {LOW_LATENCY}": OR_ANOTHER + "send its rows in time"}
LOST |= {f"GemmAllReduce, {OVERLAPPED}": OR_ANOTHER + "push its sums"}
LOST |= dict.fromkeys((*EXPERTS, "MoEReduceScatter, by stores"), OR_ANOTHER + "send its choices in time")


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("world", [3, *TWO[1:]])
@on_ranks(the_last_is_killed=True)
def test_a_dead_peer_is_named_and_the_wait_ends(rank, world, name):
    runs = (EVERY | OF_ONE_WAY)[name]
    runs.begin(rank)
    op, rows = runs.open(8, 16), [6] * world
    runs.fresh_call(op, rows)
    op.check()
    meet()
    if rank == world - 1:
        die()
    runs.forsake(op, 1.0)
    message = end_of(op, lambda: runs.fresh_call(op, rows))
    lost_by = "GemmReduceScatter" if name.endswith(OVERLAPPED) else runs.name
    assert message.startswith(f"PeerTimeout: {lost_by}, rank {rank}: ")
    assert LOST[name].format(world - 1) in message


STUCK = {  # how many copies the last one is, what is told
    "AllGatherGemm": (GatheringRows(consumer="plain", pieces=1), 1, "chunk 0 was not copied"),
    "AllGatherGemm, in pieces": (GatheringRows(consumer="plain", pieces=2), 2, "chunk 0 was not copied"),
    "GemmReduceScatter": (SCATTERING_SUMS, 1, "the sums of rank 0 were not copied"),
}


@pytest.mark.parametrize("name", STUCK)
@on_ranks(2)
def test_a_copy_that_does_not_end_is_told_from_a_peer_that_does_not_come(rank, name):
    """Hold the last copy that rank 0 pushes back until its kernel has given up."""
    runs, copies, told = STUCK[name]
    runs.begin(rank)
    op, wanted = runs.open(32, 16), "nothing was raised"
    if rank == 0:
        runs.forsake(op, 0.5)
        copy, begun = op._memory.copy, []

        def copy_last_late(dst, src, stream):
            begun.append(dst)
            if len(begun) == copies:
                stream.enqueue(lambda: wait_for(op._failures.words.any, 100.0))
            copy(dst, src, stream)

        op._memory.copy = copy_last_late
        arrived = op._pusher.pushes._here[1][ARRIVED.value]
        hold_launch(op, lambda: int(arrived) >= 32)
        wanted = f"PeerTimeout: {runs.name}, rank 0: {told} to all peers, rank 1, in time."
    assert message_of(lambda: runs.fresh_call(op, [32, 32])).startswith(wanted)


# ---- results without a peer


class WithRelu(GatheringRows):
    def call(self, op, operands, out, rows, *, told=True):
        return op(*operands, out, activation="relu")


SPOILED = {
    "gathered": WithRelu(consumer="plain"),
    "gathered by stores": GATHERING_BY_STORES,
    "scattered": SCATTERING_SUMS,
    "scattered by stores": STORING_SUMS,
    **OF_KERNELS,
    **EXPERTS,
    "MoEReduceScatter, by stores": STORING_CHOSEN,
}


@each(SPOILED)
@on_ranks(2)
def test_a_result_without_a_peer_is_nan_now_and_later(rank, runs):
    """Call twice; then rank 0 alone, whose buffers hold what rank 1 sent before, and again."""
    runs.begin(rank)
    rows = [8, 8]
    op = runs.open(8, 16)
    operands = runs.operands(op, rows, 24)
    out = runs.new_out(op, rows, operands)
    for _ in range(2):
        runs.call(op, operands, out, rows)
    assert out.isfinite().all()
    dist.barrier()
    if rank == 0:
        runs.forsake(op, 0.5)
        check, op._check_usable = op._check_usable, lambda *_: None  # of replays, which ask no host
        for _ in range(2):
            with contextlib.suppress(PeerTimeout):
                runs.call(op, operands, out, rows)
            assert out[runs.result_of_peer].isnan().all()
            out.zero_()
            runs.forsake(op, 600.0)  # the second does not wait
        op._check_usable = check
    meet()
    op.abandon()


# ---- a rank that leaves


def test_a_rank_that_leaves_tells_its_peers_behind_the_pushes_of_the_call_that_failed():
    permit, rows_sent, arrived, other = torch.ones(4, dtype=torch.int32).split(1)
    flags = {ROWS_SENT.value: rows_sent, ARRIVED.value: arrived}

    def push():
        deadline = time.monotonic() + 0.2  # a rank that told beside it would have by then
        while int(arrived) != absence.FAR and time.monotonic() < deadline:
            time.sleep(1e-3)
        arrived.fill_(8)

    pushes = types.SimpleNamespace(
        stream=HostStream("pushes"),
        before=[1],
        owes_parts=False,
        here=lambda peer, row: permit,
        raising=lambda peer, row, value: Write(flags.get(row, other), value),
    )
    pushes.stream.enqueue(push)
    absence.leave(pushes, 10.0, behind_kernels=False)
    wait_for(lambda: int(rows_sent) == absence.FAR, 10.0)
    pushes.stream.close()
    wait_for(lambda: int(arrived) == absence.FAR, 10.0)
