"""Pushes to peers beside a kernel, with their permits; nothing depends on a call's number.

    Pushes         permits, copies and flags of one side stream
    ChunkPusher    pushes this rank's chunk to all peers: `AllGatherGemm`
    SumPusher      pushes sums to their ranks: `GemmReduceScatter`, `MoEReduceScatter`

The device side is in `peers` and, for chunks, in `chunks`.

Why every push ends, and no memory is read too early or written too late: docs/protocol.md, whose notes are
cited here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator

import torch

from ..configs import INTERPRETED
from ..symm import Copy, Lowered, SideStream, Step, SymmetricMemory, SymmetricTensor, Wait, Write
from ..tensors import remember
from .flags import AFTER, ARRIVED, DONE, FORKED, FREE, ROWS_SENT

Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]  # to where, from where
RISEN = slice(ROWS_SENT.value, ARRIVED.value + 1)  # rows of flags that peers raise
FOLLOWING = slice(AFTER.value, AFTER.value + 2)  # their values after a call
BLOCK_ROWS = 16 if INTERPRETED else 128  # pieces of rows end at multiples of it: the height of most tiles
PIECES, LEAST_BYTES = 4, 0 if INTERPRETED else 4 << 20  # of a peer's sums: fewer bytes take 15 us at most


def piece_counts(rows: int) -> tuple[int, ...]:
    """Return the numbers of pieces in which so many rows may be copied; a piece has at least one block."""
    return (1, *(pieces for pieces in (2, 4) if pieces <= rows // BLOCK_ROWS))


@functools.lru_cache
def piece_ends(rows: int, pieces: int) -> tuple[int, ...]:
    """Return the end of each piece, in rows; pieces are equal, rounded to blocks."""
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
        # Peers, the one that visits this rank's chunk first in front.
        self.before = [(rank - step) % world for step in range(1, world)]
        # Views made once, not in every call: [peer][row].
        rows = range(len(flags.local))
        self._here = [[flags.local[row, peer] for row in rows] for peer in range(world)]
        self._there = [[theirs[row, rank] for row in rows] for theirs in flags.peers]
        self._set_risen = memory.prepare_copy_here(flags.local[RISEN])
        self._following = flags.local[FOLLOWING]
        self.leave = Write(flags.local[ARRIVED.value, rank], 1)
        # They let the peers write here: see [Note: no slot is overwritten while it is read].
        self._permits: list[Step] = [self.raising(peer, FREE.value, 1) for peer in self.before]
        own = self._here[rank][FORKED.value]
        self._raise = memory.prepare_here([Lowered(own), Write(own, 1)])
        self._eager_permits: list[Step] = [Wait(own, 1), *self._permits]
        self._eager_end: list[Step] = [Write(own, 0)]
        self._prepared: dict[Hashable, Callable[[], None] | None] = {}  # None: the key was used once
        self.owes_parts = False  # the peers' permits are taken, and the parts not pushed yet

    def fork(self, *, at_once: bool) -> tuple[list[Step], list[Step]]:
        """Return the first steps of a call, which give permits after the caller's work so far; and the last.

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

        at_once: from a key's second call on its steps are prepared: one driver call enqueues all signals
        between two copies; not yet tried in a capture. The first call prepares nothing: a signal takes 3 to
        4 us to prepare (2 busy cores, 2026-11-29), longer than to enqueue, and a key with counts of tokens
        may not come again.
        """
        prepared = self._prepared.get(key) if at_once else None
        if prepared is not None:
            prepared()
        elif at_once and key in self._prepared:
            made = self._prepared[key] = self.memory.prepare(list(steps), self.stream)
            made()
        else:
            if at_once:
                remember(self._prepared, key, None)
            self.memory.enqueue(steps, self.stream)

    def taking(self, peer: int, row: int) -> list[Step]:
        """Return steps that wait for a flag here, and lower it: FREE, the peer's permit, or DONE.

        See [Note: one permit a push].
        """
        flag = self._here[peer][row]
        return [Wait(flag, 1), Write(flag, 0)]

    def sending(self, peer: int, copies: Copies, row: int, value: int) -> list[Step]:
        """Return copies to the peer's memory, followed by the flag that announces them."""
        return [*(Copy(there, here) for there, here in copies), self.raising(peer, row, value)]

    def here(self, peer: int, row: int) -> torch.Tensor:
        """Return this rank's flag about a peer."""
        return self._here[peer][row]

    def raising(self, peer: int, row: int, value: int) -> Write:
        """Return the step that sets the peer's flag about this rank."""
        return Write(self._there[peer][row], value)

    def warm_up(self, copies: Copies) -> None:
        """Copy a row of zeros to each peer, which reads nothing until a flag is raised.

        So the driver sets up its first copy to a peer before a kernel spins.
        """
        for there, here in copies:
            self.memory.copy(there[:1], here[:1], self.stream)
        self.stream.join()

    def finish(self) -> None:
        """Enqueue the steps after the kernels of a call; the caller's next work follows them."""
        self.stream.join()
        self.put_back()

    def finish_stores(self, *, has_pushed: bool) -> None:
        """Do the same after a kernel that stores. has_pushed: the side stream has pushed, too."""
        self.owes_parts = False
        if has_pushed:  # else a capture has no part of the side stream
            self.stream.join()
        self.put_back()

    def put_back(self) -> None:
        """Enqueue the lowering of the flags that peers raise: see [Note: no stale pushes]."""
        self._set_risen(self._following)  # it may need an SM: free after the kernels


