"""The operations over symmetric memory on one GPU: rank 0 of two, whose peer is the host with pinned memory.

Copy engines copy pinned memory as they copy a peer's, so a kernel meets what it meets on two GPUs: rows and
flags that arrive while it runs, written by streams. The host plays the peer by the protocols at the top of
`exchange.push` and `gemm_rs.operation`, late on purpose. What is left for two GPUs: memory
of another process, NVLink, and two ranks that wait for each other.
"""

import itertools
import time
from collections.abc import Callable, Sequence

import epilogue_runs
import pytest
import torch
from dense_runs import error_ratio, force
from epilogue_runs import quantized
from gpu_cases import covering_indices
from host_as_peer import DEVICE, DTYPE, LATE_S, HostAsPeer, HostPeer, on_one_gpu, opened
from operation_runs import message_of

from dist_autotune.kernels.ag_gemm import AllGatherGemm, specialized
from dist_autotune.kernels.ag_gemm.gather_buffer import RowFormat
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, all_gather_gemm
from dist_autotune.kernels.epilogues import Epilogue, result_columns
from dist_autotune.kernels.exchange import flags
from dist_autotune.kernels.exchange.operation import Operation
from dist_autotune.kernels.exchange.push import piece_ends
from dist_autotune.kernels.gemm.pruning import prune_chunks
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs import plain as rs_plain
from dist_autotune.kernels.gemm_rs import specialized as rs_specialized
from dist_autotune.kernels.signals import as_patience
from dist_autotune.kernels.tensors import FP8

pytestmark = pytest.mark.gpu(alone=True, seconds=7)  # beside another process none ended in 150 s

CONSUMERS = {  # with some of their candidates
    "specialized": {"cooperative": 0, "ping-pong": 6, "small tiles": 9},
    "plain": {"TMA": 8, "half a tile at a time": 0, "pointers": 12},
}
# N is a multiple of what cuBLAS takes in fp8, or it is not.
SHAPES_IN_FP8 = [(512, 1024, 512), (333, 520, 272), (128, 272, 1024)]
SHAPES = [(512, 1024, 512), (333, 520, 264), (128, 264, 1024)]  # rows of a chunk, N, K


class Peer(HostPeer):
    """What rank 1 does in a call."""

    def push(self, op: AllGatherGemm, chunk: torch.Tensor, pieces: int) -> None:
        """Take part in the call that rank 0 has just made, which lasts until its own chunk has left, too."""
        pusher = op._pusher
        here, there = pusher.flags, pusher.pushes._there[1][flags.FREE.value]
        self.take(there)
        self.write(here[flags.ROWS_SENT.value, 1], len(chunk))
        begin = 0
        for end in piece_ends(len(chunk), pieces):
            time.sleep(LATE_S)
            slot = op._gather.local[1]
            self.memory.copy(slot[begin:end], chunk[begin:end], self.stream)
            self.write(here[flags.ARRIVED.value, 1], end)
            begin = end
        time.sleep(LATE_S)
        assert not torch.cuda.current_stream().query()
        self.write(here[flags.FREE.value, 1], 1)


def choose_candidate(consumer: str, name: str) -> None:
    if consumer == "specialized":
        specialized.tuned.configs = [specialized.CANDIDATES[CONSUMERS[consumer][name]]]
    else:
        all_gather_gemm.configs = [CANDIDATES[CONSUMERS[consumer][name]]]


def one_call(
    op: AllGatherGemm, peer: Peer, shape: tuple[int, int, int], pieces: int, activation: str | None = None
) -> tuple[float, bool]:
    """Return the error of a call with new inputs, and whether what was gathered has the right bits."""
    rows, n, k = shape
    here, weight = torch.randn(rows, k, device=DEVICE).to(DTYPE), torch.randn(n, k, device=DEVICE).to(DTYPE)
    theirs = torch.randn(rows, k).to(DTYPE).pin_memory()
    epilogue = Epilogue(activation=activation)
    columns = result_columns(activation, n)
    out = torch.full((2 * rows, columns), float("nan"), dtype=DTYPE, device=DEVICE)
    op._gather.local[1:].fill_(float("nan"))
    force(op, pieces=pieces)
    op(here, weight, out, activation=activation)
    peer.push(op, theirs, 3 - pieces % 3)
    op.check()
    assert torch.equal(op._gather.peers[1][0, :rows], here.cpu())
    full = torch.cat([here, theirs.to(DEVICE)])
    return error_ratio(out, full, weight, epilogue), bool(torch.equal(op.gathered, full))


