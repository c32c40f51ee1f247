"""The sockets of the hub: who is served, who is turned away, and that nobody holds up others."""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rank_programs import SOON_S, wait_for

from dist_autotune.ranks import hub as hub_module
from dist_autotune.ranks.ballot_thread import BallotThread
from dist_autotune.ranks.client import Client, HubLost
from dist_autotune.ranks.hub import Hub, HubState
from dist_autotune.ranks.watchdog import Watchdog
from dist_autotune.ranks.wire import LENGTH, TOKEN_BYTES, pack, unpack

MERGED = {"merged": b"all"}
any_end = contextlib.suppress(OSError)  # closed or reset: anything but an answer


def framed(body):
    return LENGTH.pack(len(body)) + body


def client_of(hub, rank):
    """Return the client of a rank on the hub's host."""
    address = hub.address()
    return Client(address.endpoint(address.host), address.token, rank)


@pytest.fixture
def hub():
    hub = Hub(range(3))
    yield hub
    hub.close()


@pytest.fixture
def root(hub):
    """The client of rank 0, which runs the hub."""
    client = client_of(hub, 0)
    yield client
    client.close()


@pytest.fixture
def client(hub):
    """The client of rank 1."""
    client = client_of(hub, 1)
    yield client
    client.close()


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"0" * TOKEN_BYTES,
        pack([]),
        b"\xff\xff\xff\xff",
        b"\0\0\0\2{]",
        framed(b"[" * 1000),
        b"",
    ],
    ids=["http", "wrong token", "no object", "too long", "no JSON", "nesting", "nothing"],
)
def test_strangers_are_turned_away(hub, client, first):
    port = hub.address().port
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(first + pack({"op": "publish", "id": 1, "sequence": 0, "rank": 1, "end": MERGED}))
        with any_end:
            assert stranger.recv(100) == b""
    assert client.receive(client.send("look", 0), 10)["end"] is None


class RawRank:
    """Rank 2 as a bare connection: it sends what it likes and reads when it likes."""

    def __init__(self, hub):
        self.socket = socket.create_connection(("127.0.0.1", hub.address().port))
        self.socket.settimeout(20)
        self.socket.sendall(hub.address().token[:TOKEN_BYTES].encode())
        assert self.read(TOKEN_BYTES) == hub.address().token[TOKEN_BYTES:].encode()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.socket.close()

    def send(self, op, **fields):
        self.socket.sendall(pack({"op": op, "id": 7, "sequence": 0, "rank": 2, **fields}))

    def read(self, size):
        data = b""
        while len(data) < size and (more := self.socket.recv(size - len(data))):
            data += more
        return data

    def message(self):
        head = self.read(LENGTH.size)
        (message,) = unpack(bytearray(head + self.read(*LENGTH.unpack(head))))
        return message


@pytest.mark.parametrize(
    "sent",
    [
        framed(b"[" * 100_000),
        framed(b"{}"),
        pack({"op": "post", "rank": 2, "sequence": "x"}),
        framed(b"\xff"),
    ],
    ids=["nesting", "no rank", "no sequence", "no text"],
)
def test_a_rank_that_sends_nonsense_loses_its_connection_and_the_others_are_served(hub, client, sent):
    with RawRank(hub) as rank:
        rank.socket.sendall(sent)
        with any_end:
            assert rank.socket.recv(100) == b""
    assert client.receive(client.send("look", 0), 20)["end"] is None


def test_no_exception_ends_the_hub(hub, client, monkeypatch, caplog):
    failures, handle = [RecursionError("deep"), MemoryError(), RuntimeError("set changed")], hub.state.handle

    def fail_first(message, reply):
        if failures:
            raise failures.pop()
        handle(message, reply)

    monkeypatch.setattr(hub.state, "handle", fail_first)
    while failures:
        with pytest.raises(HubLost):
            client.receive(client.send("look", 0), 20)
    assert client.receive(client.send("look", 0), 20)["end"] is None
    assert caplog.text.count("The hub of this group has closed a connection.") == 3


