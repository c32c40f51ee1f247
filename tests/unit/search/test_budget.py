"""How far a session has come: told by its report, its log and its bar while it is under way."""

from __future__ import annotations

from kernels_for_tests import Bench, launch, numbers, records
from rank_programs import tune

from dist_autotune.logs.records import Note
from dist_autotune.search.budget import Forecast
from ranks import assert_all_ok, run_ranks


def test_what_is_left_is_estimated_from_the_runs_that_a_trial_has_taken():
    outlook = Forecast(timed=4, candidates=16, planned_trials=30, runs=210, trials=10, waits=150)
    assert outlook.more_runs == 420
    assert str(outlook) == (
        "4 of 16 candidates timed, 10 of at most 30 trials in 210 runs (150 waited for the device); "
        "about 420 runs to go"
    )


def test_runs_that_wait_for_a_compiler_say_nothing_of_how_long_trials_take():
    outlook = Forecast(
        timed=4, candidates=16, planned_trials=30, runs=110, trials=10, waits=10, held=90, compiling=7
    )
    assert outlook.more_runs == 40
    assert str(outlook).startswith("4 of 16 candidates timed (7 still compiling), 10 of")


def test_the_report_tells_it_until_all_is_settled():
    bench = Bench()
    step = bench.tuned({16: 3.0, 32: 1.0, 64: 2.0}, mode="online", n_repeat=2)
    told = []
    while not step.settled:
        step()
        told.append(step.report.outlook)
        assert (str(told[-1]) in str(step.report)) is (told[-1] is not None)
    assert [outlook and (outlook.timed, outlook.trials, outlook.more_runs) for outlook in told] == [
        (1, 1, 5),
        (1, 2, 4),
        (2, 3, 3),
        (2, 4, 2),
        (3, 5, 1),
        None,
    ]
    assert "Under way" not in str(step.report)


def test_the_log_of_a_long_session_tells_it_now_and_then():
    bench = Bench()
    step = bench.tuned({16: 3.0, 32: 1.0, 64: 2.0}, mode="online", n_repeat=80)
    while not step.settled:
        step()
    notes = [note.text for note in records(Note) if "to go" in note.text]
    assert notes == [
        "1 of 3 candidates timed, 50 of at most 240 trials in 50 runs; about 190 runs to go",
        "2 of 3 candidates timed, 100 of at most 240 trials in 100 runs; about 140 runs to go",
        "3 of 3 candidates timed, 200 of at most 240 trials in 200 runs; about 40 runs to go",
    ]


def test_all_ranks_tell_the_same():
    def program(rank):
        bench, told = Bench(), []
        kernel = bench.kernel({16: 3.0, 32: 1.0 + rank, 64: 2.0})
        step = tune(bench, lambda: launch(kernel, numbers()), mode="online", n_repeat=3)
        while not step.settled:
            step()
            told.append(str(step.report.outlook))
        return told, step.report.spent.exchanges_s > 0

    (zero, waited), (one, also) = assert_all_ok(run_ranks(program, 2))
    assert zero == one
    assert len(zero) == 9
    assert waited
    assert also
