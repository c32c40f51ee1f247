"""What the tuner costs: nothing between calls, little in settled ones. Times are printed, bounds wide."""

import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton
from kernels_for_tests import Bench, add, double, launch, numbers
from triton.runtime.autotuner import Autotuner

from dist_autotune import StepTuner, contextual_autotune
from dist_autotune.launch.dispatcher import Dispatcher

CALLS_PROMISED = 48  # of a method: together 2.4 to 4.4 us on one machine, the promise is 4 us
PROMISES_ALLOWED = 4.5  # of these; a settled call takes 1.1 to 1.9, as caches and neighbours stretch both
BYTECODES_ALLOWED = 400  # of a settled call, which executes 300


# ---- one dispatcher, which stays


IN_A_NEW_PROCESS = """
import threading, sys
import torch, triton
from triton.runtime.autotuner import Autotuner
from kernels_for_tests import Bench, launch, numbers

class Library(Autotuner):
    def run(self, *args, **kwargs):
        return super().run(*args, **kwargs)

stock, start = Autotuner.run, threading.Thread.start
import dist_autotune.tuner.decorator
assert Autotuner.run is stock
bench = Bench()
kernel = bench.kernel({16: 3.0, 32: 1.0})
tuned = bench.tune(lambda: launch(kernel, numbers()))
assert Autotuner.run is stock
tuned()
ours, of_subclass = Autotuner.run, Library.run
assert ours is not stock
for _ in range(200):
    tuned()
assert Autotuner.run is ours and Library.run is of_subclass and threading.Thread.start is start
print("ended")
"""


def test_the_first_call_installs_one_dispatcher_and_nothing_else_is_ever_patched(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(IN_A_NEW_PROCESS)
    helpers = os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": helpers}
    ended = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stdout == "ended\n", ended.stderr


def wrapper_of(run: Callable[..., Any], passed: list[Any]) -> Callable[..., Any]:
    def somebody_elses(self, *args, **kwargs):
        passed.append(self)
        return run(self, *args, **kwargs)

    return somebody_elses


def test_what_others_put_on_top_stays_on_top(bench, monkeypatch):
    kernel, passed = bench.kernel({16: 3.0, 32: 1.0}), []
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    tuned()
    on_top = wrapper_of(Autotuner.run, passed)
    monkeypatch.setattr(Autotuner, "run", on_top)
    bench.forget()
    other = bench.kernel({16: 1.0, 32: 3.0}, double)
    second = bench.tune(lambda: launch(other, numbers()))
    tuned(), second()
    assert Autotuner.run is on_top
    assert len(passed) == 1 + 3
    assert (bench.blocks("add"), bench.blocks("double")) == ([32], [16, 32, 16])


# ---- what a settled call costs


class Nothing:
    """A kernel whose launch does nothing, so that all there is to measure is the way to it."""

    fn = staticmethod(add.fn)
    arg_names = add.arg_names

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        pass


def best_us(function: Callable[[], Any], calls: int) -> float:
    """Return the microseconds of this thread in a call: the best of several rounds, as others only add."""
    rounds = []
    for _ in range(7):
        began = time.thread_time()
        for _ in range(calls):
            function()
        rounds.append((time.thread_time() - began) / calls * 1e6)
    return min(rounds)


def report(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n  {text} (triton {triton.__version__}, {os.cpu_count()} cores)")


@pytest.mark.parametrize("arguments", [{}, {"x": 1, "y": 2}], ids=["no arguments", "two"])
def test_a_settled_call_costs_little_more_than_the_bare_function(capsys, request, arguments):
    def thunk(x=0, y=0):
        return None

    tuned = contextual_autotune(thunk, progress=False)
    tuned()
    assert tuned.settled
    calls = functools.partial(tuned, **arguments), functools.partial(thunk, **arguments), as_promised
    rounds = [[best_us(call, 500) for call in calls] for _ in range(3)]
    added_us = statistics.median(decorated - bare for decorated, bare, _ in rounds)
    report(capsys, f"a settled call ({request.node.callspec.id}) adds {added_us:.1f} us; promised: 4 us")
    promises = statistics.median((decorated - bare) / promised for decorated, bare, promised in rounds)
    assert promises < PROMISES_ALLOWED
    assert 0 < bytecodes(calls[0]) <= BYTECODES_ALLOWED


class Method:
    def __init__(self) -> None:
        self.x = 0

    def call(self, x: int) -> int:
        self.x = x
        return self.x


def as_promised(method: Method = Method()) -> None:  # noqa: B008
    for x in range(CALLS_PROMISED):
        method.call(x)


def bytecodes(function: Callable[[], Any]) -> int:
    """Return how many instructions of Python one call executes: the same on every machine, busy or not."""
    executed = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal executed
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        executed += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return executed


@pytest.mark.parametrize(
    ("mode", "blocks"),
    [("tune", (16, 32)), ("cached", (16, 32)), ("tune", (16,))],
    ids=["tuned", "mode cached, unknown", "one config"],
)
def test_a_settled_launch_executes_no_more_of_python_than_a_stock_launch(monkeypatch, mode, blocks):
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", mode)
    kernel = triton.autotune([triton.Config({"BLOCK": block}) for block in blocks], ["n"])(Nothing())
    x, y = numbers(), numbers()

    def thunk(launches: int) -> None:
        for _ in range(launches):
            kernel[(4,)](x, y, 64)

    tuned = contextual_autotune(thunk, progress=False, n_warmup=0, n_repeat=1, log_dir=None)
    tuned(1)
    tuned(1)
    assert len(kernel.cache) == (len(blocks) > 1)  # so the bare function's launches are stock's fastest

    def of_a_launch(function: Callable[[int], None]) -> float:
        return (bytecodes(lambda: function(11)) - bytecodes(lambda: function(1))) / 10

    assert 0 < of_a_launch(tuned) <= of_a_launch(thunk)


@pytest.mark.parametrize("overhead", [0.01, None])
def test_settled_keys_and_steps_apart_of_a_session_take_the_way_of_settled_launches(monkeypatch, overhead):
    bench, x, slow, original = Bench(), numbers(), [], Dispatcher.launch
    monkeypatch.setattr(Dispatcher, "launch", lambda *args: (slow.append(args), original(*args))[1])
    kernels = [bench.kernel({16 << n: 1 + n / 100 for n in range(6)}), bench.kernel({16: 1, 32: 30}, double)]
    options = {"overhead": overhead, "search": "racing", "cache": False, "log_dir": None, "progress": False}
    tuner, ways = StepTuner(clock=bench.clock, **options), []
    while not tuner.settled and len(ways) < 60:
        slow.clear()
        with tuner.step():
            for kernel in kernels * 3:
                launch(kernel, x)
        ways.append(len(slow))
    # Steps apart, of which the first looks new trials up once; else one kernel, as the other is settled.
    assert {*ways[4:]} == ({0, 2, 6} if overhead else {3})
    assert ways.count(0) > len(ways) / 2 or not overhead
