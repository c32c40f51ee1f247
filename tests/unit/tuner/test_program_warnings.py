"""What is said once, where a program looks as if it meant something else."""

import functools
import math
import re
import warnings
from typing import Any

import pytest
from kernels_for_tests import Bench, is_outside, launch, numbers, only, records

from dist_autotune import WallClock
from dist_autotune.errors import InvalidOption
from dist_autotune.logs.records import SessionClosed
from dist_autotune.tuner import diagnosis
from ranks import assert_all_ok, run_ranks


@pytest.fixture(autouse=True)
def nothing_is_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_warned", set())


def said(call: Any) -> list[str]:
    """Return what a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("options", "expected"), [({}, 1), ({"is_dist": True, "timeout_s": 20}, 0)], ids=str)
def test_several_ranks_without_is_dist_are_told_once_what_that_means(options, expected):
    def program(rank: int) -> list[list[str]]:
        told = []
        for name in ("one", "other"):
            bench = Bench()
            kernel = bench.kernel({16: 3.0, 32: 1.0})
            thunk = functools.partial(launch, kernel, numbers())
            tuned = bench.tune(thunk, name=name, cache=False, **options)
            told += [said(tuned), said(tuned)]
        return told

    for first, *others in assert_all_ok(run_ranks(program, 2)):
        assert len(first) == expected
        assert all("one is tuned without is_dist=True in a group of 2 ranks" in text for text in first)
        assert others == [[]] * 3


@pytest.mark.parametrize(
    ("ranks", "expected"), [("2", 1), ("1", 0), ("", 0)], ids=["two", "one", "no torchrun"]
)
def test_ranks_without_a_process_group_are_told_once_that_each_tunes_alone(
    bench, kernel, monkeypatch, ranks, expected
):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    told = []
    for name in ("one", "other"):
        tuned = bench.tune(
            lambda: launch(kernel, numbers()), name=name, cache=False, share=False, is_dist=True
        )
        told += [*said(tuned), *said(tuned)]
    assert len(told) == expected
    assert all("one has is_dist=True, and 2 ranks were started (WORLD_SIZE=2), but" in text for text in told)
    assert all("init_process_group() before the first call" in text for text in told)


@pytest.mark.parametrize("mode", ["replay", "online"])
@pytest.mark.parametrize("ms", [math.nan, -1.0, 0.0])
def test_a_clock_that_gives_no_usable_time_is_named_once(bench, ms, mode):
    tuned = bench.tuned({16: ms, 32: ms}, name="step", mode=mode)
    told = [text for _ in range(5) for text in said(tuned)]
    (text,) = told
    assert text.startswith("step: ScriptedClock returned only times that are not finite")
    assert tuned.report.warning == text == records(SessionClosed)[-1].warning
    assert only(tuned.report).config.kwargs["BLOCK"] == 16


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_a_clock_that_returns_text_is_an_error_with_the_clock_and_the_text(bench, mode):
    class Clock(WallClock):
        def __repr__(self) -> str:
            return "Clock()"

        def read_ms(self, mark: list[float]) -> Any:
            return "1.5 ms"

    tuned = bench.tuned({16: 1.0, 32: 2.0}, mode=mode, clock=Clock())
    with pytest.raises(
        InvalidOption, match=re.escape("clock=Clock(): read_ms() returned '1.5 ms'; return mill")
    ):
        tuned()
    assert is_outside()
