"""Objects are found by type, while other threads build tuples."""

from __future__ import annotations

import gc
import threading

from thread_switches import beside, frequent_switches

from dist_autotune.triton_api.live_objects import instances


class Base:
    pass


class Derived(Base):
    pass


def test_objects_of_exactly_these_types_are_found():
    base, derived = Base(), Derived()
    assert instances({Base}) == [base]
    assert set(instances([Base, Derived])) == {base, derived}
    assert instances([]) == []


def test_a_frozen_object_is_not_found():
    kept = [Base()]
    gc.freeze()
    try:
        assert kept
        assert instances({Base}) == []
    finally:
        gc.unfreeze()
        gc.freeze()  # as the session of tests has it


def test_tuples_that_another_thread_builds_are_left_alone():
    is_over, built, errors = threading.Event(), [], []

    def build():
        while not is_over.is_set():
            try:
                built.append(len(tuple(number for number in range(200))))
            except SystemError as error:
                errors.append(error)

    with frequent_switches(), beside(build, is_over):
        for _ in range(30):
            instances({Base})
    assert errors == []
    assert set(built) == {200}
