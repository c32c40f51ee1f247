"""Host-side agreement, in shared memory, on the way in which all ranks run a call.

Each rank has a ring of int64 words in a file that its peers map. The ballot of call c is word c % RING: c,
the way that the rank votes for, and the call's terms; word RING + c % RING is the sizes of its part. Way 0
needs no agreement, and way 1 is a collective. No device is involved.

[Note: all ranks decide alike] Each key has a standing way: the one that all ranks last voted for in one call,
on the same terms; at first 0. A rank that votes for it takes it without reading its peers' ballots. A rank
that votes for another reads all ballots. If one of them is for the standing way, that is taken: its host may
have gone on. If all are for the same way and terms, it becomes the standing way; otherwise way 0 does. So a
new way is taken only where all ranks have read that all vote for it, and the standing way is given up only
where all have read that none votes for it.

[Note: a refused call] A rank whose arguments are wrong votes for no way, and reads all ballots. If no rank
has gone ahead, by a vote for the standing way, all ranks have read that: nobody goes on, and what stands
stays. Otherwise all go on: the ranks that read with those ahead, and the one that refuses in their way.

[Note: a rank leaves its peers' collectives] A rank whose operation has broken marks its further ballots as
LEAVING before it reads whether a peer has gone ahead in the next call by a collective. It takes part in such
a call, else it marks it as LEFT. A rank that goes ahead casts its ballot before it reads that mark, and waits
while it is LEAVING. So either both make the collective, or none does.

[Note: ballots end] A rank writes its ballot before it waits for anything of that call. So where hosts make
the same calls in the same order all ballots are written. Every wait has a bound.

Other terms of a peer in a call by a standing collective are found in a later call, or by `check`. In other
ways the operation's kernels find them; where ranks take different ways, `differing` tells why nobody comes.

Where there is no way to agree on, ranks only name their terms (`exchange`, or `cast` and `read`): the tokens
of a call over experts, the next call of tensor-parallel layers.

[Note: no ballot is overwritten before it is read] Before a rank begins a half of its ring it waits until all
peers have begun the half before. So no rank is a whole ring ahead of another.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable

import torch
import torch.distributed as dist

from ..symm import open_symmetric_memory
from ..tensors import remember
from .errors import PeerLeft, PeerTimeout, RefusedByPeer

RING = 1024  # divides NUMBERS
NUMBERS = 2**31  # of calls, before they begin anew
QUICK_POLLS = 1000  # without a sleep, about 0.1 ms: hosts that make the same calls are not far apart
POLL_S = 5e-5  # between later polls
COLLECTIVE = 1  # the way
TERMS_BITS = 28  # of a ballot; the way has the three above
AHEAD = 1 << 31  # of a ballot for the standing way, whose rank reads no other
REFUSES = 7  # the way of a rank that refuses the call
LEFT = -1  # in place of all further ballots of a rank whose operation is broken
LEAVING = -2  # the same, while that rank looks who has gone ahead

Pages = tuple[torch.Tensor, ...]  # by rank


def host_words(group: dist.ProcessGroup | None, count: int, timeout_s: float) -> tuple[int, Pages]:
    """Return this rank and int64 zeros of each rank, in memory that all hosts map; collective.

    They are mapped as long as they live. Raises SymmetricMemoryError on all ranks where one cannot map them.
    """
    with open_symmetric_memory(group, "shm", "cpu", timeout_s=timeout_s) as memory:
        return memory.rank, memory.allocate((count,), torch.int64).peers


class Ballots:
    """The ballots of one operation, on this rank; opening is collective.

    operation: named in errors. advice: what to do where a peer does not come. Raises
    SymmetricMemoryError on all ranks where one cannot map a peer's file.
    """

    def __init__(
        self,
        operation: str,
        group: dist.ProcessGroup | None,
        timeout_s: float,
        advice: str = "Find out what that rank is doing",
    ) -> None:
        self._rank, rings = host_words(group, 2 * RING, timeout_s)
        self._rings = [words.numpy().data for words in rings]
        self._operation, self._timeout_s, self._advice = operation, timeout_s, advice
        self._call = 0
        self._standing: dict[Hashable, int] = {}
        self._unread: deque[tuple[int, int]] = deque()  # collectives, with what all should have named

    def agree(self, key: Hashable, way: int, terms: int, sizes: int | None = None) -> int:
        """Count a call; return the way that all ranks take in it.

        key: calls of one key share a standing way; the same on all ranks. way: this rank's vote, 0 to 6.
        sizes: what a rank that refuses the call must know to take part in that way; None: the terms.
        Waits for the peers unless it is the standing way, see [Note: all ranks decide alike]. Raises
        PeerTimeout, PeerLeft, RefusedByPeer, and ValueError where a peer made an earlier collective on other
        terms.
        """
        standing, word = self._standing.get(key, 0), way << TERMS_BITS | terms % 2**TERMS_BITS
        if self._unread:
            self._verify()
        if way == standing:
            self.cast(AHEAD | word, terms if sizes is None else sizes)
            if way == COLLECTIVE:
                self._raise_of_leavers()
            return self._take(way, terms)
        self.cast(word)
        named = set(self.read().values())
        ahead = {_way_of(each) for each in named if each & AHEAD}
        if not ahead and REFUSES in map(_way_of, named):
            raise RefusedByPeer
        if standing and standing in ahead:
            return self._take(standing, terms)
        if REFUSES in map(_way_of, named):  # that rank knows nothing of the key: what stands goes on to stand
            return 0
        self._standing.pop(key, None)
        if named != {word}:
            return 0
        return remember(self._standing, key, way)

    def refuse(self) -> tuple[int, int] | None:
        """Count a call that this rank refuses; return way and sizes of the ranks that have gone ahead.

        None: no rank goes on, see [Note: a refused call]. Waits for the peers' hosts; raises as `read` does.
        """
        self.cast(REFUSES << TERMS_BITS)
        for peer, ballot in self.read().items():
            if ballot & AHEAD:
                return _way_of(ballot), self._sizes_of(peer)
        return None

    def _sizes_of(self, peer: int) -> int:
        return int(self._rings[peer][RING + self._call % RING])

    def leave(self) -> None:
        """Tell who waits for a ballot of a further call that there will be none."""
        ring = self._rings[self._rank]
        for call in range(self._call + 1, self._call + 1 + RING // 2):
            ring[call % RING] = LEFT

    def leave_next(self) -> tuple[int, int] | None:
        """Leave the next call; return way and sizes of a peer that has gone ahead in it by a collective.

        This rank then counts that call, and must take part: see [Note: a rank leaves its peers' collectives].
        """
        ring, call = self._rings[self._rank], (self._call + 1) % NUMBERS
        ring[call % RING] = LEAVING
        for peer, words in enumerate(self._rings):
            ballot = int(words[call % RING])
            if (
                peer != self._rank
                and ballot >> 32 == call
                and ballot & AHEAD
                and _way_of(ballot) == COLLECTIVE
            ):
                self._call = call
                ring[call % RING] = call << 32 | REFUSES << TERMS_BITS
                return COLLECTIVE, self._sizes_of(peer)
        ring[call % RING] = LEFT
        return None

    def _raise_of_leavers(self) -> None:
        """Raise PeerLeft if a peer takes no part in this call."""
        deadline = time.monotonic() + self._timeout_s
        for peer, ring in enumerate(self._rings):
            while int(ring[self._call % RING]) == LEAVING and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if int(ring[self._call % RING]) == LEFT:
                raise PeerLeft(
                    f"{self._operation}, rank {self._rank}: rank {peer} has left call {self._call}"
                )

    def _take(self, way: int, terms: int) -> int:
        if way == COLLECTIVE:
            self._unread.append((self._call, way << TERMS_BITS | terms % 2**TERMS_BITS))
        return way

    def differing(self) -> dict[int, int]:
        """Return the ranks' terms in the first of the last calls in which not all named the same; else {}."""
        for call in range(max(1, self._call - RING // 2 + 1), self._call + 1):
            ballots = [int(ring[call % RING]) for ring in self._rings]
            named = {
                rank: each % 2**TERMS_BITS
                for rank, each in enumerate(ballots)
                if each >> 32 == call and _way_of(each) != REFUSES
            }
            if len(set(named.values())) > 1:
                return named
        return {}

    def standing(self, key: Hashable) -> int:
        """Return the standing way of that key."""
        return self._standing.get(key, 0)

    def has_collective(self) -> bool:
        """Return whether a collective is the standing way of any key."""
        return COLLECTIVE in self._standing.values()

    def check(self) -> None:
        """Wait for all ballots of calls by a standing collective; raise what `agree` would."""
        for call, _ in self._unread:
            self._read_all(call)
        self._verify()

    def _verify(self) -> None:
        """Compare the ballots that have come with this rank's; wait for none."""
        while self._unread:
            call, word = self._unread[0]
            for peer, ring in enumerate(self._rings):
                ballot = int(ring[call % RING])
                if ballot >> 32 != call:
                    return
                named = ballot & 0xFFFFFFFF
                is_of_this_way = _way_of(named) == _way_of(word)
                if peer != self._rank and is_of_this_way and named & ~AHEAD != word:
                    raise ValueError(
                        f"{self._operation}, rank {self._rank}: rank {peer} made eager call {call} with "
                        "other rows or tokens than this rank, and both by a collective, which then is "
                        "wrong or does not end. All ranks must make the same calls. Close it on all ranks "
                        "and open another"
                    )
            self._unread.popleft()

    def cast(self, terms: int, sizes: int = 0) -> None:
        """Count a call and name this rank's terms in it, up to 2**32 - 1, and the sizes of its part."""
        self._call = call = (self._call + 1) % NUMBERS
        if call % (RING // 2) == 0:  # see [Note: no ballot is overwritten before it is read]
            self._read_all((call - RING // 2) % NUMBERS)
        ring, place = self._rings[self._rank], call % RING
        ring[RING + place] = sizes  # before the ballot, which says that they are there
        ring[place] = call << 32 | terms

    def exchange(self, terms: int) -> dict[int, int]:
        """Count a call and return the terms of each rank in it; raises PeerTimeout."""
        self.cast(terms)
        return self.read()

    def read(self) -> dict[int, int]:
        """Return the terms of each rank in this call, once all have named them; raises PeerTimeout.

        To be called after `cast`: see [Note: ballots end].
        """
        return self._read_all(self._call)

    def read_said(self) -> dict[int, int]:
        """Return the terms of the ranks that have come to this call."""
        ballots = {rank: int(ring[self._call % RING]) for rank, ring in enumerate(self._rings)}
        return {rank: each & 0xFFFFFFFF for rank, each in ballots.items() if each >> 32 == self._call}

    def _read_all(self, call: int) -> dict[int, int]:
        return {peer: self._read(peer, call) for peer in range(len(self._rings))}

    def _read(self, peer: int, call: int) -> int:
        ring, polls, deadline = self._rings[peer], 0, 0.0
        while (ballot := int(ring[call % RING])) >> 32 != call:
            if ballot == LEFT:
                raise PeerLeft(f"{self._operation}, rank {self._rank}: rank {peer} has left call {call}")
            polls += 1
            if polls == QUICK_POLLS:
                deadline = time.monotonic() + self._timeout_s
            if polls > QUICK_POLLS:
                if time.monotonic() > deadline:
                    last = max(ring[:RING]) >> 32
                    raise PeerTimeout(
                        f"{self._operation}, rank {self._rank}: rank {peer} did not come to eager call "
                        f"{call} within {self._timeout_s:g} s; its last is call {last}. {self._advice}. "
                        "Close it on all ranks and open another"
                    )
                time.sleep(POLL_S)
        return ballot & 0xFFFFFFFF


def _way_of(ballot: int) -> int:
    return ballot >> TERMS_BITS & REFUSES
