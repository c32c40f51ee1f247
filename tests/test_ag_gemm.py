"""That AllGatherGemm computes the right product, whatever its ranks do meanwhile, and never hangs.

Under pytest the ranks are CPU processes in Triton's interpreter; tests marked `gpu` repeat on GPUs. The file
is a torchrun program as well, which prints PASS on rank 0:

    ./launch.sh tests/test_ag_gemm.py --case correctness_tma_autotune
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import time

import torch
import torch.distributed as dist

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as conftest does; before triton is imported

import pytest

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_gemm_candidates import CANDIDATES, CPU_CANDIDATES
from dist_autotune.kernels.ag_gemm_kernel import all_gather_gemm

# Triton 3.6 turns one-element arrays into loop bounds the way NumPy 1.25 deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

ON_GPUS = os.environ.get("DIST_AUTOTUNE_TEST_GPU") == "1"
TWO = [2, pytest.param(2, marks=pytest.mark.gpu(devices=2), id="2 GPUs")]
WORLDS = [2, 3, 4, *TWO[1:]]
PATIENCE_S = 1.0  # of a rank whose peer is meant to fail it; generous elsewhere


# ---- in a rank


def device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def tensors(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fresh random a_shard [m, k] and weight [n, k]."""
    return torch.randn(m, k, device=device()).to(dtype), torch.randn(n, k, device=device()).to(dtype)


