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
    TWO,
    delay_copies,
    device,
    left_as_before,
    run_cases,
    values,
)

from dist_autotune.kernels.ag_gemm import AllGatherGemm, specialized
from dist_autotune.kernels.ag_gemm.plain import CANDIDATES, CPU_CANDIDATES, all_gather_gemm
from dist_autotune.kernels.configs import prune_overlapped

pytestmark = INTERPRETER


def three_calls(rank, m, n, k, dtype, capacity):
    begin(rank)
    with AllGatherGemm(capacity, k, dtype) as op:
        poison(op)
        return [call_and_compare(op, m, n) for _ in range(3)]


SHAPES = {
    "whole tiles": (64, 64, 32, 64),
    "ragged m, N and K": (37, 40, 24, 37),
    "one row, one column": (1, 1, 16, 1),
    "m below capacity": (5, 70, 33, 64),
    "rows that TMA cannot address": (19, 21, 7, 20),
}


@pytest.mark.parametrize(("m", "n", "k", "capacity"), SHAPES.values(), ids=SHAPES)
def test_the_product_is_right(m, n, k, capacity):
    for errors in values(three_calls, 2, m, n, k, torch.float16, capacity):
        assert max(errors) < 1


@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_are_right_too(world):
    for errors in values(three_calls, world, 19, 24, 16, torch.float16, 24):
        assert max(errors) < 1


def test_bfloat16_is_right():
    for errors in values(three_calls, 2, 37, 40, 48, torch.bfloat16, 40):
        assert max(errors) < 1


def test_float32_is_right_on_the_cpu():
    for errors in values(three_calls, 2, 37, 40, 48, torch.float32, 40):
        assert max(errors) < 1


def by_columns(rank, index, consumer):
    begin(rank, index)
    errors = []
    with AllGatherGemm(37, 24, torch.float16, consumer=consumer) as op:
        poison(op)
        for m, n in ((37, 40), (20, 21), (37, 1)):
            a_shard, weight = tensors(m, n, 24, torch.float16)
            across = weight.T.contiguous().T
            errors.append(error_ratio(op(a_shard, across), gathered_by_torch(a_shard), weight))
    return errors


@pytest.mark.parametrize("consumer", ["plain", "matmul"])
@pytest.mark.parametrize("index", range(len(CPU_CANDIDATES)))
def test_a_weight_may_lie_by_columns(index, consumer):
    for errors in values(by_columns, 2, index, consumer):
        assert max(errors) < 1


def over_backend(rank, backend):
    begin(rank)
    with AllGatherGemm(37, 48, torch.float16, backend=backend) as op:
        poison(op)
        return [call_and_compare(op, m, 40, in_place=m == 37) for m in (37, 5, 37)], op.backend


def test_the_backend_of_symmetric_memory_may_be_named():
    for errors, used in values(over_backend, 2, "shm"):
        assert max(errors) < 1
        assert used.startswith("shm: asked for")


def outside_any_tuner(rank):
    begin(rank)
    all_gather_gemm.configs = CANDIDATES
    with AllGatherGemm(37, 48, torch.float16) as op:
        poison(op)
        errors = [call_and_compare(op, 37, 40) for _ in range(2)]
    return errors, len(all_gather_gemm.configs_timings)


@pytest.mark.filterwarnings("ignore:AllGatherGemm .* has not been tuned")  # it has not
def test_tritons_own_autotuner_finds_a_config_and_the_product_stays_right():
    for errors, candidates_timed in values(outside_any_tuner, 2):
        assert max(errors) < 1
        assert candidates_timed > 1


def one_candidate(rank, index_of_rank):
    begin(rank, index_of_rank[rank])
    with AllGatherGemm(70, 40, torch.float16) as op:
        poison(op)
        return [call_and_compare(op, m, 72) for m in (70, 33)]


@pytest.mark.parametrize("index", range(len(CPU_CANDIDATES)), ids=[str(c.kwargs) for c in CPU_CANDIDATES])
def test_every_candidate_is_right(index):
    for errors in values(one_candidate, 2, [index] * 2):
        assert max(errors) < 1


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_may_run_different_candidates_in_one_call(world):
    for errors in values(one_candidate, world, range(world)):
        assert max(errors) < 1


def many_calls(rank, delays):
    """Keep every result until the end; no rank waits for another between calls."""
    begin(rank)
    dtype, k, kept = torch.float16, 16, []
    with AllGatherGemm(24, k, dtype) as op:
        poison(op)
        for call in range(6):
            m, n = (24, 7, 24, 16)[call % 4], (24, 16, 33)[call % 3]
            a_shard, weight = tensors(m, n, k, dtype)
            if delays == "one" and rank == call % dist.get_world_size():
                time.sleep(0.1)
            if delays == "random":
                time.sleep(random.random() / 20)
            kept.append((op(a_shard, weight), a_shard, weight))
        op.check()
    return [error_ratio(out, gathered_by_torch(a_shard), weight) for out, a_shard, weight in kept]


@pytest.mark.parametrize(("delays", "world"), [("none", 2), ("one", 3), ("random", 4)])
def test_calls_back_to_back_are_right_when_ranks_are_late(delays, world):
    for errors in values(many_calls, world, delays):
        assert max(errors) < 1


