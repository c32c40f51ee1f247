"""What a rank does in place of its part of a call by pushes: stand in for it, or leave.

See docs/protocol.md, Ranks that take no part.
"""

from __future__ import annotations

import itertools
import threading
import time

import torch
import triton
import triton.language as tl

from ..launches.prepared import PlainLaunches
from ..signals import GIVEN_UP
from ..symm import Wait, Write
from ..symm.shm import HostStream
from .chunks import wait_for_own, wait_for_rows
from .flags import AFTER, ARRIVED, DONE, FREE, NOT_PUSHED, ROWS_SENT
from .peers import Peers, free_side_stream, told_by, wait_for_flag
from .push import Pushes

FAR = GIVEN_UP.value + 1  # of a flag whose rank is given up
POLL_S = 1e-4


@triton.jit(do_not_specialize=["rank", "patience_ticks"])
def await_parts(
    flags_ptr,
    errors_ptr,
    rank,
    patience_ticks,
    WORLD: tl.constexpr,
    COUNTED: tl.constexpr,
    ANNOUNCED: tl.constexpr,
):
    """Return when all peers' parts are here and ours has left, or patience has ended; a program a rank.

    COUNTED: ARRIVED counts the rows that ROWS_SENT announces. ANNOUNCED: side streams take permits and raise
    ROWS_SENT, but a kernel may raise ARRIVED before.
    """
    part = (rank + 1 + tl.program_id(0)) % WORLD
    peers = Peers(flags_ptr, errors_ptr, rank, patience_ticks)
    if part == rank:  # by the last program
        wait_for_own(peers, WORLD)
    else:
        if ANNOUNCED:
            wait_for_flag(ROWS_SENT, NOT_PUSHED, part, peers, WORLD)
        arrived = wait_for_rows(part, 1, peers, WORLD, False)
        if COUNTED and arrived < GIVEN_UP:
            arrived = wait_for_rows(part, told_by(part, peers, WORLD), peers, WORLD, False)
        if arrived >= GIVEN_UP:
            free_side_stream(part, flags_ptr, WORLD)


_AWAIT = PlainLaunches(await_parts, num_warps=1)


def stand_in(
    pushes: Pushes,
    flags: torch.Tensor,
    errors: torch.Tensor,
    mark: int,
    patience_ticks: int,
    *,
    counted: bool,
    announced: bool,
) -> None:
    """Enqueue, in place of a call, what its peers and the next call need: see [Note: a rank stands in].

    counted, announced: see `await_parts`.
    """
    rank, world = pushes.memory.rank, pushes.memory.world_size
    first, last = pushes.fork(at_once=True)
    steps = [*first]
    for peer in pushes.before:
        steps += pushes.taking(peer, FREE.value)
        steps += [pushes.raising(peer, ROWS_SENT.value, mark), pushes.raising(peer, ARRIVED.value, 1)]
    pushes.run("stands in", [*steps, *last, pushes.leave], at_once=True)
    constants = {"WORLD": world, "COUNTED": counted, "ANNOUNCED": announced}
    aligned = flags.data_ptr() % 16 == 0, errors.data_ptr() % 16 == 0
    kind = (flags.device, *aligned, *constants.values())
    _AWAIT.launch(kind, (world, 1, 1), (flags, errors), (rank, patience_ticks), constants)
    if pushes.memory.device.type == "cpu":
        pushes.stream.join()
    pushes.put_back()


def leave(pushes: Pushes, timeout_s: float, *, behind_kernels: bool) -> None:
    """Let each peer find this rank given up, once it comes to a call that this rank has not pushed for.

    behind_kernels: of this rank's calls, as some may take permits themselves. See [Note: a rank leaves].
    """
    words = (FREE.value, AFTER.value, AFTER.value + 1, ROWS_SENT.value, ARRIVED.value)
    told = {
        peer: (pushes.here(peer, FREE.value), [pushes.raising(peer, word, FAR) for word in words])
        for peer in pushes.before
    }
    if isinstance(pushes.stream, HostStream):
        if pushes.owes_parts:  # the side stream waits for sums that no kernel computes
            for peer in pushes.before:
                pushes.here(peer, DONE.value).fill_(1)
        behind = (pushes.stream, pushes.stream.mark(), told, timeout_s)
        options = {"has_permits": pushes.owes_parts}
        threading.Thread(target=_tell_behind, args=behind, kwargs=options, daemon=True).start()
    elif pushes.owes_parts:  # the peers' permits for this call are taken
        pushes.memory.enqueue(itertools.chain(*(writes for _, writes in told.values())), pushes.stream)
    else:
        if behind_kernels:
            pushes.stream.fork()
        for permit, writes in told.values():
            pushes.memory.enqueue([Wait(permit, 1), Write(permit, 0), *writes], pushes.stream)


def _tell_behind(
    stream: HostStream,
    pushed: threading.Event,
    told: dict[int, tuple[torch.Tensor, list[Write]]],
    timeout_s: float,
    *,
    has_permits: bool,
) -> None:
    """Tell the peers after this call's pushes, which would lower again what they are told.

    As each peer comes, if this call has not taken its permit, or closing has ended the pushes early.
    """
    if pushed.wait(timeout_s) and has_permits and not stream.has_failed:
        for _, writes in told.values():
            for word, value in writes:
                word.fill_(value)
    else:
        _tell(told, timeout_s)


def _tell(told: dict[int, tuple[torch.Tensor, list[Write]]], timeout_s: float) -> None:
    """Tell each peer as soon as it comes: none of them waits after another."""
    deadline = time.monotonic() + timeout_s
    while told and time.monotonic() < deadline:
        for peer in [peer for peer, (permit, _) in told.items() if int(permit) >= 1]:
            for word, value in told.pop(peer)[1]:
                word.fill_(value)
        time.sleep(POLL_S)
