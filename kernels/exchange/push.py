"""Pushing to peers beside a kernel, with their permits; nothing depends on the number of a call.

A CUDA graph repeats the values that were written during its capture, so there can be no epochs. Each flag
goes up and down once in a call instead, and has one who raises and one who lowers it: FREE[p], 1 while rank
p's memory for what comes from here may be written, and ARRIVED[p], above 0 once p's data is here.

    Permits        FREE and ARRIVED of a call
    ChunkPusher    this rank's chunk to all peers: calls of `AllGatherGemm` that are captured, or with
                   `producer="push"`
    SumPusher      sums to the ranks they are for: `GemmReduceScatter`, `MoEReduceScatter`

**Chunks.** They have slots and flags of their own and share with calls that fetch only `op.shard` and the
caller's tensors.

    slots    of the gather buffer: `rank`, which is `op.shard`; W - 1 + s, the chunk of rank r + s, for s > 0
    flags    int32 [6, W], symmetric: see `flags`

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

Rank r uses chunk r + 1 first, and rank r + 1 pushes to rank r first.

**It ends.** The pushes of call k wait for their fork and for the peers' FREE, which follows the peers' forks;
none waits for a GEMM of call k, and none needs an SM. So if all GEMMs and pushes of call k - 1 end, then all
forks of k happen, all FREE are set, all pieces are pushed, and all GEMMs of call k end. (CUDA does not
promise that the branches of a graph run side by side: where they did not, the GEMM would report it.)

**Ranks with different m** do not wait for rows that never come. Who waits for rows waits for the first one,
then looks at ANNOUNCED[p]; if they are not among those, it records that and asks no more in this call. At its
end a GEMM waits for as many as were announced, so the flags are as after any other call.

What follows holds for sums and choices of experts as well, with their kernels in place of the GEMM.

**Each push has one permit.** p sets FREE[p] here for call k + 1 behind its GEMM of k, which has seen the last
of our ARRIVED of k, which follows our FREE[p] := 0 of k.

**It reads no stale data.** GEMM k ends after it has seen all of ARRIVED[p], behind which push k writes
nothing; then that is set to 0, then call k + 1 gives p its permit. So what GEMM k + 1 finds above 0 in
ARRIVED[p] was put there by push k + 1, behind the data that it stands for.

**Nothing is overwritten while it is read.** Push k + 1 of p writes here behind our fork of k + 1: behind GEMM
k, cuBLAS, and whatever read `op.gathered` between the calls. (A permit at the end of call k would let a fast
peer write while that is read.) What our pushes of k read is written again behind the join.

**No wait is unbounded.** A stream's wait has no limit of its own; the GEMM's wait has. When its patience ends
it records the peer and sets AFTER[p] and ARRIVED[p] far ahead, so that later replays wait no second time.
Each GEMM that finds p given up also sets FREE[p], so that the side stream runs through. (No other permit can
be missing: a rank gives those of call k before it pushes its data of call k.) The host sees the record in
`check`, `close` and the next eager call, and the operation can only be closed; replays that are enqueued
already end with wrong results, also where a rank that was given up comes back. With three ranks or more a
live peer may be given up too: one whose push to us stands behind its push to the dead one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..symm import SideStream, SymmetricMemory, SymmetricTensor
from .flags import AFTER, ANNOUNCED, ARRIVED, FREE
from .pull import piece_ends


class Permits:
    """The flags with which one side stream asks peers for permits, gives its own, and ends a call.

    free: the row of FREE. risen, after: the first of `count` rows that the peers raise, and of what they
    become after a call.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        stream: SideStream,
        flags: SymmetricTensor,
        *,
        free: int,
        risen: int,
        after: int,
        count: int = 1,
    ) -> None:
        self._memory, self._stream = memory, stream
        self._free = flags.local[free]
        self._risen, self._after = (flags.local[first : first + count] for first in (risen, after))
        self._ours = [theirs[free, memory.rank] for p, theirs in enumerate(flags.peers) if p != memory.rank]

    def give(self) -> None:
        """Let the peers write here, behind what the caller has enqueued so far."""
        self._stream.fork()
        for free in self._ours:
            self._memory.write_signal(free, 1, self._stream)

    def take(self, peer: int) -> None:
        """Enqueue a wait for the peer's permit, which ends it."""
        free = self._free[peer]
        self._memory.wait_signal(free, 1, self._stream)
        self._memory.write_signal(free, 0, self._stream)

    def finish(self) -> None:
        """Enqueue what follows the kernels of a call, and order what the caller does next behind it."""
        self._stream.fork()
        self._memory.copy(self._risen, self._after, self._stream)  # it may need an SM, which is free by then
        self._stream.join()


@dataclass(frozen=True)
class _ChunkPeer:
    """One peer's slot for our chunk, and the flags there; views made once."""

    rank: int
    slot: torch.Tensor
    our_announced: torch.Tensor
    our_arrived: torch.Tensor


