"""What the user's function, kernel, hook or grid raises reaches the caller, and the next call goes on."""

import contextlib
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kernels_for_tests import Mine, inject, is_outside, launch, numbers, only, records, winner

from dist_autotune import is_tuning
from dist_autotune.logs.records import Banned, RunFailed
from dist_autotune.triton_api.interception import INTERCEPTION

# ---- from the function


@pytest.mark.parametrize("failing_run", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "error",
    [Mine("mine"), StopIteration(7), KeyboardInterrupt(), SystemExit(3), torch.OutOfMemoryError("CUDA")],
    ids=repr,
)
def test_what_the_function_raises_reaches_the_caller_and_the_next_call_goes_on(bench, failing_run, error):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    runs = itertools.count()

    def thunk(x):
        y = launch(kernel, x)
        if next(runs) == failing_run:
            raise error
        return y

    tuned = bench.tune(thunk)
    with pytest.raises(type(error)) as caught:
        tuned(numbers())
    assert caught.value is error
    assert tuned.report is not None
    assert torch.equal(tuned(numbers() + 5), numbers() + 6)
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("tuned", 32)
    assert list(only(tuned.report).timings.values()) == [3.0, 1.0, 2.0]
    blocks = [16, 32, 64, 32]
    blocks.insert(failing_run, blocks[failing_run])
    assert bench.blocks() == blocks
    assert [record.by_rank for record in records(RunFailed)] == [0]


# ---- from a launch, or the hook of a config


@pytest.mark.parametrize("where", ["launch", "pre_hook"])
@pytest.mark.parametrize(
    "error",
    [
        KeyError("no such argument"),
        AssertionError("bad shape"),
        TypeError("missing argument"),
        ValueError("bad stride"),
        RuntimeError("the size of tensor a must match"),
        NotImplementedError("PassManager::run failed"),
        StopIteration(),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("bad", [16, 64], ids=["first run", "last trial"])
def test_other_errors_propagate_unchanged_and_nothing_stays_patched(bench, where, error, bad):
    kernel = inject(bench, where, {bad: lambda: error})
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    with pytest.raises(type(error)) as caught:
        tuned()
    assert caught.value is error
    assert is_outside()
    assert not is_tuning()
    assert records(Banned) == []
    assert len(records(RunFailed)) == 1


# ---- Ctrl-C between any two lines


class CtrlC:
    """While it is entered, raises KeyboardInterrupt before the n-th line or function of those files."""

    LINES = ("/triton_api/interception.py",)
    # Python itself looks for a signal where a function begins.
    FUNCTIONS = (*LINES, "/turn.py", "/dispatcher.py")

    def __init__(self, at: int) -> None:
        self.left = at

    def __enter__(self) -> None:
        sys.settrace(self.on_call)

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)

    def on_call(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename.endswith(self.FUNCTIONS):
            self.count()
        return self.on_line if frame.f_code.co_filename.endswith(self.LINES) else None

    def on_line(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            self.count()
        return self.on_line

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("settled", [False, True], ids=["tuning", "settled"])
def test_ctrl_c_between_any_two_lines_leaves_nothing_patched_and_tuning_on(bench, settled):
    before = threading.Thread.start
    for at in itertools.count(1):
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        tuned = bench.tune(lambda kernel=kernel: launch(kernel, numbers()), cache=False, log_dir=None)
        if settled:
            tuned()
        interrupt = CtrlC(at)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            tuned()
        state = None if tuned._calls is None else tuned._calls.state
        assert is_outside()
        assert threading.Thread.start is before
        assert (is_tuning(), INTERCEPTION.calls) == (False, {})
        assert state is None or state.dispatcher.run_under_way is None
        bench.forget()
        tuned()
        assert only(tuned.report).status == "tuned"
        assert bench.blocks()[-1] == 32
        with ThreadPoolExecutor(1) as pool:  # and another thread gets its turn
            assert torch.equal(pool.submit(tuned).result(10), numbers() + 1)
        if interrupt.left > 0:
            break
    assert at > (10 if settled else 20)
