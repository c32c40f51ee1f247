"""The hub without ranks: messages and positions only, then its sockets."""

import _thread
import itertools
import random
import signal
import socket
import threading
import time

import pytest

from dist_autotune.board import Address
from dist_autotune.hub import Hub
from dist_autotune.hub_exchanges import Exchanges, children
from dist_autotune.hub_messages import bytes_of, pack, text_of, unpack
from dist_autotune.line import HubLost, LocalLine, SocketLine

MERGED = {"merged": text_of(b"all")}


class Ranks:
    """The messages of all ranks to one set of exchanges, and what each was told."""

    def __init__(self, size, fan_out=32):
        self.exchanges = Exchanges(size, fan_out)
        self.told = {position: [] for position in range(size)}
        self.replies = {position: self.told[position].append for position in range(size)}

    def send(self, position, op, sequence=0, **fields):
        asks = {} if op == "beat" else {"id": 1}
        message = {"op": op, "position": position, "sequence": sequence, **asks, **fields}
        self.exchanges.handle(message, self.replies[position])

    def give_up(self, position, sequence=0, is_patient=True):
        self.send(position, "give up", sequence, end={"by": position}, is_patient=is_patient)


# ---- the state


def test_the_root_collects_publishes_and_everybody_is_told_once():
    ranks = Ranks(3)
    ranks.send(1, "post", payload="one")
    ranks.send(0, "collect")
    assert ranks.told[0] == []
    ranks.send(2, "post", payload="two")
    assert ranks.told[0] == [{"id": 1, "payloads": ["one", "two"]}]
    ranks.send(0, "publish", end=MERGED)
    assert ranks.told[1] == ranks.told[2] == [{"id": 1, "end": MERGED}]
    assert len(ranks.exchanges) == 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 33, 34, 300])
@pytest.mark.parametrize("fan_out", [1, 2, 32])
def test_the_tree_has_every_position_once(size, fan_out):
    below = [child for position in range(size) for child in children(position, fan_out, size)]
    assert sorted(below) == list(range(1, size))
    assert max(len(children(position, fan_out, size)) for position in range(size)) <= fan_out


def test_the_first_end_stands_and_is_kept_until_everybody_knows():
    ranks = Ranks(3)
    ranks.send(2, "publish", end={"failed": 2})
    ranks.send(1, "publish", end={"failed": 1})
    assert ranks.told[1][-1]["end"] == ranks.told[2][-1]["end"] == {"failed": 2}
    assert len(ranks.exchanges) == 1
    ranks.send(0, "collect")
    assert ranks.told[0] == [{"id": 1, "end": {"failed": 2}}]
    assert len(ranks.exchanges) == 0


@pytest.mark.parametrize("end", [MERGED, {"failed": 0}], ids=["merged", "failed"])
def test_who_asks_again_when_everybody_has_been_told_gets_the_same_end(end):
    # A rank may be interrupted, or give up, in the moment in which it is told.
    ranks = Ranks(2)
    ranks.send(1, "post", payload="one")
    ranks.send(0, "publish", end=end)
    assert len(ranks.exchanges) == 0
    ranks.send(1, "publish", end={"failed": 1})
    ranks.give_up(1)
    ranks.send(0, "collect")
    ranks.send(1, "beat")
    assert [told["end"] for told in ranks.told[0] + ranks.told[1]] == [end] * 5
    assert len(ranks.exchanges) == 0


@pytest.mark.parametrize(
    ("here", "missing"),
    [
        ({0: "collect", 2: "post"}, [1]),
        ({0: "collect"}, [1, 2]),
        ({1: "post", 2: "post"}, [0]),
        ({}, [0, 1, 2]),
        ({0: "collect", 1: "post", 2: "post"}, [0]),  # it has been given all, and has not come back
    ],
    ids=str,
)
def test_who_is_missing(here, missing):
    ranks = Ranks(3)
    for position, op in here.items():
        ranks.send(position, op, payload="x")
    ranks.give_up(2)
    assert ranks.told[2][-1]["end"] == {"by": 2, "missing_positions": missing}