class ChunkPusher:
    """Pushes this rank's chunk to its peers."""

    def __init__(self, memory: SymmetricMemory, gather: SymmetricTensor, flags: SymmetricTensor) -> None:
        self.flags = flags.local
        self._memory, self._gather = memory, gather.local
        self._stream = memory.side_stream()  # its own: an eager call's may have work that is not captured
        self._permits = Permits(
            *(memory, self._stream, flags), free=FREE.value, risen=ARRIVED.value, after=AFTER.value
        )
        self.finish = self._permits.finish
        # Rows of the last pushed call, until one of another kind is noted. Only the device knows of replays.
        self._last_rows = memory.hold(torch.zeros(1, dtype=torch.int32, device=memory.device))
        rank, world = memory.rank, memory.world_size
        self._cut = (0, 0)  # rows and pieces of `_copies`
        self._copies: list[list[tuple[torch.Tensor, torch.Tensor, int]]] = []  # to, from, the row behind
        self._peers = []
        for step in range(1, world):
            peer = (rank - step) % world
            slot, theirs = gather.peers[peer][world - 1 + step], flags.peers[peer][:, rank]
            self._peers.append(_ChunkPeer(peer, slot, theirs[ANNOUNCED.value], theirs[ARRIVED.value]))

    @staticmethod
    def slots(world_size: int) -> int:
        """Return how many chunks the gather buffer has room for: those that are fetched, and those pushed."""
        return 2 * world_size - 1

    def start(self, rows: int, pieces: int) -> None:
        """Enqueue the pushes of one call behind what the caller has enqueued so far."""
        memory, stream = self._memory, self._stream
        if self._cut != (rows, pieces):
            self._cut, ends = (rows, pieces), (0, *piece_ends(rows, pieces))
            shard = self._gather[memory.rank]
            self._copies = [
                [(peer.slot[a:b], shard[a:b], b) for a, b in itertools.pairwise(ends)] for peer in self._peers
            ]
        self._permits.give()
        for peer, copies in zip(self._peers, self._copies, strict=True):
            self._permits.take(peer.rank)
            memory.write_signal(peer.our_announced, rows, stream)
            for there, here, end in copies:
                memory.copy(there, here, stream)
                memory.write_signal(peer.our_arrived, end, stream)
        memory.write_signal(self._last_rows, rows, stream)

    @contextlib.contextmanager
    def noting(self, rows: int) -> Iterator[None]:
        """Enqueue, beside the block, what `last_rows` returns of its call, which pushes nothing."""
        self._stream.fork()
        self._memory.write_signal(self._last_rows, rows, self._stream)
        yield
        self._stream.join()

    def last_rows(self) -> int:
        """Return the rows of the last call if it was pushed, else what was noted; waits for the device."""
        return int(self._last_rows.item())

    def gathered(self, rows: int) -> torch.Tensor:
        """Return the chunks in the order of their ranks, as a copy: they do not lie in that order."""
        rank, world = self._memory.rank, self._memory.world_size
        steps = [(chunk - rank) % world for chunk in range(world)]
        slots = [rank if step == 0 else world - 1 + step for step in steps]
        return torch.cat([self._gather[slot, :rows] for slot in slots])


@dataclass(frozen=True)
class _SumPeer:
    """The way of our sums to one peer, and the flags of it; views made once."""

    rank: int
    sums: torch.Tensor  # here
    slot: torch.Tensor  # there
    done: torch.Tensor  # here, set by the kernel
    our_arrived: torch.Tensor  # there


class SumPusher:
    """Pushes sums to the peers they are for, rank + 1 first.

    partial, staged: slot s - 1 holds the sums for rank + s, and there those of rank + s for that rank. done,
    arrived: the rows of these flags. permits: what a push asks for; None where the call has them already.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        stream: SideStream,
        partial: torch.Tensor,
        staged: SymmetricTensor,
        flags: SymmetricTensor,
        *,
        done: int,
        arrived: int,
        permits: Permits | None = None,
    ) -> None:
        self._memory, self._stream, self._permits = memory, stream, permits
        rank, world = memory.rank, memory.world_size
        self._peers = []
        for step in range(1, world):
            peer = (rank + step) % world
            slot = staged.peers[peer][world - step - 1]  # this rank is `world - step` behind the peer
            our_arrived = flags.peers[peer][arrived, rank]
            self._peers.append(_SumPeer(peer, partial[step - 1], slot, flags.local[done, peer], our_arrived))
        # A driver that sets up something at the first copy to a peer must not do so while a kernel spins.
        for each in self._peers:
            memory.copy(each.slot[:1], each.sums[:1], stream)  # zeros; read behind ARRIVED only
        stream.join()

    def run(self, launch: Callable[..., None], rows: Sequence[int], arrived: int, *, in_steps: bool) -> None:
        """Enqueue the launches of one call, and the pushes of `rows[p]` for rank p.

        in_steps: `launch(step)` for each chunk, which waits for the permits, and its push behind it, which
        waits for nothing. Otherwise one `launch()`; on the CPU, where that returns when the kernel has ended,
        behind the pushes.
        """
        if in_steps:
            for step, peer in enumerate(self._peers):
                launch(step)
                self._stream.fork()
                self._hand_over(peer, rows, arrived)
            launch(len(self._peers))
        elif self._memory.device.type == "cpu":
            self._push(rows, arrived)
            launch()
        else:
            launch()
            self._push(rows, arrived)

    def _push(self, rows: Sequence[int], arrived: int) -> None:
        for peer in self._peers:
            if self._permits is not None:
                self._permits.take(peer.rank)
            self._memory.wait_signal(peer.done, 1, self._stream)
            self._memory.write_signal(peer.done, 0, self._stream)
            self._hand_over(peer, rows, arrived)

    def _hand_over(self, peer: _SumPeer, rows: Sequence[int], arrived: int) -> None:
        if count := rows[peer.rank]:
            self._memory.copy(peer.slot[:count], peer.sums[:count], self._stream)
        self._memory.write_signal(peer.our_arrived, arrived, self._stream)
