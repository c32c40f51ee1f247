"""AllGatherMoE and MoEReduceScatter on GPUs: shapes, candidates, backends, graphs among eager calls.

All cases of an operation run in one process a rank, which costs the start of CUDA once.
"""

from __future__ import annotations

import gpu_cases
import pytest
import torch
from ag_moe_runs import GATHERING
from moe_rs_runs import SCATTERING, captured_layer, routed_layers, same_call_twice, sorted_rows
from moe_runs import (
    HALF,
    SHAPES,
    many_calls,
    replays_among_eager_calls,
    three_calls,
    tuned_with_other_token_counts,
)
from operation_runs import GPU_BACKENDS, message_of, run_cases, values

PATIENCE_S = 60.0  # less than a test has
IN_SHORT = ("ragged tokens, K, N and experts", "a rank without tokens")
LARGE = {"large": ((1000, 900), 512, 1024, 60, 4)}


def one_candidate(rank, runs, index, backend):
    runs.begin(rank, index)
    of_operation, of_call = runs.sizes(256, 520)
    with runs.open(700, of_operation, HALF, backend=backend, timeout_s=PATIENCE_S) as op:
        runs.poison(op)
        return [runs.call_and_compare(op, [700, 333][:: 1 - 2 * call], of_call, 8, 2) for call in range(2)]


def capture_without_tokens(rank, runs, backend):
    with runs.open(8, 16, HALF, backend=backend) as op:
        runs.fresh_call(op, [4, 4], told=False)
        operands = runs.operands(op, [4, 4], 16, 3, 2)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            message = message_of(lambda: op(*operands))
            operands[0].add_(0)  # an empty capture warns
        runs.fresh_call(op, [4, 4], told=False)
        return message == (
            f"RuntimeError: a captured call of {runs.name} needs tokens=, the number of tokens of each rank"
        )


def cases_on_gpus(rank, runs, backend):
    """Return the cases that failed; a second kind of memory has some of the shapes, one candidate."""
    in_short = backend != GPU_BACKENDS[0] and not gpu_cases.ALL_CANDIDATES
    shapes = {name: shape for name, shape in SHAPES.items() if not in_short or name in IN_SHORT}
    cases = gpu_cases.shapes_and_candidates(
        rank,
        shapes | LARGE,
        lambda shape, dtype: three_calls(rank, runs, *shape, dtype, backend=backend, timeout_s=PATIENCE_S),
        runs.candidates[:1] if in_short else runs.candidates,
        lambda index: one_candidate(rank, runs, index, backend),
    )
    if runs.name == SCATTERING.name:
        options = {"backend": backend, "timeout_s": PATIENCE_S}
        cases["same bits"] = lambda: same_call_twice(rank)
        cases["a shared sorting"] = lambda: routed_layers(rank, [700, 333], "any", **options)
        cases["a shared sorting, captured"] = lambda: captured_layer(rank, [700, 333], **options)
    else:
        cases["a capture without tokens="] = lambda: capture_without_tokens(rank, runs, backend)
    cases["late ranks"] = lambda: many_calls(rank, runs, "random")
    cases["graphs among eager calls"] = lambda: replays_among_eager_calls(rank, runs, backend)
    cases["tuned in context"] = lambda: tuned_with_other_token_counts(rank, runs)[0]
    return run_cases(cases)


@pytest.mark.gpu(devices=2, seconds=50)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_products_of_the_gather_are_right_on_gpus(backend):
    assert values(cases_on_gpus, 2, GATHERING, backend, timeout_s=300) == [[], []]


@pytest.mark.gpu(devices=2, seconds=50)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_sums_of_the_scatter_are_right_on_gpus(backend):
    assert values(cases_on_gpus, 2, SCATTERING, backend, timeout_s=300) == [[], []]


@pytest.mark.gpu(devices=1)
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
def test_sorted_rows_are_loaded_by_tma_on_one_gpu(dtype):
    shape, candidates = ((1900,), 520, 1032, 60, 4), gpu_cases.covering_indices(SCATTERING.candidates)
    ((errors, legal),) = values(sorted_rows, 1, shape, candidates, dtype, timeout_s=300)
    assert max(errors) < 1
    assert legal == [True, False] * len(candidates)
