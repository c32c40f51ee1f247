"""A forked child is in no call of its parent, and finds nothing locked."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_for_tests import Bench, double, is_outside, launch, numbers, records

from dist_autotune import StepTuner
from dist_autotune.logs.records import SessionClosed
from ranks import assert_all_ok, run_ranks

LONG_S = 30.0  # longer than anything here takes; only a failure waits for it


def in_child(function: Callable[[], Any]) -> Any:
    """Return what `function` returns in a process forked here."""
    (value,) = assert_all_ok(run_ranks(lambda rank: function(), 1, init="none"))
    return value


def fork_in_first_run(bench: Bench, kernel: Any, in_the_child: Callable[[], Any]) -> tuple[Any, Any]:
    """Tune `kernel`, forking in the first run; return what the child returned, and the tuned function."""
    values = []

    def thunk():
        if not values:
            values.append(in_child(in_the_child))
        return launch(kernel, numbers())

    tuned = bench.tune(thunk)
    tuned()
    return values[0], tuned


def test_launches_in_a_child_are_stock_launches(bench):
    benched = []
    kernel = bench.kernel(
        {16: 3.0, 32: 1.0}, double, do_bench=lambda call, quantiles: benched.append(call()) or [1.0] * 3
    )

    def child():
        y = launch(kernel, numbers())
        return torch.equal(y, numbers() * 2), len(benched), bench.clock.marks

    assert fork_in_first_run(bench, bench.kernel({16: 3.0, 32: 1.0}), child)[0] == (True, 2, 0)
    assert benched == []


@pytest.mark.parametrize("is_step", [False, True], ids=["call", "step"])
@pytest.mark.parametrize("is_settled", [False, True], ids=["tuning", "settled"])
def test_a_child_that_returns_through_the_call_it_was_forked_in_goes_on_as_if_untuned(
    bench, kernel, is_step, is_settled
):
    def body():
        nonlocal pid, forks
        y = launch(kernel, numbers())
        if forks:
            forks, pid = False, os.fork()
        return y

    def step():
        with tuner.step():
            body()

    pid, forks = -1, False
    tuner = StepTuner(clock=bench.clock, n_warmup=0, n_repeat=1, progress=False)
    call = step if is_step else bench.tune(body)
    if is_settled:
        call(), call(), call(), call()
    bench.forget()
    forks = True
    try:
        call()
        if pid == 0:
            os._exit(0 if (is_outside(), len(bench.launches)) == (True, 1) else 1)
    finally:
        if pid == 0:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert is_outside()


def test_a_child_writes_no_logs_of_the_session(bench, kernel):
    log = Path(".autotune_logs/rank-0.jsonl").absolute()

    def child():
        before = log.read_bytes()
        with pytest.raises(KeyError):
            raise_in_session()
        return log.read_bytes() == before

    sessions = []

    def raise_in_session():
        sessions[0]()

    def thunk():
        if os.getpid() != parent:
            raise KeyError("the child's own run")
        launch(kernel, numbers())
        if len(bench.blocks()) == 1:
            assert in_child(child)

    parent = os.getpid()
    tuned = bench.tune(thunk)
    sessions.append(tuned)
    tuned()
    assert [record.outcome for record in records(SessionClosed)] == ["settled"]


def test_a_fork_while_another_thread_admits_a_key_leaves_the_child_free(bench):
    def prune(configs, named, **kwargs):
        if named["n"] == 8 and not forked.is_set():
            is_admitting.set()
            assert forked.wait(LONG_S)
        return configs

    is_admitting, forked = threading.Event(), threading.Event()
    kernel = bench.kernel({16: 3.0, 32: 1.0}, prune_configs_by={"early_config_prune": prune})
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)))
    tuned(64)
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(tuned, 8)
        assert is_admitting.wait(LONG_S)
        try:
            assert in_child(lambda: torch.equal(tuned(16), numbers(16) + 1))
        finally:
            forked.set()
        assert torch.equal(settled.result(LONG_S), numbers(8) + 1)