def test_in_a_tree_those_that_wait_for_the_missing_are_not_missing():
    ranks = Ranks(7, fan_out=2)  # 0 over 1 and 2, 1 over 3 and 4, 2 over 5 and 6
    for position in (0, 1, 2):
        ranks.send(position, "collect")
    for position in (3, 4, 6):
        ranks.send(position, "post", payload="x")
    ranks.send(1, "post", payload="x")
    ranks.give_up(0)
    assert ranks.told[0][-1]["end"]["missing_positions"] == [5]
    assert ranks.told[2][-1]["end"]["missing_positions"] == [5]


def test_beats_of_a_missing_rank_buy_patience_once_each():
    ranks = Ranks(3)
    ranks.send(0, "collect")
    ranks.send(2, "beat")
    ranks.give_up(0)
    assert ranks.told[0] == [{"id": 1, "wait": True}]
    ranks.give_up(1)  # another rank has not seen that beat
    assert ranks.told[1] == [{"id": 1, "wait": True}]
    ranks.give_up(0)
    assert ranks.told[0][-1]["end"]["missing_positions"] == [1, 2]


def test_patience_has_an_end_and_beats_of_those_present_buy_none():
    ranks = Ranks(3)
    ranks.send(2, "beat")
    ranks.give_up(0, is_patient=False)
    assert "end" in ranks.told[0][-1]
    ranks.send(1, "beat", 1)
    ranks.send(1, "post", 1, payload="x")
    ranks.give_up(0, 1)
    assert ranks.told[0][-1]["end"]["missing_positions"] == [0, 2]


def test_a_closed_connection_waits_no_more_but_its_payload_counts():
    ranks = Ranks(3)
    ranks.send(0, "collect")
    ranks.send(1, "post", payload="one")
    ranks.exchanges.forget(ranks.replies[1])
    ranks.send(2, "post", payload="two")
    assert ranks.told[0] == [{"id": 1, "payloads": ["one", "two"]}]
    ranks.send(0, "publish", end=MERGED)
    assert ranks.told[1] == []
    assert ranks.told[2] == [{"id": 1, "end": MERGED}]


def test_any_order_of_messages_ends_the_same():
    generator = random.Random(0)
    for _ in range(200):
        ranks = Ranks(7, fan_out=2)
        collecting, done = set(), set()
        while len(done) < 7:
            given = {position for position in collecting if ranks.told[position]}
            position = generator.choice(sorted(given | (set(range(7)) - collecting - done)))
            if position not in given and ranks.exchanges.children(position):
                collecting.add(position)
                ranks.send(position, "collect")
                continue
            collecting.discard(position)
            done.add(position)
            below = ranks.told[position][-1]["payloads"] if position in given else []
            total = 1 + sum(map(int, below))
            if position:
                ranks.send(position, "post", payload=str(total))
            else:
                ranks.send(position, "publish", end={"merged": total})
        assert [told[-1]["end"] for told in ranks.told.values()] == [{"merged": 7}] * 7
        assert len(ranks.exchanges) == 0


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


def test_payloads_of_any_bytes_travel_as_text():
    assert bytes_of(text_of(bytes(range(256)))) == bytes(range(256))


# ---- the sockets


@pytest.fixture
def hub():
    hub = Hub(3, 32)
    yield hub
    hub.close()


@pytest.fixture
def line(hub):
    """The line of rank 1."""
    line = SocketLine(hub.address(None), 1)
    yield line
    line.close()


