"""The thread that brings ballots the hub's letters, with a hub whose connections break."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rank_programs import SOON_S, wait_for
from test_hub import client_of, hub  # noqa: F401 (a fixture)

from dist_autotune.ranks.ballot_thread import BallotThread
from dist_autotune.ranks.client import HubLost
from dist_autotune.ranks.watchdog import Watchdog


@pytest.fixture
def thread(hub):  # noqa: F811
    """The ballots of rank 1."""
    watchdog = Watchdog(1, 1.0, lambda: None)
    thread = BallotThread(lambda: client_of(hub, 1), watchdog)
    yield thread
    thread.close()
    if thread._thread is not None:
        thread._thread.join(SOON_S)


def words_of(hub, ballot):  # noqa: F811
    known = hub.ballots._rounds.get(ballot)
    return {} if known is None else known.words


def test_calls_on_several_threads_send_one_word_at_a_time():
    made, is_free, together = [], threading.Lock(), threading.Barrier(2)

    class Client:
        def __init__(self):
            made.append(self)
            time.sleep(0.02)  # on purpose: the other thread comes here meanwhile

        def notify(self, *word, **fields):
            assert is_free.acquire(blocking=False), "two threads write to one connection"
            time.sleep(0.02)
            is_free.release()

    def post(call):
        together.wait(SOON_S)
        return words._post("met", "a function", call, waits=False)

    words = BallotThread(Client, watchdog=None)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(post, range(2))) == [True, True]
    assert len(made) == 1


def test_words_that_meet_a_broken_connection_are_sent_on_the_next_one(hub, thread):  # noqa: F811
    names = ["a", "b"]
    ballots = [thread.ballot(name, SOON_S, None) for name in names]
    wait_for(lambda: 1 in hub.ballots._listening)
    own, notify, broken = thread._own, thread._own.notify, []

    def break_once(op, *about, **word):
        if op == "finished" and not broken:
            broken.append(op)
            own.close()
            raise HubLost("broken")
        notify(op, *about, **word)

    own.notify = break_once
    peer = client_of(hub, 0)
    for name in names:
        peer.notify("met", 0, ballot=name, call=1, waits=True)
    wait_for(lambda: all(each.is_asked for each in ballots))
    for each in ballots:
        each.begin(), each.end(has_new_key=False)
    wait_for(lambda: all(1 in words_of(hub, name) for name in names))
    assert broken
    peer.notify("raised", 0, ballot="a", call=2, error="Boom")
    wait_for(lambda: ballots[0]._failures)  # it still hears
    peer.close()


def test_letters_of_a_ballot_that_has_not_begun_are_kept_for_it(hub, thread):  # noqa: F811
    thread.ballot("a", SOON_S, None)
    peer = client_of(hub, 0)
    for call in (1, 2):
        peer.notify("raised", 0, ballot="b", call=call, error=str(call))
    wait_for(lambda: len(thread._early.get("b", [])) == 2)
    assert thread.ballot("b", SOON_S, None)._failures[0]["call"] == 2
    peer.close()
