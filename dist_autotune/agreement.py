"""The exchange: every rank of a group sends a payload, all get the merged one, or the same error.

Ranks form a tree. A rank sends its payload to its parent by way of the group's hub, parents merge, the
root publishes the result. The hub keeps one end for each exchange, so all ranks see the same: the merged
payload, the failure of a rank, or the ranks that were missing when somebody's time was up. No collective
of the user's is touched, and no wait is without a limit.

World size 1 is `Alone`: the same interface without a hub.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import torch.distributed as dist

from . import settings
from .attendant import Attendant
from .board import Board, BoardLost, End
from .errors import AgreementTimeout, NoValidConfig, PeerFailed, PeerHasNoConfig, TuningError, name_ranks
from .hub import Hub, Message, bytes_of, children, text_of
from .line import HubLost, HubSilent, Line, LocalLine, SocketLine

Merge: TypeAlias = Callable[..., bytes]  # any number of payloads -> one

FAN_OUT = 32  # children of a rank in the tree: flat up to 33 ranks, three levels for 1024
HEARTBEAT_S = 1.0
PATIENCE = 10  # heartbeats extend the deadline at most this many times
SILENCE_S = 5.0  # a hub that does not answer for so long, or for the time-out if that is longer, is stuck
SIGNING_S = 1.0  # how long ranks that come to the board wait for others that are on their way
FAREWELL_S = 0.5  # how long a failing rank waits for the hub to take in why
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1e-3, 20e-3  # between looks at the board


class Agreement(Protocol):
    """What a session needs of its ranks."""

    @property
    def rank(self) -> int:
        """Return the global rank, for names of logs and in messages."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks of the group."""

    def exchange(self, payload: bytes, merge: Merge, timeout_s: float, what: str) -> bytes:
        """Send `payload`, return all payloads merged; raises AgreementTimeout or PeerFailed."""

    def fail(self, error: BaseException) -> None:
        """Tell the peers that this rank does not reach the exchange it is due at."""

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """Keep peers from giving this rank up while the block runs."""

    def running(
        self, what: str, timeout_s: float, on_stuck: str, tell: Callable[[str], None]
    ) -> contextlib.AbstractContextManager[None]:
        """While the block runs the user's code: `tell` if the peers have gone on without this rank."""


