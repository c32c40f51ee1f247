"""Online, candidates are compiled in other processes while steps go on: on a pretended device, by Triton."""

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from candidates import ASSERTED, GOOD, TOO_LARGE, Compiler, arrive, banned, kernel, tuned
from process_states import status_of

from dist_autotune.compilation.child import Child
from dist_autotune.compilation.workers import PRIORITY, Work
from ranks import assert_all_ok, assert_killed, run_ranks

STEP_S = 10e-3  # shorter ones take the time that compilers need
DEADLINE_S = 100.0


def stepping(*kernels: Any, **options: Any) -> Any:
    """Return a step that launches each kernel once, tuned online."""
    x, y = torch.zeros(1, dtype=torch.float16), torch.zeros(1)

    def step() -> None:
        for tuner in kernels:
            tuner[(1,)](x, y)
        time.sleep(STEP_S)

    return tuned(step, mode="online", **options)


def steps_until(is_so: Callable[[], bool], step: Any) -> int:
    """Return how many steps were made until it is so."""
    deadline, steps = time.monotonic() + DEADLINE_S, 0
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {steps} steps"
        step()
        steps += 1
    return steps


def begin(step: Any, compiler: Compiler, block: int = 64) -> None:
    """Make the steps after which candidates are compiled; return when some process compiles `block`."""
    steps_until(lambda: block in compiler.compilations(), step)


def blocks(device: Any) -> list[int]:
    return [constants["BLOCK"] for constants in device.launched]


# ---- steps go on


def test_steps_go_on_with_the_incumbent_while_candidates_are_compiled(device, compiler):
    compiler.behaves({64: "wait"})
    step = stepping(kernel(GOOD, 64))
    begin(step, compiler)
    for _ in range(10):
        step()
    assert set(blocks(device)) == {GOOD}
    assert step.report.outlook.compiling == 1
    compiler.let_go()
    steps_until(lambda: step.settled, step)
    assert set(blocks(device)) == {GOOD, 64}
    assert sorted(compiler.compilations()) == [GOOD, 64]
    assert compiler.pids() - {os.getpid()}  # 64 was compiled elsewhere
    assert compiler.processes_left() == []


# ---- how much is compiled at a time


def test_no_more_compile_at_a_time_than_jobs_and_they_leave_the_cores_to_the_step(device, compiler):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    compiler.behaves(dict.fromkeys((64, 128, 256), "wait"))
    step = stepping(kernel(GOOD, 64, 128, 256), compile_jobs=2)
    steps_until(lambda: len(compiler.compilations()) == 3, step)  # with that of the incumbent
    for _ in range(50):
        step()
    children = compiler.pids() - {os.getpid()}
    assert len(children) == 2
    nice = 16  # the place of it from the state on
    assert {int(status_of(child)[nice]) for child in children} == {max(own, PRIORITY)}
    assert int(status_of(os.getpid())[nice]) == own
    compiler.let_go()
    steps_until(lambda: step.settled, step)


def test_compilers_pause_and_go_on_as_the_overhead_allows(device, compiler):
    compiler.behaves({64: "wait"})
    step = stepping(kernel(GOOD, 64), overhead=0.05)
    steps_until(lambda: 64 in compiler.compilations(), step)
    (child,) = compiler.pids() - {os.getpid()}
    for state in "TST":  # stopped, waiting for the gate, stopped again
        steps_until(lambda state=state: status_of(child)[0] == state, step)
    compiler.let_go()
    steps_until(lambda: step.settled, step)
    assert banned(step) == {}


# ---- what is asked no more ends


def end_by_limit(step: Any) -> None:
    while not step.settled:
        step()


def end_by_retune(step: Any) -> None:
    step.retune()
    step()


def end_by_mode(step: Any) -> None:
    os.environ["DIST_AUTOTUNE_MODE"] = "cached"
    step()
    del os.environ["DIST_AUTOTUNE_MODE"]


def end_with_the_function(step: Any) -> None:
    del step
    gc.collect()


@pytest.mark.parametrize("end", [end_by_limit, end_by_retune, end_by_mode, end_with_the_function])
def test_the_end_of_a_session_ends_its_compilers(device, compiler, end):
    compiler.behaves({64: "wait"})
    steps = [stepping(kernel(GOOD, 64), max_runs=40 if end is end_by_limit else None)]
    begin(steps[0], compiler)
    end(steps.pop())
    assert compiler.processes_left() == []


@pytest.mark.parametrize("how", ["returns", "is killed", "raises"])
def test_the_end_of_a_rank_ends_its_compilers(device, compiler, how):
    def program(rank: int) -> None:
        compiler.behaves({64: "wait"})
        step = stepping(kernel(GOOD, 64))
        begin(step, compiler)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise RuntimeError("of the user's")

    (result,) = run_ranks(program, 1, init="none")
    if how == "is killed":
        assert_killed(result)
    else:
        assert result.ok is (how == "returns")
    assert compiler.processes_left() == []


def test_a_forked_child_of_a_rank_leaves_the_rank_s_compilers_alone(compiler):
    child = Child(Work(pieces=[signal.pause], limit_s=60.0))
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            child.kill()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert (child.poll(), child.is_over) == ([], False)
    child.kill()


# ---- several ranks


def test_ranks_try_a_candidate_when_the_slowest_has_it(device, compiler, tmp_path):
    def program(rank: int) -> tuple[int, list[int], list[int]]:
        os.environ["TRITON_CACHE_DIR"] = str(tmp_path / f"cache-{rank}")  # each compiles for itself
        if rank == 1:
            compiler.behaves({64: "wait", TOO_LARGE: "wait"})
        step = stepping(kernel(GOOD, 64, TOO_LARGE), is_dist=True)
        # Rank 0 loads that last: it has 64 then, and rank 1 has not.
        step()
        held = steps_until(lambda: TOO_LARGE in banned(step), step)
        launched = sorted(set(blocks(device)))
        arrive(tmp_path, rank, 2)
        compiler.let_go()
        return held + steps_until(lambda: step.settled, step), launched, sorted(set(blocks(device)))

    zero, one = assert_all_ok(run_ranks(program, 2, timeout_s=DEADLINE_S))
    assert zero == one
    assert zero[1:] == ([GOOD], [GOOD, 64])


def test_a_candidate_that_fails_on_one_rank_runs_on_none(device, compiler, tmp_path):
    def program(rank: int) -> tuple[dict[int, str], list[int]]:
        os.environ["TRITON_CACHE_DIR"] = str(tmp_path / f"cache-{rank}")
        if rank == 2:
            compiler.behaves({64: "exit"})
        step = stepping(kernel(GOOD, 64, ASSERTED), is_dist=True)
        steps_until(lambda: step.settled, step)
        return banned(step), sorted(set(blocks(device)))

    endings = assert_all_ok(run_ranks(program, 3))
    assert [launched for _, launched in endings] == [[GOOD]] * 3
    assert endings[0] == endings[1] == endings[2]
    assert endings[0][0][64] == "rank 2: the compiler ended its process with exit code 3"
