"""How often a function runs, what each run tries, and how a session ends, whatever the function does."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

from dist_autotune import contextual_autotune, is_tuning, tunable
from dist_autotune.flows import STRATEGIES
from dist_autotune.records import Note, RunFailed, RunStarted, SessionClosed, SessionOpened
from kernels_for_tests import Bench, accumulate, double, launch, numbers, only, records


@pytest.fixture
def bench() -> Bench:
    return Bench()


def winner(context: Any) -> int:
    return context.config.kwargs["BLOCK"]


# ---- the schedule


def test_two_kernels_with_two_and_three_configs_follow_the_schedule_of_the_readme(bench):
    one = bench.kernel({16: 2.0, 32: 1.0})
    other = bench.kernel({16: 1.0, 32: 2.0, 64: 3.0}, double)
    tuned = bench.tune(lambda: (launch(one, numbers()), launch(other, numbers())), n_repeat=2)
    first, second = tuned()
    assert bench.blocks("add") == [16, 16, 32, 32, 32, 32, 32]
    assert bench.blocks("double") == [16, 16, 32, 32, 64, 64, 16]
    assert tuned.report.runs == 7
    assert torch.equal(first, numbers() + 1)
    assert torch.equal(second, numbers() * 2)


def test_warm_up_runs_are_run_and_not_measured(bench):
    kernel = bench.kernel({16: lambda _: 100.0 if len(bench.blocks()) < 2 else 1.0, 32: 2.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()), n_warmup=2, n_repeat=3)
    tuned()
    assert bench.blocks() == [16] * 5 + [32] * 5 + [16]
    assert list(only(tuned.report).timings.values()) == [1.0, 2.0]


def test_by_default_it_races(bench):
    kernel = bench.kernel({16: 1.0, 32: 100.0, 64: 1.5})
    tuned = bench.tune(lambda: launch(kernel, numbers()), n_warmup=None, n_repeat=None)
    tuned()
    assert bench.blocks()[:3] == [16, 32, 64]
    assert bench.blocks().count(32) == 1
    assert bench.blocks()[-1] == winner(only(tuned.report)) == 16


@pytest.mark.parametrize("search", sorted(STRATEGIES))
@pytest.mark.parametrize("best", [16, 32, 64])
def test_every_strategy_ends_on_the_fastest_config(bench, search, best):
    kernel = bench.kernel({block: 1.0 if block == best else 2.0 for block in (16, 32, 64)})
    tuned = bench.tune(lambda: launch(kernel, numbers()), search=search)
    assert torch.equal(tuned(), numbers() + 1)
    assert bench.blocks()[-1] == winner(only(tuned.report)) == best


def test_a_strategy_of_the_users_own_may_be_given(bench):
    def backwards(candidates, *, n_warmup, n_repeat):
        ms = {}
        for index in reversed(candidates):
            ms[index] = yield index
        return min(ms, key=ms.__getitem__)

    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    bench.tune(lambda: launch(kernel, numbers()), search=backwards)()
    # Nobody knows the candidates before the first launch, so that one is the incumbent's.
    assert bench.blocks() == [16, 64, 32, 16, 32]


def test_the_second_call_is_one_run_with_the_winners(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda x: launch(kernel, x))
    tuned(numbers())
    bench.forget()
    assert torch.equal(tuned(numbers() + 5), numbers() + 6)
    assert bench.blocks() == [32]


def test_the_arguments_of_the_call_reach_every_run_and_its_last_result_comes_back(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    calls = []

    def thunk(x, *, scale):
        calls.append(scale)
        return launch(kernel, x * scale), len(calls)

    y, count = bench.tune(thunk)(numbers(), scale=3)
    assert calls == [3, 3, 3]
    assert count == 3
    assert torch.equal(y, numbers() * 3 + 1)


def test_is_tuning_is_true_only_while_a_launch_may_be_a_trial(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    seen = []

    def thunk():
        seen.append(is_tuning())
        launch(kernel, numbers())

    tuned = bench.tune(thunk)
    assert not is_tuning()
    tuned()
    assert all(seen)
    seen.clear()
    tuned()
    assert seen == [False]
    assert not is_tuning()


# ---- launches that come and go


def test_a_kernel_launched_only_in_the_first_run_starves_and_that_is_said(bench):
    kernel = bench.kernel({16: 1.0, 32: 2.0})
    runs = itertools.count()
    tuned = bench.tune(lambda: launch(kernel, numbers()) if next(runs) == 0 else None, n_repeat=3)
    tuned()
    assert tuned.report.runs <= 5
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("starved", 16)
    (closed,) = records(SessionClosed)
    assert "no longer launched" in closed.warning
    assert "add" in closed.warning


def test_a_caller_that_keeps_the_config_and_bypasses_the_autotuner_does_not_hang(bench):
    kernel = bench.kernel({16: 1.0, 32: 2.0})
    frozen: list[Any] = []

    def thunk():
        if not frozen:
            launch(kernel, numbers())
            frozen.append(kernel.best_config)
        y = torch.zeros(64)
        kernel.fn.run(numbers(), y, 64, grid=(8,), warmup=False, **frozen[0].all_kwargs())
        return y

    tuned = bench.tune(thunk, n_repeat=3)
    assert torch.equal(tuned(), numbers() + 1)
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("starved", 16)
    (closed,) = records(SessionClosed)
    assert closed.warning == tuned.report.warning
    assert closed.warning.startswith("no longer launched, settled with what is known: add[64")


@pytest.mark.parametrize("counts", [(1, 2, 3), (2, 0, 1), (3, 0)], ids=str)
def test_the_number_of_launches_may_vary_from_run_to_run(bench, counts):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    number = itertools.cycle(counts)
    tuned = bench.tune(lambda: [launch(kernel, numbers()) for _ in range(next(number))], n_repeat=2)
    tuned()
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("tuned", 32)
    assert set(only(tuned.report).timings.values()) == {1.0, 2.0, 3.0}


def test_a_new_key_in_every_run_ends_with_incumbents(bench):
    kernel = bench.kernel({16: 1.0, 32: 2.0})
    sizes = iter(range(64, 164))  # a run too many would raise instead of going on for ever
    tuned = bench.tune(lambda: launch(kernel, numbers(next(sizes))), n_repeat=5)
    tuned()
    assert tuned.report.runs < 60
    assert {context.status for context in tuned.report.contexts} == {"starved", "partial"}
    tuned()
    assert bench.blocks()[-1] == 16


def test_a_key_first_seen_in_a_settled_call_runs_its_incumbent_and_is_tuned_by_the_next(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)))
    tuned(64)
    assert tuned.settled
    bench.forget()
    assert torch.equal(tuned(128), numbers(128) + 1)
    assert bench.blocks() == [16]
    assert (128, "torch.float32", "torch.float32") not in kernel.cache
    assert not tuned.settled
    tuned(128)
    assert bench.blocks() == [16, 16, 32, 32]
    assert tuned.settled


def test_a_context_admitted_too_late_is_partial_and_tuned_by_a_later_call(bench):
    one, late = bench.kernel({16: 1.0, 32: 2.0}), bench.kernel({16: 2.0, 32: 1.0}, double)
    runs = itertools.count()

    def thunk():
        launch(one, numbers())
        if next(runs) >= 16:
            launch(late, numbers())

    tuned = bench.tune(thunk, n_repeat=20)
    tuned()
    statuses = {context.kernel: context.status for context in tuned.report.contexts}
    assert statuses == {"add": "tuned", "double": "partial"}
    for _ in range(2):
        tuned()
    assert {context.kernel: winner(context) for context in tuned.report.contexts} == {"add": 16, "double": 32}
    assert {context.status for context in tuned.report.contexts} <= {"tuned", "cached"}


def test_a_function_without_launches_ends_at_once_and_says_so(bench):
    calls = itertools.count()
    tuned = bench.tune(lambda: next(calls))
    assert tuned() == 0
    assert (tuned.report.runs, tuned.report.contexts) == (1, ())
    assert records(SessionClosed)[0].warning == "no launches of autotuned kernels seen"


def test_kernels_first_launched_by_the_second_call_are_tuned_then(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda works: launch(kernel, numbers()) if works else None)
    tuned(False)
    tuned(True)
    tuned(True)
    assert bench.blocks() == [16, 16, 32, 32]


# ---- budgets


@pytest.mark.parametrize("search", sorted(STRATEGIES))
@pytest.mark.parametrize("max_runs", [1, 2, 3, 5])
def test_max_runs_is_never_exceeded_and_the_next_call_goes_on(bench, search, max_runs):
    blocks = [16, 32, 64, 128, 256]
    kernel = bench.kernel({block: 10.0 - i for i, block in enumerate(blocks)})
    tuned = bench.tune(lambda: launch(kernel, numbers()), max_runs=max_runs, search=search)
    tuned()
    assert tuned.report.runs == max_runs  # also where the first run is the only trial
    assert only(tuned.report).status == "partial"
    assert not tuned.settled
    for _ in range(100 if max_runs > 1 else 0):
        tuned()
        assert tuned.report.runs <= max_runs
    if max_runs > 1:
        assert (only(tuned.report).status, winner(only(tuned.report))) == ("tuned", 256)


def test_a_spent_budget_keeps_the_best_so_far(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0, 128: 0.5})
    tuned = bench.tune(lambda: launch(kernel, numbers()), max_runs=4)
    tuned()
    assert bench.blocks() == [16, 32, 64, 32]
    assert kernel.best_config.kwargs["BLOCK"] == 32
    bench.forget()
    tuned()
    assert bench.blocks() == [128, 128]
    assert only(tuned.report).status == "tuned"
    assert tuned.settled


def test_a_budget_in_seconds_ends_the_session(bench, monkeypatch):
    now = itertools.count(step=1)
    monkeypatch.setattr("dist_autotune.session.time.monotonic", lambda: float(next(now)))
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0, 128: 0.5})
    tuned = bench.tune(lambda: launch(kernel, numbers()), budget_s=3.0)
    tuned()
    assert only(tuned.report).status == "partial"
    assert tuned.report.runs < 5


def test_a_search_without_an_end_is_ended(bench):
    def endless(candidates, *, n_warmup, n_repeat):
        while True:
            for index in candidates:  # noqa: UP028  a range has no send()
                yield index

    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()), search=endless, n_repeat=2)
    tuned()
    assert tuned.report.runs == 4 * (2 * 2 + 1)
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("partial", 32)


# ---- exceptions of the function


class Mine(Exception):
    pass


@pytest.mark.parametrize("failing_run", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "error", [Mine("mine"), StopIteration(7), KeyboardInterrupt(), SystemExit(3)], ids=repr
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


def test_an_exception_before_any_launch_leaves_a_session_to_go_on(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    runs = itertools.count()

    def thunk():
        if next(runs) == 0:
            raise Mine
        return launch(kernel, numbers())

    tuned = bench.tune(thunk)
    with pytest.raises(Mine):
        tuned()
    tuned()
    assert bench.blocks() == [16, 32, 32]


def test_an_exception_in_a_settled_call_changes_nothing(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})

    def thunk(fails):
        launch(kernel, numbers())
        if fails:
            raise Mine

    tuned = bench.tune(thunk)
    tuned(False)
    report = tuned.report
    with pytest.raises(Mine):
        tuned(True)
    assert tuned.settled
    tuned(False)
    assert bench.blocks()[-2:] == [32, 32]
    assert tuned.report == report


def test_an_exception_inside_the_kernel_is_the_users(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    error = AssertionError("inside the kernel")
    kernel.fn.failures[32] = lambda: error
    tuned = bench.tune(lambda: launch(kernel, numbers()))
    with pytest.raises(AssertionError) as caught:
        tuned()
    assert caught.value is error
    kernel.fn.failures.clear()
    tuned()
    assert bench.blocks() == [16, 32, 32]


# ---- functions in functions


def test_a_tuned_function_inside_a_tuned_function_joins_its_session(bench):
    one, other = bench.kernel({16: 3.0, 32: 1.0}), bench.kernel({16: 1.0, 32: 3.0}, double)
    inner = bench.tune(lambda: launch(one, numbers()), name="inner")
    outer = bench.tune(lambda: (inner(), launch(other, numbers())), name="outer")
    outer()
    assert bench.blocks("add") == [16, 32, 32]
    assert bench.blocks("double") == [16, 32, 16]
    assert len(outer.report.contexts) == 2
    assert inner.report is None
    assert [record.thunk for record in records(SessionOpened)] == ["outer"]
    bench.forget()
    inner()  # on its own it finds what the outer session settled
    assert bench.blocks("add") == [32]
    assert only(inner.report).status == "cached"


def test_an_exception_of_an_inner_function_ends_only_the_run(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    failures = iter([False, True])

    def body():
        launch(kernel, numbers())
        if next(failures, False):
            raise Mine

    inner = bench.tune(body)

    def outer():
        try:
            inner()
        except Mine:
            return "caught"
        return "fine"

    tuned = bench.tune(outer)
    assert tuned() == "fine"
    assert bench.blocks() == [16, 32, 32]


def test_one_function_may_call_itself(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})

    def recursive(depth):
        launch(kernel, numbers())
        if depth:
            tuned(depth - 1)

    tuned = bench.tune(recursive)
    tuned(2)
    assert bench.blocks() == [16] * 3 + [32] * 3 + [32] * 3


# ---- memory


def test_no_tensor_of_a_run_outlives_it(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    kernel.fn.failures[64] = lambda: torch.OutOfMemoryError("out of memory")
    earlier: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def thunk():
        alive.append(sum(tensor() is not None for tensor in earlier))
        x = numbers()
        y = launch(kernel, x)
        earlier.extend((weakref.ref(x), weakref.ref(y)))
        return y

    gc.disable()  # a cycle would keep them as well
    try:
        result = bench.tune(thunk)()
    finally:
        gc.enable()
    assert alive == [0] * len(alive)
    assert len(alive) == 4
    del result
    assert not any(tensor() is not None for tensor in earlier)


def test_no_argument_of_a_call_outlives_it(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda x: launch(kernel, x).sum())
    x = numbers()
    gone = weakref.ref(x)
    tuned(x)
    del x
    assert gone() is None


def test_the_arguments_of_a_call_that_raised_are_let_go(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})

    def thunk(x):
        launch(kernel, x)
        raise Mine

    tuned = bench.tune(thunk)
    x = numbers()
    gone = weakref.ref(x)
    with pytest.raises(Mine) as caught:
        tuned(x)
    del x, caught
    assert gone() is None


# ---- the time of the whole run


def test_objective_thunk_judges_by_the_run_and_compares_with_the_default_plan(bench):
    kernel = bench.kernel({16: 2.0, 32: 1.0})

    def thunk():
        launch(kernel, numbers())
        bench.spend(10.0 if bench.blocks()[-1] == 32 else 0.0)  # 32 is fast alone and slows what follows

    tuned = bench.tune(thunk, objective="thunk")
    tuned()
    assert winner(only(tuned.report)) == 16
    assert list(only(tuned.report).timings.values()) == [2.0, 11.0]


def test_objective_thunk_adopts_a_plan_that_beats_the_default(bench):
    kernel = bench.kernel({16: 2.0, 32: 1.0})
    tuned = bench.tune(lambda: launch(kernel, numbers()), objective="thunk")
    tuned()
    assert winner(only(tuned.report)) == 32
    duel = bench.blocks()[4:-1]
    assert duel == [32, 16] * (len(duel) // 2)
    assert len(duel) >= 6


def test_objective_thunk_keeps_the_default_plan_when_it_is_not_beaten_and_says_so(bench):
    kernel = bench.kernel({16: 2.0, 32: 1.0})

    def thunk():
        launch(kernel, numbers())
        if len(bench.blocks()) > 4 and bench.blocks()[-1] == 32:
            bench.spend(5.0)  # what looked fast when tuned alone is not in the final comparison

    tuned = bench.tune(thunk, objective="thunk")
    tuned()
    assert winner(only(tuned.report)) == 16
    assert bench.blocks()[-1] == 16
    assert any("the default plan is kept" in record.text for record in records(Note))
    assert kernel.best_config.kwargs["BLOCK"] == 16


def plans_that_only_seem_fast(bench, **options):
    """Return a tuned function whose default plan (16, 16) is best, though each step away from it pays."""
    first, second = bench.kernel({16: 3.0, 32: 1.0}), bench.kernel({16: 3.0, 32: 1.0}, double)

    def thunk():
        launch(first, numbers())
        launch(second, numbers())
        bench.spend({(16, 16): 0.0, (32, 32): 50.0}.get(tuple(bench.blocks()[-2:]), 60.0))

    return bench.tune(thunk, objective="thunk", **options)


@pytest.mark.parametrize("max_runs", [5, 7, 10, 15, 18], ids="max_runs={}".format)
def test_a_plan_that_has_not_met_the_default_one_is_provisional_and_the_next_call_compares_them(
    bench, tmp_cache, max_runs
):
    tuned = plans_that_only_seem_fast(bench, max_runs=max_runs)
    tuned()
    assert {context.status for context in tuned.report.contexts} == {"partial"}
    assert list(tmp_cache.glob("*.json")) == []
    while not tuned.settled:
        began = len(bench.blocks())
        tuned()
        assert len(bench.blocks()) - began <= 2 * max_runs
        assert len(bench.blocks()) < 20 * max_runs
    assert bench.blocks()[-2:] == [16, 16]
    assert {context.status for context in tuned.report.contexts} == {"tuned"}
    assert any("the default plan is kept" in record.text for record in records(Note))


def test_results_that_have_yet_to_beat_the_default_plan_are_not_written(bench, tmp_cache):
    tuned = plans_that_only_seem_fast(bench)
    written = []
    spend = bench.spend
    bench.spend = lambda ms: (written.append(len(list(tmp_cache.glob("*.json")))), spend(ms))
    tuned()
    assert set(written[:-1]) == {0}  # the last run is the final one
    assert len(list(tmp_cache.glob("*.json"))) == 2


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


def test_a_tunable_outside_a_tuned_function_is_the_settled_choice_or_the_first_option(bench):
    options = ["copy engine", "kernel"]
    assert tunable("transport", options, key=(64,)) == "copy engine"

    def thunk(size):
        chosen = tunable("transport", options, key=(size,))
        bench.spend({"copy engine": 2.0, "kernel": 1.0}[chosen])
        return chosen

    tuned = bench.tune(thunk)
    assert tuned(64) == "kernel"
    assert tunable("transport", options, key=(64,)) == "kernel"
    assert tunable("transport", options, key=(128,)) == "copy engine"
    assert tunable("transport", ["copy engine"], key=(64,)) == "copy engine"


def test_a_tunable_has_a_context_for_each_key(bench):
    def thunk():
        chosen = [tunable("depth", [1, 2], key=(size,)) for size in (64, 128)]
        bench.spend({1: 1.0, 2: 2.0}[chosen[0]] + {1: 2.0, 2: 1.0}[chosen[1]])
        return chosen

    tuned = bench.tune(thunk)
    assert tuned() == [1, 2]
    assert {context.key: context.config for context in tuned.report.contexts} == {(64,): 1, (128,): 2}


def test_a_tunable_with_one_option_needs_no_trial(bench):
    tuned = bench.tune(lambda: tunable("only", ["this"]))
    assert tuned() == "this"
    assert tuned.report.runs == 1


@pytest.mark.parametrize(
    "options",
    [[], None, 3, "ab", iter([1]), [object()], [{1, 2}], [1.0, float("nan")], [float("inf")]],
    ids=["none", "no list", "a number", "a text", "an iterator", "object", "set", "nan", "inf"],
)
def test_options_of_a_tunable_must_be_json(bench, options):
    for call in (lambda: tunable("bad", options), bench.tune(lambda: tunable("bad", options))):
        with pytest.raises(ValueError, match=r"tunable\('bad'\)"):
            call()


@pytest.mark.parametrize("key", [4096, None, "abc"], ids=repr)
def test_the_key_of_a_tunable_must_be_a_tuple(bench, key):
    for call in (lambda: tunable("bad", [1], key=key), bench.tune(lambda: tunable("bad", [1], key=key))):
        with pytest.raises(ValueError, match=r"tunable\('bad'\): key="):
            call()


def test_options_that_python_takes_for_equal_are_told_apart(bench):
    def thunk():
        chosen = tunable("mixed", [1, True, 1.0])
        bench.spend({"1": 3.0, "True": 1.0, "1.0": 2.0}[repr(chosen)])
        return chosen

    tuned = bench.tune(thunk)
    assert [repr(tuned()), repr(tuned()), repr(tuned())] == ["True"] * 3
    assert repr(tunable("mixed", [1, 1.0, True])) == "True"
    assert repr(tunable("mixed", [0, 1])) == "0"


def test_settled_each_call_of_a_tunable_gets_one_of_its_own_options(bench):
    options = [[1, 2]]

    def thunk():
        chosen = [tunable("shape", given) for given in options[-1]]
        bench.spend(sum(1.0 if choice == 2 else 2.0 for choice in chosen))
        return chosen

    tuned = bench.tune(thunk)
    for given in ([[1, 2]], [[2, 1]], [[1, 2], [True, 2]], [[True, False, 2]]):
        options.append(given)
        for _ in range(3):
            chosen = tuned()
        assert all(any(choice is option for option in own) for choice, own in zip(chosen, given, strict=True))
        assert chosen == [2] * len(given)


@pytest.mark.parametrize("option", [None, True, 1.5, "text", [1, 2], {"a": 1}], ids=repr)
def test_any_json_option_comes_back_as_it_was_given(bench, option):
    assert bench.tune(lambda: tunable("any", [option]))() is option


# ---- one trial per call


def test_online_makes_one_run_per_call_and_returns_its_result(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    tuned = bench.tune(lambda x: launch(kernel, x), mode="online")
    for call, settled in enumerate([False, False, True, True, True]):
        assert torch.equal(tuned(numbers() + call), numbers() + call + 1)
        assert tuned.settled is settled
    assert bench.blocks() == [16, 32, 64, 32, 32]


def test_online_a_context_starves_after_64_runs_and_resumes_when_launched_again(bench):
    one, other = bench.kernel({16: 3.0, 32: 1.0}), bench.kernel({16: 2.0, 32: 1.0}, double)

    def thunk(with_other):
        launch(one, numbers())
        if with_other:
            launch(other, numbers())

    tuned = bench.tune(thunk, mode="online", n_repeat=2)
    tuned(True)
    for _ in range(70):
        tuned(False)
    statuses = {context.kernel: context.status for context in tuned.report.contexts}
    assert statuses == {"add": "tuned", "double": "starved"}
    for _ in range(8):
        tuned(True)
    assert bench.blocks("double")[-1] == 32
    assert other.best_config.kwargs["BLOCK"] == 32
    assert tuned.settled


def test_online_an_exception_costs_one_sample_only(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})

    def thunk(fails):
        launch(kernel, numbers())
        if fails:
            raise Mine

    tuned = bench.tune(thunk, mode="online")
    tuned(False)
    with pytest.raises(Mine):
        tuned(True)
    tuned(False)
    assert bench.blocks() == [16, 32, 32]
    assert tuned.settled


class SlowClock:
    """Its times are known two runs after the launch, as those of events on a busy device."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.run = 0
        self.waited = 0

    def start(self) -> Any:
        return [self.run, self.inner.start()]

    def stop(self, mark: Any) -> None:
        self.inner.stop(mark[1])

    def ready(self, mark: Any) -> bool:
        return self.run >= mark[0] + 2

    def read_ms(self, mark: Any) -> float:
        self.waited += not self.ready(mark)
        return self.inner.read_ms(mark[1])


