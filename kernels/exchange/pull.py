"""Pulling: a rank fetches its peers' chunks on a side stream, piece by piece, and raises flags behind them.

The memory of a rank, W ranks:

    gather   [W, m_per_rank, K], symmetric; slots of pushed chunks lie behind it. Chunk p is rank p's shard;
             the own chunk is `op.shard`, read in place by the own GEMM and copied by the peers
    flags    int32 [7, W], symmetric: see `flags`

Call e on rank r, with m rows. e is the epoch, 1, 2, 3, ...; b is the base, the rows of each chunk that were
fetched in all calls before. Neither is ever reset; both wrap, and are compared by their difference:

    caller's stream                           side stream: copy engine and stream memory operations
    a_shard to chunk r, if it is not there
    fork                               -->    READY[r] of every peer := e
    GEMM, one persistent kernel:              for p = r + 1, r + 2, ... (mod W):
        chunk r at once,                          wait until READY[p] >= e
        rows up to i of chunk p once              for each piece of the chunk, up to row i:
        ARRIVED[p] >= b + i,                          the piece of rank p's chunk p to chunk p here
        at last waits for ARRIVED[p] >= b + m         ARRIVED[p] := b + i
        and FETCHED[p] >= e                       FETCHED[r] of rank p := e

Nothing joins the side stream: a GEMM that has ended has seen all that was written here, and that no peer
fetches from here any more. On the CPU the host waits for it, to raise what went wrong there.

The notes hold as well for the small kernel that waits where cuBLAS multiplies.

[Note: a pull ends] No operation of the side stream needs an SM, and those of call e are enqueued before the
GEMM of call e: neither a full chip nor a shared hardware queue holds them back. They wait for the fork, that
is for the caller's earlier work, and for the peers' READY, which follows the peers' forks; none waits for a
GEMM of call e. So if all GEMMs of call e - 1 end, then all forks of e happen, all READY are written, all
pieces are copied, all ARRIVED come to b + m, all FETCHED are written, and all GEMMs of call e end.

[Note: pieces need no agreement] Rank r alone writes and reads its ARRIVED[p], which counts rows. A program
that has read ARRIVED[p] may read ARRIVED[p] - b rows without another wait.

[Note: no stale rows] ARRIVED[p] := b + i follows the copy of the rows up to i on one stream, and that
follows READY. Before call e ARRIVED[p] is b, as every call ends at its own b + m, the next one's base. So
call e has written any value above b.

[Note: no chunk is overwritten while it is read] The copies of call e + 1 write chunk p here behind the fork
of e + 1, so behind the GEMM of e, its only reader beside cuBLAS. The caller writes chunk r behind the GEMM of
e, which does not end before every peer's FETCHED says that its last piece is copied. One gather buffer is
enough. ROWS has a flag for even and one for odd epochs: p writes the same flag again in call e + 2, behind
its GEMM of e + 1, behind our FETCHED of e + 1, behind our fork of e + 1, behind the GEMM of e that read it. A
rank copies as many rows as it has itself; at the end ROWS shows a peer that has others.

[Note: a pull is given up] When the GEMM's patience ends it records the peer and the epoch in memory that the
host reads, sets ARRIVED[p] far ahead of b, and releases its side stream by setting READY[p] itself. The next
call, `check` and `close` report that, and the operation can only be closed. If the side stream's copies go on
after all, they lower ARRIVED[p] again: a program may wait its patience once more for each piece. Otherwise
ARRIVED[p] stays ahead of the bases of the next 2**29 rows: calls that are enqueued already do not wait again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..configs import INTERPRETED
from ..symm import Copy, Step, SymmetricMemory, SymmetricTensor, Wait, Write
from ..tensors import remember
from .flags import ARRIVED, FETCHED, READY, ROWS

BLOCK_ROWS = 16 if INTERPRETED else 128  # pieces end at multiples of it: the height of most tiles
EPOCH, BASE = 0, 1  # the numbers of a call that its steps count from


def piece_counts(rows: int) -> tuple[int, ...]:
    """Return in how many pieces a chunk of so many rows may be copied; each is to be a block at least."""
    return (1, *(pieces for pieces in (2, 4) if pieces <= rows // BLOCK_ROWS))


@functools.lru_cache
def piece_ends(rows: int, pieces: int) -> tuple[int, ...]:
    """Return the row behind each piece, in order; the pieces are of equal size, to a block."""
    blocks = rows // BLOCK_ROWS
    ends = {piece * blocks // pieces * BLOCK_ROWS for piece in range(1, pieces)} - {0}
    return (*sorted(ends), rows)


@dataclass(frozen=True)
class _Peer:
    """One peer's chunk and the flags between it and this rank; views made once, not in every call."""

    chunk_here: torch.Tensor
    chunk_there: torch.Tensor
    arrived: torch.Tensor  # here, for the kernel
    ready: torch.Tensor  # here, written by the peer
    our_ready: torch.Tensor  # there
    our_fetched: torch.Tensor  # there
    our_rows: tuple[torch.Tensor, torch.Tensor]  # there, for even and for odd epochs


