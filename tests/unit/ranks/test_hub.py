"""The sockets of the hub: who is served, who is turned away, and that nobody holds up others."""

import contextlib
import os
import socket
import time

import pytest
from rank_programs import wait_for

from dist_autotune.ranks import hub as hub_module
from dist_autotune.ranks.client import Client, HubLost
from dist_autotune.ranks.hub import Hub
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
