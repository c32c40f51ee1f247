"""Whether a call tunes: anew after retune(), not at all in the mode off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernels_for_tests import KEY, block_of, entries, launch, numbers, only, records
from triton.runtime.autotuner import Autotuner

from dist_autotune.logs.records import SessionClosed, SessionOpened

# ---- anew


def test_retune_ignores_what_memory_and_disk_hold(bench, tmp_cache):
    ms = {16: 3.0, 32: 1.0}
    kernel = bench.kernel(ms)
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    assert tuned.settled
    ms[32] = 9.0
    tuned.retune()
    assert not tuned.settled
    bench.forget()
    tuned()
    assert bench.blocks() == [16, 32, 16]
    assert (only(tuned.report).status, block_of(kernel.cache[KEY])) == ("tuned", 16)
    assert ["BLOCK: 16" in entry["config"] for entry in entries(tmp_cache)] == [True]
    tuned()
    assert bench.blocks() == [16, 32, 16, 16]


def test_retune_in_the_middle_of_a_session_starts_it_anew(bench):
    tuned = bench.tuned({16: 3.0, 32: 1.0, 64: 2.0}, mode="online")
    tuned()
    tuned()
    tuned.retune()
    for _ in range(4):
        tuned()
    assert bench.blocks() == [16, 32, 16, 32, 64, 32]
    assert len(records(SessionOpened)) == len(records(SessionClosed)) == 2
    assert tuned.settled


@pytest.mark.parametrize("run", [2, 5], ids=["while tuning", "in a settled call"])
def test_retune_from_inside_a_call_tunes_anew_at_the_next_call(bench, run):
    kernel = bench.kernel({16: 1.0, 32: 2.0})
    runs = []

    def thunk():
        runs.append(launch(kernel, numbers()))
        if len(runs) == run:
            tuned.retune()

    tuned = bench.tune(thunk)
    tuned()
    while len(runs) < run:
        tuned()
    assert bench.blocks() == [16, 32] + [16] * (len(runs) - 2)
    assert not tuned.settled
    bench.forget()
    tuned()
    assert bench.blocks() == [16, 32, 16]
    assert tuned.settled


# ---- modes


def test_mode_off_is_the_bare_function(bench, monkeypatch):
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "off")
    stock = Autotuner.run
    kernel = bench.kernel({16: 3.0, 32: 1.0}, do_bench=lambda call, quantiles: call() or [1.0] * 3)
    seen = []

    def thunk():
        seen.append(Autotuner.run)
        return launch(kernel, numbers())

    tuned = bench.tune(thunk)
    assert torch.equal(tuned(), numbers() + 1)
    assert seen == [stock]
    assert bench.clock.marks == 0
    assert tuned.report is None
    assert tuned.settled
    assert not Path(".autotune_logs").exists()
