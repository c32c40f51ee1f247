"""The hub: a thread of a group's first rank, through which the ranks of the group exchange messages.

torch's TCPStore is not used for this: its operations can be neither interrupted nor bounded in time,
waiting on it means polling, and it asks the name server about everybody who connects (which takes 5 s
where the answer is lost; torch 2.13). What the hub loses with its process is on the `board`.

A message is a JSON object after its length in four bytes. A request carries an `id`, its reply the same.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .board import Address, End

Message: TypeAlias = dict[str, Any]
Reply: TypeAlias = Callable[[Message], None]

STRANGERS_BYTES = 1024  # the longest message of a connection that has not shown the token
TICK_S = 0.5
SEND_S = 5.0  # a rank that takes nothing in for so long is dropped
_LENGTH = struct.Struct("!I")


def pack(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def unpack(buffer: bytearray) -> Iterator[Message]:
    """Take every whole message out of `buffer`."""
    while len(buffer) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        body = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ValueError("a message is an object")
        yield message


def text_of(payload: bytes) -> str:
    return base64.b64encode(payload).decode()


def bytes_of(text: str) -> bytes:
    return base64.b64decode(text)


@dataclass
class _Request:
    """A request that is not answered yet: of a parent for its children's payloads, or for the end."""

    position: int
    wants_payloads: bool
    id: int
    reply: Reply


@dataclass
class _Round:
    """One exchange: what has come, who waits, how it ended."""

    payloads: dict[int, str] = field(default_factory=dict)
    requests: list[_Request] = field(default_factory=list)
    beats: Counter[int] = field(default_factory=Counter)
    beats_seen: dict[int, Counter[int]] = field(default_factory=dict)  # by whom
    end: End | None = None
    told: set[int] = field(default_factory=set)  # positions that know the end


class Exchanges:
    """The state of a hub: knows messages and positions in the tree, neither sockets nor threads."""

    def __init__(self, size: int, fan_out: int) -> None:
        self._size = size
        self._fan_out = fan_out
        self._rounds: dict[int, _Round] = {}
        # The latest that everybody has been told the end of. A rank that gave up, or was interrupted, while
        # it was told may still ask; no rank can ask about an earlier one.
        self._latest_over = -1
        self._latest_end: End = {}

    def __len__(self) -> int:
        return len(self._rounds)

    def children(self, position: int) -> range:
        return children(position, self._fan_out, self._size)

    def handle(self, message: Message, reply: Reply) -> None:
        """Take in a message; `reply` is called now or later, or never for one that asks nothing."""
        number, position = int(message["sequence"]), int(message["position"])
        if number not in self._rounds and number <= self._latest_over:
            if "id" in message:
                reply({"id": message["id"], "end": self._latest_end})
            return
        exchange = self._rounds.setdefault(number, _Round())
        match message["op"]:
            case "beat":
                exchange.beats[position] += 1
            case "look":
                reply({"id": message["id"], "end": exchange.end})
            case "give up":
                self._give_up(exchange, message, reply)
            case "publish":
                exchange.end = exchange.end or message["end"]
                reply({"id": message["id"], "end": exchange.end})
                exchange.told.add(position)
            case "collect" | "post" as op:
                if op == "post":
                    exchange.payloads[position] = message["payload"]
                exchange.requests.append(_Request(position, op == "collect", message["id"], reply))
        self._answer(exchange)
        if len(exchange.told) == self._size:
            assert exchange.end is not None
            self._latest_over, self._latest_end = number, exchange.end
            self._rounds = {later: kept for later, kept in self._rounds.items() if later > number}

    def forget(self, reply: Reply) -> None:
        """Drop the requests of a connection that has closed."""
        for exchange in self._rounds.values():
            exchange.requests = [request for request in exchange.requests if request.reply is not reply]

    def _answer(self, exchange: _Round) -> None:
        for request in sorted(exchange.requests, key=lambda request: -request.position):
            # The hub's own rank comes last: when it hears of the end it may end its process, and this thread.
            answer: Message = {"id": request.id}
            if exchange.end is not None:
                answer["end"] = exchange.end
                exchange.told.add(request.position)
            elif request.wants_payloads and self._has_all(exchange, request.position):
                answer["payloads"] = [exchange.payloads[child] for child in self.children(request.position)]
            else:
                continue
            exchange.requests.remove(request)
            request.reply(answer)

    def _has_all(self, exchange: _Round, position: int) -> bool:
        return exchange.payloads.keys() >= set(self.children(position))

    def _give_up(self, exchange: _Round, message: Message, reply: Reply) -> None:
        """End the exchange for everybody, unless a missing rank has sent a heartbeat since the last look."""
        missing = self._missing(exchange)
        seen = exchange.beats_seen.setdefault(int(message["position"]), Counter())
        moved = any(exchange.beats[position] > seen[position] for position in missing)
        exchange.beats_seen[int(message["position"])] = exchange.beats.copy()
        if exchange.end is None and moved and message["is_patient"]:
            reply({"id": message["id"], "wait": True})
            return
        exchange.end = exchange.end or {**message["end"], "missing_positions": missing}
        exchange.told.add(int(message["position"]))
        reply({"id": message["id"], "end": exchange.end})

    def _missing(self, exchange: _Round) -> list[int]:
        """Return whom the exchange waits for: who has neither come, nor waits for others in turn."""
        waiting = {request.position for request in exchange.requests}
        return [
            position
            for position in range(self._size)
            if position not in exchange.payloads
            and (position not in waiting or self._has_all(exchange, position))
        ]


