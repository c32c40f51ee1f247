"""AllGatherMoE's kernel on one GPU: rank 0 of two, whose peer is the host, late on purpose."""

from __future__ import annotations

import time

import pytest
import torch
from expert_runs import explained_error, products, random_choices, randoms, relative_error
from host_as_peer import DEVICE, DTYPE, LATE_S, HostAsPeer, HostPeer, on_one_gpu, opened
from operation_runs import message_of

from dist_autotune.kernels.exchange.flags import ARRIVED, FREE, GIVEN, ROWS_SENT
from dist_autotune.kernels.moe import ag_moe_kernel
from dist_autotune.kernels.moe.ag_moe import AllGatherMoE
from dist_autotune.kernels.moe.announcer import TOPK_SPAN
from dist_autotune.kernels.signals import as_patience

pytestmark = pytest.mark.gpu(alone=True, seconds=7)  # beside another process none ended in 150 s


def choose(index: int) -> None:
    """Leave the kernel one candidate."""
    ag_moe_kernel.all_gather_moe.configs = [ag_moe_kernel.GPU_CANDIDATES[index]]


def error_of(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> float:
    """Return the error as a multiple of what the arithmetic explains."""
    wanted = products(x.repeat_interleave(ids.shape[1], dim=0), weight, ids.reshape(-1))
    return relative_error(out, wanted) / explained_error(out.dtype, 1, x.shape[1])


def inputs(tokens: int, k: int, n: int, experts: int, topk: int) -> tuple[torch.Tensor, ...]:
    weight = randoms(experts, n, k, dtype=DTYPE)
    return randoms(tokens, k, dtype=DTYPE), weight, random_choices(tokens, experts, topk)


class Peer(HostPeer):
    """What rank 1 does in a call."""

    def tell(self, op: AllGatherMoE, ids: torch.Tensor) -> None:
        """Permit rank 0 to push, and send it choices."""
        here, (count, topk) = op._flags.local, ids.shape
        self.write(here[FREE.value, 1], 1)
        begin = op._capacity * topk
        self.memory.copy(op._ids.local[begin : begin + ids.numel()], ids.reshape(-1), self.stream)
        self.write(here[GIVEN.value, 1], op._digest(is_shared=False))
        self.write(here[ROWS_SENT.value, 1], count * TOPK_SPAN.value + topk)

    def push(self, op: AllGatherMoE, tokens: torch.Tensor) -> None:
        self.memory.copy(op._gather.local[1, : len(tokens)], tokens, self.stream)
        self.write(op._flags.local[ARRIVED.value, 1], 1)

    def receive(self, op: AllGatherMoE) -> None:
        """Wait for what rank 0 pushes in a call."""
        for flag in (FREE, ROWS_SENT, ARRIVED):
            self.take(op._flags.peers[1][flag.value, 0])


BY_INDEX = pytest.mark.parametrize("index", [0, 10])


@BY_INDEX
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@on_one_gpu
def test_tokens_that_arrive_late_are_waited_for(rank: int, index: int, captured: bool) -> None:
    torch.manual_seed(0)
    choose(index)
    memory, (tokens, k, n, experts, topk) = HostAsPeer(), (500, 264, 520, 5, 2)
    with opened(memory, AllGatherMoE, tokens + 3, k) as op:
        peer, counts = Peer(memory), [tokens, tokens - 7]
        x, weight, ids = inputs(tokens, k, n, experts, topk)
        out = torch.empty(sum(counts) * topk, n, dtype=DTYPE, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        for call in range(5):
            theirs = torch.randn(counts[1], k).to(DTYPE).pin_memory()
            their_ids = torch.randint(-1, experts, (counts[1], topk)).pin_memory()
            x.normal_()
            ids.random_(-1, experts)
            for tensor in (out, op._gather.local):
                tensor.fill_(float("nan"))
            torch.cuda.synchronize()
            op._told = tuple(counts)
            peer.tell(op, their_ids)
            if not call:  # loading a kernel waits for those that run, so none may wait for this thread
                peer.push(op, theirs)
            graph.replay() if captured and call else op(x, weight, ids, out, tokens=counts)
            if call:
                time.sleep(LATE_S)  # the kernel has the own tokens, and waits
                peer.push(op, theirs)
            peer.receive(op)
            op.check()
            all_x, all_ids = torch.cat([x, theirs.to(DEVICE)]), torch.cat([ids, their_ids.to(DEVICE)])
            assert error_of(out, all_x, weight, all_ids) < 1
            assert torch.equal(op._gather.peers[1][0, :tokens], x.cpu())
            if captured and not call:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    op(x, weight, ids, out, tokens=counts)


@BY_INDEX
@on_one_gpu
def test_a_peer_that_never_pushes_is_named_and_the_gpu_is_free(rank: int, index: int) -> None:
    """Call with a peer that tells its choices and never pushes."""
    choose(index)
    memory, (tokens, k, n, experts, topk) = HostAsPeer(), (300, 256, 256, 4, 2)
    op = opened(memory, AllGatherMoE, tokens, k)
    op._patience_ticks = as_patience(1.0)
    x, weight, ids = inputs(tokens, k, n, experts, topk)
    theirs, began = ids.cpu().pin_memory(), time.monotonic()

    def call() -> None:
        op._told = (tokens, tokens)
        Peer(memory).tell(op, theirs)
        op(x, weight, ids, tokens=op._told)
        op.check()

    message = message_of(call)
    op.abandon()
    assert message.startswith("PeerTimeout: AllGatherMoE, rank 0: rank 1")
    assert "did not push its tokens in time" in message
    assert 1 <= time.monotonic() - began < 60
