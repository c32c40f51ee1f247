"""Pushing to peers beside a kernel, with their permits; nothing depends on the number of a call.

A CUDA graph repeats the values that were written during its capture, so there can be no epochs. Instead each
flag goes up and down once in a call, raised by one side and lowered by the other: FREE[p], 1 while this rank
may write its slot on p, and ARRIVED[p], above 0 once p's data is here.

    Pushes         permits, copies and flags of one side stream
    ChunkPusher    pushes this rank's chunk to all peers: `AllGatherGemm`
    SumPusher      pushes sums to their ranks: `GemmReduceScatter`, `MoEReduceScatter`
    peers          the device side; that of chunks is `chunks`

The memory of a rank for chunks, W ranks:

    gather   [W, m_per_rank, K], symmetric. Chunk p is rank p's shard; the own chunk is `op.shard`, read in
             place by the own GEMM and copied to chunk r of the peers
    flags    int32 [7, W], symmetric: see `flags`

Call k on rank r, with m rows:

    caller's stream                           side stream: copy engine and stream memory operations
    a_shard to chunk r, if it is not there
    fork: wait until DONE[r] = 0,
        DONE[r] := 1                   -->    wait until DONE[r] >= 1
    GEMM, one persistent kernel:              FREE[r] of every peer := 1
        chunk r at once,                      for p = r - 1, r - 2, ... (mod W):
        rows up to i of chunk p once              wait until FREE[p] >= 1, FREE[p] := 0
        ARRIVED[p] >= i,                          TOLD[r] of rank p := m
        at last all that p has announced          for each piece of chunk r, up to row i:
        and ARRIVED[r]                                the piece to chunk r on rank p
    TOLD, ARRIVED := AFTER                            ARRIVED[r] of rank p := i
                                              DONE[r] := 0, ARRIVED[r] := 1

Rank r uses chunk r + 1 first, and rank r + 1 pushes to rank r first.

[Note: a fork is a flag, and nothing joins] The side stream of an eager call waits for DONE[r] of this rank
itself, which the caller's stream raises. That orders as an event does, in one call of the driver, as the wait
shares that of the permits. The host enqueues the raise first: no wait at the head of a hardware queue holds
it up. A GEMM that has ended has seen in ARRIVED[r] that all has left: the side stream is empty, and what
follows in the caller's stream may write what the pushes have read. Captured calls fork and join by events,
the edges of their graphs; their GEMMs wait for ARRIVED[r], too. (A rank alone that gathers, and calls over
experts, join; on the CPU all pushes do.)

[Note: no raise is lost] The side stream lowers DONE[r] at its end of a call, which the next raise awaits.
Behind a GEMM that has seen ARRIVED[r] that wait is over. Behind one that has given up its own pushes, eager
calls that are enqueued already would else run ahead of the side stream; of two raises one would be lost, and
it would wait for ever. (Two H100: the wait takes the device no time that shows. Replays behind such a call do
not wait, which would take each eager call 2 to 6 us, and a peer that has given this rank up may give too few
permits: a side stream may still be left waiting, so `calls.wait_for_device` has a bound.)

[Note: a push ends] The pushes of call k wait for their fork and for the peers' FREE, which follows the peers'
forks; none waits for a GEMM of call k, and none needs an SM. So if all GEMMs and pushes of call k - 1 end,
then all forks of k happen, all FREE are set, all pieces are pushed, and all GEMMs of call k end. (CUDA does
not promise that the branches of a graph run side by side: where they did not, the GEMM would report it.)

[Note: pieces need no agreement] ARRIVED[p] counts rows, and p alone raises it. A program that has read it may
read so many rows without another wait.

[Note: ranks with other rows] A GEMM does not wait for rows that never come. It waits for the first row of a
chunk, then reads TOLD[p]; if the rows it needs were not announced, it records that and asks no more in this
call. At its end it waits for all rows that were announced, so the flags are as after any other call.

The notes below hold for sums and choices of experts as well, with their kernels in place of the GEMM.

[Note: one permit a push] p sets FREE[p] here for call k + 1 behind its GEMM of k. That GEMM has seen the last
of our ARRIVED of k, which follows our FREE[p] := 0 of k.

[Note: no stale pushes] GEMM k ends after it has seen all of ARRIVED[p], and push k writes nothing behind
that. Then ARRIVED[p] becomes 0, then call k + 1 gives p its permit. So if GEMM k + 1 finds ARRIVED[p] above
0, push k + 1 has written it, behind the data that it announces.

[Note: no slot is overwritten while it is read] Push k + 1 of p writes here behind our fork of k + 1: behind
GEMM k, cuBLAS, and the caller's reads of `op.gathered`. (A permit at the end of call k would let a fast peer
write during those reads.) The sources of our pushes of k are written again behind GEMM k, which has seen
ARRIVED[r], or over experts behind the join.

[Note: a collective needs no permit] A collective in place of call k + 1 writes here behind our own part of
it, so behind GEMM k, which has seen all that peers push here in k, and that our chunk has left. No peer
pushes in k + 1, as all ranks make the collective; a push of k + 2 has our permit of k + 2, which follows.

[Note: a push is given up] A stream's wait has no limit of its own; the GEMM's wait has. When its patience
ends it records the peer and sets AFTER[p] and ARRIVED[p] far ahead, so that later replays do not wait again.
(It waits W times as long for ARRIVED[r]: peers may hold up our side stream until they are given up, one after
the other.) Each GEMM that finds p given up also sets FREE[p], so that the side stream runs through. (No other
permit can be missing: a rank gives its permits of call k before it pushes its data of call k.) The host sees
the record in `check`, `close` and the next eager call, and the operation can only be closed. Replays enqueued
already end with wrong results, even if the peer comes back. With three ranks or more a live peer may be given
up too: one whose push to us follows its push to the dead one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator

import torch

from ..configs import INTERPRETED
from ..symm import Copy, Lowered, SideStream, Step, SymmetricMemory, SymmetricTensor, Wait, Write
from ..tensors import remember
from .flags import AFTER, ARRIVED, DONE, FREE, TOLD

Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]  # to where, from where
RISEN = slice(TOLD.value, ARRIVED.value + 1)  # rows of flags that peers raise
FOLLOWING = slice(AFTER.value, AFTER.value + 2)  # their values after a call
BLOCK_ROWS = 16 if INTERPRETED else 128  # pieces of rows end at multiples of it: the height of most tiles
PIECES, LEAST_BYTES = 4, 0 if INTERPRETED else 4 << 20  # of a peer's sums: fewer bytes take 15 us at most


def piece_counts(rows: int) -> tuple[int, ...]:
    """Return in how many pieces a chunk of so many rows may be copied; each is to be a block at least."""
    return (1, *(pieces for pieces in (2, 4) if pieces <= rows // BLOCK_ROWS))


@functools.lru_cache
def piece_ends(rows: int, pieces: int) -> tuple[int, ...]:
    """Return the row behind each piece, in order; the pieces are of equal size, to a block."""
    blocks = rows // BLOCK_ROWS
    ends = {piece * blocks // pieces * BLOCK_ROWS for piece in range(1, pieces)} - {0}
    return (*sorted(ends), rows)


class Pushes:
    """The pushes of one side stream: permits, copies and flags.

    flags: [FLAGS, W], see `flags`.
    """

    def __init__(self, memory: SymmetricMemory, stream: SideStream, flags: SymmetricTensor) -> None:
        self.memory, self.stream = memory, stream
        rank, world = memory.rank, memory.world_size
        self.before = [(rank - step) % world for step in range(1, world)]  # peers, whose first chunk is ours
        # Views made once, not in every call: [peer][row].
        rows = range(len(flags.local))
        self._here = [[flags.local[row, peer] for row in rows] for peer in range(world)]
        self._there = [[theirs[row, rank] for row in rows] for theirs in flags.peers]
        self._set_risen = memory.prepare_copy_here(flags.local[RISEN])
        self._following = flags.local[FOLLOWING]
        self.leave = Write(flags.local[ARRIVED.value, rank], 1)
        # They let the peers write here: see [Note: no slot is overwritten while it is read].
        self._permits: list[Step] = [self.raising(peer, FREE.value, 1) for peer in self.before]
        own = self._here[rank][DONE.value]
        self._raise = memory.prepare_here([Lowered(own), Write(own, 1)])
        self._eager_permits: list[Step] = [Wait(own, 1), *self._permits]
        self._eager_end: list[Step] = [Write(own, 0)]
        self._prepared: dict[Hashable, Callable[[], None]] = {}
        self.owes_parts = False  # permits of the peers are taken, and parts are not pushed yet

    def fork(self, *, at_once: bool) -> tuple[list[Step], list[Step]]:
        """Return the first steps of a call, behind the caller's work so far, the permits; and the last ones.

        at_once: as in `run`. The last ones come before `leave`. See [Note: a fork is a flag, and nothing
        joins], and see [Note: no raise is lost].
        """
        if not at_once:
            self.stream.fork()
            return self._permits, []
        self._raise()
        return self._eager_permits, self._eager_end

    def run(self, key: Hashable, steps: Iterable[Step], *, at_once: bool) -> None:
        """Enqueue the steps on the side stream. `key` identifies them.

        at_once: prepare them once for each key, with one call of the driver for the signals between two
        copies; not yet tried in a capture.
        """
        if not at_once:
            self.memory.enqueue(steps, self.stream)
            return
        prepared = self._prepared.get(key)
        if prepared is None:
            made = self.memory.prepare(list(steps), self.stream)
            prepared = remember(self._prepared, key, made)
        prepared()

    def taking(self, peer: int, row: int) -> list[Step]:
        """Return a wait for a flag here, and its lowering: FREE, the peer's permit, or DONE.

        See [Note: one permit a push].
        """
        flag = self._here[peer][row]
        return [Wait(flag, 1), Write(flag, 0)]

    def sending(self, peer: int, copies: Copies, row: int, value: int) -> list[Step]:
        """Return copies to the peer's memory, and behind them the flag that announces them."""
        return [*(Copy(there, here) for there, here in copies), self.raising(peer, row, value)]

    def here(self, peer: int, row: int) -> torch.Tensor:
        """Return this rank's flag about a peer."""
        return self._here[peer][row]

    def raising(self, peer: int, row: int, value: int) -> Write:
        """Return the setting of the peer's flag about this rank."""
        return Write(self._there[peer][row], value)

    def warm_up(self, copies: Copies) -> None:
        """Copy a row of zeros to each peer, which reads none before a flag is raised.

        The driver's setup for the first copy to a peer must not happen while a kernel spins.
        """
        for there, here in copies:
            self.memory.copy(there[:1], here[:1], self.stream)
        self.stream.join()

    def finish(self) -> None:
        """Enqueue what follows the kernels of a call, and order what the caller does next behind it."""
        self.stream.join()
        self.put_back()

    def put_back(self) -> None:
        """Enqueue that flags which peers raise are lowered: see [Note: no stale pushes]."""
        self._set_risen(self._following)  # it may need an SM: free behind the kernels


