"""Objects are found by type, while other threads build tuples."""

import threading

from thread_switches import beside, frequent_switches

from dist_autotune.triton_api.live_objects import instances


class Base:
    pass


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
