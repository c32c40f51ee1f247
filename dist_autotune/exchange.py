"""One rank's part in one exchange: through the hub of its group, or without it to an end that all can read.

Ranks form a tree. A rank sends its payload to its parent by way of the hub, parents merge, the root publishes
the result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from . import attendant
from .board import BoardLost, End
from .hub_messages import Message, bytes_of, text_of
from .line import HubLost, HubSilent, Line
from .peers import Peers

Merge: TypeAlias = Callable[..., bytes]  # any number of payloads -> one

SILENCE_S = 5.0  # a hub that does not answer for so long, or for the time-out if that is longer, is stuck
SIGNING_S = 1.0  # how long ranks that come to the board wait for others that are on their way
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1e-3, 20e-3  # between looks at the board


class Exchange:
    """One rank's part in one exchange."""

    def __init__(self, peers: Peers, sequence: int, timeout_s: float, what: str) -> None:
        self._peers = peers
        self._sequence = sequence
        self._timeout_s = timeout_s
        self._what = what
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s

    def take_part(self, payload: bytes, merge: Merge) -> End:
        """Return how the exchange ended, the same on all ranks."""
        peers = self._peers
        try:
            if not peers.is_lost and self._has_hub():
                return self._through_hub(payload, merge)
        except HubLost:
            peers.is_lost = True
        except HubSilent:
            pass
        except BoardLost:
            return self._without_board()
        try:
            return self._on_board()
        except BoardLost:
            return self._without_board()

    # -- through the hub -----------------------------------------------------------------------------------

    def _through_hub(self, payload: bytes, merge: Merge) -> End:
        peers, sequence = self._peers, self._sequence
        line = peers.line
        assert line is not None
        if peers.children:
            reply = self._reply(line, line.send("collect", sequence))
            if "end" in reply:
                return self._noted(reply["end"])
            payload = merge(payload, *map(bytes_of, reply["payloads"]))
        if peers.position == 0:
            end = self._end_while_away() or {"merged": text_of(payload)}
            request = line.send("publish", sequence, end=end)
        else:
            request = line.send("post", sequence, payload=text_of(payload))
        return self._noted(self._reply(line, request)["end"])

    def _end_while_away(self) -> End | None:
        """Return the end that the others have given this exchange while the hub's process was stopped."""
        hub = self._peers.hub
        return self._peers.board.end(self._sequence) if hub is not None and hub.was_away() else None

    def _reply(self, line: Line, request: int) -> Message:
        """Return the reply to a request, or when the time is up the end that the hub makes of it."""
        while True:
            reply = line.receive(request, self._deadline - time.monotonic())
            if reply is not None:
                return reply
            latest = self._began + attendant.PATIENCE * self._timeout_s
            verdict = line.receive(
                line.send(
                    "give up",
                    self._sequence,
                    end=self._missing([]),
                    is_patient=time.monotonic() < latest,
                ),
                max(SILENCE_S, self._timeout_s),
            )
            if verdict is None:
                line.close()
                raise HubSilent
            if "end" in verdict:
                return verdict
            self._deadline = min(time.monotonic() + 3 * attendant.HEARTBEAT_S, latest)

    # -- without it ---------------------------------------------------------------------------------------

    def _has_hub(self) -> bool:
        """Wait for the hub; return False when there is none, or this exchange has ended before."""
        peers, board = self._peers, self._peers.board
        if peers.line is not None:
            return True
        pauses = _pauses()
        while not peers.find_hub():
            board.sign(self._sequence)
            if time.monotonic() > self._deadline or board.end(self._sequence) is not None:
                return False
            time.sleep(next(pauses))
        return board.end(self._sequence) is None

    def _on_board(self) -> End:
        """Agree without the hub on how the exchange ends: whose failure, or who is missing."""
        peers, board = self._peers, self._peers.board
        host_rank = peers.ranks[0]
        board.sign(self._sequence)
        until = self._deadline
        if peers.line is not None:  # the others may still be finding out about the hub
            until = max(until, time.monotonic() + SIGNING_S)
        pauses = _pauses()
        while (end := board.end(self._sequence)) is None:
            absent = [rank for rank in board.absent(self._sequence) if rank != host_rank]
            is_clear = not absent and (peers.is_lost or time.monotonic() > self._deadline)
            if is_clear or time.monotonic() > until:
                board.publish(self._sequence, self._missing(sorted([host_rank, *absent])))
            time.sleep(next(pauses))
        return end

    def _without_board(self) -> End:
        """Return the end for a rank that reaches nobody."""
        return {
            **self._missing([0 if self._peers.line is None else self._peers.ranks[0]]),
            "is_lost": True,
        }

    def _missing(self, ranks: list[int]) -> End:
        waited_s = round(time.monotonic() - self._began, 1)
        return {"missing": ranks, "by": self._peers.rank, "waited_s": waited_s, "what": self._what}

    def _noted(self, end: End) -> End:
        """Return `end` with ranks for positions; put a bad one where it outlives the hub."""
        if "missing_positions" in end:
            ranks = [self._peers.ranks[position] for position in end["missing_positions"]]
            end = {**end, "missing": ranks}
        if "merged" not in end and self._peers.hub is not None:
            with contextlib.suppress(BoardLost):
                self._peers.board.publish(self._sequence, end)
        return end


def _pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