class ChunkPusher:
    """Pushes this rank's chunk to its peers, and notes on the device what replays of graphs gather."""

    def __init__(self, memory: SymmetricMemory, gather: SymmetricTensor, flags: SymmetricTensor) -> None:
        self.pushes, rank = Pushes(memory, memory.side_stream(), flags), memory.rank
        self._shard, self.flags = gather.local[rank], flags.local
        self._slots = [(peer, gather.peers[peer][rank]) for peer in self.pushes.before]
        # Of the last call or replay, if it was captured; else 0. Only the device knows of replays.
        self._noted = memory.hold(flags.local.new_zeros(1))
        # A lone rank's kernel waits for nothing, on the CPU the host does, and a graph joins its branches.
        self._joins = memory.world_size == 1 or memory.device.type == "cpu"

    def start(self, rows: int, pieces: int, *, is_capturing: bool) -> None:
        """Enqueue the pushes of one call behind the caller's work so far: see [Note: a push ends]."""
        first, last = self.pushes.fork(at_once=not is_capturing)
        steps = self._steps(first, last, rows, pieces, noted=rows if is_capturing else 0)
        self.pushes.run((rows, pieces), steps, at_once=not is_capturing)

    def finish(self, *, is_capturing: bool) -> None:
        """Order what follows behind the pushes, where no kernel does; on the CPU, raise their errors."""
        if is_capturing or self._joins:
            self.pushes.stream.join()

    def _steps(
        self, first: list[Step], last: list[Step], rows: int, pieces: int, *, noted: int
    ) -> Iterator[Step]:
        pushes = self.pushes
        yield from first
        for peer, slot in self._slots:
            yield from pushes.taking(peer, FREE.value)
            yield pushes.raising(peer, TOLD.value, rows)
            for a, b in itertools.pairwise((0, *piece_ends(rows, pieces))):
                yield from pushes.sending(peer, [(slot[a:b], self._shard[a:b])], ARRIVED.value, b)
        yield Write(self._noted, noted)
        yield from last
        yield pushes.leave

    @contextlib.contextmanager
    def noting(self, rows: int) -> Iterator[None]:
        """Note `rows` beside the block, a call that pushes nothing."""
        self.pushes.stream.fork()
        self.pushes.run(("noted", rows), [Write(self._noted, rows)], at_once=False)
        yield
        self.pushes.stream.join()

    def noted(self) -> int:
        """Return what the last call or replay has noted; wait for the device."""
        return int(self._noted.item())