class Alone:
    """One rank: its payload is the merged one."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.ranks: tuple[int, ...] = (rank,)

    def exchange(self, payload: bytes, merge: Merge, timeout_s: float, what: str) -> bytes:
        return payload

    def fail(self, error: BaseException) -> None:
        """Nobody waits."""

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def running(
        self, what: str, timeout_s: float, on_stuck: str, tell: Callable[[str], None]
    ) -> Iterator[None]:
        yield


class GroupAgreement:
    """The ranks of one process group. Create it on all ranks of the group."""

    def __init__(self, group: Any) -> None:
        # Not `self.group = group`: a gloo group that outlives destroy_process_group() can abort the
        # process at exit (its thread then finds no interpreter; torch 2.13).
        self.rank = dist.get_rank()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.pid = os.getpid()
        self.position = self.ranks.index(self.rank)
        self.board = Board(group, self.ranks, self.rank)
        self.line: Line | None = None  # to the hub; None: not found yet
        self.hub: Hub | None = None  # on the first rank
        self.is_lost = False  # the hub has gone
        self._sequence = 0
        self._attendant: Attendant | None = None

    def exchange(self, payload: bytes, merge: Merge, timeout_s: float, what: str) -> bytes:
        sequence = self._next_sequence()
        try:
            end = _Exchange(self, sequence, timeout_s, what).take_part(payload, merge)
        except BaseException as error:  # Ctrl-C while waiting: the peers must learn of it
            self._fail_at(sequence, error)
            raise
        if "merged" in end:
            return bytes_of(end["merged"])
        raise self._as_error(end)

    def fail(self, error: BaseException) -> None:
        self._fail_at(self._next_sequence(), error)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        if self.line is None:
            yield
            return
        with contextlib.suppress(HubLost, HubSilent):
            self.line.tell("beat", self._sequence)
        with self._own_attendant().beating(self._sequence):
            yield

    @contextlib.contextmanager
    def running(
        self, what: str, timeout_s: float, on_stuck: str, tell: Callable[[str], None]
    ) -> Iterator[None]:
        if self.line is None:
            yield
            return
        with self._own_attendant().watching(self._sequence, what, timeout_s, on_stuck, tell):
            yield

    def find_hub(self) -> bool:
        """Connect to the hub if it is there by now, or start it; return whether there is one."""
        if self.line is not None:
            return True
        if self.position == 0:
            self.hub = Hub(len(self.ranks), FAN_OUT)
            self.board.put_address(self.hub.address(self.board.host))
        self.line = self._new_line()
        return self.line is not None

    def close(self) -> None:
        """Let go of hub and store: the process group has ended."""
        self.is_lost = True
        for closes in (self.line, self.hub, self.board):
            if closes is not None:
                closes.close()

    def _new_line(self) -> Line | None:
        if self.hub is not None:
            return LocalLine(self.hub, self.position)
        address = self.board.address()
        return None if address is None else SocketLine(address, self.position)

    def _own_attendant(self) -> Attendant:
        if self._attendant is None:
            self._attendant = Attendant(self.rank, HEARTBEAT_S, self._new_line)
        return self._attendant

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _fail_at(self, sequence: int, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}".rstrip(": ")[:2000]
        end = {"failed": self.rank, "error": text, "unusable": isinstance(error, NoValidConfig)}
        with contextlib.suppress(BoardLost):  # for who has not found the hub yet, or finds it gone
            self.board.publish(sequence, end)
        with contextlib.suppress(BoardLost, HubLost, HubSilent, OSError):
            if self.is_lost or not self.find_hub():
                return
            assert self.line is not None
            reply = self.line.receive(self.line.send("publish", sequence, end=end), FAREWELL_S)
            if reply is not None and "merged" in reply["end"]:
                self.fail(error)  # the others have gone on: they meet the failure at their next exchange

    def _as_error(self, end: End) -> TuningError:
        if "failed" in end:
            rank, error = int(end["failed"]), str(end["error"])
            kind = PeerHasNoConfig if end.get("unusable") else PeerFailed
            text = f"Rank {rank} failed, so this call ends on rank {self.rank} too: {error}"
            return kind(text, rank, error)
        missing = tuple(int(rank) for rank in end["missing"])
        if end.get("is_lost"):
            text = (
                f"Rank {self.rank} lost the store of the process group while agreeing on {end['what']}: "
                f"its host, usually {name_ranks(missing)}, is gone."
            )
        else:
            text = (
                f"Rank {end['by']} waited {end['waited_s']:g} s for {name_ranks(missing)} to agree on "
                f"{end['what']}."
            )
        return AgreementTimeout(text, missing)


class _Exchange:
    """One rank's part in one exchange."""

    def __init__(self, agreement: GroupAgreement, sequence: int, timeout_s: float, what: str) -> None:
        self._agreement = agreement
        self._sequence = sequence
        self._timeout_s = timeout_s
        self._what = what
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s

    def take_part(self, payload: bytes, merge: Merge) -> End:
        """Return how the exchange ended, the same on all ranks."""
        agreement = self._agreement
        try:
            if not agreement.is_lost and self._has_hub():
                return self._through_hub(payload, merge)
        except HubLost:
            agreement.is_lost = True
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
        agreement, sequence = self._agreement, self._sequence
        line, position = agreement.line, agreement.position
        assert line is not None
        if children(position, FAN_OUT, len(agreement.ranks)):
            reply = self._reply(line, line.send("collect", sequence))
            if "end" in reply:
                return self._noted(reply["end"])
            payload = merge(payload, *map(bytes_of, reply["payloads"]))
        if position == 0:
            end = self._end_while_away() or {"merged": text_of(payload)}
            request = line.send("publish", sequence, end=end)
        else:
            request = line.send("post", sequence, payload=text_of(payload))
        return self._noted(self._reply(line, request)["end"])

    def _end_while_away(self) -> End | None:
        """Return the end that the others have given this exchange while the hub's process was stopped."""
        hub = self._agreement.hub
        return self._agreement.board.end(self._sequence) if hub is not None and hub.was_away() else None

    def _reply(self, line: Line, request: int) -> Message:
        """Return the reply to a request, or when the time is up the end that the hub makes of it."""
        while True:
            reply = line.receive(request, self._deadline - time.monotonic())
            if reply is not None:
                return reply
            latest = self._began + PATIENCE * self._timeout_s
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
            self._deadline = min(time.monotonic() + 3 * HEARTBEAT_S, latest)

    # -- without it ---------------------------------------------------------------------------------------

    def _has_hub(self) -> bool:
        """Wait for the hub; return False when there is none, or this exchange has ended before."""
        agreement, board = self._agreement, self._agreement.board
        if agreement.line is not None:
            return True
        pauses = _pauses()
        while not agreement.find_hub():
            board.sign(self._sequence)
            if time.monotonic() > self._deadline or board.end(self._sequence) is not None:
                return False
            time.sleep(next(pauses))
        return board.end(self._sequence) is None

    def _on_board(self) -> End:
        """Agree without the hub on how the exchange ends: whose failure, or who is missing."""
        agreement, board = self._agreement, self._agreement.board
        host_rank = agreement.ranks[0]
        board.sign(self._sequence)
        until = self._deadline
        if agreement.line is not None:  # the others may still be finding out about the hub
            until = max(until, time.monotonic() + SIGNING_S)
        pauses = _pauses()
        while (end := board.end(self._sequence)) is None:
            absent = [rank for rank in board.absent(self._sequence) if rank != host_rank]
            is_clear = not absent and (agreement.is_lost or time.monotonic() > self._deadline)
            if is_clear or time.monotonic() > until:
                board.publish(self._sequence, self._missing(sorted([host_rank, *absent])))
            time.sleep(next(pauses))
        return end

    def _without_board(self) -> End:
        """Return the end for a rank that reaches nobody."""
        return {
            **self._missing([0 if self._agreement.line is None else self._agreement.ranks[0]]),
            "is_lost": True,
        }

    def _missing(self, ranks: list[int]) -> End:
        waited_s = round(time.monotonic() - self._began, 1)
        return {"missing": ranks, "by": self._agreement.rank, "waited_s": waited_s, "what": self._what}

    def _noted(self, end: End) -> End:
        """Return `end` with ranks for positions; put a bad one where it outlives the hub."""
        if "missing_positions" in end:
            ranks = [self._agreement.ranks[position] for position in end["missing_positions"]]
            end = {**end, "missing": ranks}
        if "merged" not in end and self._agreement.hub is not None:
            with contextlib.suppress(BoardLost):
                self._agreement.board.publish(self._sequence, end)
        return end


def _pauses() -> Iterator[float]:
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


class Agreements:
    """The agreements of this process, one per process group, shared by all tuned functions."""

    def __init__(self) -> None:
        self._by_group: weakref.WeakKeyDictionary[Any, GroupAgreement] = weakref.WeakKeyDictionary()
        self._alone: dict[int, Alone] = {}

    def alone(self) -> Agreement:
        """Return the agreement of this process with itself."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else settings.process_rank()
        return self._alone.setdefault(rank, Alone(rank))

    def of(self, group: Any) -> Agreement:
        """Return the agreement of `group` (None: the default group).

        Without torch.distributed, with one rank, or in a forked child of a rank: `alone()`.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self.alone()
        if group is None:
            group = dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
            raise TuningError(
                f"Rank {dist.get_rank()} called a tuned function whose group= it is not a member of. "
                "Call it on members only, or give each rank its own group."
            )
        if dist.get_world_size(group) == 1:
            return self.alone()
        known = self._by_group.get(group)
        if known is not None and known.pid != os.getpid():
            return self.alone()
        if known is None:
            known = self._by_group[group] = GroupAgreement(group)
            weakref.finalize(group, known.close).atexit = False
        return known


AGREEMENTS = Agreements()
