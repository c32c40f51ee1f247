"""`search=` is a function of the user's own: what it is told, whose winner stands, what it may not do."""

import math

import pytest
from kernels_for_tests import launch, numbers, out_of_resources

from dist_autotune import TuningError
from dist_autotune.search.strategies import Warmup

MS = {16: 2.0, 32: 1.0, 64: 0.5}


def test_a_strategy_is_told_the_time_so_far_and_inf_for_a_ban(bench):
    told, times = [], iter([2.0, 9.0, 3.0])

    def listening(candidates, *, n_warmup, n_repeat):
        for request in (0, Warmup(0), 0, 1):
            told.append((yield request))
        return 0

    kernel = bench.kernel({16: lambda _: next(times, 1.0), 32: 1.0})
    kernel.fn.failures[32] = out_of_resources
    bench.tune(lambda: launch(kernel, numbers()), search=listening)()
    assert told == [2.0, 2.0, 2.5, math.inf]  # a warm-up is no sample


# ---- what a strategy may not do


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


BREACHES = {
    "is no generator": (lambda candidates, *, n_warmup, n_repeat: 1, "returned 1, expected a generator"),
    "takes other arguments": (lambda candidates: iter(()), "TypeError"),
    "too large": (yields(3), "asked for 3, which is none of 3 candidates"),
    "text": (yields("a"), "asked for 'a'"),
    "None": (yields(None), "asked for None"),
    "warm-up of none": (yields(Warmup(7)), "asked for 7"),
    "no winner": (returns(None), "returned None"),
    "banned for ever": (asks_for_a_banned_one_for_ever, "keeps asking for candidates that are banned"),
    "raises at once": (raises_at_once, "KeyError: 'no such threshold'"),
    "raises later": (raises_later, "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize(("strategy", "message"), BREACHES.values(), ids=BREACHES)
def test_a_strategy_that_breaks_the_contract_gets_an_error_with_its_name(bench, strategy, message):
    kernel = bench.kernel(MS)
    kernel.fn.failures[32] = out_of_resources
    with pytest.raises(TuningError) as caught:
        bench.tune(lambda: launch(kernel, numbers()), search=strategy)()
    assert str(caught.value).startswith(f"search={strategy.__qualname__}: ")
    assert message in str(caught.value)