class SumPusher:
    """Pushes sums to their ranks, rank + 1 first.

    partial: slot s - 1 holds this rank's sums for rank + s. staged: slot s - 1 holds the sums of rank + s for
    this rank. with_permits: a call forks here, and joins here where it must, its permits are given and taken
    here, and the kernel waits until all sums have left. Else who made the call has forked, given and taken
    them, and joins.
    """

    def __init__(
        self, pushes: Pushes, partial: torch.Tensor, staged: SymmetricTensor, *, with_permits: bool
    ) -> None:
        self.pushes, self._partial = pushes, partial
        self._with_permits = with_permits and pushes.memory.world_size > 1
        self._sums = []  # by step: the peer, its memory for them, and where they are here
        for step, peer in enumerate(reversed(pushes.before), 1):
            slot = pushes.memory.world_size - step - 1  # this rank is `world - step` behind the peer
            self._sums.append((peer, staged.peers[peer][slot], partial[step - 1]))
        pushes.warm_up((there, here) for _, there, here in self._sums)

    def room(self, rows: int) -> torch.Tensor:
        """Return memory for so many sums of a collective: the partial sums', if it is enough."""
        held = self._partial.flatten(0, 1)[:rows]
        return held if len(held) == rows else held.new_empty((rows, held.shape[1]))

    def run(
        self,
        launch: Callable[..., None],
        rows: tuple[int, ...],
        *,
        in_pieces: bool,
        in_steps: bool,
        at_once: bool,
    ) -> None:
        """Enqueue the launches of one call, and behind the caller's work so far the pushes of `rows[p]` to p.

        in_pieces: TOLD[r] of p becomes the number of its rows, and ARRIVED[r] how many are there so far; else
        ARRIVED[r] becomes 1. in_steps: `launch(step)` for each chunk, whose kernel takes the permit, and the
        push behind it, without a wait. Otherwise one `launch()`: see [Note: shared hardware queues].
        at_once: as in `Pushes.run`.
        """
        pushes = self.pushes
        first, last = pushes.fork(at_once=at_once) if self._with_permits else ([], [])
        if in_steps:
            if first:  # a kernel of each rank waits for them
                pushes.run("permits", first, at_once=at_once)
            for step, (peer, there, here) in enumerate(self._sums):
                launch(step)
                pushes.stream.fork()
                steps = self._sending(last, peer, there, here, rows[peer], in_pieces)
                pushes.run((peer, rows[peer]), steps, at_once=at_once)
            launch(len(self._sums))
        elif pushes.memory.device.type == "cpu":
            self._push(first, last, rows, in_pieces)
            pushes.owes_parts = True
            launch()
        else:
            launch()
            self._push(first, last, rows, in_pieces)
        pushes.owes_parts = False
        # A capture has no part of a stream that it was not forked to, and ends only if it joins all it was.
        if self._with_permits and (not at_once or pushes.memory.device.type == "cpu"):
            pushes.stream.join()

    def _push(self, first: list[Step], last: list[Step], rows: tuple[int, ...], in_pieces: bool) -> None:
        self.pushes.run(("sums", rows), self._steps(first, last, rows, in_pieces), at_once=True)

    def _steps(
        self, first: list[Step], last: list[Step], rows: tuple[int, ...], in_pieces: bool
    ) -> Iterator[Step]:
        yield from first
        for peer, there, here in self._sums:
            if self._with_permits:
                yield from self.pushes.taking(peer, FREE.value)
            yield from self.pushes.taking(peer, DONE.value)
            yield from self._sending(last, peer, there, here, rows[peer], in_pieces)

    def _sending(
        self,
        last: list[Step],
        peer: int,
        there: torch.Tensor,
        here: torch.Tensor,
        rows: int,
        in_pieces: bool,
    ) -> Iterator[Step]:
        """Yield the copies of one peer's sums, and the flags that announce them.

        TOLD comes behind the first piece, and before the flag that announces it: one batch of signals less.
        """
        if not in_pieces:
            copies = [(there[:rows], here[:rows])] if rows else []
            yield from self.pushes.sending(peer, copies, ARRIVED.value, 1)
            return
        pieces = PIECES if rows * here.shape[1] * here.element_size() >= LEAST_BYTES else 1
        for begin, end in itertools.pairwise((0, *piece_ends(rows, pieces))):
            yield Copy(there[begin:end], here[begin:end])
            if begin == 0:
                yield self.pushes.raising(peer, TOLD.value, rows)
            yield self.pushes.raising(peer, ARRIVED.value, end)
        if self._with_permits and peer == self._sums[-1][0]:
            yield from last
            yield self.pushes.leave
