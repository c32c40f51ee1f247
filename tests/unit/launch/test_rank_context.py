"""What a rank keeps of a context: the forms in which it was launched, what it need not compile."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from dist_autotune.compilation.backlog import FORMS
from dist_autotune.launch.rank_context import RankContext
from dist_autotune.search.expectation.order import AT_LEAST, KEYS, LIKELY, most_tried
from dist_autotune.storage.known_results import ContextIdentity, KnownOfKernel


@pytest.fixture
def context() -> Any:
    """Give a context that is new and has no configs."""
    return new_context((), {})


def new_context(key: tuple[int, ...], texts: dict[str, str]) -> RankContext:
    nothing: Any = SimpleNamespace()
    about = ContextIdentity("k", nothing, key, f"[{', '.join(map(str, key))}]", texts)
    return RankContext("k[]", "[]", about, nothing, rank=0)


def test_forms_are_kept_up_to_the_bound_and_a_remark_says_that_there_are_more(context):
    assert all(context.compile.keep_form(form) for form in range(FORMS))
    assert context.compile.remark == ""
    assert [context.compile.keep_form(form) for form in (FORMS, FORMS + 1, 0)] == [False] * 3
    assert context.compile.remark == f"forms after the first {FORMS} left to their launches"
    assert len(context.compile.forms) == FORMS + 1


def test_what_the_search_names_later_is_compiled_once_too(context):
    context.search = search = SimpleNamespace(is_tuned_by_launches=True, waves=0)
    context.compile.is_preflighted = True
    assert not context.is_to_preflight
    search.waves = 1
    assert context.is_to_preflight
    context.compile.waves = 1
    assert not context.is_to_preflight


TEXTS = {
    f"d{warps}{block}": f"BLOCK: {16 << block}, num_warps: {1 << warps}"
    for warps in range(4)
    for block in range(10)
}


def ms(key: int, text: str) -> float:
    """Return what a config takes: the fastest has a block of about the key, and four warps."""
    block, warps = (math.log2(int(each.split()[1])) for each in text.split(", "))
    return 1.0 + abs(block - math.log2(key)) + 0.1 * abs(warps - 2)


@pytest.mark.parametrize("keys", [3, 4])
@pytest.mark.parametrize("tries_few", [True, False])
def test_what_other_keys_expect_to_be_slow_is_not_compiled(keys, tries_few):
    context = new_context((512,), TEXTS)
    told = {f"[{32 << n}]": {text: ms(32 << n, text) for text in TEXTS.values()} for n in range(keys)}
    context.begin_with(KnownOfKernel({}, told, None), tries_few=tries_few)
    if not tries_few:
        assert not context.outside_race
        return
    likely = TEXTS.keys() - context.outside_race
    size = 512 if keys >= KEYS else 128  # the nearest of so few keys
    fastest = set(sorted(TEXTS, key=lambda digest: ms(size, TEXTS[digest]))[:10])
    first = next(iter(context.candidates))
    assert first in likely
    if keys < KEYS:  # a wave of what they expect to be the fastest
        assert len(likely) == AT_LEAST
        assert likely - {first} <= fastest
        return
    assert len(likely) == LIKELY * most_tried(len(TEXTS)) == 30
    assert fastest <= likely
