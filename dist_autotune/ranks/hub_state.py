"""What a hub keeps of each exchange: the payloads that have come, who waits for what, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .messages import End, Message, Reply

Merging: TypeAlias = Callable[[list[bytes]], End]  # all payloads -> the end that they make


@dataclass(frozen=True)
class _Request:
    """A request that is not answered yet."""

    rank: int
    id: int
    reply: Reply


@dataclass
class _Round:
    """One exchange: what has come, who waits, how it ended."""

    payloads: dict[int, bytes] = field(default_factory=dict)
    waiting: list[_Request] = field(default_factory=list)  # for the end
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
    """The state of a hub: knows messages and ranks, neither sockets nor threads.

    A message costs the same however many ranks there are, but for the one that ends an exchange.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.merges: dict[int, Merging] = {}  # by exchange; the first rank adds each before it posts
        self._ranks = ranks  # the hub's own first
        self._rounds: dict[int, _Round] = {}
        # The latest exchange whose end all ranks know. A rank that gave up, or was interrupted, while it was
        # informed may still ask; no rank can ask about an earlier one.
        self._latest_over = -1
        self._latest_end: End = {}

    def __len__(self) -> int:
        return len(self._rounds)

    def handle(self, message: Message, reply: Reply) -> None:
        """Take in a message; `reply` is called now or later, or never for one that asks nothing."""
        number, rank = int(message["sequence"]), int(message["rank"])
        if number not in self._rounds and number <= self._latest_over:
            if "id" in message:
                reply({"id": message["id"], "end": self._latest_end})
            return
        exchange = self._rounds.setdefault(number, _Round())
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
        exchange.waiting.append(_Request(rank, message["id"], reply))
        if exchange.end is None and len(exchange.payloads) == len(self._ranks):
            exchange.end = self.merges[number]([exchange.payloads[each] for each in self._ranks])
        if exchange.end is not None:
            self._answer(exchange, exchange.end)
        if len(exchange.informed) == len(self._ranks):
            assert exchange.end is not None
            self._latest_over, self._latest_end = number, exchange.end
            for over in [each for each in list(self.merges) if each <= number]:
                del self.merges[over]
            self._rounds = {later: kept for later, kept in self._rounds.items() if later > number}

    def forget(self, reply: Reply) -> None:
        """Drop the requests of a connection that has closed."""
        for exchange in self._rounds.values():
            exchange.waiting = [each for each in exchange.waiting if each.reply is not reply]

    def _answer(self, exchange: _Round, end: End) -> None:
        """Send all that wait the end; the hub's own rank last, as it may end its process, and this thread."""
        requests, exchange.waiting = exchange.waiting, []
        for request in sorted(requests, key=lambda each: each.rank == self._ranks[0]):
            exchange.informed.add(request.rank)
            request.reply({"id": request.id, "end": end})
