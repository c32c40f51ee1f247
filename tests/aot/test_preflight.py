"""Candidates are compiled and loaded before they are tried: with Triton's compiler, and a pretended device.

The compiler is real, failures included. Loading a binary and launching it do nothing, so every launch
leaves its output alone; what a device would refuse, too much shared memory, Triton refuses by itself.
"""

import weakref

import pytest
import torch
from candidates import (
    ABORTS,
    ASSERTED,
    ENDLESS,
    GOOD,
    TOO_LARGE,
    banned,
    kernel,
    settle,
    square,
    tuned,
    tuned_kernel,
)

from dist_autotune.compilation.preflight import plan
from dist_autotune.errors import TuningError
from dist_autotune.triton_api.launch import Launch
from ranks import assert_all_ok, run_ranks

ENDS_COMPILER = 512
MODES = pytest.mark.parametrize("mode", ["replay", "online"])


@MODES
def test_each_failure_is_found_before_a_trial_and_named(device, compiler, capfd, mode):
    compiler.behaves({ENDS_COMPILER: "exit"})
    function = tuned_kernel(kernel(GOOD, ASSERTED, 64, TOO_LARGE, ABORTS, ENDS_COMPILER), mode=mode)
    settle(function)
    reasons = banned(function)
    assert reasons.keys() == {ASSERTED, TOO_LARGE, ABORTS, ENDS_COMPILER}
    assert "CompileTimeAssertionFailure" in reasons[ASSERTED]
    assert "out of resource: shared memory" in reasons[TOO_LARGE]
    assert reasons[ABORTS].startswith("rank 0: the compiler was ended by SIGABRT: Assertion ")
    assert reasons[ENDS_COMPILER] == "rank 0: the compiler ended its process with exit code 3"
    assert {constants["BLOCK"] for constants in device.launched} == {GOOD, 64}
    assert "Assertion" in capfd.readouterr().err  # the compiler's own words are kept from nobody
    if mode == "replay":
        assert function.report.runs == 3


def test_a_launch_never_finds_a_kernel_that_is_planned_and_not_compiled(device, monkeypatch):
    launch = Launch(
        kernel(GOOD, 64, 64), (torch.zeros(1, dtype=torch.float16), torch.zeros(1)), {"grid": (1,)}
    )
    compile_one, found = Launch.compile, []

    def compile_and_look(self, config):  # as another thread would between two candidates
        found.extend(square.device_caches[0][0].values())
        return compile_one(self, config)

    monkeypatch.setattr(Launch, "compile", compile_and_look)
    planned = plan(launch, dict(enumerate(launch.tuner.configs)), 0.0)
    assert len(planned.compilations) == 3
    assert [*found, *square.device_caches[0][0].values()] == []


@MODES
def test_a_candidate_that_compiles_without_end_is_banned_when_its_time_is_up(
    device, compiler, monkeypatch, mode
):
    compiler.behaves({ENDLESS: "spin"})
    monkeypatch.setenv("DIST_AUTOTUNE_COMPILE_TIMEOUT_S", "1")
    function = tuned_kernel(kernel(GOOD, ENDLESS), mode=mode)
    settle(function)
    assert banned(function) == {ENDLESS: "rank 0: did not compile within 1 s"}
    assert compiler.processes_left() == []


@MODES
def test_an_error_of_the_user_s_reaches_the_caller_with_its_traceback(device, compiler, mode):
    compiler.behaves({64: "raise"})
    with pytest.raises(TypeError, match="of the user's") as caught:
        settle(tuned_kernel(kernel(GOOD, 64), mode=mode))
    assert caught.traceback[-1].name == "misbehave"
    assert compiler.processes_left() == []


def test_no_argument_outlives_the_call_though_candidates_do_not_load(device):
    tuner, kept = kernel(GOOD, ASSERTED, TOO_LARGE), []

    def launch() -> None:
        x = torch.zeros(1, dtype=torch.float16)
        tuner[(1,)](x, torch.zeros(1))
        kept.append(weakref.ref(x))

    tuned(launch)()
    assert [reference() for reference in kept] == [None] * len(kept)


def test_two_ranks_lose_a_compiler_each_to_a_candidate_at_most_and_both_ban_it(device, compiler):
    def program(rank: int) -> tuple[dict[int, str], list[int]]:
        function = tuned_kernel(kernel(GOOD, ABORTS, 64), is_dist=True)
        function()
        return banned(function), sorted({constants["BLOCK"] for constants in device.launched})

    ((zero, launched), (one, launched_by_one)) = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert zero.keys() == {ABORTS}
    assert "SIGABRT" in zero[ABORTS]
    assert launched == launched_by_one == [GOOD, 64]
    assert compiler.compilations().count(ABORTS) <= 2


def test_without_a_gpu_a_launch_says_how_to_interpret_it(monkeypatch):
    function = tuned_kernel(kernel(GOOD, 64))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TuningError, match="set TRITON_INTERPRET=1 before Python starts"):
        function()