def test_a_rank_that_does_not_read_holds_up_nobody_and_gets_whole_messages_when_it_does(
    hub, client, root, monkeypatch
):
    monkeypatch.setattr(hub_module, "SEND_S", 600)  # longer than anybody here waits
    end = {"merged": "x" * (16 << 20)}  # more than any socket takes
    with RawRank(hub) as rank:
        rank.send("post", payload="two")
        wait_for(lambda: len(hub.state))
        root.send("publish", 0, end=end)
        wait_for(lambda: any(each.transport.get_write_buffer_size() for each in hub.connections.copy()))
        # While that rank has taken in next to nothing.
        assert client.receive(client.send("look", 1), 20)["end"] is None
        rank.send("look")
        assert [rank.message()["end"] == end for _ in range(2)] == [True, True]


def test_a_rank_that_reads_nothing_holds_up_the_hubs_own_rank_for_a_while(hub, root, monkeypatch):
    monkeypatch.setattr(hub_module, "SEND_S", 0.5)
    end = {"merged": "x" * (16 << 20)}
    with RawRank(hub) as rank:
        rank.send("post", payload="two")
        wait_for(lambda: len(hub.state))
        began = time.monotonic()
        published = root.send("publish", 0, end=end)
        # The hub's own rank hears of the end last, as it may end its process; but it does not wait for ever.
        assert root.receive(published, 20)["end"] == end
        assert time.monotonic() - began > 0.5
        assert rank.message()["end"] == end


def test_connections_that_show_no_token_make_room_for_each_other_and_are_closed_in_time(
    hub, client, monkeypatch
):
    monkeypatch.setattr(hub_module, "STRANGERS", 8)
    monkeypatch.setattr(hub_module, "STRANGERS_S", 1.0)
    port, before = hub.address().port, len(os.listdir("/proc/self/fd"))
    client.send("look", 0)
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for stranger in strangers:
        stranger.sendall(b"half")
    for stranger in strangers[:-8]:  # the oldest; the others wait
        with any_end:
            assert stranger.recv(100) == b""
    assert client.receive(client.send("look", 0), 20)["end"] is None
    assert len(os.listdir("/proc/self/fd")) <= before + 100 + 8 + 2
    for stranger in strangers[-8:]:
        with any_end:
            assert stranger.recv(100) == b""
    for stranger in strangers:
        stranger.close()


def test_the_hub_listens_on_the_loopback_device_alone_until_somebody_outside_asks(hub):
    # The whole net 127/8 is this host: what listens everywhere answers there.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", hub.address().port))
    assert hub.address().endpoint("another host") is None
    hub.open_towards("127.0.0.1")
    client = Client(hub.address().endpoint("another host"), hub.address().token, 1)
    assert client.receive(client.send("look", 0), 20)["end"] is None
    client.close()


@pytest.mark.parametrize("is_busy", [False, True], ids=["", "hub busy before"])
def test_a_rank_that_closes_and_does_not_come_back_is_missing_at_once(
    hub, root, client, is_busy, monkeypatch
):
    monkeypatch.setattr(hub_module, "AWAY_S", 60)  # a busy machine is not to be taken for a hub that was away
    monkeypatch.setattr(hub_module, "RETURN_S", 60)  # nor its ranks for some that stay away
    client.receive(client.send("look", 0), 20)
    client.close()
    assert client.receive(client.send("look", 0), 20)["end"] is None  # this one is back
    monkeypatch.setattr(hub_module, "RETURN_S", 0.2)
    if is_busy:
        hub.loop.call_soon_threadsafe(time.sleep, 3 * hub_module.TICK_S)
    with RawRank(hub) as rank:
        rank.send("look")
        rank.message()
    end = root.receive(root.send("post", 0, payload=b"", what="a test"), 20)["end"]
    assert (end["missing"], end["by"], end["what"]) == ([2], 0, "a test")
    assert hub.state.lost == {2}


