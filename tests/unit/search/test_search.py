"""One context's search: driven by what ranks agree, with no kernel behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from dist_autotune.errors import TuningError
from dist_autotune.search.context import Context, Outcome
from dist_autotune.search.messages import MIXED, Announcement, Part, femtoseconds
from dist_autotune.search.rules import BY_LAUNCH, Rules
from dist_autotune.search.strategies import STRATEGIES, Warmup, Winner, exhaustive


def rules(strategy=exhaustive, search: str = "exhaustive", **options) -> Rules:
    chosen = {"n_warmup": 0, "n_repeat": 1, "rank_reduce": "max", **options}
    return Rules(strategy=strategy, search=search, **chosen)


def announce(candidates: Sequence[str], **fields) -> Announcement:
    order = tuple((name, f"BLOCK={name}") for name in candidates)
    return Announcement(
        **{"rank": 0, "kernel": "matmul", "key": "64", "order": order, "shared": tuple(candidates), **fields}
    )


def context(candidates: Sequence[str] = ("a", "b", "c"), *, start: bool = True, **options) -> Context:
    made = Context("ctx", announce(candidates), rules(**options), run=0)
    if start:
        made.start()
    return made


def timed(ran: str, ms: float, **fields) -> Part:
    return Part(ran=ran, worst_ms=ms, best_ms=ms, total_fs=femtoseconds(ms), measured=1, **fields)


def advance(made: Context, part: Part) -> Outcome:
    made.apply(part)
    return made.advance(part)


def finish(made: Context, ms: dict[str, float]) -> list[str]:
    """Run every trial the context asks for; return the candidates launched."""
    ran: list[str] = []
    while not made.settled:
        candidate = made.digests[made.planned]
        ran.append(candidate)
        advance(made, timed(candidate, ms[candidate]))
        assert len(ran) < 1000, "the search does not end"
    return ran


def winner(made: Context) -> str:
    assert made.winner is not None
    return made.digests[made.winner]


# ---- what a run was


def test_runs_are_warm_ups_and_samples_counted_from_one():
    made = context(("a", "b"), n_warmup=1, n_repeat=2)
    outcomes = [advance(made, timed(name, 1.0)) for name in "aaabbb"]
    assert [(o.kind, o.index, o.k, o.n) for o in outcomes] == [
        ("warm-up", 0, 1, 1),
        ("sample", 0, 1, 2),
        ("sample", 0, 2, 2),
        ("warm-up", 1, 1, 1),
        ("sample", 1, 1, 2),
        ("sample", 1, 2, 2),
    ]
    assert made.status == "tuned"


@pytest.mark.parametrize(
    "part",
    [Part(), Part(ran="b", measured=1, worst_ms=1.0), Part(ran=MIXED, measured=1, worst_ms=1.0)],
    ids=["nobody launched it", "another candidate ran", "ranks ran different candidates"],
)
def test_a_run_that_did_not_run_the_plan_does_not_count(part):
    made = context()
    assert advance(made, part).kind == "incumbent"
    assert made.times.ms == {}
    assert made.digests[made.planned] == "a"
    assert advance(made, timed("a", 1.0)) == Outcome("sample", 0, 1, 1, BY_LAUNCH)


def test_a_trial_whose_sample_is_not_read_yet_is_waited_for_on_the_incumbent():
    made = context()
    advance(made, timed("a", 1.0))
    assert made.digests[made.planned] == "b"
    advance(made, Part(ran="b", pending=1))
    assert made.waiting
    assert made.digests[made.planned] == "a"
    advance(made, timed("b", 0.5))
    assert not made.waiting
    assert made.digests[made.planned] == "c"
    assert made.times.ms == {0: 1.0, 1: 0.5}


# ---- who wins


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("incumbent", ["b", "c"])
def test_a_tie_goes_to_the_incumbent_before_the_lowest_index(strategy, incumbent):
    made = context(strategy=STRATEGIES[strategy], search=strategy, start=False)
    made.adopt((0, incumbent, None))
    made.start()
    finish(made, dict.fromkeys("abc", 1.0))
    assert winner(made) == incumbent


@pytest.mark.parametrize(
    "ms", [{"a": 1.0, "b": 1.001, "c": 2.0}, {"a": 1.001, "b": 1.0, "c": 2.0}], ids=["slower", "faster"]
)
def test_a_tie_inside_the_noise_of_racing_goes_to_the_incumbent(ms):
    made = context(strategy=STRATEGIES["racing"], search="racing", start=False)
    made.adopt((0, "b", None))
    made.start()
    finish(made, ms)
    assert winner(made) == "b"


@pytest.mark.parametrize(("incumbent", "expected"), [("b", "b"), ("c", "c"), ("d", "a")])
def test_a_tie_that_the_flow_tells_of_goes_to_the_incumbent(incumbent, expected):
    def flow(candidates, *, n_warmup, n_repeat):
        for index in candidates:
            ms = yield index
            assert ms >= 1.0
        return Winner(0, {0, 1, 2})

    made = context(tuple("abcd"), strategy=flow, search="mine", start=False)
    made.adopt((0, incumbent, None))
    made.start()
    finish(made, {"a": 1.0, "b": 1.3, "c": 1.2, "d": 1.1})
    assert winner(made) == expected


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_candidate_that_some_rank_never_timed_cannot_win(strategy):
    made = context(strategy=STRATEGIES[strategy], search=strategy, n_repeat=2)
    while not made.settled:
        candidate = made.digests[made.planned]
        part = timed(candidate, 5.0) if candidate == "b" else timed(candidate, 0.1, unmeasured=1)
        advance(made, part)
    assert winner(made) == "b"
    assert set(made.times.ms) == {1}


def test_without_any_sample_the_incumbent_stays():
    made = context()
    while not made.settled:
        advance(made, Part(ran=made.digests[made.planned], unmeasured=1))
    assert (winner(made), made.status, made.times.ms) == ("a", "tuned", {})


# ---- candidates that do not work everywhere


def test_a_ban_in_the_middle_of_a_trial_moves_on_to_the_next_candidate():
    made = context(n_repeat=3)
    advance(made, timed("a", 1.0))
    outcome = advance(made, Part(ran="b", bans={"a": (2, "OutOfResources")}))
    assert (outcome.kind, outcome.index) == ("incumbent", 0)
    assert made.digests[made.planned] == "b"
    assert finish(made, {"b": 3.0, "c": 2.0}) == ["b", "b", "b", "c", "c", "c"]
    assert winner(made) == "c"
    assert made.banned == {0: (2, "OutOfResources")}
    assert 0 not in made.times.ms


def test_a_banned_winner_is_replaced_by_the_next_fastest():
    made = context()
    finish(made, {"a": 3.0, "b": 1.0, "c": 2.0})
    made.ban(1, 0, "OutOfResources")
    assert winner(made) == "c"
    assert made.digests[made.planned] == "c"


# ---- strategies of the user's own


def test_a_strategy_is_told_the_time_so_far_and_inf_for_a_ban():
    told = []

    def listening(candidates, *, n_warmup, n_repeat):
        for request in (0, Warmup(0), 0, 1):
            told.append((yield request))
        return 0

    made = context(strategy=listening, search="listening")
    advance(made, timed("a", 2.0))
    advance(made, timed("a", 9.0))  # a warm-up is no sample
    advance(made, timed("a", 3.0))
    advance(made, Part(ran="a", bans={"b": (0, "PTXASError")}))
    assert told == [2.0, 2.0, 3.0, math.inf]


def yields(*requests):
    def strategy(candidates, *, n_warmup, n_repeat):
        yield from requests
        return 0

    return strategy


def returns(value):
    def strategy(candidates, *, n_warmup, n_repeat):
        yield 0
        return value

    return strategy


def asks_for_a_banned_one_for_ever(candidates, *, n_warmup, n_repeat):
    while True:
        yield 1


def raises_at_once(candidates, *, n_warmup, n_repeat):
    raise KeyError("no such threshold")
    yield 0


def raises_later(candidates, *, n_warmup, n_repeat):
    yield 0
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda candidates, *, n_warmup, n_repeat: 1, "returned 1, expected a generator"),
        (lambda candidates: iter(()), "TypeError"),
        (yields(3), "asked for 3, which is none of 3 candidates"),
        (yields(-1), "asked for -1"),
        (yields("a"), "asked for 'a'"),
        (yields(1.0), "asked for 1.0"),
        (yields(None), "asked for None"),
        (yields(Warmup(7)), "asked for 7"),
        (returns(None), "returned None"),
        (returns(3), "returned 3"),
        (asks_for_a_banned_one_for_ever, "keeps asking for candidates that are banned"),
        (raises_at_once, "KeyError: 'no such threshold'"),
        (raises_later, "ZeroDivisionError: division by zero"),
    ],
    ids=[
        "is no generator", "takes other arguments", "too large", "negative", "text", "float", "None",
        "warm-up of none", "no winner", "winner too large", "banned for ever", "raises at once",
        "raises later",
    ],
)  # fmt: skip
def test_a_strategy_that_breaks_the_contract_gets_an_error_with_its_name(strategy, message):
    made = context(strategy=strategy, search="mine", start=False)
    made.ban(1, 0, "PTXASError")

    def search():
        made.start()
        while not made.settled:
            advance(made, timed("a", 1.0))

    with pytest.raises(TuningError, match="search=mine") as caught:
        search()
    assert message in str(caught.value)


def insists(candidates, *, n_warmup, n_repeat):
    for index in candidates:
        sent = yield index
        assert isinstance(sent, float)
    return 2


@pytest.mark.parametrize(
    "fields", [{"bans": {"c": (0, "PTXASError")}}, {"unmeasured": 1}], ids=lambda f: [*f]
)
def test_a_winner_that_is_banned_or_has_no_sample_is_replaced_by_the_best_known(fields):
    made = context(strategy=insists, search="insists")
    advance(made, timed("a", 2.0))
    advance(made, timed("b", 1.0))
    advance(made, timed("c", 0.5, **fields))
    assert made.settled
    assert winner(made) == "b"


def test_the_word_of_a_flow_of_the_users_stands_where_times_are_equal():
    made = context(strategy=insists, search="insists")
    finish(made, dict.fromkeys("abc", 1.0))
    assert winner(made) == "c"


def test_a_flow_may_choose_a_candidate_that_it_never_tried():
    def knows(candidates, *, n_warmup, n_repeat):
        yield 0
        return 2

    made = context(strategy=knows, search="knows")
    finish(made, {"a": 1.0})
    assert winner(made) == "c"
    assert 2 not in made.times.ms
