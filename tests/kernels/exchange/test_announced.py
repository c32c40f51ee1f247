"""The report of a function says how the operations in its runs send their data, and why so."""

import torch
from kernels_for_tests import records

from dist_autotune import contextual_autotune
from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.logs.records import SessionClosed


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
