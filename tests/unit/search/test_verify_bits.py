"""Bits of outputs, decided: whatever configs change, alone or together, the last run has the first's bits."""

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation.protocol_simulation import Simulation
from dist_autotune import TuningError
from dist_autotune.search.phases import verify_bits


class Outputs:
    """Outputs that depend on the plan: by candidates, by pairs of them, and by how often some have run."""

    def __init__(self, changing=(), pairs=(), unsteady=(), on_rank=0):
        self.changing, self.pairs, self.unsteady = set(changing), set(map(frozenset, pairs)), set(unsteady)
        self.on_rank, self._count = on_rank, itertools.count()

    def __call__(self, plan, rank):
        if rank != self.on_rank:
            return ""
        launched = set(plan.values())
        together = [sorted(pair) for pair in self.pairs if pair <= launched]
        count = next(self._count) if launched & self.unsteady else 0
        return f"{sorted(launched & self.changing)} {sorted(together)} {count}"


def simulation(contexts, outputs, *, bits="same", ms=None, **options):
    times = ms or {c: 3.0 - 0.5 * i for names in contexts.values() for i, c in enumerate(names)}
    return Simulation(contexts, times, outputs=outputs, bits=bits, **options)


def named(*names, candidates=3):
    return {name: [f"{name}{number}" for number in range(candidates)] for name in names}


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_where_every_candidate_changes_bits_the_runs_are_bounded(count):
    contexts = named(*"abcdefgh"[:count])
    every = [c for names in contexts.values() for c in names[1:]]
    simulated = simulation(contexts, Outputs(changing=every))
    plans = simulated.session()
    assert simulated.winners() == {name: f"{name}0" for name in contexts}
    search_runs, final = 3, 1
    most = verify_bits.runs_at_most(len(names) for names in contexts.values())
    assert len(plans) <= search_runs + most + final


@pytest.mark.parametrize("run", range(9))
def test_where_the_first_config_fails_the_next_one_stands_for_it(run):
    """Four runs search, two are of the first configs, two of the winners; then the result stands."""
    outputs = Outputs(changing={"a1"})
    simulated = simulation(
        named("a", "b", candidates=4),
        outputs,
        bans=lambda now, rank, name: {"a0": "failed"} if (now, name) == (run, "a") else {},
    )
    plans = simulated.session()
    assert simulated.winners() == {"a": "a1" if run < 8 else "a3", "b": "b3"}
    assert outputs(plans[-1], 0) == outputs({"a": "a1" if run < 8 else "a0"}, 0)


def test_launches_that_no_plan_decides_are_refused():
    simulated = simulation({"a": ["a0", "a1"]}, Outputs())
    planned = simulated._candidate
    simulated._candidate = lambda name: "a1" if len(simulated.plans) > 1 else planned(name)  # pruned away
    with pytest.raises(TuningError, match="other configs are launched than those planned"):
        simulated.session()


@settings(max_examples=150)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_changes_bits_the_last_run_has_those_of_the_first_configs(seed):
    random = Random(seed)
    contexts = {
        name: [f"{name}{i}" for i in range(random.randint(1, 4))] for name in "abcd"[: random.randint(1, 4)]
    }
    choices = {name for name in contexts if random.random() < 0.3}
    first = {names[0] for names in contexts.values()}
    others = [c for names in contexts.values() for c in names[1:]]
    some = [c for c in others if random.random() < 0.3]
    unsteady = [c for c in others if random.random() < 0.15]
    pairs = [pair for pair in itertools.combinations(others, 2) if random.random() < 0.15]
    outputs = Outputs(some, pairs, unsteady, on_rank=random.randint(0, 1))
    asks = {}  # the choice whose last option launches it
    for name in contexts:
        asks[name] = random.choice([None, None, *(choice for choice in sorted(choices) if choice < name)])
    fails = {(random.randint(0, 30), name): random.choice(names) for name, names in contexts.items()}
    fails = {where: c for where, c in fails.items() if c not in first and random.random() < 0.3}

    def launches(run, rank, name):
        choice = asks[name]
        is_asked = choice is None or launches(run, rank, choice)
        return is_asked and (choice is None or simulated._candidate(choice) == contexts[choice][-1])

    def bans(run, rank, name):
        return {fails[run, name]: "failed"} if (run, name) in fails and rank == 0 else {}

    options = {
        "search": random.choice(["exhaustive", "racing"]),
        "objective": random.choice(["kernel", "thunk"]),
        "max_runs": random.choice([None, None, random.randint(1, 40)]),
    }
    times = {c: round(random.uniform(1, 3), 3) for names in contexts.values() for c in names}
    simulated = simulation(
        contexts,
        outputs,
        ms=times,
        choices=choices,
        ranks=2,
        launches=launches,
        bans=bans,
        run_ms=lambda plan: 1.0,
        **options,
    )
    plans = simulated.session(runs_at_most=6000)
    assert outputs(plans[-1], outputs.on_rank) == Outputs()({}, 0)
    assert not first & {c.digests[i] for c in simulated.tuning.contexts.values() for i in c.banned}
    if options["max_runs"] is not None:
        assert len(plans) <= options["max_runs"] + 1
    # What the next call launches, too: it makes no run of its own where all is settled.
    final = {name: c for name, c in simulated.winners().items() if launches(0, 0, name)}
    assert outputs(final, outputs.on_rank) == Outputs()({}, 0)


@pytest.mark.parametrize("max_runs", [8, 11], ids="max_runs={}".format)
@pytest.mark.parametrize(
    ("contexts", "objective"),
    [
        (named(*"abcdefgh"), "kernel"),
        (named("a", "x"), "kernel"),
        (named("a", "x", "of_x2"), "kernel"),
        (named("a", "b"), "thunk"),
    ],
    ids=["kernels", "a choice", "a kernel that an option brings", "plans of kernels"],
)
def test_a_session_that_is_cut_short_goes_on_in_the_next_one(contexts, objective, max_runs):
    def simulated(**options):
        def launches(run, rank, name):
            return name != "of_x2" or made._candidate("x") == "x2"

        def outputs(plan, rank):  # of other inputs in each session
            return f"{made._began} {sorted({'a1', 'c2', 'x1'} & set(plan.values()))}"

        made = simulation(
            contexts,
            outputs,
            search="racing",
            objective=objective,
            choices={"x"},
            launches=launches,
            run_ms=lambda plan: 2.0 - 0.5 * int(plan.get("x", "x0")[-1]),
            **options,
        )
        return made

    whole, parts = simulated(), simulated(max_runs=max_runs)
    whole.session()
    parts.session()
    while "partial" in parts.statuses().values():
        parts.session()
        assert len(parts.plans) < 6 * len(whole.plans)
    assert parts.winners() == whole.winners()
