"""Random sessions of virtual ranks: a few hundred; `tests/helpers/fuzz.py` plays thousands."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from fuzz import play, play_sessions
from random_programs import BLOCKS, Choice, Event, Kernel, Pattern, Program
from virtual_tuners import VirtualClock

pytestmark = pytest.mark.usefixtures("one_core")  # virtual ranks are threads that take turns

ALWAYS = Pattern()


def test_whatever_ranks_do_they_agree_and_end():
    counts: Counter[str] = Counter()
    play_sessions(3066, 60, counts)  # none of the programs, one in thirty, that take ten seconds each
    assert counts["sessions"] >= 60
    assert counts["tuned"] > 15


def program_of(
    *kernels: Kernel, events: tuple[Event, ...] = (), calls: int = 1, late_clock: int = 0, **options: object
) -> Program:
    chosen = {"mode": "replay", "n_warmup": 0, "n_repeat": 1, "max_runs": None, "watch": True, **options}
    choices = chosen.pop("choices", ())
    assert isinstance(choices, tuple)
    return Program(
        world_size=len(kernels[0].candidates),
        options=chosen,
        search="exhaustive",
        kernels=kernels,
        choices=choices,
        events=events,
        calls=calls,
        is_noisy=False,
        late_clock=late_clock,
        seconds_a_run=0.0,
    )


def kernel_of(*candidates: tuple[int, ...], patterns: tuple[Pattern, ...] = (), **fields: object) -> Kernel:
    """Return a kernel of one key; its times fall with BLOCK."""
    ranks = range(len(candidates))
    plain = Kernel(
        function=0,
        candidates=candidates,
        ms={(rank, block): 256.0 / block for rank in ranks for block in BLOCKS},
        failures={},
        bad_samples={},
        is_sometimes_bad=False,
        launches=tuple(((64, pattern),) for pattern in patterns or (ALWAYS,) * len(candidates)),
    )
    return replace(plain, **fields)


def winners(ranks):
    return [rank.endings[-1].winners for rank in ranks]


def test_a_rank_that_missed_the_last_trial_has_its_say_when_a_peer_reads_its_clock_late(monkeypatch):
    # Both launch the first sample of each candidate, rank 0 alone the second, which it reads one run later.
    monkeypatch.setattr(VirtualClock, "lateness", lambda self, rank, mark: 1 - rank)
    kernel = kernel_of((16, 32), (16, 32), patterns=(ALWAYS, Pattern("every", 4)))
    slow = {**kernel.ms, (1, 16): 1.0, (0, 16): 1.0, (0, 32): 0.5, (1, 32): 9.0}
    program = program_of(replace(kernel, ms=slow), mode="online", n_repeat=2, calls=12)
    assert winners(play(program, Random(0), Counter())) == [{(0, 64): 16}] * 2


@pytest.mark.parametrize("objective", ["thunk", "graph"])
@pytest.mark.parametrize("at_run", range(1, 20))
def test_a_rank_that_raises_in_any_run_leaves_a_state_from_which_the_next_call_tunes(at_run, objective):
    # Nine runs tune, then two plans are compared in alternation; run 19 is a settled call.
    kernel = kernel_of((16, 32, 64), (16, 32, 64))
    events = (Event("raise", -1, rank=1, number=at_run),)
    program = program_of(kernel, objective=objective, events=events, calls=4)
    ranks = play(program, Random(0), Counter())
    failed = [[type(ending.error).__name__ for ending in rank.endings if ending.error] for rank in ranks]
    assert failed == [["PeerFailed"] if at_run < 19 else [], ["Boom"]]
    assert sum(ending.runs for ending in ranks[0].endings[:2]) == 20  # the session goes on, or was over
    assert winners(ranks) == [{(0, 64): 64}] * 2


def test_a_candidate_banned_between_two_sessions_is_not_tried_by_the_second():
    # The budget ends while 32 is on trial; then rank 1 comes to the kernel, and does not have it.
    kernel = kernel_of((16, 32, 64), (16, 64), patterns=(ALWAYS, Pattern("from", 2)))
    program = program_of(kernel, n_repeat=2, max_runs=3, calls=5)
    ranks = play(program, Random(0), Counter())
    assert winners(ranks) == [{(0, 64): 64}] * 2


@pytest.mark.parametrize("first_run", [1, 2, 5])
def test_kernels_taken_for_one_stay_two_on_a_rank_that_comes_to_have_both(first_run):
    # In the first run each rank has launched one Autotuner of the function, with configs of its own.
    one = kernel_of((16, 32), (16, 32), patterns=(ALWAYS, Pattern("never")))
    other = kernel_of((16, 32, 64), (16, 32, 64))
    late = ((96, Pattern("from", first_run)),), ((96, ALWAYS),)
    program = program_of(one, replace(other, launches=late), n_repeat=3, calls=3)
    first, _ = play(program, Random(0), Counter())
    assert {n: block for (_, n), block in first.endings[-1].winners.items()} == {64: 32, 96: 64}


# ---- the checks see what they are there for


def keys_of(*sizes: int) -> tuple[tuple[tuple[int, Pattern], ...], ...]:
    """Return the launches of one rank with these keys, in every run."""
    return (tuple((n, ALWAYS) for n in sizes),)


def test_kernels_of_one_name_do_not_steady_each_other_where_options_are_searched():
    # Of one function, and opposite: each one's fastest config is slow in the other, which has more keys.
    ms = {(0, block): float(block) for block in BLOCKS}
    many = kernel_of((16, 64, 128), ms=ms, launches=keys_of(80, 96, 112, 128))
    one = kernel_of((128, 16), ms={key: 300.0 - each for key, each in ms.items()})
    choice = Choice(number=0, options=(0, 1), ms=(1.0, 2.0), launches=(ALWAYS,))
    program = program_of(many, one, choices=(choice,), n_warmup=None, n_repeat=None)
    (found,) = winners(play(replace(program, search="racing"), Random(0), Counter()))
    assert found == {(0, n): 16 for n in (80, 96, 112, 128)} | {(0, 64): 128}
