"""What a rank keeps of a context: the forms in which it was launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dist_autotune.launch.rank_context import FORMS, RankContext


@pytest.fixture
def context() -> Any:
    """Give a context that is new and has no configs."""
    nothing: Any = SimpleNamespace()
    return RankContext("k[]", "k", nothing, (), "[]", {}, nothing, rank=0, slot="[]", constants="")


def test_a_form_is_kept_once(context):
    assert [context.keep_form(form) for form in ("a", "a", "b", "a")] == [True, False, True, False]


def test_forms_are_kept_up_to_the_bound_and_a_remark_says_that_there_are_more(context):
    assert all(context.keep_form(form) for form in range(FORMS))
    assert context.forms_remark == ""
    assert [context.keep_form(form) for form in (FORMS, FORMS + 1, 0)] == [False] * 3
    assert context.forms_remark == f"forms after the first {FORMS} left to their launches"
    assert len(context.forms) == FORMS + 1


def test_samples_of_a_context_are_checked_for_their_form_in_its_first_run_and_if_it_has_several(context):
    assert context.checks_form
    context.search = SimpleNamespace(judge="launch", is_on_trial=True)
    context.keep_form("a")
    assert context.measures
    assert not context.checks_form
    context.keep_form("b")
    assert context.checks_form
    context.search.is_on_trial = False
    assert not context.checks_form