def children(position: int, fan_out: int, size: int) -> range:
    """Return the positions below `position` in the tree."""
    first = position * fan_out + 1
    return range(min(first, size), min(first + fan_out, size))


class Hub:
    """Serves `Exchanges` to the other ranks on a thread, and to its own rank by `handle`."""

    def __init__(self, size: int, fan_out: int) -> None:
        self.exchanges = Exchanges(size, fan_out)
        self._token = os.urandom(16).hex()
        self._lock = threading.Lock()
        self._is_closed = False
        self._was_away = False
        self._ticked_at = time.monotonic()
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=dual)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="dist_autotune hub", daemon=True).start()

    def address(self, peer: tuple[str, int] | None) -> Address:
        """Return where this hub is, as seen from hosts that know `peer`."""
        return Address(socket.gethostname(), _ip_towards(peer), self._server.getsockname()[1], self._token)

    def handle(self, message: Message, reply: Reply) -> None:
        with self._lock:
            self.exchanges.handle(message, reply)

    def close(self) -> None:
        self._is_closed = True

    def was_away(self) -> bool:
        """Return, once, whether this process has been stopped: peers may have gone on without it."""
        away, self._was_away = self._was_away, False
        return away or time.monotonic() - self._ticked_at > 2 * TICK_S

    def _serve(self) -> None:
        while not self._is_closed:
            events = self._selector.select(timeout=TICK_S)
            now = time.monotonic()
            self._was_away |= now - self._ticked_at > 2 * TICK_S
            self._ticked_at = now
            for key, _ in events:
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # only sockets are registered
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connection = _Connection(self._server.accept()[0])
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            for message in connection.receive():
                if connection.is_known:
                    self.handle(message, connection.reply)
                else:
                    connection.is_known = hmac.compare_digest(str(message.get("token")), self._token)
        except (OSError, ValueError, KeyError, TypeError):  # closed, or no rank of ours
            self._selector.unregister(connection.socket)
            connection.socket.close()
            with self._lock:
                self.exchanges.forget(connection.reply)


class _Connection:
    """A rank at the other end, as the hub sees it."""

    def __init__(self, socket_: socket.socket) -> None:
        self.socket = socket_
        self.socket.settimeout(SEND_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_known = False
        self.reply: Reply = self._send  # one object, by which requests of this connection are told
        self._buffer = bytearray()

    def receive(self) -> Iterator[Message]:
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionResetError
        self._buffer += data
        if not self.is_known and int.from_bytes(self._buffer[: _LENGTH.size]) > STRANGERS_BYTES:
            raise ValueError("no rank of ours")
        return unpack(self._buffer)

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the reading side finds out
            self.socket.sendall(pack(message))


def _ip_towards(peer: tuple[str, int] | None) -> str:
    """Return the address of this host on the way to `peer`; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(peer or (socket.gethostname(), 9))
        return str(probe.getsockname()[0])
    return ""
