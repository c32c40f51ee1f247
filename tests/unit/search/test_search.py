"""One context's search: driven by what ranks agree, with no kernel behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from dist_autotune.errors import TuningError
from dist_autotune.search.context import Context, Outcome
from dist_autotune.search.messages import Announcement, Part, femtoseconds
from dist_autotune.search.rules import Rules
from dist_autotune.search.strategies import STRATEGIES, Warmup, exhaustive


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


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_candidate_that_some_rank_never_timed_cannot_win(strategy):
    made = context(strategy=STRATEGIES[strategy], search=strategy, n_repeat=2)
    while not made.settled:
        candidate = made.digests[made.planned]
        part = timed(candidate, 5.0) if candidate == "b" else timed(candidate, 0.1, unmeasured=1)
        advance(made, part)
    assert winner(made) == "b"
    assert set(made.times.ms) == {1}


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
