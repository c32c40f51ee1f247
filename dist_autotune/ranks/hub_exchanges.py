"""What a hub keeps of each exchange: the payloads that have come, who waits for what, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from .messages import Message, Reply
from .store import End


@dataclass
class _Request:
    """A request that is not answered yet: of the first rank for all payloads, or for the end."""

    position: int
    wants_payloads: bool
    id: int
    reply: Reply


@dataclass
class _Round:
    """One exchange: what has come, who waits, how it ended."""

    payloads: dict[int, bytes] = field(default_factory=dict)
    requests: dict[int, list[_Request]] = field(default_factory=dict)  # not answered yet, by position
    beats: int = 0  # so far, of all ranks
    latest_beat: dict[int, int] = field(default_factory=dict)  # position -> which beat of all was its last
    beats_at_look: dict[int, int] = field(default_factory=dict)  # by whoever asked for patience
    end: End | None = None
    told: set[int] = field(default_factory=set)  # positions that know the end


class Exchanges:
    """The state of a hub: knows messages and positions, neither sockets nor threads.

    A message costs the same however many ranks there are, but for the one that ends an exchange.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._rounds: dict[int, _Round] = {}
        # The latest that everybody has been told the end of. A rank that gave up, or was interrupted, while
        # it was told may still ask; no rank can ask about an earlier one.
        self._latest_over = -1
        self._latest_end: End = {}

    def __len__(self) -> int:
        return len(self._rounds)

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
                exchange.beats += 1
                exchange.latest_beat[position] = exchange.beats
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
                request = _Request(position, op == "collect", message["id"], reply)
                exchange.requests.setdefault(position, []).append(request)
        self._answer(exchange)
        if len(exchange.told) == self._size:
            assert exchange.end is not None
            self._latest_over, self._latest_end = number, exchange.end
            self._rounds = {later: kept for later, kept in self._rounds.items() if later > number}

    def forget(self, reply: Reply) -> None:
        """Drop the requests of a connection that has closed."""
        for exchange in self._rounds.values():
            for position, requests in list(exchange.requests.items()):
                self._keep(exchange, position, [each for each in requests if each.reply is not reply])

    def _answer(self, exchange: _Round) -> None:
        """Give the first rank all payloads when they are there, and at the end everybody the end."""
        if exchange.end is None:
            if 0 in exchange.requests and self._has_all(exchange):
                self._hand_over(exchange, exchange.requests[0])
            return
        requests, exchange.requests = exchange.requests, {}
        # The hub's own rank comes last: when it hears of the end it may end its process, and this thread.
        for waiting in sorted(requests, reverse=True):
            exchange.told.add(waiting)
            for request in requests[waiting]:
                request.reply({"id": request.id, "end": exchange.end})

    def _hand_over(self, exchange: _Round, requests: list[_Request]) -> None:
        self._keep(exchange, 0, [request for request in requests if not request.wants_payloads])
        payloads = [exchange.payloads[position] for position in range(1, self._size)]
        for request in requests:
            if request.wants_payloads:
                request.reply({"id": request.id, "payloads": payloads})

    @staticmethod
    def _keep(exchange: _Round, position: int, requests: list[_Request]) -> None:
        if requests:
            exchange.requests[position] = requests
        else:
            exchange.requests.pop(position, None)

    def _has_all(self, exchange: _Round) -> bool:
        return len(exchange.payloads) == self._size - 1

    def _give_up(self, exchange: _Round, message: Message, reply: Reply) -> None:
        """End the exchange for everybody, unless a missing rank has sent a heartbeat since the last look."""
        position = int(message["position"])
        seen = exchange.beats_at_look.get(position, 0)
        exchange.beats_at_look[position] = exchange.beats
        is_alive = any(
            beat > seen and self._is_missing(exchange, beater)
            for beater, beat in exchange.latest_beat.items()
        )
        if exchange.end is None and is_alive and message["is_patient"]:
            reply({"id": message["id"], "wait": True})
            return
        if exchange.end is None:
            missing = [each for each in range(self._size) if self._is_missing(exchange, each)]
            exchange.end = {**message["end"], "missing_positions": missing}
        exchange.told.add(position)
        reply({"id": message["id"], "end": exchange.end})

    def _is_missing(self, exchange: _Round, position: int) -> bool:
        """Return whether the exchange waits for it: it has neither come, nor waits for others in turn."""
        is_collecting = position in exchange.requests and not self._has_all(exchange)
        return position not in exchange.payloads and not is_collecting
