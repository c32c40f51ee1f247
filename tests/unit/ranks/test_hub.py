"""The hub without ranks: messages and ranks only, then its sockets."""

import _thread
import asyncio
import itertools
import os
import random
import signal
import socket
import threading
import time

import pytest
from rank_programs import wait_for

from dist_autotune.ranks import hub as hub_module
from dist_autotune.ranks.client import Client, HubLost
from dist_autotune.ranks.hub import Hub, HubState
from dist_autotune.ranks.messages import LENGTH, TOKEN_BYTES, pack, unpack

MERGED = {"merged": b"all"}
PARTS = (b"zero", b"one", b"two")


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


@pytest.mark.parametrize("last", [0, 2])
def test_when_all_have_come_everybody_is_told_what_their_payloads_make(last):
    ranks = Ranks(3)
    order = [rank for rank in range(3) if rank != last]
    for rank in order:
        ranks.send(rank, "post", payload=b"%d" % rank)
    assert not any(ranks.told.values())
    ranks.send(last, "post", payload=b"%d" % last)
    assert list(ranks.told.values()) == [[{"id": 1, "end": {"merged": b"0 1 2"}}]] * 3
    assert len(ranks.state) == 0


def test_the_first_end_stands_and_is_kept_until_everybody_knows():
    ranks = Ranks(3)
    ranks.send(2, "publish", end={"failed": 2})
    ranks.send(1, "publish", end={"failed": 1})
    assert ranks.told[1][-1]["end"] == ranks.told[2][-1]["end"] == {"failed": 2}
    assert len(ranks.state) == 1
    ranks.send(0, "post")
    assert ranks.told[0] == [{"id": 1, "end": {"failed": 2}}]
    assert len(ranks.state) == 0


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


@pytest.mark.parametrize(("here", "missing"), [((0, 2), [1]), ((1, 2), [0]), ((), [0, 1, 2])], ids=str)
def test_who_is_missing(here, missing):
    ranks = Ranks(3)
    for rank in here:
        ranks.send(rank, "post")
    ranks.give_up(2)
    assert ranks.told[2][-1]["end"] == {"by": 2, "missing": missing}


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


def test_patience_has_an_end_and_beats_of_those_present_buy_none():
    ranks = Ranks(3)
    ranks.send(2, "beat")
    ranks.give_up(0, is_patient=False)
    assert "end" in ranks.told[0][-1]
    ranks.send(1, "beat", 1)
    ranks.send(1, "post", 1)
    ranks.give_up(0, 1)
    assert ranks.told[0][-1]["end"]["missing"] == [0, 2]


def test_a_rank_that_asks_anew_is_answered_by_its_latest_connection():
    ranks = Ranks(3)
    ranks.send(0, "post")
    ranks.send(1, "post")
    dead, ranks.told[1] = ranks.told[1], []
    ranks.replies[1] = ranks.told[1].append
    ranks.send(1, "post")
    ranks.send(2, "post")
    assert dead == []
    assert list(ranks.told.values()) == [[{"id": 1, "end": {"merged": b"x x x"}}]] * 3


def test_a_rank_whose_connection_was_lost_when_the_others_were_told_may_still_ask():
    ranks = Ranks(2)
    ranks.send(0, "post")
    ranks.send(1, "post")  # answered, though nobody may have read it
    ranks.send(0, "post", 1)
    ranks.send(1, "post")
    assert ranks.told[1] == [{"id": 1, "end": {"merged": b"x x"}}] * 2


def test_any_order_of_messages_ends_the_same():
    generator = random.Random(0)
    for _ in range(200):
        ranks = Ranks(7)
        for rank in generator.sample(range(7), 7):
            ranks.send(rank, "post", payload=b"%d" % rank)
        assert [told[-1]["end"] for told in ranks.told.values()] == [{"merged": b"0 1 2 3 4 5 6"}] * 7
        assert len(ranks.state) == 0


# ---- messages


def test_messages_are_taken_apart_wherever_they_are_cut():
    messages = [{"n": n, "text": "é" * n} for n in (0, 1, 300)]
    data = b"".join(map(pack, messages))
    for step in (1, 3, 4, 5, len(data)):
        buffer, taken = bytearray(), []
        for chunk in itertools.batched(data, step) if hasattr(itertools, "batched") else chunks(data, step):
            buffer += bytes(chunk)
            taken += unpack(buffer)
        assert taken == messages
        assert not buffer


def chunks(data, step):
    return (data[at : at + step] for at in range(0, len(data), step))


def test_payloads_of_any_bytes_travel_as_they_are():
    every = bytes(range(256))
    message = {"id": 3, "payloads": [every, b"", every * 3], "end": {"merged": every, "by": [1, {"a": None}]}}
    buffer = bytearray(pack(message))
    assert list(unpack(buffer)) == [message]


@pytest.mark.parametrize("body", [b"", b"{", b'{"a":{"bytes":0}}', b"[]"])
def test_a_malformed_frame_is_an_error(body):
    with pytest.raises((ValueError, AttributeError)):
        list(unpack(bytearray(LENGTH.pack(len(body)) + body)))


# ---- the sockets


def framed(body):
    return LENGTH.pack(len(body)) + body


def client_of(hub, rank):
    """Return the client of a rank on the hub's host."""
    address = hub.address()
    return Client(address.endpoints(address.host), address.token, rank)


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