def test_a_program_that_answers_in_place_of_the_hub_is_not_believed(hub):
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Client(server.getsockname(), hub.address().token, 1)
        request = client.send("look", 0)
        with server.accept()[0] as other:
            other.sendall(b"0" * TOKEN_BYTES + pack({"id": request, "end": MERGED}))
            with pytest.raises(HubLost, match="another program"):
                client.receive(request, 20)


def test_a_hub_that_is_gone_is_told_apart_from_one_that_is_slow(hub, client):
    request = client.send("post", 0, payload="x")
    assert client.receive(request, 0.01) is None
    hub.close()
    with pytest.raises(HubLost):
        client.receive(request, 10)
    with pytest.raises(HubLost):
        client.send("look", 0)


def joined(payloads):
    return {"merged": b" ".join(payloads)}


class Ranks:
    """The messages of all ranks to the state of one hub, and what each was told."""

    def __init__(self, size):
        self.state = HubState(range(size))
        self.told = {rank: [] for rank in range(size)}
        self.replies = {rank: self.told[rank].append for rank in range(size)}

    def send(self, rank, op, sequence=0, **fields):
        asks = {} if op == "beat" else {"id": 1}
        if op == "post":
            fields = {"payload": b"x", **fields}
            self.state.merges[sequence] = joined
        message = {"op": op, "rank": rank, "sequence": sequence, **asks, **fields}
        self.state.handle(message, self.replies[rank])

    def give_up(self, rank, sequence=0, is_patient=True):
        self.send(rank, "give up", sequence, end={"by": rank}, is_patient=is_patient)


# ---- the state


@pytest.mark.parametrize("end", [MERGED, {"failed": 0}], ids=["merged", "failed"])
def test_who_asks_again_when_everybody_has_been_told_gets_the_same_end(end):
    # A rank may be interrupted, or give up, in the moment in which it is told.
    ranks = Ranks(2)
    ranks.send(1, "post")
    ranks.send(0, "publish", end=end)
    assert len(ranks.state) == 0
    ranks.send(1, "publish", end={"failed": 1})
    ranks.give_up(1)
    ranks.send(0, "post")
    ranks.send(1, "beat")
    assert [told["end"] for told in ranks.told[0] + ranks.told[1]] == [end] * 5
    assert len(ranks.state) == 0


def test_beats_of_a_missing_rank_buy_patience_once_each():
    ranks = Ranks(3)
    ranks.send(0, "post")
    ranks.send(2, "beat")
    ranks.give_up(0)
    assert ranks.told[0] == [{"id": 1, "wait": True}]
    ranks.give_up(1)  # another rank has not seen that beat
    assert ranks.told[1] == [{"id": 1, "wait": True}]
    ranks.give_up(0)
    assert ranks.told[0][-1]["end"]["missing"] == [1, 2]


def test_a_rank_whose_connection_was_lost_when_the_others_were_told_may_still_ask():
    ranks = Ranks(2)
    ranks.send(0, "post")
    ranks.send(1, "post")  # answered, though nobody may have read it
    ranks.send(0, "post", 1)
    ranks.send(1, "post")
    assert ranks.told[1] == [{"id": 1, "end": {"merged": b"x x"}}] * 2


# ---- the thread that brings ballots the hub's letters


@pytest.fixture
def thread(hub):
    """The ballots of rank 1."""
    watchdog = Watchdog(1, 1.0, lambda: None)
    thread = BallotThread(lambda: client_of(hub, 1), watchdog)
    yield thread
    thread.close()
    if thread._thread is not None:
        thread._thread.join(SOON_S)


def words_of(hub, ballot):
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


def test_words_that_meet_a_broken_connection_are_sent_on_the_next_one(hub, thread):
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


def test_letters_of_a_ballot_that_has_not_begun_are_kept_for_it(hub, thread):
    thread.ballot("a", SOON_S, None)
    peer = client_of(hub, 0)
    for call in (1, 2):
        peer.notify("raised", 0, ballot="b", call=call, error=str(call))
    wait_for(lambda: len(thread._early.get("b", [])) == 2)
    assert thread.ballot("b", SOON_S, None)._failures[0]["call"] == 2
    peer.close()
