"""How far a session has come: told by its report, its log and its bar while it is under way."""

from kernels_for_tests import Bench, records

from benchmarks.simulation.protocol_simulation import Simulation
from dist_autotune.logs.records import Note
from dist_autotune.search.budget import Forecast
from dist_autotune.search.context import Context


def test_runs_that_wait_for_a_compiler_say_nothing_of_how_long_trials_take():
    outlook = Forecast(
        timed=4, candidates=16, planned_trials=30, runs=110, trials=10, waits=10, held=90, compiling=7
    )
    assert outlook.more_runs == 40
    assert str(outlook).startswith("4 of 16 candidates timed (7 still compiling), 10 of")


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


def test_a_step_asks_nothing_of_keys_that_have_settled_before(monkeypatch):
    contexts = {"last": [f"c{n}" for n in range(40)], **{f"k{n}": [f"k{n}a", f"k{n}b"] for n in range(20)}}
    launches = {"launches": lambda run, _, name: name == "last" or run < 20}
    simulation, asked = Simulation(contexts, lambda *_: 1.0, mode="online", **launches), set()
    simulation.tuning.open()
    for _ in range(30):
        simulation.run()
    assert simulation.tuning.forecast.settled == 20
    is_settled = Context.settled.fget
    monkeypatch.setattr(Context, "settled", property(lambda self: asked.add(self.name) or is_settled(self)))
    simulation.run()
    assert simulation.tuning.forecast.contexts == 21
    assert asked == {"last"}
