"""The hub: a thread of a group's first rank, through which the ranks of the group exchange messages.

torch's TCPStore would have to be polled, can be neither interrupted nor bounded in time, and asks the name
server about everybody who connects (5 s where the answer is lost; torch 2.13).

It listens on the loopback device, and on one more interface once a rank of another host asks for it.
Whoever connects shows a token of fixed size before anything is parsed, and is shown one in return.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

from .ballots import BallotBox
from .wire import TOKEN_BYTES, End, HubMessage, Reply, pack, unpack

TICK_S = 0.5
SEND_S = 5.0  # the longest wait for the other side to take a message in
SEND_POLL_S = 0.01  # between two looks whether it has
STRANGERS = 256  # connections at once that have not shown the token; the oldest makes room for the next
STRANGERS_S = 10.0  # how long one may take to show it
RETURN_S = 2.0  # in which a rank that has closed its connections comes back, unless its process has ended
AWAY_S = 3.0  # after a hub that was stopped for so long, living ranks too have closed: `exchange.SILENCE_S`
QUEUE = 1024  # connections that wait to be accepted

Merging: TypeAlias = Callable[[list[bytes]], End]  # all payloads -> the end that they make

logger = logging.getLogger("dist_autotune")


@dataclass(frozen=True)
class Address:
    """Where a hub listens. A client shows the first half of `token` and is answered the second."""

    host: str  # as `this_host` names it
    port: int  # for ranks on the same host
    outside: tuple[str, int] | None  # for ranks on other hosts, once one has asked
    token: str  # twice `TOKEN_BYTES`

    def endpoint(self, from_host: str) -> tuple[str, int] | None:
        """Return where a rank on a host connects to; None: it has to ask."""
        return ("127.0.0.1", self.port) if from_host == self.host else self.outside


@functools.cache
def this_host() -> str:
    """Return a text that is equal for processes that share a loopback device."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"  # containers have networks of their own
    except OSError:
        return socket.gethostname()


def interface_towards(host: str) -> str:
    """Return the address of this host's interface on the way to another; empty: not known. Sends nothing."""
    if host:
        with contextlib.suppress(OSError):
            for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
    return ""


@dataclass
class _ExchangeRound:
    """One exchange: payloads, waiting ranks, and its end."""

    payloads: dict[int, bytes] = field(default_factory=dict)
    first: tuple[float, int, str] | None = None  # when the first payload came, of which rank, for what
    waiting: dict[int, Callable[[End], None]] = field(default_factory=dict)  # by rank: its latest request
    beats: int = 0  # so far, of all ranks
    latest_beat: dict[int, int] = field(default_factory=dict)  # rank -> which beat of all was its last
    beats_at_look: dict[int, int] = field(default_factory=dict)  # by the rank that asked for patience
    end: End | None = None
    informed: set[int] = field(default_factory=set)  # ranks that know the end

    def has_heartbeat_for(self, rank: int) -> bool:
        """Return whether a missing rank has sent a heartbeat since `rank` asked last."""
        seen = self.beats_at_look.get(rank, 0)
        self.beats_at_look[rank] = self.beats
        return any(beat > seen and sender not in self.payloads for sender, beat in self.latest_beat.items())


