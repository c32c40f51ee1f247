"""What a call by a collective tells when ranks differ or one does not come, and that every wait ends."""

from __future__ import annotations

import os
import signal

import ag_gemm_runs
import gemm_rs_runs
import pytest
import torch.distributed as dist
from ag_gemm_runs import tensors
from collective_runs import HALF, PATIENCE_S, SHORT_S
from operation_runs import INTERPRETER, message_of, results, values

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from ranks import assert_all_ok, assert_killed, meet

pytestmark = INTERPRETER


def opened_differently(rank):
    return [
        message_of(lambda: AllGatherGemm(8, 16, HALF, collective=(True, None)[rank])),
        message_of(lambda: GemmReduceScatter(8, 16, HALF, collective=(False, None)[rank])),
    ]


def test_ranks_that_fix_it_differently_are_told_so_when_they_open():
    for first, second in values(opened_differently, 2):
        text = "ValueError: the ranks pass different values of collective: rank 0: {!r}; rank 1: 'None'."
        assert first.startswith(text.format("True"))
        assert second.startswith(text.format("False"))


def without_nccl(rank, backends):
    dist.get_backend_config = lambda group: backends
    message = message_of(lambda: GemmReduceScatter(8, 16, HALF, collective=True, timeout_s=PATIENCE_S))
    with GemmReduceScatter(8, 16, HALF, timeout_s=PATIENCE_S) as op:
        return message, op._collective.wants(8, ()), gemm_rs_runs.call_and_compare(op, 8, 16)


def test_a_group_that_cannot_make_it_is_refused_where_it_is_fixed():
    for message, wants, error in values(without_nccl, 2, "cuda:nccl,xcpu:gloo"):
        assert message == (
            "ValueError: collective=True needs a backend on cpu; the group has cuda:nccl,xcpu:gloo"
        )
        assert not wants
        assert error < 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"collective": "auto"}, "collective is 'auto'; it is True, False, or None, which tunes it"),
        ({"collective": True, "consumer": "plain"}, "consumer is 'plain', but collective=True leaves the"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(given, text):
    with pytest.raises(ValueError, match=text):
        AllGatherGemm(8, 16, HALF, backend="shm", **given)


def different_rows(rank):
    gather = AllGatherGemm(8, 16, HALF, collective=True)
    scatter = GemmReduceScatter(8, 16, HALF, collective=True)
    return (
        message_of(lambda: gather(*tensors(4 if rank == 0 else 7, 16, 16, HALF))),
        message_of(lambda: scatter(*gemm_rs_runs.operands(4 if rank == 0 else 8, 16, 16, HALF))),
    )


def test_different_rows_raise_on_every_rank():
    for rank, (gather, scatter) in enumerate(values(different_rows, 2)):
        peer = 1 - rank
        rows, parts = (4, 7)[peer], (2, 4)[peer]
        assert gather.startswith(
            f"ValueError: AllGatherGemm, rank {rank}: in call 1 rank {peer} passed {rows}"
        )
        assert scatter.startswith(f"ValueError: GemmReduceScatter, rank {rank}: rank {peer} has {parts} rows")


def peer_that_does_not_come(rank, how):
    """Leave rank 0 alone in the second call: rank 1 makes none, dies, or fails behind its ballot."""
    gather = AllGatherGemm(8, 16, HALF, collective=True, timeout_s=SHORT_S)
    scatter = GemmReduceScatter(8, 16, HALF, collective=True, timeout_s=SHORT_S)
    errors = [ag_gemm_runs.call_and_compare(gather, 8, 16), gemm_rs_runs.call_and_compare(scatter, 8, 16)]
    assert max(errors) < 1
    meet()
    operands = tensors(8, 16, 16, HALF)
    calls = [lambda: gather(*operands), lambda: scatter(*operands)]
    if rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fails behind its ballot":
            for op in (gather, scatter):
                op._collective._make = None
            messages = [message_of(call) for call in calls]
            meet()
            return messages
        meet()
        return []
    found = [(message_of(call), message_of(call)) for call in calls]
    if how != "dies":
        meet()
    return found


@pytest.mark.parametrize("how", ["makes none", "dies", "fails behind its ballot"])
def test_a_peer_that_does_not_come_is_named_and_the_wait_ends(how):
    waiting, other = results(peer_that_does_not_come, 2, how)
    if how == "dies":
        assert_killed(other)
        other = waiting
    (gather, scatter), _ = assert_all_ok([waiting, other])
    for (first, again), name in ((gather, "AllGatherGemm"), (scatter, "GemmReduceScatter")):
        assert first.startswith(
            f"PeerTimeout: {name}: all ranks agreed on a collective, and one did not take part"
        )
        assert again.startswith(f"RuntimeError: {name}, rank 0: ")
        assert "was not carried out: PeerTimeout" in again
