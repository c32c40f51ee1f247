"""Heartbeats and watched runs of several threads at once."""

import functools
import gc
import weakref
from unittest import mock

import pytest
from rank_programs import wait_for

from dist_autotune.errors import PeerFailed
from dist_autotune.ranks import exchange
from dist_autotune.ranks import watchdog as watchdog_module
from dist_autotune.ranks.watchdog import Watch, Watchdog


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(exchange, "HEARTBEAT_S", 0.01)


def test_a_rank_beats_until_the_last_of_its_threads_has_compiled():
    beats, watchdog = [], Watchdog(0)
    beat = functools.partial(beats.append, None)
    with watchdog.beating(beat):
        with watchdog.beating(beat):
            pass
        count = len(beats)
        wait_for(lambda: len(beats) > count + 1)
    watchdog.close()


def test_a_run_is_watched_while_another_one_ends_and_let_go_when_it_ends():
    failures, told, watchdog, where = {}, [], Watchdog(0), mock.Mock(return_value="")
    watch, find = Watch("a call", 60.0, "raise", told.append, where), functools.partial(failures.get, 5)
    with watchdog.watching(watch, find):
        with watchdog.watching(watch, find):
            pass
        failures[5] = PeerFailed("", 1, "Boom")
        wait_for(lambda: told)
    assert "is still in a call, but rank 1 has failed (Boom)" in told[0]
    let_go = weakref.ref(where)
    del where, watch
    wait_for(lambda: (gc.collect(), let_go())[1] is None)
    watchdog.close()


def test_a_run_that_ends_while_the_thread_starts_is_watched_no_more(monkeypatch):
    told, watchdog = [], Watchdog(0)
    with monkeypatch.context() as patch:
        patch.setattr(watchdog, "_start", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            watchdog.watching(Watch("the first call", 0.01, "raise", told.append, str)).__enter__()
    with watchdog.watching(Watch("the next call", 0.01, "raise", told.append, str)):
        wait_for(lambda: told)
    watchdog.close()
    assert ["the next call" in text for text in told] == [True]


def test_a_report_that_fails_ends_neither_the_heartbeats_nor_the_abort(monkeypatch, caplog):
    beats, ended = [], []

    def report(text):
        raise RuntimeWarning("No more logs in /logs: No space left on device.")

    monkeypatch.setattr(watchdog_module, "os", mock.Mock(_exit=ended.append))
    monkeypatch.setattr(watchdog_module, "faulthandler", mock.Mock())
    watchdog = Watchdog(0)
    with watchdog.watching(Watch("a call", 0.01, "abort", report, lambda: "")):
        wait_for(lambda: ended)
        with watchdog.beating(lambda: beats.append(None)):
            count = len(beats)
            wait_for(lambda: len(beats) > count)
    watchdog.close()
    assert "has been in a call" in caplog.text
