"""Heartbeats and watched runs of several threads at once."""

from unittest import mock

from rank_programs import wait_for

from dist_autotune.ranks import watchdog as watchdog_module
from dist_autotune.ranks.watchdog import Watch, Watchdog


class Hub:
    """What the watchdog sends, and how each exchange has ended."""

    def __init__(self):
        self.beats, self.ends = [], {}

    def notify(self, op, sequence):
        self.beats.append(sequence)

    def send(self, op, sequence):
        return sequence

    def receive(self, sequence, timeout_s):
        return {"end": self.ends.get(sequence)}

    def close(self):
        pass


def test_a_rank_beats_until_the_last_of_its_threads_has_compiled():
    hub = Hub()
    watchdog = Watchdog(0, 0.01, lambda: hub)
    with watchdog.beating(3):
        with watchdog.beating(3):
            pass
        count = len(hub.beats)
        wait_for(lambda: len(hub.beats) > count + 1)
    watchdog.close()


def test_a_run_is_watched_while_another_one_ends():
    hub, told = Hub(), []
    watchdog = Watchdog(0, 0.01, lambda: hub)
    watch = Watch("a call", 60.0, "raise", told.append)
    with watchdog.watching(5, watch):
        with watchdog.watching(5, watch):
            pass
        hub.ends[5] = {"failed": 1, "error": "Boom"}
        wait_for(lambda: told)
    assert "is still in a call, but rank 1 has failed (Boom)" in told[0]
    watchdog.close()


def test_a_report_that_fails_ends_neither_the_heartbeats_nor_the_abort(monkeypatch, caplog):
    hub, ended = Hub(), []

    def report(text):
        raise RuntimeWarning("No more logs in /logs: No space left on device.")

    monkeypatch.setattr(watchdog_module, "os", mock.Mock(_exit=ended.append))
    monkeypatch.setattr(watchdog_module, "faulthandler", mock.Mock())
    watchdog = Watchdog(0, 0.01, lambda: hub)
    with watchdog.watching(5, Watch("a call", 0.01, "abort", report, lambda: "")):
        wait_for(lambda: ended)
        with watchdog.beating(5):
            count = len(hub.beats)
            wait_for(lambda: len(hub.beats) > count)
    watchdog.close()
    assert "has been in a call" in caplog.text
