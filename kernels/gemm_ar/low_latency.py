"""The kernel for few rows: it sends each peer its rows in words that say of which call they are.

A word of 64 bits is stored whole: the lower half are two elements of 16 bits, or one of 32, the upper half
its stamp: the number c of the call, and how many rows it has. Who finds the stamp of its call has the
elements. So no flag is raised behind the data, and nothing is acknowledged. Who finds its call with other
rows gives the rank up: they passed different numbers. What a rank holds, W ranks, R rows at most:

    mail    int64 [2, W, R, words of a row], symmetric: mail[c % 2, p] is what rank p sends in call c
    ticket  int64 [1]: TICKETS for each call that has begun, and 1 for each ticket of this one
    lost    int32 [1], symmetric: a bit for each peer that has been given up

Who finds the stamp of its call in all words of a part adds it, ends the rows and writes them. Why it ends,
and nothing is overwritten or read too early: docs/protocol.md, Mail. Sums have the same bits on all ranks,
and every wait has a bound, as in `pull`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..compat import compiled_for, leave_the_core
from ..configs import capability, take_first
from ..launches.settled import SettledLaunches
from ..signals import SLEEP_CPU_S, after_round, polls_per_round, record_failure, rounds_of
from ..symm import SymmetricMemory, SymmetricTensor
from .pull import OTHER_ROWS
from .rows import (
    Ends,
    Place,
    RowsLaunch,
    RowsShape,
    Tail,
    candidate,
    end_row,
    prune,
    with_norms,
)

MOST_ROWS = 64  # more are many words
MOST_COLUMNS = 2**18
TICKET_BITS = tl.constexpr(24)
TICKETS = tl.constexpr(1 << 24)  # above those of any call: a ticket for each part, and one for each program

NOT_SENT = tl.constexpr(4)  # what a failure record says about a peer, beside OTHER_ROWS
ROWS_BITS = tl.constexpr(7)  # of a stamp, the lowest: as many as MOST_ROWS needs
ROWS_MASK = tl.constexpr(127)

CANDIDATES = with_norms(
    [
        candidate(1024, 1, 4),
        candidate(512, 1, 4),
        candidate(2048, 1, 8),
        candidate(1024, 2, 4),
        candidate(512, 2, 2),
        candidate(4096, 1, 16),
    ]
)


class Mail(NamedTuple):
    """One call, as a program knows it."""

    table_ptr: Any  # int64 [WORLD]: where the mail of each rank lies
    mail_ptr: Any  # int64 [2, WORLD, capacity, length], this rank's
    capacity: Any  # rows of a slot
    length: Any  # words of a row
    lost_ptr: Any
    errors_ptr: Any  # int64 [WORLD], in memory that the host reads without waiting
    rank: Any
    stamp: Any  # int32
    patience_ticks: Any


@triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "WORLD", "SENT", "NORM"],
    prune_configs_by={"early_config_prune": prune},
    do_bench=take_first,  # outside a tuned function: a launch ends when the peers have come, behind theirs
)
@triton.jit(do_not_specialize=["rows", "capacity", "size_class", "rank", "patience_ticks", "eps"])
def exchange_rows(
    part_ptr,  # int32 [rows, N / PACK]: the elements of this rank's rows
    table_ptr,
    mail_ptr,
    ticket_ptr,  # int64 [1]
    lost_ptr,
    errors_ptr,
    residual_ptr,  # these four as in `rows.Tail`
    weight_ptr,
    out_ptr,
    sum_ptr,
    rows,
    capacity,
    size_class,  # of rows
    N,
    stride_residual,
    stride_out,
    rank,
    patience_ticks,
    eps,
    WORLD: tl.constexpr,
    PACK: tl.constexpr,  # elements of a word
    SENT: tl.constexpr,  # the words are sent to all, this rank among them, by `sending.multiply_and_send`
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    ROW: tl.constexpr,  # the least power of 2 that is N or more, if NORM
    BLOCK_N: tl.constexpr,
    PER_SM: tl.constexpr,  # the grid's: programs on an SM, at most
):
    """Write the rows' sum over ranks + residual; and its RMSNorm if NORM."""
    TARGET: tl.constexpr = compiled_for()
    WIDTH: tl.constexpr = ROW if NORM else BLOCK_N
    length = N // PACK
    blocks = tl.cdiv(N, WIDTH)
    parts = rows * blocks
    programs = tl.num_programs(0)
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed", scope="gpu")
    call = (ticket >> TICKET_BITS) + 1
    part = tl.cast(ticket & (TICKETS - 1), tl.int32)
    stamp = stamp_of(call, rows)
    mail = Mail(table_ptr, mail_ptr, capacity, length, lost_ptr, errors_ptr, rank, stamp, patience_ticks)
    to_send = 0
    if not SENT:
        to_send = parts
        while part < parts:
            _send(part_ptr, part // blocks, part % blocks, mail, WORLD, WIDTH // PACK)
            part = tl.cast(tl.atomic_add(ticket_ptr, 1, sem="relaxed", scope="gpu") & (TICKETS - 1), tl.int32)
    order = part - to_send  # how many programs came here before
    tail = Tail(residual_ptr, stride_residual, weight_ptr, sum_ptr, out_ptr, stride_out, eps)
    for part in range(order, parts, programs):
        row = part // blocks
        first = part % blocks * (WIDTH // PACK)
        cols = first * PACK + tl.arange(0, WIDTH)
        mask = cols < N
        total, is_lost = _receive(part_ptr, row, first, mail, out_ptr, WORLD, WIDTH // PACK, SENT)
        end_row(total, row, row, cols, mask, N, is_lost, tail, HAS_RESIDUAL, NORM)
    if SENT and TARGET == "cuda":
        tl.extra.cuda.gdc_wait()  # the kernel before this one has ended, too, and read `ticket`
    if order == programs - 1:
        tl.atomic_add(ticket_ptr, -to_send - programs + TICKETS, sem="relaxed", scope="gpu")


@triton.jit
def stamp_of(call, rows):
    """Return the stamp, an int32, of a call with so many rows."""
    return tl.cast((call << ROWS_BITS) | rows, tl.int32)


@triton.jit
def word_of(stamp, elements):
    """Return stamped words; elements: two of 16 bits each, or one of 32, in the lower half of an int64."""
    return (tl.cast(stamp, tl.int64) << 32) | elements


@triton.jit
def _slot_of(mail_ptr, sender, row, mail, WORLD: tl.constexpr):
    """Return where a row of this call, of a sender, lies in a rank's mail, of less than 2**31 words."""
    slot = ((mail.stamp >> ROWS_BITS) & 1) * WORLD + sender
    return mail_ptr + (slot * mail.capacity + row) * mail.length


@triton.jit
def _send(part_ptr, row, block, mail, WORLD: tl.constexpr, WORDS: tl.constexpr):
    """Store a part of an own row to all peers."""
    places = block * WORDS + tl.arange(0, WORDS)
    mask = places < mail.length
    elements = tl.load(part_ptr + row * mail.length + places, mask=mask, other=0)
    words = word_of(mail.stamp, elements.to(tl.int64) & 0xFFFFFFFF)
    for peer in range(0, WORLD):
        if peer != mail.rank:
            theirs_ptr = tl.load(mail.table_ptr + peer).to(tl.pointer_type(tl.int64))
            theirs_ptr = tl.multiple_of(theirs_ptr, 16)  # as all that is allocated
            tl.store(_slot_of(theirs_ptr, mail.rank, row, mail, WORLD) + places, words, mask=mask)


@triton.jit
def _receive(
    part_ptr, row, first, mail, like_ptr, WORLD: tl.constexpr, WORDS: tl.constexpr, SENT: tl.constexpr
):
    """Return the sum over ranks of a part of a row, and 1 if a rank's part of it does not come.

    All ranks' words are looked at in turns until none is missing: who waited for one after the other would
    look once more for each.
    """
    TARGET: tl.constexpr = compiled_for()
    HAS_CLOCK: tl.constexpr = TARGET == "cuda"
    POLLS: tl.constexpr = polls_per_round(TARGET)
    total, missing = _look(part_ptr, row, first, mail, like_ptr, WORLD, WORDS, SENT)
    pending = tl.max(missing, axis=0)
    waited_for = -1  # a bit for each rank that has not been given up, as far as this program has asked
    rounds_left = rounds_of(mail.patience_ticks, HAS_CLOCK)
    if TARGET == "cpu":  # a look takes as long there as so many polls of one word
        rounds_left = tl.cdiv(rounds_left, 1 + WORLD)
    began = 0
    polls = 0
    while (pending > 0) & (rounds_left > 0):
        if polls == 0:
            # One thread reads it for all: see `signals.in_any_thread`.
            waited_for = ~tl.atomic_or(mail.lost_ptr, 0, sem="relaxed", scope="gpu")
        if TARGET == "cpu":
            leave_the_core(SLEEP_CPU_S)
        total, missing = _look(part_ptr, row, first, mail, like_ptr, WORLD, WORDS, SENT)
        pending = tl.max(missing & waited_for, axis=0)
        polls += 1
        if polls == POLLS:
            polls = 0
            if pending > 0:
                _give_up_other_rows(row, first, mail, WORLD)
            rounds_left, began = after_round(rounds_left, began, mail.patience_ticks, HAS_CLOCK)
    is_lost = 0
    if (pending > 0) | (waited_for != -1):
        for peer in tl.static_range(0, WORLD):
            if tl.max((missing >> peer) & 1, axis=0) > 0:
                is_lost = 1
                if (waited_for >> peer) & 1 != 0:
                    _give_up(peer, NOT_SENT, 0, mail)
    return total, is_lost


@triton.jit
def _give_up(peer, kind, seen, mail):
    record_failure(mail.errors_ptr + peer, kind, mail.stamp >> ROWS_BITS, seen)
    tl.atomic_or(mail.lost_ptr, 1 << peer, sem="relaxed", scope="gpu")


@triton.jit
def _give_up_other_rows(row, first, mail, WORLD: tl.constexpr):
    """Give up the ranks that have sent this part in this call, with other rows: its first word tells."""
    for peer in tl.range(0, WORLD):
        slot_ptr = _slot_of(mail.mail_ptr, peer, row, mail, WORLD)
        found = tl.cast(tl.load(slot_ptr + first, volatile=True) >> 32, tl.int32)
        rows = found & ROWS_MASK  # 0: of a word that nobody has sent, whose number of the call comes, too
        if (found != mail.stamp) & (found >> ROWS_BITS == mail.stamp >> ROWS_BITS) & (rows != 0):
            _give_up(peer, OTHER_ROWS, rows, mail)


@triton.jit
def _look(part_ptr, row, first, mail, like_ptr, WORLD: tl.constexpr, WORDS: tl.constexpr, SENT: tl.constexpr):
    """Return the sum of what is there of all ranks, and for each word a bit for each rank that is missing.

    `like_ptr` has the type of the elements. Each word is stored whole, so its lower half is that of its
    stamp; no memory beside the words is ordered by this.
    """
    tl.static_assert(WORLD < 32)
    places = first + tl.arange(0, WORDS)
    mask = places < mail.length
    missing = tl.zeros((WORDS,), dtype=tl.int32)
    total = tl.zeros((WORDS * (32 // like_ptr.dtype.element_ty.primitive_bitwidth),), dtype=tl.float32)
    for peer in tl.range(0, WORLD, loop_unroll_factor=2 if WORDS <= 4096 else 1):  # more words would spill
        if (peer == mail.rank) & (not SENT):
            elements = tl.load(part_ptr + row * mail.length + places, mask=mask, other=0)
        else:
            slot_ptr = _slot_of(mail.mail_ptr, peer, row, mail, WORLD)
            words = tl.load(slot_ptr + places, mask=mask, other=0, volatile=True)
            elements = words.to(tl.int32)
            missing |= tl.where(mask & ((words >> 32).to(tl.int32) != mail.stamp), 1 << peer, 0)
        total += _unpacked(elements, like_ptr)
    return total, missing


@triton.jit
def _unpacked(elements, like_ptr):
    """Return the elements of words of 32 bits, in float32."""
    TYPE: tl.constexpr = like_ptr.dtype.element_ty
    if TYPE.primitive_bitwidth == 32:
        return elements.to(tl.float32, bitcast=True)
    else:  # noqa: RET505  the compiler returns from both
        even = (elements & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True)
        odd = (elements >> 16).to(tl.int16).to(TYPE, bitcast=True)
        return tl.interleave(even.to(tl.float32), odd.to(tl.float32))


class MailMemory(NamedTuple):
    """The tensors of one operation, which no call changes."""

    table: torch.Tensor
    mail: torch.Tensor
    ticket: torch.Tensor
    lost: torch.Tensor
    errors: torch.Tensor


_SETTLED: SettledLaunches[RowsShape] = SettledLaunches(exchange_rows, operation="GemmAllReduce")


def elements_of_word(dtype: torch.dtype) -> int:
    """Return how many elements a word has beside its stamp."""
    return 4 // dtype.itemsize


def can_take(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Return whether a call with so many rows and columns can go this way."""
    return rows <= MOST_ROWS and columns < MOST_COLUMNS and columns % elements_of_word(dtype) == 0


def open_mail(
    memory: SymmetricMemory, m: int, n: int, dtype: torch.dtype, errors: torch.Tensor
) -> tuple[MailMemory, SymmetricTensor]:
    """Allocate the mail of calls with up to m rows of n columns, and `lost` of all ranks; collective."""
    device, world = memory.device, memory.world_size
    mail = memory.allocate((2, world, min(m, MOST_ROWS), n // elements_of_word(dtype)), torch.int64)
    table = memory.hold(mail.addresses())
    ticket = memory.hold(torch.zeros(1, dtype=torch.int64, device=device))
    lost = memory.allocate((1,), torch.int32)
    return MailMemory(table, mail.local, ticket, lost.local, errors), lost


def leave(lost: SymmetricTensor, rank: int) -> None:
    """Let each peer find this rank given up, but for words that it has sent before."""
    for peer, theirs in enumerate(lost.peers):
        if peer != rank:
            theirs.bitwise_or_(1 << rank)


def prepare(place: Place, part: torch.Tensor, memory: MailMemory, ends: Ends, *, sent: bool) -> RowsLaunch:
    """Return the exchange of `part` [M, N], contiguous, which is kept; as `pull.prepare`.

    sent: by `sending.multiply_and_send`, just before; `part` is not read then.
    """
    rows, tensors = len(part), (part.view(torch.int32), *memory)
    own = {"PACK": elements_of_word(part.dtype), "SENT": sent}
    if sent and capability(part.device):
        own["launch_pdl"] = True
    sizes = (rows, memory.mail.shape[2])
    return RowsLaunch(_SETTLED, place, tensors, sizes, ends, rows=rows, of_all=rows, **own)
