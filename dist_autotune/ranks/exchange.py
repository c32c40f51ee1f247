"""One rank's part in one exchange: through the hub of its group, or without it to an end that all can read.

Every rank sends its payload to the hub; the first rank of the group merges them and publishes the result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from . import watchdog
from .client import Client, HubLost, HubSilent, HungUp
from .hub import SEND_S
from .members import Members
from .messages import Message
from .store import PATIENCE_S, End, StoreLost

Merge: TypeAlias = Callable[..., bytes]  # any number of payloads -> one

SILENCE_S = 5.0  # a hub that does not answer for so long is stuck
LOOK_S = 1.0  # who waits asks the hub so often whether it is there; more often if the time-out is short
CONNECTIONS = 5  # how often in one exchange the hub may hang up
SIGNING_S = 1.0  # how long ranks that come to the board wait for others that are on their way
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1e-3, 20e-3  # between looks at the board


class Exchange:
    """One rank's part in one exchange."""

    def __init__(self, peers: Members, sequence: int, timeout_s: float, what: str) -> None:
        self._peers = peers
        self._sequence = sequence
        self._timeout_s = timeout_s
        self._what = what
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._look_s = min(LOOK_S, timeout_s / 8)
        self._heard_at = self._began  # when the hub last answered
        self._signed_at: float | None = None
        self._board_lost: StoreLost | None = None

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
        except StoreLost:
            return self._without_board()
        try:
            return self._on_board()
        except StoreLost:
            return self._without_board()

    # -- through the hub -----------------------------------------------------------------------------------

    def _through_hub(self, payload: bytes, merge: Merge) -> End:
        peers = self._peers
        line = peers.line
        assert line is not None
        line.patience_s = min(SEND_S, self._timeout_s)
        if peers.position > 0:
            return self._noted(self._ask(line, "post", payload=payload)["end"])
        reply = self._ask(line, "collect")
        if "end" in reply:
            return self._noted(reply["end"])
        end = self._end_while_away() or {"merged": merge(payload, *reply["payloads"])}
        return self._noted(self._ask(line, "publish", end=end)["end"])

    def _end_while_away(self) -> End | None:
        """Return the end that the others have given this exchange while the hub's process was stopped."""
        hub = self._peers.hub
        return self._peers.board.end(self._sequence) if hub is not None and hub.was_away() else None

    def _ask(self, line: Client, op: str, **fields: Any) -> Message:
        """Return the reply to a request, or when the time is up the end that the hub makes of it.

        A hub that hangs up, on a rank that was stopped for one, is asked again: to ask twice changes nothing.
        """
        for _ in range(CONNECTIONS):
            with contextlib.suppress(HungUp):
                return self._reply(line, line.send(op, self._sequence, **fields))
        raise HubLost("the hub closes every connection")

    def _reply(self, line: Client, request: int) -> Message:
        while True:
            reply = self._reply_in_time(line, request)
            if reply is not None:
                return reply
            latest = self._began + watchdog.PATIENCE * self._timeout_s
            request_end = line.send(
                "give up", self._sequence, end=self._missing([]), is_patient=time.monotonic() < latest
            )
            verdict = line.receive(request_end, self._heard_at + SILENCE_S - time.monotonic())
            if verdict is None:
                line.close()
                raise HubSilent
            if "end" in verdict:
                return verdict
            self._heard_at = time.monotonic()
            self._deadline = min(time.monotonic() + 3 * watchdog.HEARTBEAT_S, latest)

    def _reply_in_time(self, line: Client, request: int) -> Message | None:
        """Return the reply, or None when the time is up.

        Meanwhile a rank looks whether the hub still answers, so as to know by then; and signs on the board if
        it does not, so that the others know that this rank is there.
        """
        hub, look = self._peers.hub, None
        pauses = _pauses(self._look_s)
        while (left_s := self._deadline - time.monotonic()) > 0:
            awaits_others = hub is not None and not hub.has_met_all
            reply = line.receive(request, min(left_s, next(pauses) if awaits_others else self._look_s))
            if reply is not None or hub is not None:
                self._heard_at = time.monotonic()
            if reply is not None:
                return reply
            if hub is not None:
                if awaits_others and self._board_lost is None:
                    self._let_in()
            elif look is None:
                look = line.send("look", self._sequence)
            elif line.receive(look, 0.0) is not None:
                self._heard_at = time.monotonic()
                look = line.send("look", self._sequence)
            elif self._signed_at is None and self._board_lost is None:
                self._sign()
        return None

    # -- without it ---------------------------------------------------------------------------------------

    def _has_hub(self) -> bool:
        """Wait for the hub; return False when there is none, or this exchange has ended before."""
        peers, board = self._peers, self._peers.board
        if peers.line is not None:
            return True
        pauses = _pauses()
        while not peers.find_hub(self._patience_s):
            board.sign(self._sequence, self._patience_s)
            if time.monotonic() > self._deadline or board.end(self._sequence, self._patience_s) is not None:
                return False
            time.sleep(next(pauses))
        return board.end(self._sequence, self._patience_s) is None

    def _on_board(self) -> End:
        """Agree without the hub on how the exchange ends: whose failure, or who is missing."""
        peers, board = self._peers, self._peers.board
        host_rank = peers.ranks[0]
        if self._board_lost is not None:
            raise self._board_lost
        if self._signed_at is None:
            board.sign(self._sequence, self._patience_s)
            self._signed_at = time.monotonic()
        until = self._deadline
        if peers.line is not None:  # the others may still be finding out about the hub
            until = max(until, self._signed_at + SIGNING_S)
        pauses = _pauses()
        while (end := board.end(self._sequence, self._patience_s)) is None:
            unsigned = board.absent(self._sequence, self._patience_s)
            absent = [rank for rank in unsigned if rank != host_rank]
            is_clear = not absent and (peers.is_lost or time.monotonic() > self._deadline)
            if is_clear or time.monotonic() > until:
                missing = self._missing(sorted([host_rank, *absent]))
                board.publish(self._sequence, missing, self._patience_s)
            time.sleep(next(pauses))
        return end

    def _let_in(self) -> None:
        """Let in those on other hosts who ask; ranks of this one need no store that answers."""
        try:
            self._peers.let_in(min(self._patience_s, SILENCE_S))
        except StoreLost as error:
            self._board_lost = error

    def _sign(self) -> None:
        """Sign on the board while the hub may still answer."""
        try:
            self._peers.board.sign(self._sequence, self._patience_s)
            self._signed_at = time.monotonic()
        except StoreLost as error:
            self._board_lost = error

    @property
    def _patience_s(self) -> float:
        """Return how long one operation of the board may take: the time-out is for all of them."""
        return min(PATIENCE_S, max(self._deadline - time.monotonic(), SIGNING_S))

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
            with contextlib.suppress(StoreLost):
                self._peers.board.publish(self._sequence, end)
        return end


def _pauses(last_s: float = _LAST_PAUSE_S) -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, last_s)
