"""That AllGatherGemm computes the right product, whatever its ranks do meanwhile.

Under pytest the ranks are CPU processes in Triton's interpreter; tests marked `gpu` repeat on GPUs. The file
is a torchrun program as well, which prints PASS on rank 0:

    ./launch.sh tests/kernels/ag_gemm/test_ag_gemm.py --case correctness_tma_autotune
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time

import torch
import torch.distributed as dist

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as conftest does; before triton is imported

import pytest
from ag_gemm_runs import begin, call_and_compare, error_ratio, gathered_by_torch, poison, tensors
from gpu_cases import covering_indices
from operation_runs import (
    GPU_BACKENDS,
    INTERPRETER,
    ON_GPUS,
    TWO,
    assert_cases,
    cases_of,
    delay_copies,
    device,
    left_as_before,
    values,
)

from dist_autotune.kernels.ag_gemm import AllGatherGemm, specialized
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, CPU_CANDIDATES, all_gather_gemm
from dist_autotune.kernels.configs import prune_overlapped

pytestmark = INTERPRETER


HALF = torch.float16
SHAPES = {  # m, N, K, capacity
    "whole tiles": (64, 64, 32, 64),
    "ragged m, N and K": (37, 40, 24, 37),
    "one row, one column": (1, 1, 16, 1),
    "m below capacity": (5, 70, 33, 64),
    "rows that TMA cannot address": (19, 21, 7, 20),
}


def calls(rank, m, n, k, capacity, dtype=HALF, candidate=None):
    begin(rank, candidate)
    with AllGatherGemm(capacity, k, dtype) as op:
        poison(op)
        return [call_and_compare(op, m, n) for _ in range(3)]


def by_columns(rank, index, consumer):
    begin(rank, index)
    errors = []
    with AllGatherGemm(37, 24, HALF, consumer=consumer) as op:
        poison(op)
        for m, n in ((37, 40), (20, 21), (37, 1)):
            a_shard, weight = tensors(m, n, 24, HALF)
            across = weight.T.contiguous().T
            errors.append(error_ratio(op(a_shard, across), gathered_by_torch(a_shard), weight))
    return errors


def over_backend(rank, backend):
    begin(rank)
    with AllGatherGemm(37, 48, HALF, backend=backend) as op:
        assert backend in ("auto", op.backend.partition(":")[0])
        poison(op)
        return [call_and_compare(op, m, 40, in_place=m == 37) for m in (37, 5, 37)]


def outside_any_tuner(rank):
    begin(rank)
    all_gather_gemm.configs = CANDIDATES
    with AllGatherGemm(37, 48, HALF) as op:
        poison(op)
        errors = [call_and_compare(op, 37, 40) for _ in range(2)]
    return [*errors, 0.0 if ON_GPUS or len(all_gather_gemm.configs_timings) > 1 else 9.0]


def late_calls(rank, delays):
    """Keep every result until the end; no rank waits for another between calls."""
    begin(rank)
    k, kept = 16, []
    with AllGatherGemm(24, k, HALF) as op:
        poison(op)
        for call in range(6):
            m, n = (12, 7, 24, 5)[call % 4], (24, 16, 33)[call % 3]
            a_shard, weight = tensors(m, n, k, HALF)
            if delays == "one" and rank == call % dist.get_world_size():
                time.sleep(0.1)
            if delays == "random":
                time.sleep(random.random() / 20)
            kept.append((op(a_shard, weight), a_shard, weight))
        op.check()
    return [error_ratio(out, gathered_by_torch(a_shard), weight) for out, a_shard, weight in kept]


def late_producer(rank):
    """Fetch late on rank 0: its kernel is spinning long before the chunk is there."""
    begin(rank)
    with AllGatherGemm(16, 16, torch.float32) as op:
        poison(op)
        if rank == 0:
            delay_copies(op, lambda: time.sleep(0.2))
        return [call_and_compare(op, 16, 16) for _ in range(2)]


def two_operations(rank):
    begin(rank)
    errors = []
    with AllGatherGemm(16, 32, HALF) as first, AllGatherGemm(40, 16, torch.bfloat16) as second:
        for _ in range(2):
            errors.append(call_and_compare(first, 16, 24))
            errors.append(call_and_compare(second, 33, 40))
            errors.append(call_and_compare(second, 2, 8, in_place=True))
    return errors


def in_place(rank):
    begin(rank)
    with AllGatherGemm(16, 32, HALF) as op:
        return [call_and_compare(op, m, 24, in_place=True) for m in (16, 3, 16)]


def copies_of_a_shard_in_place(rank):
    """Return whether a call whose shard lies elsewhere makes one copy more, of 16 rows and of 3."""
    begin(rank)
    with AllGatherGemm(16, 32, HALF) as op:
        versions = [op.shard._version]  # counts the writes to the gather buffer
        for m in (16, 3):
            a_shard, weight = tensors(m, 8, 32, HALF)
            op(op.shard[:m], weight)
            versions.append(op.shard._version)
            op(a_shard, weight)
            versions.append(op.shard._version)
        writes = [after - before for before, after in itertools.pairwise(versions)]
        more = [copied - of_itself for of_itself, copied in zip(writes[::2], writes[1::2], strict=True)]
        return more == [1, 1]


def strided_operands(rank):
    begin(rank)
    with AllGatherGemm(16, 32, HALF) as op:
        a_shard, weight = tensors(16, 24, 64, HALF)
        a_shard, weight = a_shard[:, 3:35], weight[:, 5:37]  # rows that begin at odd addresses
        out = torch.full((16 * dist.get_world_size(), 50), float("nan"), dtype=HALF, device=device())
        op(a_shard, weight, out[:, 1:25])
        beside = out[:, 0].isnan().all() and out[:, 25:].isnan().all()
        return [error_ratio(out[:, 1:25], gathered_by_torch(a_shard), weight), 0.0 if beside else 9.0]


def stays_out_of_autograd_where_grad_is_not_enabled(rank):
    begin(rank)
    with AllGatherGemm(16, 32, HALF) as op:
        a_shard, weight = (tensor.requires_grad_() for tensor in tensors(16, 24, 32, HALF))
        with torch.no_grad():
            out = op(a_shard, weight)
        return not (out.requires_grad or op.shard.requires_grad or op.gathered.requires_grad)


def epochs_that_wrap(rank):
    """Make calls across the 2**31st."""
    begin(rank)
    with AllGatherGemm(8, 16, torch.float32) as op:
        op._fetches = 2**31 - 3
        errors = [call_and_compare(op, 8, 16) for _ in range(4)]
        return [*errors, 0.0 if op._fetches == 2**31 + 1 else 9.0]


EVERYWHERE = (
    *(outside_any_tuner, two_operations, in_place, copies_of_a_shard_in_place, strided_operands),
    stays_out_of_autograd_where_grad_is_not_enabled,
)


def of_two_ranks(rank):
    cases = {name: lambda shape=shape: calls(rank, *shape) for name, shape in SHAPES.items()}
    for dtype in (torch.bfloat16, torch.float32):
        cases[str(dtype)] = lambda dtype=dtype: calls(rank, 37, 40, 48, 40, dtype)
    for index in range(len(CPU_CANDIDATES)):
        cases[f"candidate {index}"] = lambda index=index: calls(rank, 33, 72, 40, 70, candidate=index)
    cases["back to back"] = lambda: late_calls(rank, "none")
    cases["backend shm"] = lambda: over_backend(rank, "shm")
    return cases | cases_of((*EVERYWHERE, epochs_that_wrap), rank)


@pytest.mark.filterwarnings("ignore:AllGatherGemm .* has not been tuned")  # it has not
def test_products_of_any_shape_type_and_candidate_are_right_and_nothing_beside_them_is_written():
    assert_cases(of_two_ranks, 2)


def of_columns(rank):
    return {
        f"{consumer}, candidate {index}": lambda index=index, consumer=consumer: by_columns(
            rank, index, consumer
        )
        for index, consumer in [*((index, "plain") for index in range(len(CPU_CANDIDATES))), (0, "matmul")]
    }


def test_a_weight_may_lie_by_columns():
    assert_cases(of_columns, 2)


def in_a_subset(rank):
    begin(rank)
    group = dist.new_group([0, 2])
    if rank == 1:
        return [0.0]
    with AllGatherGemm(16, 16, HALF, group) as op:
        return [call_and_compare(op, 9, 16, group=group)]


def of_more_ranks(rank, world):
    if world == 4:
        return {"late ranks": lambda: late_calls(rank, "random")}
    cases = {"different candidates": lambda: calls(rank, 19, 24, 16, 24)}
    cases["late ranks"] = lambda: late_calls(rank, "one")
    return cases | cases_of((late_producer, in_a_subset), rank)


@pytest.mark.parametrize("world", [3, 4])
def test_ranks_of_different_candidates_may_be_late_and_the_group_a_subset(world):
    assert_cases(of_more_ranks, world, world)


def test_one_rank_needs_no_process_group(monkeypatch):
    monkeypatch.setattr(specialized, "can_run", specialized.can_run)  # `begin` sets it
    with left_as_before(all_gather_gemm):
        begin(0)
        with AllGatherGemm(20, 16, HALF, backend="shm") as op:
            a_shard, weight = tensors(20, 24, 16, HALF)
            assert error_ratio(op(a_shard, weight), a_shard, weight) < 1
            assert torch.equal(op.gathered, a_shard)


# ---- tuned where it runs


def tune(rank, directory):
    from dist_autotune import contextual_autotune

    begin(rank)
    all_gather_gemm.configs = CANDIDATES
    # On a GPU the smallest tiles alone would suit the CPU's shape.
    m, n, k = (64, 128, 64) if torch.cuda.is_available() else (33, 40, 32)
    errors = []
    with AllGatherGemm(m + 7, k, torch.float16) as op:
        args = {"a_ptr": op.shard, "M": m * op.world_size, "N": n}
        candidates = len(prune_overlapped(CANDIDATES, args, WORLD=op.world_size, TMA_LEGAL=True))

        @contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1, cache=False, log_dir=directory)
        def step():
            errors.append(call_and_compare(op, m, n))

        step()
        tuned_runs = len(errors)
        step()
    winners = {context.kernel: str(context.config) for context in step.report.contexts}
    return errors, candidates, tuned_runs, winners


@pytest.mark.parametrize("world", TWO)
def test_tuned_in_context_every_run_is_right_and_ranks_agree(world, tmp_path):
    ends = values(tune, world, str(tmp_path), timeout_s=300)
    assert len({tuple(winners.items()) for *_, winners in ends}) == 1
    assert len({runs for _, _, runs, _ in ends}) == 1
    choices = {f"ag_gemm {name}" for name in ("way", "consumer", "pieces", "programs")}
    for errors, candidates, tuned_runs, winners in ends:
        assert max(errors) < 1
        assert candidates >= 4
        assert tuned_runs >= candidates
        assert len(errors) == tuned_runs + 1
        assert winners.keys() - choices == {"all_gather_gemm"}


# ---- on GPUs: a start of fresh processes takes seconds, so there are few


def cases_on_gpus(rank):
    cases = {name: lambda shape=shape: calls(rank, *shape) for name, shape in SHAPES.items()}
    cases["bfloat16"] = lambda: calls(rank, 37, 40, 48, 40, torch.bfloat16)
    for delays in ("none", "one", "random"):
        cases[f"back to back, delays: {delays}"] = lambda delays=delays: late_calls(rank, delays)
    for backend in GPU_BACKENDS:
        cases[f"backend {backend}"] = lambda name=backend: over_backend(rank, name)
    return cases | cases_of(EVERYWHERE, rank)


@pytest.mark.gpu(devices=2, seconds=100)
def test_all_of_the_above_is_so_on_gpus():
    assert_cases(cases_on_gpus, 2, timeout_s=300)


def candidates_on_gpus(rank):
    return {
        f"{index}: {CANDIDATES[index]}": lambda index=index: calls(rank, 70, 72, 40, 70, candidate=index)
        for index in covering_indices(CANDIDATES)
    }


@pytest.mark.gpu(devices=2, seconds=40)
def test_every_candidate_is_right_on_gpus():
    assert_cases(candidates_on_gpus, 2, timeout_s=300)


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
            errors += [error_ratio(out, gathered_by_torch(a_shard), weight) for out, a_shard, weight in kept]
    return max(errors)


CASES = {
    "correctness": lambda: correctness(tma=False, autotune=False),
    "correctness_tma": lambda: correctness(tma=True, autotune=False),
    "correctness_autotune": lambda: correctness(tma=False, autotune=True),
    "correctness_tma_autotune": lambda: correctness(tma=True, autotune=True),
    "stress": stress,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
