"""The second lane of `AllGatherGemm`: nothing in a call depends on its number, so a graph can replay it.

A graph repeats the values that were written during its capture, so there can be no epochs. This lane's words
go up and down again instead, once in each call, and its chunks have slots of their own: it shares with calls
that fetch only `op.shard` and the caller's tensors. Chunks are pushed by their owner: a push takes the
receiver's permit away and brings its arrival, so each word has one who raises and one who lowers it, in turn.
With `producer="push"` eager calls are calls of this lane too, enqueued one by one.

    slots    of the gather buffer: `rank`, which is `op.shard`; W - 1 + s, the chunk of rank r + s, for s > 0
    words    int32 [6, W], symmetric: FREE[p], 1 if rank p's slot for our chunk may be written; ANNOUNCED[p],
             how many rows p pushes; ARRIVED[p], how many of them are here; AFTER[p], 0 (but see below)

Call k on rank r, with m rows:

    caller's stream                           side stream: copy engine and stream memory operations
    a_shard to chunk r, if it is not there
    fork                               -->    FREE[r] of every peer := 1
    GEMM, one persistent kernel:              for p = r - 1, r - 2, ... (mod W):
        chunk r at once,                          wait until FREE[p] >= 1, FREE[p] := 0
        rows up to i of chunk p once              ANNOUNCED[r] of rank p := m
        ARRIVED[p] >= i,                          for each piece of chunk r, up to row i:
        all that p has announced                      the piece to its slot on rank p
        before it ends                                ARRIVED[r] of rank p := i
    fork                               -->    ARRIVED := AFTER
    join                               <--

Rank r uses chunk r + 1 first, and rank r + 1 pushes to rank r first. Into how many pieces a chunk is cut is
its owner's affair.

**It ends.** The pushes of call k wait for their fork and for the peers' FREE, which follows the peers' forks;
none waits for a GEMM of call k, and none needs an SM. So if all GEMMs and pushes of call k - 1 end, then all
forks of k happen, all FREE are set, all pieces are pushed, and all GEMMs of call k end. (That the branches
of a graph run side by side is what the hardware does, not what CUDA promises: where it did not, the GEMM
would report it, see below.) Calls in between that fetch wait for forks and copies of their own alone.

**Each push has one permit.** p sets FREE[p] here for call k + 1 behind its GEMM of k, which has seen the last
of our ARRIVED of k, which follows our FREE[p] := 0 of k.

**It reads no stale data.** GEMM k ends after ARRIVED[p] has come to what p announced, behind which push k
writes nothing; then that is set to 0, then call k + 1 gives p its permit. So what GEMM k + 1 finds above 0 in
ARRIVED[p] was put there by push k + 1, behind the rows that it counts and behind ANNOUNCED.

**Nothing is overwritten while it is read.** Push k + 1 of p writes its slot and ANNOUNCED[p] here behind our
fork of k + 1: behind GEMM k, cuBLAS, and whatever read `op.gathered` between the calls. (A permit at the end
of call k would let a fast peer write while that is read.) Chunk r is read by GEMM k and by our pushes of k,
all before the join.

**Ranks with different m** do not wait for rows that never come. Who waits for rows waits for the first one,
then looks at ANNOUNCED[p]: are they not among those, it records that and asks no more in this call. At its
end a GEMM waits for as many as were announced, more than its own m or fewer, so the words are as after any
other call. The host is told both numbers.

**No wait is unbounded.** A stream's wait has no limit of its own; the GEMM's wait has. When its patience
ends, at the first row of a chunk or in the middle, it records the peer and sets AFTER[p] and ARRIVED[p] far
ahead, so that later replays wait no second time. Each GEMM that finds p given up also sets FREE[p], so that
the side stream runs through. (No other permit can be missing: a rank gives those of call k before it pushes
its chunk of call k.) The host sees the record in `check`, `close` and the next eager call; replays that are
enqueued already run to their end with wrong results. So may those of a rank that has been given up and comes
back: each piece that it still pushes lowers ARRIVED[p] once more, for which a later call may be patient once
more if the rest does not come. The failure is that of the operation, on all ranks.

**A live peer may be given up too** where there are three ranks or more: one whose push to us stands behind
its push to the dead one, if our GEMM gives up before its own does. What we then push to it without its permit
may overwrite an earlier push, so it may wait for us in vain as well, once.

**A call that fails on the host**, after its pushes were enqueued, sends the small kernel of `matmul` after
them: it waits as the GEMM would have. Nobody sets the permits for the peers, which may still read the slots.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ..symm import SymmetricMemory, SymmetricTensor
from .pull import piece_ends
from .words import AFTER, ANNOUNCED, ARRIVED, FREE


def slots_of(world_size: int, *, lane: bool) -> int:
    """Return how many chunks the gather buffer has room for: without this lane, or with both."""
    return 2 * world_size - 1 if lane else world_size


@dataclass(frozen=True)
class _Peer:
    """One peer's slot for our chunk and the words between it and this rank; views made once."""

    slot_there: torch.Tensor
    free: torch.Tensor  # here, set by the peer
    our_free: torch.Tensor  # there
    our_announced: torch.Tensor  # there
    our_arrived: torch.Tensor  # there


