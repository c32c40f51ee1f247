"""Under CUDA-graph capture: no mark, no wait, no trial, only the incumbent. The capture is pretended."""

import pytest
import torch
from kernels_for_tests import launch, no_bench, numbers, only, out_of_resources

from dist_autotune import NoValidConfig


class Capture:
    """What torch says of the current stream."""

    active = False

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *exception: object) -> None:
        self.active = False


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    made = Capture()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.active)
    return made


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_a_call_under_capture_is_one_run_of_incumbents(bench, capture, mode):
    tuned = bench.tuned({16: 3.0, 32: 1.0}, mode=mode)
    bench.clock.start = bench.clock.stop = bench.clock.read_ms = no_bench
    with capture:
        assert torch.equal(tuned(), numbers() + 1)
        tuned()
    assert bench.blocks() == [16, 16]
    assert not tuned.settled
    assert tuned.report is None


def test_a_config_that_fails_under_capture_is_replaced_in_that_launch(bench, kernel, capture):
    kernel.fn.failures[16] = out_of_resources
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    with capture:
        assert torch.equal(tuned(), numbers() + 1)
        kernel.fn.failures[32] = out_of_resources
        with pytest.raises(NoValidConfig, match=r"BLOCK: 16.*OutOfResources.*BLOCK: 32.*OutOfResources"):
            tuned()
    assert bench.blocks() == [32]


def test_a_captured_call_takes_the_winner_that_is_on_disk_or_in_memory(bench, kernel, capture):
    bench.tune(lambda: launch(kernel, numbers()))()
    bench.forget()
    fresh = bench.kernel({16: 3.0, 32: 1.0})
    with capture:
        bench.tune(lambda: launch(fresh, numbers()))()  # from the disk
        bench.tune(lambda: launch(kernel, numbers()), cache=False)()  # from Autotuner.cache
    assert bench.blocks() == [32, 32]


def test_online_a_call_under_capture_between_trials_advances_nothing(bench, capture):
    tuned = bench.tuned({16: 3.0, 32: 1.0, 64: 2.0}, mode="online")
    tuned()
    with capture:
        tuned()
    tuned()
    tuned()
    assert bench.blocks() == [16, 16, 32, 64]
    assert (tuned.settled, tuned.report.runs) == (True, 3)


def test_launches_that_the_function_captures_itself_are_no_trials(bench, capture):
    kernel, inside = bench.kernel({16: 3.0, 32: 1.0}), bench.kernel({16: 1.0, 32: 1.0}, key=())
    captured = []

    def thunk():
        if not captured:  # warm up, capture, and from then on replay
            with capture:
                captured.append(launch(inside, numbers()))
        return launch(kernel, numbers())

    tuned = bench.tune(thunk)
    tuned()
    assert bench.blocks() == [16, 16, 32, 32]
    assert only(tuned.report).status == "tuned"
    assert bench.clock.marks == 2
