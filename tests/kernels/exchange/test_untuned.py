"""That an operation which nobody has tuned says so, once, and is still tuned when a session comes."""

import warnings

import pytest
import torch
from dense_runs import SCATTERING_SUMS
from kernels_for_tests import records
from operation_runs import left_as_before, tuned_in_context
from operations import HALF, factors

from dist_autotune import contextual_autotune
from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.gemm_rs import plain as gemm_rs
from dist_autotune.kernels.gemm_rs.plain import CANDIDATES, gemm_reduce_scatter
from dist_autotune.kernels.launches.settled import UntunedWarning
from dist_autotune.logs.records import SessionClosed

N, K = 40, 24


@pytest.fixture
def op(monkeypatch):
    """Give an operation of one rank of which this process knows nothing yet."""
    gemm_reduce_scatter.cache.clear()
    monkeypatch.setattr(gemm_rs._KERNEL, "_told", set())
    with left_as_before(gemm_reduce_scatter):
        SCATTERING_SUMS.begin(0)
        gemm_reduce_scatter.configs = CANDIDATES
        with GemmReduceScatter(160, N, HALF, backend="shm") as op:
            yield op
    gemm_reduce_scatter.cache.clear()


def told_by(call):
    """Return the texts of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UntunedWarning)
        call()
    return [str(each.message) for each in caught if each.category is UntunedWarning]


def test_the_first_call_outside_a_session_says_what_to_do_and_other_sizes_of_the_layer_do_not(op):
    (text,) = told_by(lambda: SCATTERING_SUMS.call_and_compare(op, [160], K))
    assert text == (
        "GemmReduceScatter [size_class=160, N=40, K=24, TMA_LEGAL=True, BY_COLUMNS=False, "
        "STORES=False] has not been tuned and takes the first of its candidates in every call. Call it in a "
        "function decorated with "
        "contextual_autotune, on all ranks with is_dist=True, which tunes it and keeps the result on disk"
    )
    assert told_by(lambda: SCATTERING_SUMS.call_and_compare(op, [160], K)) == []
    assert told_by(lambda: SCATTERING_SUMS.call_and_compare(op, [96], K)) == []
    assert len(told_by(lambda: SCATTERING_SUMS.call_and_compare(op, [96], 2 * K))) == 1  # another layer


def test_a_session_tunes_what_was_taken_before_and_says_nothing(op):
    step, errors = tuned_in_context(lambda: SCATTERING_SUMS.call_and_compare(op, [160], K))
    assert len(told_by(lambda: SCATTERING_SUMS.call_and_compare(op, [160], K))) == 1
    assert told_by(step) == []
    assert step.report.runs == len(CANDIDATES) + 1
    assert max(errors) < 1
    assert told_by(step) == []
    assert told_by(lambda: SCATTERING_SUMS.call_and_compare(op, [160], K)) == []


def test_a_capture_is_not_disturbed(op, monkeypatch):
    a, weight = factors(64, N, K, HALF)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert told_by(lambda: op(a, weight)) == []


# ---- how operations send their data


def test_the_report_has_a_line_about_each_operation_of_its_runs(monkeypatch):
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "cached")  # one run
    a, weight = torch.ones(4, 16), torch.ones(8, 16)
    with AllGatherGemm(4, 16, torch.float32) as op, AllGatherGemm(4, 16, torch.float32) as idle:
        tuned, other = contextual_autotune(lambda: op(a, weight)), contextual_autotune(lambda: None)
        tuned()
        other()
        idle(a, weight)
    why = "CPU processes of one host share files"
    line = f"AllGatherGemm: memory by shm: {why}; the host moves rows; no multicast is used"
    assert tuned.report.operations == (line,)
    assert line in str(tuned.report).splitlines()
    assert other.report.operations == ()
    assert [record.operations for record in records(SessionClosed)] == [(line,), ()]