class ChunkPusher:
    """Pushes this rank's chunk to its peers."""

    def __init__(self, memory: SymmetricMemory, gather: SymmetricTensor, flags: SymmetricTensor) -> None:
        self.pushes, rank = Pushes(memory, memory.side_stream(), flags), memory.rank
        self._shard, self.flags = gather.local[rank], flags.local
        self._slots = [(peer, gather.peers[peer][rank]) for peer in self.pushes.before]
        # A lone rank's kernel waits for nothing; on the CPU the host waits; a graph joins its branches.
        self._joins = memory.world_size == 1 or memory.device.type == "cpu"

    def start(self, rows: int, pieces: int, *, is_capturing: bool) -> None:
        """Enqueue the pushes of one call after the caller's work so far: see [Note: a push ends]."""
        first, last = self.pushes.fork(at_once=not is_capturing)
        steps = self._steps(first, last, rows, pieces)
        self.pushes.run((rows, pieces), steps, at_once=not is_capturing)

    def finish(self, *, is_capturing: bool) -> None:
        """Order later work after the pushes, unless a kernel does so; on the CPU, raise their errors."""
        if is_capturing or self._joins:
            self.pushes.stream.join()

    def _steps(self, first: list[Step], last: list[Step], rows: int, pieces: int) -> Iterator[Step]:
        pushes = self.pushes
        yield from first
        for peer, slot in self._slots:
            yield from pushes.taking(peer, FREE.value)
            yield pushes.raising(peer, ROWS_SENT.value, rows)
            for a, b in itertools.pairwise((0, *piece_ends(rows, pieces))):
                yield from pushes.sending(peer, [(slot[a:b], self._shard[a:b])], ARRIVED.value, b)
        yield from last
        yield pushes.leave


class SumPusher:
    """Pushes sums to their ranks, rank + 1 first.

    partial: slot s - 1 holds this rank's sums for rank + s. staged: slot s - 1 holds the sums of rank + s for
    this rank. with_permits: this class forks, gives and takes permits, and joins if it must; the kernel waits
    until all sums have left. Else the caller does so.
    """

    def __init__(
        self, pushes: Pushes, partial: torch.Tensor, staged: SymmetricTensor, *, with_permits: bool
    ) -> None:
        self.pushes, self._partial = pushes, partial
        self._with_permits = with_permits and pushes.memory.world_size > 1
        self._sums = []  # by step: the peer, its memory for them, and where they are here
        for step, peer in enumerate(reversed(pushes.before), 1):
            slot = pushes.memory.world_size - step - 1  # this rank is `world - step` after the peer
            self._sums.append((peer, staged.peers[peer][slot], partial[step - 1]))
        pushes.warm_up((there, here) for _, there, here in self._sums)

    def room(self, rows: int) -> torch.Tensor:
        """Return memory for so many rows of sums for a collective: that of partial sums if it is enough."""
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
        """Enqueue the launches of one call, and after the caller's work so far pushes of `rows[p]` to rank p.

        in_pieces: on p, ROWS_SENT of this rank becomes the number of rows, and ARRIVED the number so far;
        else ARRIVED becomes 1. in_steps: for each chunk `launch(step)`, whose kernel takes the permit, then
        the push, without a wait; else one `launch()`: see [Note: shared hardware queues]. at_once: as in
        `Pushes.run`.
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
        # A capture ends only if all streams that were forked in it are joined, and none that were not.
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

        ROWS_SENT comes after the first piece, before the flag that announces it: a batch of signals less.
        """
        if not in_pieces:
            copies = [(there[:rows], here[:rows])] if rows else []
            yield from self.pushes.sending(peer, copies, ARRIVED.value, 1)
            return
        pieces = PIECES if rows * here.shape[1] * here.element_size() >= LEAST_BYTES else 1
        for begin, end in itertools.pairwise((0, *piece_ends(rows, pieces))):
            yield Copy(there[begin:end], here[begin:end])
            if begin == 0:
                yield self.pushes.raising(peer, ROWS_SENT.value, rows)
            yield self.pushes.raising(peer, ARRIVED.value, end)
        if self._with_permits and peer == self._sums[-1][0]:
            yield from last
            yield self.pushes.leave