class HubState:
    """The state of a hub, without sockets. Only the end of an exchange costs more with more ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.merges: dict[int, Merging] = {}  # by exchange; the first rank adds each before it posts
        self.lost: set[int] = set()  # ranks whose processes have ended
        self._ranks = ranks  # the hub's own first
        self._rounds: dict[int, _ExchangeRound] = {}
        # The latest exchange whose end all ranks know. A rank that gave up, or was interrupted, while it was
        # informed may still ask; no rank can ask about an earlier one.
        self._latest_over = -1
        self._latest_end: End = {}

    def __len__(self) -> int:
        return len(self._rounds)

    def handle(self, message: HubMessage, reply: Reply) -> None:
        """Take in a message; `reply` is called now or later, or never for one that asks nothing."""
        number, rank = int(message["sequence"]), int(message["rank"])
        if number not in self._rounds and number <= self._latest_over:
            if "id" in message:
                reply({"id": message["id"], "end": self._latest_end})
            return
        exchange = self._rounds.setdefault(number, _ExchangeRound())
        match message["op"]:
            case "beat":
                exchange.beats += 1
                exchange.latest_beat[rank] = exchange.beats
                return
            case "look":
                reply({"id": message["id"], "end": exchange.end})
                return
            case "give up":
                if exchange.end is None and message["is_patient"] and exchange.has_heartbeat_for(rank):
                    reply({"id": message["id"], "wait": True})
                    return
                missing = [each for each in self._ranks if each not in exchange.payloads]
                exchange.end = exchange.end or {**message["end"], "missing": missing}
            case "publish":
                exchange.end = exchange.end or message["end"]
            case "post":
                exchange.payloads[rank] = message["payload"]
                exchange.first = exchange.first or (time.monotonic(), rank, message.get("what", ""))
        exchange.waiting[rank] = lambda end: reply({"id": message["id"], "end": end})
        self._advance(number, exchange)

    def lose(self, ranks: set[int]) -> None:
        """End the exchanges that others have come to and these ranks have not: their processes have ended."""
        self.lost |= ranks
        for number, exchange in list(self._rounds.items()):
            self._advance(number, exchange)

    def _advance(self, number: int, exchange: _ExchangeRound) -> None:
        """End an exchange if no further rank will come to it, and answer the ranks that wait."""
        if exchange.end is None and len(exchange.payloads) == len(self._ranks):
            exchange.end = self.merges[number]([exchange.payloads[each] for each in self._ranks])
        elif exchange.end is None and exchange.first and (lost := self.lost - exchange.payloads.keys()):
            since, by, what = exchange.first
            waited_s = round(time.monotonic() - since, 1)
            exchange.end = {"missing": sorted(lost), "by": by, "waited_s": waited_s, "what": what}
        if exchange.end is not None:
            self._answer(exchange, exchange.end)
        if len(exchange.informed) == len(self._ranks):
            assert exchange.end is not None
            self._latest_over, self._latest_end = number, exchange.end
            for over in [each for each in list(self.merges) if each <= number]:
                del self.merges[over]
            self._rounds = {later: kept for later, kept in self._rounds.items() if later > number}

    def _answer(self, exchange: _ExchangeRound, end: End) -> None:
        """Answer all waiting ranks, the hub's own rank last: it may end its process, and so this thread."""
        waiting, exchange.waiting = exchange.waiting, {}
        for rank in sorted(waiting, key=lambda each: each == self._ranks[0]):
            exchange.informed.add(rank)
            waiting[rank](end)