class PushLane:
    """Pushes this rank's chunk to its peers, and takes back what the call has changed."""

    def __init__(self, memory: SymmetricMemory, gather: SymmetricTensor, words: SymmetricTensor) -> None:
        self.words = words.local
        self._memory, self._gather = memory, gather.local
        self._stream = memory.side_stream()  # its own: an eager call's may have work that is not captured
        # Rows of the lane's last call; 0 once an eager call has followed. Only the device knows of replays.
        self._last_rows = memory.hold(torch.zeros(1, dtype=torch.int32, device=memory.device))
        self._arrived, self._after = words.local[ARRIVED.value], words.local[AFTER.value]
        rank, world = memory.rank, memory.world_size
        self._cut = (0, 0)  # rows and pieces of `_copies`
        self._copies: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = []  # to, from, the row behind
        self._peers = []
        for step in range(1, world):
            peer = (rank - step) % world
            theirs = words.peers[peer][:, rank]
            self._peers.append(
                _Peer(
                    slot_there=gather.peers[peer][world - 1 + step],
                    free=words.local[FREE.value, peer],
                    our_free=theirs[FREE.value],
                    our_announced=theirs[ANNOUNCED.value],
                    our_arrived=theirs[ARRIVED.value],
                )
            )

    def start(self, rows: int, pieces: int) -> None:
        """Enqueue the pushes of one call behind what the caller has enqueued so far."""
        memory, stream = self._memory, self._stream
        if self._cut != (rows, pieces):
            self._cut, ends = (rows, pieces), (0, *piece_ends(rows, pieces))
            shard = self._gather[memory.rank]
            self._copies = [
                [(peer.slot_there[a:b], shard[a:b], b) for a, b in itertools.pairwise(ends)]
                for peer in self._peers
            ]
        stream.fork()
        for peer in self._peers:
            memory.write_signal(peer.our_free, 1, stream)
        for peer, copies in zip(self._peers, self._copies, strict=True):
            memory.wait_signal(peer.free, 1, stream)
            memory.write_signal(peer.free, 0, stream)
            memory.write_signal(peer.our_announced, rows, stream)
            for there, here, end in copies:
                memory.copy(there, here, stream)
                memory.write_signal(peer.our_arrived, end, stream)
        memory.write_signal(self._last_rows, rows, stream)

    def finish(self) -> None:
        """Enqueue what follows the GEMM, and order what the caller does next behind it."""
        memory, stream = self._memory, self._stream
        stream.fork()
        memory.copy(self._arrived, self._after, stream)  # it may need an SM, which no GEMM holds any more
        stream.join()

    def note_eager_call(self) -> None:
        """Enqueue that the last call was an eager one; to be called where nothing of the lane is running."""
        self._stream.fork()
        self._memory.write_signal(self._last_rows, 0, self._stream)
        self._stream.join()

    def last_rows(self) -> int:
        """Return the rows of the last call if it went through this lane, else 0; waits for the device."""
        return int(self._last_rows.item())

    def gathered(self, rows: int) -> torch.Tensor:
        """Return the chunks in the order of their ranks, as a copy: they do not lie in that order."""
        rank, world = self._memory.rank, self._memory.world_size
        steps = [(chunk - rank) % world for chunk in range(world)]
        slots = [rank if step == 0 else world - 1 + step for step in steps]
        return torch.cat([self._gather[slot, :rows] for slot in slots])