@pytest.mark.parametrize("consumer", CONSUMERS)
@on_one_gpu
def test_rows_that_arrive_late_and_in_pieces_are_waited_for(rank: int, consumer: str) -> None:
    torch.manual_seed(0)
    found = {}
    for name, shape in itertools.product(CONSUMERS[consumer], SHAPES):
        choose_candidate(consumer, name)
        memory = HostAsPeer()
        with opened(memory, AllGatherGemm, shape[0] + 3, shape[2], consumer=consumer, programs=132) as op:
            peer = Peer(memory)
            for pieces in (1, 2, 4):
                found[f"{name}, {shape}, {pieces} pieces"] = one_call(op, peer, shape, pieces)
            gated = shape[0], shape[1] - shape[1] % 16, shape[2]
            found[f"{name}, {gated}, gated"] = one_call(op, peer, gated, 2, "swiglu")
    assert {case: seen for case, seen in found.items() if not (seen[0] < 1 and seen[1])} == {}


def call_in_fp8(op: AllGatherGemm, peer: Peer, shape: tuple[int, int, int], epilogue: Epilogue) -> float:
    """Return the error of a call with new inputs; `epilogue` has a bias and an activation, if any."""
    rows, n, k = shape
    here, theirs, (weight, scale_weight) = (quantized(size, k, DEVICE) for size in (rows, rows, n))
    chunk = torch.zeros((rows, op._gather.local.shape[2]), dtype=torch.uint8, pin_memory=True)
    for part, values in zip((RowFormat(k, FP8).rows_in, RowFormat(k, FP8).scales_in), theirs, strict=True):
        part(chunk).copy_(values.reshape(part(chunk).shape))
    op._gather.local.fill_(255)  # NaN, elements and scales
    options = {"scale_a": here[1], "scale_weight": scale_weight}
    out = op(here[0], weight, bias=epilogue.bias, activation=epilogue.activation, **options)
    peer.push(op, chunk, 2)
    op.check()
    full, scales = (torch.cat([ours, others]) for ours, others in zip(here, theirs, strict=True))
    of_all = epilogue._replace(scale_a=scales, scale_b=scale_weight)
    return epilogue_runs.error_ratio(out, full, weight, of_all)


@pytest.mark.parametrize("consumer", CONSUMERS)
@on_one_gpu
def test_rows_in_fp8_arrive_with_their_scales(rank: int, consumer: str) -> None:
    torch.manual_seed(0)
    found = {}
    for name, shape in itertools.product(CONSUMERS[consumer], SHAPES_IN_FP8):
        choose_candidate(consumer, name)
        memory, options = HostAsPeer(), {"consumer": consumer, "programs": 132, "dtype": FP8}
        with opened(memory, AllGatherGemm, shape[0] + 3, shape[2], **options) as op:
            peer, bias = Peer(memory), torch.randn(shape[1], device=DEVICE)
            for ending in (Epilogue(), Epilogue(bias, "gelu")):
                found[f"{name}, {shape}, {ending.activation}"] = call_in_fp8(op, peer, shape, ending)
    assert {case: error for case, error in found.items() if not error < 1} == {}