def test_online_never_waits_for_the_device(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    clock = SlowClock(bench.clock)

    def thunk():
        clock.run += 1
        return launch(kernel, numbers())

    tuned = bench.tune(thunk, mode="online", clock=clock, n_repeat=2)
    calls = 0
    while not tuned.settled:
        tuned()
        calls += 1
        assert calls < 50
    assert clock.waited == 0
    assert (winner(only(tuned.report)), list(only(tuned.report).timings.values())) == (32, [3.0, 1.0, 2.0])
    plan = [record.plan for record in records(RunStarted)]
    assert any(not tried for tried in plan)  # while a sample is awaited the incumbent runs


@pytest.mark.parametrize("objective", ["kernel", "thunk"])
def test_online_kernels_and_choices_are_tuned_over_the_calls(bench, objective):
    kernel = bench.kernel({16: 2.0, 32: 1.0})

    def thunk():
        slices = tunable("slices online", [1, 2])
        launch(kernel, numbers())
        bench.spend({1: 2.0, 2: 1.0}[slices])
        return slices

    tuned = bench.tune(thunk, mode="online", objective=objective)
    calls = 0
    while not tuned.settled:
        tuned()
        calls += 1
        assert calls < 50
    assert (tuned(), bench.blocks()[-1]) == (2, 32)
    assert tuned.report.runs == calls


# ---- other shapes


@pytest.mark.parametrize("agree", ["key", "ordinal"])
def test_alone_both_ways_to_agree_find_the_same(bench, agree):
    def start():
        kernel = bench.kernel({16: lambda made: 1.0 * made.n, 32: lambda made: 100.0})
        tuned = bench.tune(lambda: [launch(kernel, numbers(n)) for n in (64, 256)], agree=agree)
        tuned()
        return {context.key[0]: winner(context) for context in tuned.report.contexts}, tuned.report.runs

    assert start() == ({64: 16, 256: 32}, 3)
    assert start() == ({64: 16, 256: 32}, 1)


@pytest.mark.parametrize("objective", ["kernel", "thunk"])
def test_all_defaults_work_in_the_interpreter(bench, objective):
    kernel = bench.kernel({16: 1.0, 32: 1.0}, interpreted=True)
    tuned = contextual_autotune(lambda x: launch(kernel, x), objective=objective)
    assert torch.equal(tuned(numbers()), numbers() + 1)
    assert torch.equal(tuned(numbers() + 1), numbers() + 2)
    assert tuned.settled
    context = only(tuned.report)
    assert context.status == "tuned"
    assert context.config in kernel.configs
    assert all(ms > 0 for ms in context.timings.values())
    assert tuned.report.clock == "WallClock"


def test_an_exception_in_the_final_comparison_of_plans_leaves_no_half_plan(bench):
    kernel = bench.kernel({16: 2.0, 32: 1.0})
    fails = iter([False] * 7 + [True])

    def thunk():
        launch(kernel, numbers())
        if next(fails, False):
            raise Mine

    tuned = bench.tune(thunk, objective="thunk")
    with pytest.raises(Mine):
        tuned()
    tuned()
    assert (only(tuned.report).status, winner(only(tuned.report))) == ("tuned", 32)
    bench.forget()
    tuned()
    assert bench.blocks() == [32]


def test_a_kernel_launched_again_by_backward_has_one_config_in_the_run(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})

    class AddOne(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return launch(kernel, x.detach())

        @staticmethod
        def backward(ctx, gradient):
            launch(kernel, numbers())  # as activation checkpointing does
            return gradient

    def thunk():
        x = numbers().requires_grad_()
        AddOne.apply(x).sum().backward()
        return x.grad

    assert torch.equal(bench.tune(thunk)(), torch.ones(64))
    assert bench.blocks() == [16, 16, 32, 32, 32, 32]


@pytest.mark.parametrize("n_repeat", [1, 3])
def test_side_effects_happen_once_per_run_and_runs_are_counted(bench, n_repeat):
    kernel = bench.kernel({16: 3.0, 32: 1.0}, accumulate)
    total = torch.zeros(64)
    tuned = bench.tune(lambda: launch(kernel, numbers(), total), n_repeat=n_repeat)
    tuned()
    assert tuned.report.runs == 2 * n_repeat + 1
    assert torch.equal(total, numbers() * tuned.report.runs)


def test_a_method_tunes_for_all_instances(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})

    class Layer:
        def __init__(self, bias):
            self.bias = bias

        @bench.tune()
        def forward(self, x):
            return launch(kernel, x) + self.bias

    assert torch.equal(Layer(1).forward(numbers()), numbers() + 2)
    bench.forget()
    assert torch.equal(Layer(2).forward(numbers()), numbers() + 3)
    assert bench.blocks() == [32]