def late_producer(rank):
    """Fetch late on rank 0: its kernel is spinning long before the chunk is there."""
    begin(rank)
    with AllGatherGemm(16, 16, torch.float32) as op:
        poison(op)
        if rank == 0:
            delay_copies(op, lambda: time.sleep(0.2))
        return [call_and_compare(op, 16, 16) for _ in range(2)]


def test_the_kernel_waits_for_a_chunk_that_is_late():
    for errors in values(late_producer, 3):
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


def test_two_operations_do_not_disturb_each_other():
    for errors in values(two_operations, 2):
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
        writes = [after - before for before, after in itertools.pairwise(versions)]
        return errors, [
            copied - not_copied for not_copied, copied in zip(writes[::2], writes[1::2], strict=True)
        ]


IN_PLACE_COPIES = [1, 1]  # how many more a call makes whose shard lies elsewhere, of 16 rows and of 3


def test_a_shard_written_in_place_is_not_copied():
    for errors, copies in values(in_place, 2):
        assert max(errors) < 1
        assert copies == IN_PLACE_COPIES


def strided_operands(rank):
    begin(rank)
    with AllGatherGemm(16, 32, torch.float16) as op:
        a_shard, weight = tensors(16, 24, 64, torch.float16)
        a_shard, weight = a_shard[:, 3:35], weight[:, 5:37]  # rows that begin at odd addresses
        out = torch.full((16 * dist.get_world_size(), 50), float("nan"), dtype=torch.float16, device=device())
        op(a_shard, weight, out[:, 1:25])
        full = gathered_by_torch(a_shard)
        untouched = out[:, 0].isnan().all() and out[:, 25:].isnan().all()
        return error_ratio(out[:, 1:25], full, weight), bool(untouched)


def test_operands_may_be_slices_and_nothing_beside_them_is_written():
    for error, untouched in values(strided_operands, 2):
        assert error < 1
        assert untouched


def inputs_with_gradients(rank):
    begin(rank)
    with AllGatherGemm(16, 32, torch.float16) as op:
        a_shard, weight = (tensor.requires_grad_() for tensor in tensors(16, 24, 32, torch.float16))
        with torch.no_grad():
            out = op(a_shard, weight)
        return out.requires_grad, op.shard.requires_grad, op.gathered.requires_grad


def test_the_operation_stays_out_of_autograd_where_grad_is_not_enabled():
    assert values(inputs_with_gradients, 2) == [(False, False, False)] * 2


def across_the_wrap(rank):
    begin(rank)
    with AllGatherGemm(8, 16, torch.float32) as op:
        op._calls = 2**31 - 3
        return [call_and_compare(op, 8, 16) for _ in range(4)], op._calls


def test_epochs_wrap_after_2_to_the_31_calls():
    for errors, calls in values(across_the_wrap, 2):
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
    assert max(values(in_a_subset, 3)) < 1


def test_one_rank_needs_no_process_group(monkeypatch):
    monkeypatch.setattr(specialized, "can_run", specialized.can_run)  # `begin` sets it
    with left_as_before(all_gather_gemm):
        begin(0)
        with AllGatherGemm(20, 16, torch.float16, backend="shm") as op:
            a_shard, weight = tensors(20, 24, 16, torch.float16)
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
    """Do on GPUs, in one process, what the tests above do on CPU ranks one by one."""
    half = torch.float16
    cases = {name: lambda s=s: three_calls(rank, *s[:3], half, s[3]) for name, s in SHAPES.items()}
    cases["bfloat16"] = lambda: three_calls(rank, 37, 40, 48, torch.bfloat16, 40)
    cases["Triton's own autotuner"] = lambda: outside_any_tuner(rank)[0]
    cases["different candidates"] = lambda: one_candidate(rank, range(2))
    for delays in ("none", "one", "random"):
        cases[f"back to back, delays: {delays}"] = lambda delays=delays: many_calls(rank, delays)
    cases["two operations"] = lambda: two_operations(rank)
    cases["in place"] = lambda: in_place(rank)[0]
    cases["copies of in place"] = lambda: in_place(rank)[1] == IN_PLACE_COPIES
    cases["slices"] = lambda: [strided_operands(rank)[0]]
    cases["beside slices"] = lambda: strided_operands(rank)[1]
    cases["autograd"] = lambda: not any(inputs_with_gradients(rank))
    for backend in GPU_BACKENDS:
        cases[f"backend {backend}"] = lambda name=backend: over_backend(rank, name)[0]
    return run_cases(cases)


@pytest.mark.gpu(devices=2, seconds=100)
def test_all_of_the_above_is_so_on_gpus():
    assert values(cases_on_gpus, 2, timeout_s=300) == [[], []]


def candidates_on_gpus(rank):
    names = {f"{index}: {CANDIDATES[index]}": index for index in covering_indices(CANDIDATES)}
    return run_cases(
        {name: lambda index=index: one_candidate(rank, [index] * 2) for name, index in names.items()}
    )


@pytest.mark.gpu(devices=2, seconds=40)
def test_every_candidate_is_right_on_gpus():
    assert values(candidates_on_gpus, 2, timeout_s=300) == [[], []]


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
