"""All operations on GPUs: shapes, candidates, backends, layouts, graphs among eager calls, a session.

All cases of an operation run in one process a rank, which costs the start of CUDA once.
"""

from unittest import mock

import gpu_cases
import pytest
import torch
from dense_runs import OF_SPECIALIZED_KERNEL, SCATTERING_SUMS
from every_operation import EVERY, OF_ONE_WAY
from expert_runs import GATHERING, SCATTERING, captured_layer, routed_layers, same_call_twice, sorted_rows
from operation_runs import GPU_BACKENDS, message_of, on_ranks, values
from operations import (
    in_odd_places,
    many_calls,
    one_candidate,
    replays_among_eager_calls,
    three_calls,
    tuned_with_other_row_counts,
    two_operations,
)

from dist_autotune.kernels.gemm_rs import specialized
from dist_autotune.kernels.symm import open_symmetric_memory

PATIENCE_S = 60.0  # less than a test has
IN_SHORT = ("ragged tokens, K, N and experts", "a rank without tokens")
LARGE = {"large": ((1000, 900), 512, 1024, 60, 4)}
WIDE = {"wide": ((64, 64), 512, 8192, 1, 1)}  # rows of which a norm is taken
OPERATIONS = {name: {name: runs} for name, runs in EVERY.items() if name != "GemmAllReduce"}
for name, runs in OF_ONE_WAY.items():
    OPERATIONS.setdefault(runs.name, {})[name] = runs


def capture_without_tokens(rank, runs, backend):
    with runs.open(8, 16, backend=backend) as op:
        runs.fresh_call(op, [4, 4], told=False)
        operands = runs.operands(op, [4, 4], 16)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            message = message_of(lambda: op(*operands))
            operands[0].add_(0)  # an empty capture warns
        runs.fresh_call(op, [4, 4], told=False)
        return message == (
            f"RuntimeError: a captured call of {runs.name} needs tokens=, the number of tokens of each rank"
        )


def one_plain_candidate(rank, runs, index, *shape, **options):
    """Do as `one_candidate`, with the plain kernel of GemmReduceScatter, whatever its other one can run."""
    with mock.patch.object(specialized, "can_run", return_value=False):
        return one_candidate(rank, runs, index, *shape, **options)


def cases_of_runs(rank, runs, backend):
    """Return the cases of one way; a second kind of memory has some of the shapes, one candidate."""
    in_short = backend != GPU_BACKENDS[0] and not gpu_cases.ALL_CANDIDATES
    shapes = {name: shape for name, shape in runs.shapes.items() if not in_short or name in IN_SHORT}
    shapes |= LARGE | (WIDE if runs.name == "GemmAllReduce" else {})
    options = {"backend": backend, "timeout_s": PATIENCE_S}
    n = 8192 if runs.name == "GemmAllReduce" else 520
    cases = gpu_cases.shapes_and_candidates(
        rank,
        shapes,
        lambda shape, dtype: three_calls(rank, runs, *shape, dtype, **options),
        runs.candidates[:1] if in_short else runs.candidates,
        lambda index: one_plain_candidate(rank, runs, index, (700, 333), 256, n, 8, **options),
    )
    if runs is SCATTERING_SUMS:
        large = (1152, 1152), 512, 1024, 1, 1
        cases["a launch for each chunk"] = lambda: three_calls(rank, runs, *large, **options)
    if runs is SCATTERING:
        cases["same bits"] = lambda: same_call_twice(rank)
        cases["a shared sorting"] = lambda: routed_layers(rank, [700, 333], "any", **options)
        cases["a shared sorting, captured"] = lambda: captured_layer(rank, [700, 333], **options)
    if runs is GATHERING:
        cases["a capture without tokens="] = lambda: capture_without_tokens(rank, runs, backend)
    cases["late ranks"] = lambda: many_calls(rank, runs, "random", **options)
    cases["graphs among eager calls"] = lambda: replays_among_eager_calls(rank, runs, backend)
    cases["odd places"] = lambda: in_odd_places(rank, runs, **options)
    return cases


def cases_of_specialized_kernel(rank, backend):
    runs, options = OF_SPECIALIZED_KERNEL, {"backend": backend, "timeout_s": PATIENCE_S}
    cases = gpu_cases.shapes_and_candidates(
        rank,
        runs.shapes,
        lambda shape, dtype: three_calls(rank, runs, *shape, dtype, **options),
        runs.candidates,
        lambda index: one_candidate(rank, runs, index, (700, 333), 256, 520, **options),
    )
    cases["graphs among eager calls"] = lambda: replays_among_eager_calls(rank, runs, backend)
    return {f"specialized, {name}": case for name, case in cases.items()}


@pytest.mark.gpu(devices=2, seconds=80)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("name", OPERATIONS)
@on_ranks(2, timeout_s=400)
def test_every_operation_is_right_on_gpus(rank, name, backend):
    held = open_symmetric_memory(backend=backend)  # NVSHMEM is initialised once, not a second for each case
    every = EVERY[name]
    found = {
        "tuned in context": lambda: tuned_with_other_row_counts(rank, every, (64, 57), 64, 128)[0],
        "two operations": lambda: two_operations(rank, every),
    }
    found |= {
        f"{way}, {case}": run
        for way, runs in OPERATIONS[name].items()
        for case, run in cases_of_runs(rank, runs, backend).items()
    }
    if name == "AllGatherGemm" and torch.cuda.get_device_capability()[0] == 9:
        found |= cases_of_specialized_kernel(rank, backend)
    return found | {"closing": lambda: closed(held)}


def closed(memory):
    memory.close()
    return True


@pytest.mark.gpu(devices=1)
def test_sorted_rows_are_loaded_by_tma_on_one_gpu():
    shape, candidates = ((1900,), 520, 1032, 60, 4), gpu_cases.covering_indices(SCATTERING.candidates)
    ((errors, legal),) = values(sorted_rows, 1, shape, candidates, timeout_s=300)
    assert max(errors) < 1
    assert legal == [True, False] * len(candidates)