def test_lines_reach_the_hub(hub, line):
    root, other = LocalLine(hub, 0), SocketLine(hub.address(None), 2)
    posts = [each.send("post", 0, payload=text) for each, text in ((line, "one"), (other, "two"))]
    reply = root.receive(root.send("collect", 0), 10)
    assert reply["payloads"] == ["one", "two"]
    root.send("publish", 0, end=MERGED)
    ends = [each.receive(post, 10)["end"] for each, post in zip((line, other), posts, strict=True)]
    assert ends == [MERGED] * 2
    other.close()


@pytest.mark.parametrize("kind", ["local", "socket"])
def test_a_reply_that_does_not_come_is_None_in_time(hub, kind):
    line = LocalLine(hub, 0) if kind == "local" else SocketLine(hub.address(None), 0)
    request = line.send("collect", 0)
    began = time.monotonic()
    assert line.receive(request, 0.1) is None
    assert 0.05 < time.monotonic() - began < 30
    assert line.receive(line.send("look", 0), 10)["end"] is None  # the line still works
    line.close()


@pytest.fixture
def ctrl_c():
    """Let SIGINT raise KeyboardInterrupt, which it does not where pytest was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", ["local", "socket"])
def test_ctrl_c_that_interrupts_no_system_call_ends_a_wait_soon_too(hub, kind, ctrl_c):
    line = LocalLine(hub, 0) if kind == "local" else SocketLine(hub.address(None), 0)
    request = line.send("collect", 0)
    began = time.monotonic()
    # As if the signal had come just before the system call: Python knows of it, the call goes on.
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        line.receive(request, 60)
    assert time.monotonic() - began < 30
    line.close()


@pytest.mark.parametrize(
    "first",
    [b"GET / HTTP/1.1\r\n\r\n", pack({"token": "guess"}), pack([]), b"\xff\xff\xff\xff", b"\0\0\0\2{]", b""],
    ids=["http", "wrong token", "no object", "too long", "no JSON", "nothing"],
)
def test_strangers_are_turned_away(hub, line, first):
    port = hub.address(None).port
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(
            first + pack({"op": "publish", "id": 1, "sequence": 0, "position": 1, "end": MERGED})
        )
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError) if first == pack({"token": "guess"}) else any_end():
            assert stranger.recv(100) == b""
    assert line.receive(line.send("look", 0), 10)["end"] is None


class any_end:
    """Closed, reset or silent: anything but an answer."""

    def __enter__(self):
        pass

    def __exit__(self, kind, error, traceback):
        return isinstance(error, OSError)


def test_a_hub_that_is_gone_is_told_apart_from_one_that_is_slow(hub, line):
    request = line.send("post", 0, payload="x")
    assert line.receive(request, 0.01) is None
    hub.close()
    with pytest.raises(HubLost):
        line.receive(request, 10)
    with pytest.raises(HubLost):
        line.send("look", 0)


def test_an_address_that_nobody_listens_at():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that nobody else comes to listen there
        port = taken.getsockname()[1]
        with pytest.raises(HubLost):
            SocketLine(Address(socket.gethostname(), "127.0.0.1", port, "token"), 1).send("look", 0)


def test_a_line_connects_anew_after_it_was_closed(line):
    line.send("post", 0, payload="x")
    line.close()
    assert line.receive(line.send("look", 0), 10)["end"] is None


def test_many_ranks_at_once():
    size = 24
    hub = Hub(size, 4)
    address, ends = hub.address(None), [None] * size

    def rank(position):
        line = LocalLine(hub, 0) if position == 0 else SocketLine(address, position)
        for sequence in range(20):
            total = 1
            if children(position, 4, size):
                total += sum(map(int, line.receive(line.send("collect", sequence), 20)["payloads"]))
            op = (
                {"op": "post", "payload": str(total)}
                if position
                else {"op": "publish", "end": {"merged": total}}
            )
            ends[position] = line.receive(line.send(op.pop("op"), sequence, **op), 20)["end"]
        line.close()

    threads = [threading.Thread(target=rank, args=(position,)) for position in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ends == [{"merged": size}] * size
    assert len(hub.exchanges) == 0
    hub.close()