class Hub:
    """Serves a `HubState` to the ranks of a group. Its attributes are those of its thread."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.rank = ranks[0]
        self.state, self.ballots = HubState(ranks), BallotBox(ranks)
        self.token, self.answer = (os.urandom(TOKEN_BYTES // 2).hex().encode() for _ in range(2))
        self.loop = asyncio.SelectorEventLoop()
        self.connections: set[_Connection] = set()
        self.strangers: dict[_Connection, None] = {}  # have not shown the token; the oldest first
        self.absent = set(ranks)  # have not sent anything yet
        self.closed: set[int] = set()  # have closed all their connections, which living ranks do not
        self._was_away = False
        self._ticked_at, self._woke_at, self._away_s = time.monotonic(), 0.0, 0.0
        self._servers: list[asyncio.Server] = []
        self._outside: tuple[str, int] | None = None
        self.loop.call_soon(self._tick)
        threading.Thread(target=self._serve, name="dist_autotune hub", daemon=True).start()
        self._port = self._listen("127.0.0.1")

    def address(self) -> Address:
        return Address(this_host(), self._port, self._outside, (self.token + self.answer).decode())

    def open_towards(self, host: str) -> None:
        """Listen on the interface towards another host too; on all interfaces if it is unknown."""
        interface = interface_towards(host)
        self._outside = interface or socket.gethostname(), self._listen(interface)

    @property
    def awaits_hosts(self) -> bool:
        """Return whether a rank that has not come may ask for an interface."""
        return self._outside is None and bool(self.absent)

    def handle(self, message: HubMessage, reply: Reply) -> None:
        self.absent.discard(message["rank"])
        self.closed.discard(message["rank"])
        self.state.lost.discard(message["rank"])
        if "ballot" in message:
            self.ballots.handle(message, reply)
            return
        self.state.handle(message, reply)

    def send_last(self, connection: _Connection, message: HubMessage, until: float) -> None:
        """Send this rank its result once all others have taken theirs in: it may end its process."""
        is_unsent = any(other.transport.get_write_buffer_size() for other in self.connections)
        if is_unsent and time.monotonic() < until:
            self.loop.call_later(SEND_POLL_S, self.send_last, connection, message, until)
        else:
            connection.send(message)

    def rank_closed(self, rank: int) -> None:
        """Expect a rank back that has closed all its connections."""
        now = time.monotonic()
        away_s = max(now - self._ticked_at, self._away_s if now - self._woke_at < TICK_S else 0.0)
        if away_s < AWAY_S:
            self.closed.add(rank)
            self.loop.call_later(RETURN_S, self._give_up, rank)

    def _give_up(self, rank: int) -> None:
        """Give up a rank that has not come back, if this process was awake long enough to hear of it."""
        if rank in self.closed:
            left_s = self._woke_at + RETURN_S - time.monotonic()
            if left_s > 0:
                self.loop.call_later(left_s, self._give_up, rank)
            else:
                self.state.lose(self.closed)

    def was_away(self) -> bool:
        """Return, once, whether this process has been stopped: peers may have gone on without it."""
        away, self._was_away = self._was_away, False
        return away or time.monotonic() - self._ticked_at > 2 * TICK_S

    def close(self) -> None:
        """End the thread. Takes no lock: it may be called by the garbage collector, on any thread."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _listen(self, interface: str) -> int:
        """Listen on an interface, on all if it is "", and return the port."""
        every = not interface and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if every or ":" in interface else socket.AF_INET
        listener = socket.create_server((interface, 0), family=family, dualstack_ipv6=every)
        # One is accepted at a time: a rank that has come shows its token before strangers take its place.
        opening = self.loop.create_server(lambda: _Connection(self), sock=listener, backlog=1)
        self._servers.append(asyncio.run_coroutine_threadsafe(opening, self.loop).result(SEND_S))
        listener.listen(QUEUE)
        return int(listener.getsockname()[1])

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked_at > 2 * TICK_S:
            self._was_away, self._woke_at, self._away_s = True, now, now - self._ticked_at
        self._ticked_at = now
        self.loop.call_later(TICK_S, self._tick)

    def _serve(self) -> None:
        self.loop.run_forever()
        for server in self._servers:
            server.close()
        for connection in self.connections:
            connection.transport.abort()
        self.loop.run_until_complete(asyncio.sleep(0))  # they close their sockets
        self.loop.close()


class _Connection(asyncio.Protocol):
    """The hub's end of a rank's connection."""

    transport: asyncio.Transport

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.rank: int | None = None  # None: it has not sent anything yet
        self._is_shut_out = False  # by the hub
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        hub, self.transport = self._hub, cast("asyncio.Transport", transport)
        hub.connections.add(self)
        if len(hub.strangers) >= STRANGERS:
            oldest = next(iter(hub.strangers))
            del hub.strangers[oldest]
            oldest.transport.abort()
        hub.strangers[self] = None
        self._timer = hub.loop.call_later(STRANGERS_S, self.transport.abort)  # unless it shows the token

    def data_received(self, data: bytes) -> None:
        """Handle received bytes; close the connection after any error."""
        self._received += data
        is_stranger = self in self._hub.strangers
        try:
            if is_stranger:
                if len(self._received) < TOKEN_BYTES:
                    return
                if not hmac.compare_digest(self._received[:TOKEN_BYTES], self._hub.token):
                    self.transport.abort()
                    return
                self._timer.cancel()
                del self._received[:TOKEN_BYTES], self._hub.strangers[self]
                self.transport.write(self._hub.answer)
            for message in unpack(self._received):
                self.rank = message["rank"]
                self._hub.handle(message, self._reply)
        except Exception:
            logger.warning("The hub of this group has closed a connection.", exc_info=True)
            self._is_shut_out = True
            self.transport.abort()

    def send(self, message: HubMessage) -> None:
        self.transport.write(pack(message))

    def _reply(self, message: HubMessage) -> None:
        if self.rank == self._hub.rank and "merged" in (message.get("end") or {}):
            self._hub.loop.call_soon(self._hub.send_last, self, message, time.monotonic() + SEND_S)
        else:
            self.send(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._hub.connections.discard(self)
        self._hub.strangers.pop(self, None)
        is_left = all(other.rank != self.rank for other in self._hub.connections)
        if self.rank is not None and is_left and not self._is_shut_out:
            self._hub.rank_closed(self.rank)
