"""mode='online': one run a call, tried over the calls, while keys come and go."""

from __future__ import annotations

from kernels_for_tests import double, launch, numbers, winner

from dist_autotune.search.state import ADMISSION_RUNS


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


def test_online_keys_that_each_come_once_are_admitted_in_sixteen_runs_and_the_session_ends(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)), mode="online")
    for n in range(1, 200):
        tuned(n)
        if tuned.settled:
            break
    assert n <= 16 + 64 + 1  # the last one admitted is starved
    statuses = [context.status for context in tuned.report.contexts]
    assert (statuses.count("starved"), statuses.count("partial")) == (16, n - 16)


def test_new_keys_without_end_leave_few_under_way_and_one_that_comes_again_goes_on(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    tuned = bench.tune(lambda n: launch(kernel, numbers(n)), mode="online")
    tuned(64)
    under_way = []
    for n in range(65, 265):
        tuned(n)
        under_way.append(sum(context.status == "tuning" for context in tuned.report.contexts))
    assert max(under_way) <= ADMISSION_RUNS
    for _ in range(8):
        tuned(64)
    (first,) = [context for context in tuned.report.contexts if context.key[0] == 64]
    assert (first.status, winner(first)) == ("tuned", 32)