@pytest.mark.parametrize("consumer", CONSUMERS)
@on_one_gpu
def test_a_peer_that_does_not_come_is_named_and_the_gpu_is_free(rank: int, consumer: str) -> None:
    choose_candidate(consumer, next(iter(CONSUMERS[consumer])))
    rows, n, k = SHAPES[0]
    weight = torch.empty(n, k, dtype=DTYPE, device=DEVICE)
    memory = HostAsPeer()
    op = opened(memory, AllGatherGemm, rows, k, consumer=consumer, pieces=2, programs=132)
    one_call(op, Peer(memory), SHAPES[0], 2)
    message = told_in_time(op, lambda: op(op.shard, weight))
    assert message.startswith("PeerTimeout: AllGatherGemm, rank 0: rank 1")
    assert "did not push chunk 1 in time" in message
    assert message_of(op.close) == message


def told_in_time(op: Operation, call: Callable[[], object]) -> str:
    """Return what a call raises whose peer does not come, once patience is over, and soon."""
    op._patience_ticks = as_patience(1.0)
    began = time.monotonic()
    message = message_of(lambda: (call(), op.check()))
    assert 1 <= time.monotonic() - began < 60
    return message


# ---- GEMM + reduce-scatter

BODIES = {  # the tuner and its candidates
    "specialized": (rs_specialized.tuned, rs_specialized.CANDIDATES),
    "plain": (rs_plain.gemm_reduce_scatter, rs_plain.CANDIDATES),
}
SUMS = (700, 520, 512)  # M, N, K


def leave(body: str, index: int) -> bool:
    """Leave the body one candidate, and take no other one; return whether it can take these sums."""
    tuner, candidates = BODIES[body]
    if body == "plain":
        rs_specialized.can_run = lambda operands, held: False
    m, n, k = SUMS
    tuner.configs, tuner.cache = [candidates[index]], {}
    args = {"M": m, "N": n, "K": k, "WORLD": 2, "TENSOR_MEMORY": False, "TRANS_B": True}
    return body == "plain" or bool(prune_chunks(tuner.configs, args))


def assert_sums(
    body: str, captured: bool, indices: Sequence[int], calls: int, dtype: torch.dtype = DTYPE
) -> None:
    """Compare this rank's sums and what it pushed, with a peer that is late."""
    torch.manual_seed(0)
    found = {
        str(BODIES[body][1][index]): sums_of_a_candidate(captured, calls, dtype)
        for index in indices
        if leave(body, index)
    }
    assert found
    assert {which: errors for which, errors in found.items() if not all(each < 0.01 for each in errors)} == {}


