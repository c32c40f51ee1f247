"""What each rank's host says of a call before it is made, where all ranks must decide alike.

Each rank has a ring of int64 words in a file that its peers map. The ballot of call c is word c % RING: c,
and on which terms the rank would make the call in the way that takes all ranks, or 0. No device is involved.

**All ranks decide alike.** A call is agreed on if its ballots all name the same terms. A rank that writes 0
knows that it is not and reads no other ballot; one that names terms reads them all.

**It ends.** A rank writes its ballot before it waits for anything of that call. So where hosts make the same
calls in the same order all ballots are written. Every wait has a bound.

**No ballot is overwritten before it is read.** Before a rank begins a half of its ring it waits until all
peers have begun the half before. So none is a whole ring ahead of another.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ..symm import open_symmetric_memory
from .operation import PeerTimeout

RING = 1024  # divides NUMBERS
NUMBERS = 2**31  # of calls, before they begin anew
QUICK_POLLS = 1000  # about 0.1 ms: hosts that make the same calls are not far apart
POLL_S = 5e-5  # behind those


class Ballots:
    """The ballots of one operation, on this rank; opening is collective.

    operation: named in errors. Raises SymmetricMemoryError on all ranks where one cannot map a peer's file.
    """

    def __init__(self, operation: str, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        with open_symmetric_memory(group, "shm", "cpu", timeout_s=timeout_s) as memory:
            rings = memory.allocate((RING,), torch.int64)
            self._rank = memory.rank
        self._rings = [words.numpy().data for words in rings.peers]  # mapped as long as these live
        self._operation, self._timeout_s = operation, timeout_s
        self._call = 0

    def agree(self, terms: int) -> bool:
        """Count a call; return whether all ranks name these terms in it. With 0 it waits for no ballot.

        Raises PeerTimeout if a peer does not come to the call in time.
        """
        self.cast(terms)
        return terms > 0 and all(named == terms for named in self.read().values())

    def cast(self, terms: int) -> None:
        """Count a call and name this rank's terms in it, up to 2**32 - 1."""
        self._call = call = (self._call + 1) % NUMBERS
        if call % (RING // 2) == 0:
            self._read_all((call - RING // 2) % NUMBERS)
        self._rings[self._rank][call % RING] = call << 32 | terms

    def read(self) -> dict[int, int]:
        """Return the terms of each rank in this call, once all have named them; raises PeerTimeout."""
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
            polls += 1
            if polls == QUICK_POLLS:
                deadline = time.monotonic() + self._timeout_s
            if polls > QUICK_POLLS:
                if time.monotonic() > deadline:
                    last = max(ring) >> 32
                    raise PeerTimeout(
                        f"{self._operation}, rank {self._rank}: rank {peer} did not come to eager call "
                        f"{call} within {self._timeout_s:g} s; its last is call {last}. Find out what that "
                        "rank is doing. Close it on all ranks and open another"
                    )
                time.sleep(POLL_S)
        return ballot & 0xFFFFFFFF