def gathered_by_gloo(a_shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    parts = [torch.empty_like(a_shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, a_shard.contiguous(), group=group)
    return torch.cat(parts)


def error_in_ulps(out: torch.Tensor, a: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the relative error against float32 as a multiple of what the arithmetic explains.

    Rounding the result to its type costs at most eps (the interpreter truncates bfloat16). Products of
    halves are exact in float32, and adding K of them there costs about sqrt(K) float32 eps.
    """
    wanted = a.float() @ weight.float().T
    explained = torch.finfo(out.dtype).eps + a.shape[1] ** 0.5 * torch.finfo(torch.float32).eps
    return float((out.float() - wanted).norm() / wanted.norm() / explained)


def poison(op: AllGatherGemm) -> None:
    """Fill the gather buffer with NaN, so that whatever is read before it arrives shows."""
    op._gather.local.fill_(float("nan"))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def call_and_compare(op: AllGatherGemm, m: int, n: int, *, in_place: bool = False, group=None) -> float:
    """Return the error of one call with fresh inputs and an output full of NaN."""
    k, dtype = op.shard.shape[1], op.shard.dtype
    a_shard, weight = tensors(m, n, k, dtype)
    full = gathered_by_gloo(a_shard, group)
    out = torch.full((full.shape[0], n), float("nan"), dtype=dtype, device=a_shard.device)
    if in_place:
        op.shard[:m].copy_(a_shard)
        a_shard = op.shard[:m]
    returned = op(a_shard, weight, out)
    assert returned is out
    assert torch.equal(op.gathered, full)
    return error_in_ulps(out, full, weight)


def begin(rank: int, candidate: int | None = None) -> None:
    """Seed this rank and leave its kernel one candidate: by default another one on each rank."""
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    all_gather_gemm.configs = [CANDIDATES[(rank if candidate is None else candidate) % len(CANDIDATES)]]


def message_of(call) -> str:
    """Return what `call` raises, as "Type: message"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# ---- in pytest


def ranks(fn, world: int, *args, timeout_s: float = 120.0, **options) -> list:
    """Return the values of fn(rank, *args) on `world` ranks, all of which must end well."""
    from ranks import assert_all_ok, run_ranks  # not at the top: torchrun starts this file without it

    backend = "cpu:gloo,cuda:nccl" if ON_GPUS else "gloo"
    return assert_all_ok(run_ranks(fn, world, *args, timeout_s=timeout_s, backend=backend, **options))


def three_calls(rank, m, n, k, dtype, capacity):
    begin(rank)
    with AllGatherGemm(capacity, k, dtype) as op:
        poison(op)
        return [call_and_compare(op, m, n) for _ in range(3)]


SHAPES = [
    pytest.param(64, 64, 32, 64, id="whole tiles"),
    pytest.param(37, 40, 24, 37, id="ragged m, N and K"),
    pytest.param(1, 1, 16, 1, id="one row, one column"),
    pytest.param(5, 70, 33, 64, id="m below capacity"),
    pytest.param(19, 21, 7, 20, id="rows that TMA cannot address"),
]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("m", "n", "k", "capacity"), SHAPES)
def test_the_product_is_right(world, m, n, k, capacity):
    for errors in ranks(three_calls, world, m, n, k, torch.float16, capacity):
        assert max(errors) < 1


@pytest.mark.parametrize("world", TWO)
def test_bfloat16_is_right(world):
    for errors in ranks(three_calls, world, 37, 40, 48, torch.bfloat16, 40):
        assert max(errors) < 1


def test_float32_is_right_on_the_cpu():
    for errors in ranks(three_calls, 2, 37, 40, 48, torch.float32, 40):
        assert max(errors) < 1


def outside_any_tuner(rank):
    begin(rank)
    all_gather_gemm.configs = CANDIDATES
    with AllGatherGemm(37, 48, torch.float16) as op:
        poison(op)
        errors = [call_and_compare(op, 37, 40) for _ in range(2)]
    return errors, len(all_gather_gemm.configs_timings)


@pytest.mark.parametrize("world", TWO)
def test_tritons_own_autotuner_finds_a_config_and_the_product_stays_right(world):
    for errors, candidates_timed in ranks(outside_any_tuner, world):
        assert max(errors) < 1
        assert candidates_timed > 1


def one_candidate(rank, index_of_rank):
    begin(rank, index_of_rank[rank])
    with AllGatherGemm(70, 40, torch.float16) as op:
        poison(op)
        return [call_and_compare(op, m, 72) for m in (70, 33)]


@pytest.mark.parametrize("index", range(len(CPU_CANDIDATES)), ids=[str(c.kwargs) for c in CPU_CANDIDATES])
def test_every_candidate_is_right(index):
    for errors in ranks(one_candidate, 2, [index] * 2):
        assert max(errors) < 1


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("index", range(len(CANDIDATES)))
def test_every_candidate_is_right_on_gpus(index):
    for errors in ranks(one_candidate, 2, [index] * 2):
        assert max(errors) < 1


@pytest.mark.parametrize("world", [2, 4, *TWO[1:]])
def test_ranks_may_run_different_candidates_in_one_call(world):
    for errors in ranks(one_candidate, world, range(world)):
        assert max(errors) < 1


def many_calls(rank, delays):
    """Keep every result until the end; no rank waits for another between calls."""
    begin(rank)
    dtype, k, kept = torch.float16, 32, []
    with AllGatherGemm(24, k, dtype) as op:
        poison(op)
        for call in range(8):
            m, n = (24, 7, 24, 16)[call % 4], (40, 16, 33)[call % 3]
            a_shard, weight = tensors(m, n, k, dtype)
            if delays == "one" and rank == call % dist.get_world_size():
                time.sleep(0.1)
            if delays == "random":
                time.sleep(random.random() / 20)
            kept.append((op(a_shard, weight), a_shard, weight))
        op.check()
    return [error_in_ulps(out, gathered_by_gloo(a_shard), weight) for out, a_shard, weight in kept]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("delays", ["none", "one", "random"])
def test_calls_back_to_back_are_right_when_ranks_are_late(world, delays):
    for errors in ranks(many_calls, world, delays):
        assert max(errors) < 1


def late_producer(rank):
    """Fetch late on rank 0: its kernel is spinning long before the chunk is there."""
    begin(rank)
    with AllGatherGemm(16, 16, torch.float32) as op:
        poison(op)
        if rank == 0:
            copy = op._memory.copy

            def copy_late(dst, src, stream):
                stream.enqueue(lambda: time.sleep(0.2))
                copy(dst, src, stream)

            op._memory.copy = copy_late
        return [call_and_compare(op, 16, 16) for _ in range(2)]


def test_the_kernel_waits_for_a_chunk_that_is_late():
    for errors in ranks(late_producer, 3):
        assert max(errors) < 1


def two_operations(rank):
    begin(rank)
    errors = []
    with AllGatherGemm(16, 32, torch.float16) as first, AllGatherGemm(40, 16, torch.bfloat16) as second:
        for _ in range(3):
            errors.append(call_and_compare(first, 16, 24))
            errors.append(call_and_compare(second, 33, 40))
            errors.append(call_and_compare(second, 2, 8, in_place=True))
    return errors


@pytest.mark.parametrize("world", TWO)
def test_two_operations_do_not_disturb_each_other(world):
    for errors in ranks(two_operations, world):
        assert max(errors) < 1


def in_place(rank):
    begin(rank)
    with AllGatherGemm(16, 32, torch.float16) as op:
        errors = [call_and_compare(op, m, 24, in_place=True) for m in (16, 3, 16)]
        versions = [op.shard._version]  # counts the writes to the gather buffer
        for m in (16, 3):
            a_shard, weight = tensors(m, 8, 32, torch.float16)
            op(op.shard[:m], weight)
            versions.append(op.shard._version)
            op(a_shard, weight)
            versions.append(op.shard._version)
        return errors, [after - before for before, after in itertools.pairwise(versions)]


@pytest.mark.parametrize("world", TWO)
def test_a_shard_written_in_place_is_not_copied(world):
    for errors, (in_place_16, copied_16, in_place_3, copied_3) in ranks(in_place, world):
        assert max(errors) < 1
        assert in_place_16 == copied_16 - 1
        assert in_place_3 == copied_3 - 1


def strided_operands(rank):
    begin(rank)
    with AllGatherGemm(16, 32, torch.float16) as op:
        a_shard, weight = tensors(16, 24, 64, torch.float16)
        a_shard, weight = a_shard[:, 3:35], weight[:, 5:37]  # rows that begin at odd addresses
        out = torch.full((16 * dist.get_world_size(), 50), float("nan"), dtype=torch.float16, device=device())
        op(a_shard, weight, out[:, 1:25])
        full = gathered_by_gloo(a_shard)
        return error_in_ulps(out[:, 1:25], full, weight), out[:, 0].isnan().all(), out[:, 25:].isnan().all()


@pytest.mark.parametrize("world", TWO)
def test_operands_may_be_slices_and_nothing_beside_them_is_written(world):
    for error, left_untouched, right_untouched in ranks(strided_operands, world):
        assert error < 1
        assert left_untouched
        assert right_untouched


def across_the_wrap(rank):
    begin(rank)
    with AllGatherGemm(8, 16, torch.float32) as op:
        op._calls = 2**31 - 3
        return [call_and_compare(op, 8, 16) for _ in range(4)], op._calls


def test_epochs_wrap_after_2_to_the_31_calls():
    for errors, calls in ranks(across_the_wrap, 2):
        assert max(errors) < 1
        assert calls == 2**31 + 1


def in_a_subset(rank):
    begin(rank)
    group = dist.new_group([0, 2])
    if rank == 1:
        return 0.0
    with AllGatherGemm(16, 16, torch.float16, group) as op:
        return call_and_compare(op, 9, 16, group=group)


def test_the_group_may_be_a_subset():
    assert max(ranks(in_a_subset, 3)) < 1


def test_one_rank_needs_no_process_group():
    begin(0)
    with AllGatherGemm(20, 16, torch.float16, backend="shm") as op:
        a_shard, weight = tensors(20, 24, 16, torch.float16)
        assert error_in_ulps(op(a_shard, weight), a_shard, weight) < 1
        assert torch.equal(op.gathered, a_shard)


# ---- the caller's mistakes

HALF = torch.float16
MISTAKES = [
    pytest.param(lambda op: (torch.zeros(0, 8, dtype=HALF), W), "a_shard has 0 rows; this operation takes 1 to m_per", id="m=0"),
    pytest.param(lambda op: (torch.zeros(5, 8, dtype=HALF), W), "a_shard has 5 rows; .* 1 to m_per_rank=4", id="m too large"),
    pytest.param(lambda op: (torch.zeros(4, 9, dtype=HALF), W), r"a_shard \[4, 9\] and weight \[6, 8\] must both have K=8", id="K of a"),
    pytest.param(lambda op: (A, W.T.contiguous()), r"must both have K=8 .* \[N, K\], not \[K, N\]", id="weight [K, N]"),
    pytest.param(lambda op: (A, W[:0]), "weight has no rows", id="N=0"),
    pytest.param(lambda op: (A.float(), W), "a_shard is torch.float32 on cpu; .* torch.float16 on cpu", id="dtype"),
    pytest.param(lambda op: (A.to("meta"), W), "a_shard is torch.float16 on meta", id="device"),
    pytest.param(lambda op: (A, W[None]), r"weight has shape \[1, 6, 8\]; two dimensions", id="weight not 2-D"),
    pytest.param(lambda op: (torch.zeros(8, 4, dtype=HALF).T, W), r"rows of a_shard are not contiguous \(strides", id="columns first"),
    pytest.param(lambda op: (A, W, torch.zeros(3, 6, dtype=HALF)), r"out has shape \[3, 6\]; the result has \[4, 6\]", id="shape of out"),
    pytest.param(lambda op: (A, W, torch.zeros(4, 6)), "out is torch.float32", id="dtype of out"),
    pytest.param(lambda op: (op.shard[1:3], W), r"overlaps op.shard .* pass op.shard\[:m\]", id="middle of op.shard"),
    pytest.param(lambda op: (A.tolist(), W), "a_shard is a list; a tensor is needed", id="no tensor"),
]  # fmt: skip
A, W = torch.zeros(4, 8, dtype=HALF), torch.zeros(6, 8, dtype=HALF)


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_told_with_its_values_and_costs_nothing(arguments, message):
    with AllGatherGemm(4, 8, HALF, backend="shm") as op:
        with pytest.raises((ValueError, TypeError), match=message):
            op(*arguments(op))
        a_shard, weight = tensors(4, 6, 8, HALF)
        assert error_in_ulps(op(a_shard, weight), a_shard, weight) < 1


@pytest.mark.parametrize(
    ("m_per_rank", "k", "dtype", "message"),
    [
        pytest.param(0, 8, HALF, r"shape \[1, 0, 8\]: every dimension must be at least 1", id="m_per_rank=0"),
        pytest.param(8, 8, torch.float64, "torch.float64 is not supported on cpu; use one of", id="dtype"),
    ],
)
def test_an_operation_that_cannot_be_is_refused(m_per_rank, k, dtype, message):
    with pytest.raises(ValueError, match=message):
        AllGatherGemm(m_per_rank, k, dtype, backend="shm")


def open_differently(rank):
    return message_of(lambda: AllGatherGemm(8, 16 + rank, torch.float16))


def test_operations_opened_differently_raise_on_every_rank():
    for message in ranks(open_differently, 2):
        assert "rank 0: [2, 8, 16] torch.float16; rank 1: [2, 8, 17] torch.float16" in message


def test_a_closed_operation_says_so_and_closes_twice():
    op = AllGatherGemm(4, 8, HALF, backend="shm")
    op.close()
    op.close()
    for use in (lambda: op(A, W), lambda: op.shard, lambda: op.gathered, op.check):
        with pytest.raises(RuntimeError, match="this AllGatherGemm is closed; open another on all ranks"):
            use()


def test_nothing_is_gathered_before_the_first_call():
    with (
        AllGatherGemm(4, 8, HALF, backend="shm") as op,
        pytest.raises(RuntimeError, match="nothing has been gathered yet"),
    ):
        _ = op.gathered


# ---- what goes wrong between ranks; every wait of the others ends


def different_rows(rank):
    op = AllGatherGemm(8, 16, torch.float16, timeout_s=20)
    call_and_compare(op, 4, 16)
    m = 4 if rank == 0 else 7

    def call():
        op(*tensors(m, 16, 16, torch.float16))
        op.check()

    first = message_of(call)
    again = message_of(call)
    return first, again == first, message_of(op.close) == first


@pytest.mark.parametrize("world", [2, 3, *TWO[1:]])
def test_different_rows_raise_on_every_rank(world):
    for rank, (message, again, at_close) in enumerate(ranks(different_rows, world)):
        peer, rows = (1, 7) if rank == 0 else (0, 4)
        wanted = f"ValueError: AllGatherGemm, rank {rank}: in call 2 rank {peer} passed {rows} rows"
        assert message.startswith(wanted)
        assert "Close it on all ranks and open another" in message
        assert again
        assert at_close


def dead_peer(rank, last):
    op = AllGatherGemm(8, 16, torch.float16, timeout_s=PATIENCE_S)
    call_and_compare(op, 8, 16)
    if rank == last:
        os.kill(os.getpid(), signal.SIGKILL)

    def call():
        op(*tensors(8, 16, 16, torch.float16))
        op.check()

    started = time.monotonic()
    message = message_of(call)
    return message, time.monotonic() - started, message_of(call) == message, message_of(op.close) == message


@pytest.mark.parametrize("world", [2, 3, *TWO[1:]])
def test_a_dead_peer_is_named_and_the_wait_ends(world):
    from ranks import run_ranks

    backend = "cpu:gloo,cuda:nccl" if ON_GPUS else "gloo"
    *survivors, dead = run_ranks(dead_peer, world, world - 1, timeout_s=60, backend=backend)
    assert dead.signal is signal.SIGKILL
    for rank, survivor in enumerate(survivors):
        message, elapsed_s, again, at_close = survivor.value
        lost = f"chunk {world - 1} of call 2 did not arrive from rank {world - 1} in time"
        assert message.startswith(f"PeerTimeout: AllGatherGemm, rank {rank}: {lost}")
        assert message.count("did not arrive") == 1
        assert elapsed_s < 10 * PATIENCE_S
        assert again
        assert at_close


def die_before_fetching(rank):
    op = AllGatherGemm(8, 16, torch.float16, timeout_s=PATIENCE_S)
    if rank == 1:
        op._memory.copy = lambda dst, src, stream: stream.enqueue(lambda: os.kill(os.getpid(), signal.SIGKILL))
    return message_of(lambda: op(*tensors(8, 16, 16, torch.float16)))


def test_a_peer_that_dies_before_it_has_fetched_is_named():
    from ranks import run_ranks

    survivor, dead = run_ranks(die_before_fetching, 2)
    assert dead.signal is signal.SIGKILL
    assert survivor.value.startswith(
        "PeerTimeout: AllGatherGemm, rank 0: rank 1 did not fetch chunk 0 of call 1 in time"
    )


def failing_launch(rank):
    """Break rank 1's launch after its peers have heard of the call."""
    op = AllGatherGemm(8, 16, torch.float16, timeout_s=PATIENCE_S)
    if rank == 1:
        all_gather_gemm.configs = []
    started = time.monotonic()
    first = message_of(lambda: op(*tensors(8, 16, 16, torch.float16)))
    again = message_of(lambda: op(*tensors(8, 16, 16, torch.float16)))
    closing = message_of(op.close)
    return first, again, closing, time.monotonic() - started


def test_a_launch_that_fails_breaks_the_operation_and_nobody_hangs():
    peer, failed = ranks(failing_launch, 2)
    assert failed[0].startswith("IndexError")
    assert failed[1].startswith("RuntimeError: AllGatherGemm, rank 1: call 1 was not carried out: IndexError")
    assert failed[2] == failed[1]
    assert peer[1].startswith("PeerTimeout: AllGatherGemm, rank 0: chunk 1 of call 2 did not arrive")
    assert max(peer[3], failed[3]) < 20 * PATIENCE_S


# ---- tuned where it runs


def tune(rank, directory):
    from dist_autotune import contextual_autotune

    begin(rank)
    all_gather_gemm.configs = CANDIDATES
    errors = []
    with AllGatherGemm(40, 32, torch.float16) as op:

        @contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1, cache=False, log_dir=directory)
        def step():
            errors.append(call_and_compare(op, 33, 40))

        step()
        tuned_runs = len(errors)
        step()
    return errors, tuned_runs, str(all_gather_gemm.best_config), len(step.report.contexts)


@pytest.mark.parametrize("world", TWO)
def test_tuned_in_context_every_run_is_right_and_ranks_agree(world, tmp_path):
    values = ranks(tune, world, str(tmp_path), timeout_s=300)
    assert len({winner for _, _, winner, _ in values}) == 1
    assert len({runs for _, runs, _, _ in values}) == 1
    for errors, tuned_runs, _, contexts in values:
        assert max(errors) < 1
        assert tuned_runs > len(CPU_CANDIDATES)
        assert len(errors) == tuned_runs + 1
        assert contexts == 1


# ---- the torchrun program


def correctness(*, tma: bool, autotune: bool) -> float:
    """Return the largest error, in units of what the arithmetic explains."""
    m, n, k = (999, 1024, 1024) if torch.cuda.is_available() else (37, 64, 64)
    family = [config for config in CANDIDATES if config.kwargs["TMA"] is tma]
    all_gather_gemm.configs = family if autotune else family[:1]
    errors = []
    with AllGatherGemm(m, k, torch.float16) as op:

        def step() -> None:
            errors.append(call_and_compare(op, m, n))

        if autotune:
            from dist_autotune import contextual_autotune

            step = contextual_autotune(is_dist=True)(step)
        for _ in range(3):
            poison(op)
            step()
        op.check()
    return max(errors)


def stress() -> float:
    """Run 200 calls without host synchronisation: changing shapes, random delays, in place and not."""
    k, capacity = (1024, 999) if torch.cuda.is_available() else (32, 24)
    shapes = random.Random(0)  # the same on all ranks
    errors = []
    with AllGatherGemm(capacity, k, torch.float16) as op:
        poison(op)
        for _ in range(10 if torch.cuda.is_available() else 2):
            kept = []
            for call in range(20):
                m, n = shapes.choice([1, capacity // 2, capacity]), shapes.choice([k, k // 2 + 8, k + 40])
                a_shard, weight = tensors(m, n, k, torch.float16)
                if call % 7 == dist.get_rank():
                    time.sleep(random.random() / 100)
                given = a_shard
                if call % 2:
                    op.shard[:m].copy_(a_shard)
                    given = op.shard[:m]
                kept.append((op(given, weight), a_shard, weight))
            errors += [error_in_ulps(out, gathered_by_gloo(a_shard), weight) for out, a_shard, weight in kept]
    return max(errors)


CASES = {
    "correctness": lambda: correctness(tma=False, autotune=False),
    "correctness_tma": lambda: correctness(tma=True, autotune=False),
    "correctness_autotune": lambda: correctness(tma=False, autotune=True),
    "correctness_tma_autotune": lambda: correctness(tma=True, autotune=True),
    "stress": stress,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="without it, the cases are listed")
    case = parser.parse_args().case
    if case is None:
        if os.environ.get("RANK", "0") == "0":
            print("\n".join(CASES))
        return 0
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        rank = dist.get_rank()
        begin(rank)
        passed = torch.tensor([int(CASES[case]() < 1)], device=device())  # NaN fails
        dist.all_reduce(passed, op=dist.ReduceOp.MIN)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        print(f"{'PASS' if passed else 'FAIL'} {case}: {dist_description()}", flush=True)
    return 0 if passed else 1


def dist_description() -> str:
    what = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, interpreted"
    return f"{os.environ.get('WORLD_SIZE', 1)} ranks on {what}"


if __name__ == "__main__":
    sys.exit(main())
