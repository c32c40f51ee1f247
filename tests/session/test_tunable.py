"""Choices of the host, `tunable(name, options)`: when they are tuned, what comes back, what is refused."""

import re

import pytest
from kernels_for_tests import KEY, launch, numbers
from rank_programs import run_until_settled

from dist_autotune import tunable
from dist_autotune.search.phases.pace import Pace, StepKind


def test_a_tunable_is_chosen_by_the_time_of_the_run_after_the_kernels(bench):
    kernel = bench.kernel({16: 2.0, 32: 1.0})
    chosen = []

    def thunk():
        split = tunable("split", [1, 2, 4])
        chosen.append(split)
        launch(kernel, numbers())
        bench.spend({1: 3.0, 2: 1.0, 4: 2.0}[split])
        return split

    tuned = bench.tune(thunk)
    assert tuned() == 2
    assert bench.blocks()[:2] == [16, 32]
    assert chosen == [1, 1, 1, 2, 4, 2]
    contexts = {context.kernel: context for context in tuned.report.contexts}
    assert contexts["split"].config == 2
    assert contexts["split"].status == "tuned"
    assert tuned() == 2


def test_a_choice_under_one_option_is_tuned_though_the_kernels_of_another_take_many_runs(bench):
    slow = bench.kernel({2**power: 5.0 for power in range(4, 10)})  # tuned while the other option waits

    def thunk():
        if tunable("way", ["direct", "by kernel"]) == "by kernel":
            launch(slow, numbers())
            return bench.spend(5.0)
        return bench.spend({1: 3.0, 2: 1.0}[tunable("pieces", [1, 2])])

    tuned = bench.tune(thunk)
    tuned()
    found = {context.kernel: (context.config, context.status) for context in tuned.report.contexts}
    assert (found["way"], found["pieces"]) == (("direct", "tuned"), (2, "tuned"))
    runs = tuned.report.runs
    tuned()
    assert tuned.settled
    assert tuned.report.runs == runs


def test_a_tunable_outside_a_tuned_function_is_the_settled_choice_or_the_first_option(bench):
    options = ["copy engine", "kernel"]
    assert tunable("transport", options, key=(64,)) == "copy engine"
    tuned = bench.tune(bench.choosing("transport", {"copy engine": 2.0, "kernel": 1.0}))
    assert tuned(64) == "kernel"
    assert tunable("transport", options, key=(64,)) == "kernel"
    assert tunable("transport", options, key=(128,)) == "copy engine"
    assert tunable("transport", ["copy engine"], key=(64,)) == "copy engine"


def test_outside_each_list_of_options_has_the_choice_that_was_settled_for_it(bench):
    ms = {1: 5.0, 2: 2.0, 4: 1.0}

    def thunk(n):
        bench.spend(ms[chosen := tunable("splits", [1, 2] if n < 100 else [1, 2, 4])])
        return chosen

    tuned = bench.tune(thunk)
    assert [tuned(64), tuned(128), tuned(64)] == [2, 4, 2]
    assert [tunable("splits", [1, 2]), tunable("splits", [2, 1]), tunable("splits", [1, 2, 4])] == [2, 2, 4]
    assert tunable("splits", [1, 4]) == 4, "no list of its own: what was settled last"
    assert tunable("splits", [1, 3]) == 1


REFUSED = [
    *(
        (("bad", options), {})
        for options in ([], 3, "ab", [object()], [{1, 2}], [float("nan")], [float("inf")])
    ),
    *((("bad", [1]), {"key": key}) for key in (4096, None, "abc")),
    (([1, 2], [1]), {}),
    (("", [1]), {}),
]


@pytest.mark.parametrize(("given", "named"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_options_that_are_no_json_keys_that_are_no_tuples_and_names_that_are_no_text_are_refused(
    bench, given, named
):
    for call in (tunable, bench.tune(lambda *given, **named: tunable(*given, **named))):
        with pytest.raises(ValueError, match=re.escape(f"tunable({given[0]!r}): ")):
            call(*given, **named)


def test_options_that_python_takes_for_equal_are_told_apart(bench):
    def thunk():
        chosen = tunable("mixed", [1, True, 1.0])
        bench.spend({"1": 3.0, "True": 1.0, "1.0": 2.0}[repr(chosen)])
        return chosen

    tuned = bench.tune(thunk)
    assert [repr(tuned()), repr(tuned()), repr(tuned())] == ["True"] * 3
    assert repr(tunable("mixed", [1, 1.0, True])) == "True"
    assert repr(tunable("mixed", [0, 1])) == "0"


def test_online_an_option_is_judged_with_kernels_that_earlier_sessions_have_settled(bench, monkeypatch):
    def hold_after_trials(pace, overhead, kind):
        pace.holds = kind is StepKind.TRIAL

    def step():
        launch(kernel, numbers())
        if asks:
            bench.spend({16: (5.0, 6.0), 32: (5.0, 1.0)}[bench.blocks()[-1]][tunable("choice", [0, 1])])

    looks, asks = [], []
    monkeypatch.setattr(Pace, "_decide", hold_after_trials)
    bench.clock.ready = lambda mark: mark in looks or looks.append(mark)  # one step later
    kernel = bench.kernel({16: 1.0, 32: 1.2})
    tuned = bench.tune(step, mode="online", n_warmup=None, n_repeat=None)
    run_until_settled(tuned)
    asks.append(True)
    tuned()
    run_until_settled(tuned, 400)
    assert {context.kernel: context.config for context in tuned.report.contexts}["choice"] == 1
    assert kernel.cache[KEY].kwargs["BLOCK"] == 32