def sums_of_a_candidate(captured: bool, calls: int, dtype: torch.dtype) -> list[float]:
    memory, (m, n, k) = HostAsPeer(), SUMS
    rows, found, scales = m // 2, [], {}
    with opened(memory, GemmReduceScatter, m + 6, n, dtype=dtype) as op:
        peer, here = Peer(memory), op._flags.local
        a, weight, addend = (
            torch.empty(size, device=DEVICE, dtype=DTYPE) for size in ((m, k), (n, k), (m, n))
        )
        out = torch.empty(rows, n, dtype=DTYPE, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        for call in range(calls):
            if dtype == FP8:
                (a, scale_a), (weight, scale_weight) = (quantized(size, k, DEVICE) for size in (m, n))
                scales = {"scale_a": scale_a, "scale_weight": scale_weight}
            else:
                for tensor in (a, weight, addend):
                    tensor.normal_()
            for tensor in (out, op._held.partial, op._held.staged):
                tensor.fill_(float("nan"))
            theirs = torch.randn(rows, n).to(DTYPE).pin_memory()
            torch.cuda.synchronize()
            adds = not captured and call % 2 == 1 and dtype != FP8
            if captured and call:
                graph.replay()
            else:
                op(a, weight, out, addend=addend if adds else None, **scales)
            peer.write(here[flags.FREE.value, 1], 1)
            there = op._flags.peers[1][:, 0]
            peer.take(there[flags.FREE.value])
            peer.take(there[flags.ARRIVED.value])  # while the kernel still waits for the peer's sums
            peer.take(there[flags.ROWS_SENT.value])
            peer.write(here[flags.ROWS_SENT.value, 1], rows)
            begin = 0
            for end in (128, rows):
                time.sleep(LATE_S)
                memory.copy(op._held.staged[0, begin:end], theirs[begin:end], peer.stream)
                peer.write(here[flags.ARRIVED.value, 1], end)
                begin = end
            op.check()
            product = a.float() @ weight.float().T + (addend.float() if adds else 0)
            if scales:
                product *= scales["scale_a"] * scales["scale_weight"].T
            wanted = product[:rows] + theirs.to(DEVICE).float()
            [(_, pushed, _)] = op._pusher._sums
            pushed = pushed[:rows].to(DEVICE)
            found += [relative(out, wanted), relative(pushed, product[rows:])]
            if captured and not call:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    op(a, weight, out)
    return found


def relative(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest error of a row: scales of rows are far apart."""
    return float(((result.float() - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("body", BODIES)
@on_one_gpu
def test_sums_leave_while_the_kernel_waits_for_those_of_the_peer(
    rank: int, body: str, captured: bool
) -> None:
    assert_sums(body, captured, (0, 7), 5)


@pytest.mark.parametrize("body", BODIES)
@on_one_gpu
def test_sums_in_fp8_are_scaled_before_they_leave_or_are_added(rank: int, body: str) -> None:
    assert_sums(body, False, (0, 4, 7), 3, FP8)


@pytest.mark.parametrize("half", [0, 1])  # of the compiling
@on_one_gpu
def test_every_candidate_of_the_specialised_body_hands_over_and_adds(rank: int, half: int) -> None:
    assert_sums("specialized", False, covering_indices(rs_specialized.CANDIDATES)[half::2], 3)


@pytest.mark.parametrize("body", BODIES)
@on_one_gpu
def test_sums_that_do_not_come_are_told_and_the_gpu_is_free(rank: int, body: str) -> None:
    leave(body, 0)
    op = opened(HostAsPeer(), GemmReduceScatter, 256, 256)
    a, weight = (torch.randn(256, 256, device=DEVICE).to(DTYPE) for _ in range(2))
    message = told_in_time(op, lambda: op(a, weight))
    assert message.startswith("PeerTimeout: GemmReduceScatter, rank 0: rank 1, or one that it waits for")


# ---- pushes that do not leave


@pytest.mark.parametrize("name", ["AllGatherGemm", "GemmReduceScatter"])
@on_one_gpu
def test_calls_behind_pushes_that_do_not_leave_end(rank: int, name: str) -> None:
    """No check waits longer than kernels do; and once the pushes leave the device is free."""
    memory, (rows, n, k) = HostAsPeer(), SHAPES[0]
    peer = HostPeer(memory)  # first: CUDA makes no stream while another one waits
    weight = torch.zeros(n, k, dtype=DTYPE, device=DEVICE)
    if name == "AllGatherGemm":
        choose_candidate("specialized", "cooperative")
        op = opened(memory, AllGatherGemm, rows, k, consumer="specialized", pieces=1, programs=132)
        pushes = op._pusher.pushes
    else:
        leave("specialized", 0)
        rows *= 2
        op = opened(memory, GemmReduceScatter, rows, n)
        pushes = op._pushes
    a = torch.zeros(rows, k, dtype=DTYPE, device=DEVICE)
    held = memory.hold(torch.zeros(1, dtype=torch.int32, device=DEVICE))[0]
    op._patience_ticks = as_patience(0.3)
    op(a, weight)  # loads what the others launch, and gives the peer up
    torch.cuda.synchronize()
    memory.wait_signal(held, 1, pushes.stream)
    op._check_usable = lambda *_: None  # of calls that are enqueued before the host can hear of the failure
    for _ in range(4):
        op(a, weight)
    del op._check_usable

    def told(step: Callable[[], None]) -> None:
        began = time.monotonic()
        text = message_of(step)
        assert text.startswith(f"PeerTimeout: {name}, rank 0: ")
        assert "rank 1" in text  # of which either the own pushes or the peer's tell
        assert time.monotonic() - began < 20

    told(op.check)
    peer.write(held, 1)
    told(op.check)
    torch.cuda.synchronize()
    told(op.close)