class ChunkProducer:
    """Copies chunks rank + 1, rank + 2, ... on a side stream of the memory it is given.

    On GPUs the side stream is a CUDA stream and needs no SM; on the CPU it is a thread. Both take the order
    of operations, on which the proof above rests, from `start` and `steps`.
    """

    def __init__(self, memory: SymmetricMemory, gather: SymmetricTensor, flags: SymmetricTensor) -> None:
        self._memory = memory
        self._stream = memory.side_stream()
        self._announced_rows = [0, 0]
        self._exchanges: dict[tuple[int, int], Callable[..., None]] = {}  # by rows and pieces
        self._peers = []
        for step in range(1, memory.world_size):
            peer = (memory.rank + step) % memory.world_size
            theirs = flags.peers[peer][:, memory.rank]
            self._peers.append(
                _Peer(
                    chunk_here=gather.local[peer],
                    chunk_there=gather.peers[peer][peer],
                    arrived=flags.local[ARRIVED.value, peer],
                    ready=flags.local[READY.value, peer],
                    our_ready=theirs[READY.value],
                    our_fetched=theirs[FETCHED.value],
                    our_rows=(theirs[ROWS.value], theirs[ROWS.value + 1]),
                )
            )

    def start(self, rows: int, epoch: int, base: int, pieces: int) -> None:
        """Enqueue the exchange of one call, behind the caller's work so far.

        base: ARRIVED before this call. pieces: of each chunk. To be called before the kernel is launched:
        see [Note: a pull ends].
        """
        exchange = self._exchanges.get((rows, pieces))
        if exchange is None:
            exchange = self._memory.prepare(self.steps(rows, pieces), self._stream)
            remember(self._exchanges, (rows, pieces), exchange)
        self._stream.fork()
        parity = epoch & 1  # see [Note: no chunk is overwritten while it is read]
        if self._announced_rows[parity] != rows:
            self._announced_rows[parity] = rows
            for peer in self._peers:
                self._memory.write_signal(peer.our_rows[parity], rows, self._stream)
        exchange(epoch, base)

    def steps(self, rows: int, pieces: int) -> list[Step]:
        """Return what follows the fork and the numbers of rows, in this order."""
        steps: list[Step] = [Write(peer.our_ready, 0, plus=EPOCH) for peer in self._peers]
        for peer in self._peers:
            steps.append(Wait(peer.ready, 0, plus=EPOCH))
            for begin, end in itertools.pairwise((0, *piece_ends(rows, pieces))):
                steps.append(Copy(peer.chunk_here[begin:end], peer.chunk_there[begin:end]))
                steps.append(Write(peer.arrived, end, plus=BASE))  # see [Note: no stale rows]
            steps.append(Write(peer.our_fetched, 0, plus=EPOCH))
        return steps

    def finish(self) -> None:
        """On the CPU, wait for the exchange and raise its errors."""
        if self._memory.device.type == "cpu":
            self._stream.join()