def test_clients_reach_the_hub(hub, client):
    clients = [client_of(hub, 0), client, client_of(hub, 2)]
    hub.state.merges[0] = joined
    posts = [each.send("post", 0, payload=text) for each, text in zip(clients, PARTS, strict=True)]
    ends = [each.receive(post, 10)["end"] for each, post in zip(clients, posts, strict=True)]
    assert ends == [{"merged": b"zero one two"}] * 3
    clients[0].close()
    clients[2].close()


def test_a_reply_that_does_not_come_is_None_in_time(client):
    request = client.send("post", 0, payload=b"")
    began = time.monotonic()
    assert client.receive(request, 0.1) is None
    assert 0.05 < time.monotonic() - began < 30
    assert client.receive(client.send("look", 0), 10)["end"] is None  # the client still works


@pytest.fixture
def ctrl_c():
    """Let SIGINT raise KeyboardInterrupt, which it does not where pytest was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_that_interrupts_no_system_call_ends_a_wait_soon_too(client, ctrl_c):
    request = client.send("post", 0, payload=b"")
    began = time.monotonic()
    # As if the signal had come just before the system call: Python knows of it, the call goes on.
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        client.receive(request, 60)
    assert time.monotonic() - began < 30


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
        with any_end():
            assert stranger.recv(100) == b""
    assert client.receive(client.send("look", 0), 10)["end"] is None


class any_end:
    """Closed or reset: anything but an answer."""

    def __enter__(self):
        pass

    def __exit__(self, kind, error, traceback):
        return isinstance(error, OSError)


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
        with any_end():
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


def test_a_rank_that_does_not_read_holds_up_nobody_and_gets_whole_messages_when_it_does(hub, client, root):
    end = {"merged": "x" * (16 << 20)}  # more than any socket takes
    with RawRank(hub) as rank:
        rank.send("post", payload="two")
        wait_for(lambda: len(hub.state))
        began = time.monotonic()
        root.send("publish", 0, end=end)
        wait_for(lambda: hub.backlogged)
        assert client.receive(client.send("look", 1), 20)["end"] is None
        assert time.monotonic() - began < hub_module.SEND_S  # while that rank has taken in next to nothing
        rank.send("look")
        assert [rank.message()["end"] == end for _ in range(2)] == [True, True]


def test_a_rank_that_reads_nothing_for_long_is_shut_out_and_gets_its_answer_on_a_new_connection(
    hub, root, monkeypatch
):
    monkeypatch.setattr(hub_module, "SEND_S", 0.2)
    monkeypatch.setattr(hub_module, "TICK_S", 0.05)
    end = {"merged": "x" * (16 << 20)}
    with RawRank(hub) as rank:
        rank.send("post", payload="two")
        wait_for(lambda: len(hub.state))
        published = root.send("publish", 0, end=end)
        # The hub's own rank hears of the end last, as it may end its process; but not after this one.
        assert root.receive(published, 20)["end"] == end
        with any_end():
            assert len(rank.read(16 << 20)) < 16 << 20
    with RawRank(hub) as rank:
        rank.send("post", payload="two")
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
        with any_end():
            assert stranger.recv(100) == b""
    assert client.receive(client.send("look", 0), 20)["end"] is None
    assert len(os.listdir("/proc/self/fd")) <= before + 100 + 8 + 2
    for stranger in strangers[-8:]:
        with any_end():
            assert stranger.recv(100) == b""
    for stranger in strangers:
        stranger.close()


def test_the_hub_listens_on_the_loopback_device_alone_until_somebody_outside_asks(hub):
    # The whole net 127/8 is this host: what listens everywhere answers there.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", hub.address().port))
    assert hub.address().endpoints("another host") == []
    hub.open_towards("127.0.0.1")
    ((name, port),) = hub.address().endpoints("another host")
    client = Client([(name, port)], hub.address().token, 1)
    assert client.receive(client.send("look", 0), 20)["end"] is None
    client.close()
    hub.open_towards("127.0.0.1")
    assert hub.address().endpoints("another host") == [(name, port)]


def test_a_hub_can_be_made_where_an_event_loop_runs():
    async def make():  # as in a notebook
        hub = Hub(range(1))
        client = client_of(hub, 0)
        found = client.receive(client.send("look", 0), 20)["end"]
        client.close()
        hub.close()
        return found

    assert asyncio.run(make()) is None


def test_a_program_that_answers_in_place_of_the_hub_is_not_believed(hub):
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Client([("127.0.0.1", server.getsockname()[1])], hub.address().token, 1)
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


def test_an_address_that_nobody_listens_at():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that nobody else comes to listen there
        port = taken.getsockname()[1]
        with pytest.raises(HubLost):
            Client([("127.0.0.1", port)], "token", 1).send("look", 0)


def test_a_client_connects_anew_after_it_was_closed(client):
    client.send("post", 0, payload="x")
    client.close()
    assert client.receive(client.send("look", 0), 10)["end"] is None


def test_many_ranks_at_once():
    size = 24
    hub = Hub(range(size))
    hub.state.merges.update(dict.fromkeys(range(20), joined))
    ends = [None] * size

    def run(rank):
        client = client_of(hub, rank)
        for sequence in range(20):
            ends[rank] = client.receive(client.send("post", sequence, payload=b"1"), 20)["end"]
        client.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ends == [joined([b"1"] * size)] * size
    assert len(hub.state) == 0
    hub.close()
