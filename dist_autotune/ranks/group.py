"""The exchange: every rank of a group sends a payload, all get the merged one, or the same error.

The hub of a group keeps one end for each exchange, so all ranks see the same: the merged payload, the
failure of a rank, or the ranks that were missing when somebody's time was up. No collective of the user's is
touched, and no wait is without a limit.

World size 1 is `SingleRank`: the same interface without a hub.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch.distributed as dist

from .. import settings
from ..errors import (
    AgreementTimeout,
    InvalidOption,
    NoValidConfig,
    PeerFailed,
    PeerHasNoConfig,
    TuningError,
    name_ranks,
)
from ..formatting import described
from . import watchdog
from .client import HubLost, HubSilent, HungUp
from .exchange import Exchange, Merge
from .members import Members
from .messages import Message
from .store import End, StoreLost
from .watchdog import Watchdog

FAREWELL_S = 0.5  # how long a failing rank waits for the hub to take in why


class RankGroup(Protocol):
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
        self,
        what: str,
        timeout_s: float,
        on_stuck: str,
        tell: Callable[[str], None],
        whereabouts: Callable[[], str] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """While the block runs the user's code: `tell` if the peers have gone on without this rank.

        With `whereabouts`, which says what the code is at, tell also when it takes longer than `timeout_s`.
        `on_stuck="abort"`: end the process another `timeout_s` after either.
        """


class SingleRank:
    """One rank: its payload is the merged one."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.ranks: tuple[int, ...] = (rank,)
        self._attendant = Watchdog(rank, watchdog.HEARTBEAT_S, lambda: None)

    def exchange(self, payload: bytes, merge: Merge, timeout_s: float, what: str) -> bytes:
        return payload

    def fail(self, error: BaseException) -> None:
        """Nobody waits."""

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        with self._attendant.beating(0):
            yield

    @contextlib.contextmanager
    def running(
        self,
        what: str,
        timeout_s: float,
        on_stuck: str,
        tell: Callable[[str], None],
        whereabouts: Callable[[], str] | None = None,
    ) -> Iterator[None]:
        if whereabouts is None:  # there are no peers
            yield
            return
        with self._attendant.watching(0, what, timeout_s, on_stuck, tell, whereabouts):
            yield


class ProcessGroup:
    """The ranks of one process group. Create it on all ranks of the group."""

    def __init__(self, group: Any) -> None:
        self.pid = os.getpid()
        self.peers = Members(group)
        self.rank, self.ranks = self.peers.rank, self.peers.ranks
        self._sequence = 0
        self._attendant: Watchdog | None = None

    def exchange(self, payload: bytes, merge: Merge, timeout_s: float, what: str) -> bytes:
        sequence = self._next_sequence()
        try:
            end = Exchange(self.peers, sequence, timeout_s, what).take_part(payload, merge)
        except BaseException as error:  # Ctrl-C while waiting: the peers must learn of it
            self._fail_at(sequence, error)
            raise
        if "merged" in end:
            return bytes(end["merged"])
        raise self._as_error(end)

    def fail(self, error: BaseException) -> None:
        self._fail_at(self._next_sequence(), error)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        if self.peers.line is None:
            yield
            return
        with contextlib.suppress(HubLost, HubSilent):
            self.peers.line.tell("beat", self._sequence)
        with self._own_attendant().beating(self._sequence):
            yield

    @contextlib.contextmanager
    def running(
        self,
        what: str,
        timeout_s: float,
        on_stuck: str,
        tell: Callable[[str], None],
        whereabouts: Callable[[], str] | None = None,
    ) -> Iterator[None]:
        if self.peers.line is None and whereabouts is None:
            yield
            return
        watch = self._own_attendant().watching
        with watch(self._sequence, what, timeout_s, on_stuck, tell, whereabouts):
            yield

    def close(self) -> None:
        """End all that was started for the group: it has ended. Takes no lock: a collector may call it."""
        if self._attendant is not None:
            self._attendant.close()
        self.peers.close()

    def _own_attendant(self) -> Watchdog:
        if self._attendant is None:
            self._attendant = Watchdog(self.rank, watchdog.HEARTBEAT_S, self.peers.new_line)
        return self._attendant

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _fail_at(self, sequence: int, error: BaseException) -> None:
        text = described(error)[:2000]
        end = {"failed": self.rank, "error": text, "unusable": isinstance(error, NoValidConfig)}
        with contextlib.suppress(StoreLost):  # for who has not found the hub yet, or finds it gone
            self.peers.board.publish(sequence, end)
        with contextlib.suppress(StoreLost, HubLost, HubSilent, OSError):
            if self.peers.is_lost or not self.peers.find_hub():
                return
            reply = self._published(sequence, end)
            if reply is not None and "merged" in reply["end"]:
                self.fail(error)  # the others have gone on: they meet the failure at their next exchange

    def _published(self, sequence: int, end: End) -> Message | None:
        """Tell the hub how an exchange ends, on a new connection if it hangs up on this one."""
        line = self.peers.line
        assert line is not None
        with contextlib.suppress(HungUp):
            return line.receive(line.send("publish", sequence, end=end), FAREWELL_S)
        return line.receive(line.send("publish", sequence, end=end), FAREWELL_S)

    def _as_error(self, end: End) -> TuningError:
        if "failed" in end:
            rank, error = int(end["failed"]), str(end["error"])
            kind = PeerHasNoConfig if end.get("unusable") else PeerFailed
            text = f"rank {rank} failed, so this call ends on rank {self.rank} too: {error}"
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


class Groups:
    """The agreements of this process, one per process group, shared by all tuned functions."""

    def __init__(self) -> None:
        self._by_group: weakref.WeakKeyDictionary[Any, ProcessGroup] = weakref.WeakKeyDictionary()
        self._alone: dict[int, SingleRank] = {}

    def alone(self) -> RankGroup:
        """Return the agreement of this process with itself."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else settings.process_rank()
        return self._alone.setdefault(rank, SingleRank(rank))

    def of(self, group: Any) -> RankGroup:
        """Return the agreement of `group` (None: the default group).

        Without torch.distributed, with one rank, or in a forked child of a rank: `alone()`.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self.alone()
        if group is None:
            group = dist.group.WORLD
        if group is dist.GroupMember.NON_GROUP_MEMBER or _rank_in(group) < 0:
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
            self._close_ended()
            known = self._by_group[group] = ProcessGroup(group)
            weakref.finalize(group, known.close).atexit = False
        return known

    def _close_ended(self) -> None:
        """End what belongs to groups that were destroyed, though the program still holds them."""
        for group, known in list(self._by_group.items()):
            if known.pid == os.getpid() and _has_ended(group):
                known.close()
                del self._by_group[group]


def _has_ended(group: Any) -> bool:
    try:
        return dist.get_rank(group) < 0
    except (ValueError, RuntimeError):  # destroyed, or all of them were
        return True


def _rank_in(group: Any) -> int:
    """Return this process's rank in a process group, below 0 if it is no member; InvalidOption: no group."""
    try:
        return dist.get_rank(group)
    except ValueError as error:  # never made, or destroyed
        raise InvalidOption(f"group={group!r}: {error}") from None


GROUPS = Groups()
