"""Mail: rows that a kernel stores into its peers' memory, in words that say of which call they are.

A word of 64 bits is stored whole: the lower half are two elements of 16 bits, or one of 32; the upper half
its stamp: the number c of the call, and how many rows it has. Who finds the stamp of its call has the
elements. So no flag is raised after the data, and nothing is acknowledged. Who finds its call with other
rows gives the rank up: they passed different numbers. What a rank holds, W ranks, R rows at most:

    mail    int64 [2, W, R, words of a row], symmetric: mail[c % 2, p] is what rank p sends in call c
    ticket  int64 [1]: TICKETS for each call that has begun, and 1 for each ticket of this one
    lost    int32 [1], symmetric: a bit for each peer that has been given up

Why a call ends, and nothing is overwritten or read too early: docs/protocol.md, Mail. Every wait has a bound.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..compat import compiled_for, leave_the_core
from ..signals import SLEEP_CPU_S, after_round, polls_per_round, record_failure, rounds_of
from ..symm import SymmetricMemory, SymmetricTensor
from .flags import NO_MAIL, OTHER_ROWS

MOST_ROWS = 64  # more are many words
MOST_COLUMNS = 2**18
TICKET_BITS = tl.constexpr(24)
TICKETS = tl.constexpr(1 << 24)  # above those of any call: a ticket for each part, and one for each program

ROWS_BITS = tl.constexpr(7)  # of a stamp, the lowest: as many as MOST_ROWS needs
ROWS_MASK = tl.constexpr(127)


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


@triton.jit
def stamp_of(call, rows):
    """Return the stamp, an int32, of a call with so many rows."""
    return tl.cast((call << ROWS_BITS) | rows, tl.int32)


@triton.jit
def word_of(stamp, elements):
    """Return stamped words; elements: two of 16 bits each, or one of 32, in the lower half of an int64."""
    return (tl.cast(stamp, tl.int64) << 32) | elements


@triton.jit
def slot_of(mail_ptr, sender, row, mail, WORLD: tl.constexpr):
    """Return where a row of this call, of a sender, lies in a rank's mail, of less than 2**31 words."""
    slot = ((mail.stamp >> ROWS_BITS) & 1) * WORLD + sender
    return mail_ptr + (slot * mail.capacity + row) * mail.length


@triton.jit
def send_part(part_ptr, row, block, mail, WORLD: tl.constexpr, WORDS: tl.constexpr):
    """Store a part of an own row to all peers."""
    places = block * WORDS + tl.arange(0, WORDS)
    mask = places < mail.length
    elements = tl.load(part_ptr + row * mail.length + places, mask=mask, other=0)
    words = word_of(mail.stamp, elements.to(tl.int64) & 0xFFFFFFFF)
    for peer in range(0, WORLD):
        if peer != mail.rank:
            theirs_ptr = tl.load(mail.table_ptr + peer).to(tl.pointer_type(tl.int64))
            theirs_ptr = tl.multiple_of(theirs_ptr, 16)  # as all that is allocated
            tl.store(slot_of(theirs_ptr, mail.rank, row, mail, WORLD) + places, words, mask=mask)


@triton.jit
def take_ticket(ticket_ptr):
    """Return the number of the call under way, and which of its tickets this program has."""
    ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed", scope="gpu")
    return (ticket >> TICKET_BITS) + 1, tl.cast(ticket & (TICKETS - 1), tl.int32)


@triton.jit
def send_parts(part_ptr, part, parts, blocks, ticket_ptr, mail, WORLD: tl.constexpr, WORDS: tl.constexpr):
    """Store own parts to all peers, one for each ticket; return how many programs have ended that before.

    part: the program's first ticket.
    """
    while part < parts:
        send_part(part_ptr, part // blocks, part % blocks, mail, WORLD, WORDS)
        _, part = take_ticket(ticket_ptr)
    return part - parts


@triton.jit
def receive_part(
    part_ptr, row, first, mail, like_ptr, senders, end, WORLD: tl.constexpr, WORDS: tl.constexpr,
    SENT: tl.constexpr,
):  # fmt: skip
    """Return the sum over ranks `senders` to `end` - 1 of a part of a row, and 1 if one's part does not come.

    The sum is in float32; of elements like int32, as many as words, it is one of their bits. All senders'
    words are looked at in turns until none is missing: who waited for one after the other would look once
    more for each. Unless SENT, a rank's own words are those of `part_ptr`, and nobody sends them.
    """
    TARGET: tl.constexpr = compiled_for()
    HAS_CLOCK: tl.constexpr = TARGET == "cuda"
    POLLS: tl.constexpr = polls_per_round(TARGET)
    total, missing = _look(part_ptr, row, first, mail, like_ptr, senders, end, WORLD, WORDS, SENT)
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
        total, missing = _look(part_ptr, row, first, mail, like_ptr, senders, end, WORLD, WORDS, SENT)
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
                    _give_up(peer, NO_MAIL, 0, mail)
    return total, is_lost


@triton.jit
def _give_up(peer, kind, seen, mail):
    record_failure(mail.errors_ptr + peer, kind, mail.stamp >> ROWS_BITS, seen)
    tl.atomic_or(mail.lost_ptr, 1 << peer, sem="relaxed", scope="gpu")


@triton.jit
def _give_up_other_rows(row, first, mail, WORLD: tl.constexpr):
    """Give up the ranks that have sent this part in this call, with other rows: its first word tells."""
    for peer in tl.range(0, WORLD):
        slot_ptr = slot_of(mail.mail_ptr, peer, row, mail, WORLD)
        found = tl.cast(tl.load(slot_ptr + first, volatile=True) >> 32, tl.int32)
        rows = found & ROWS_MASK  # 0: of a word that nobody has sent, whose number of the call comes, too
        if (found != mail.stamp) & (found >> ROWS_BITS == mail.stamp >> ROWS_BITS) & (rows != 0):
            _give_up(peer, OTHER_ROWS, rows, mail)


@triton.jit
def _look(
    part_ptr, row, first, mail, like_ptr, senders, end, WORLD: tl.constexpr, WORDS: tl.constexpr,
    SENT: tl.constexpr,
):  # fmt: skip
    """Return the sum of what is there of these ranks, and for each word a bit for each that is missing.

    `like_ptr` has the type of the elements. Each word is stored whole, so its lower half is that of its
    stamp; no memory beside the words is ordered by this.
    """
    tl.static_assert(WORLD < 32)
    places = first + tl.arange(0, WORDS)
    mask = places < mail.length
    missing = tl.zeros((WORDS,), dtype=tl.int32)
    total = _unpacked(missing, like_ptr)
    for peer in tl.range(senders, end, loop_unroll_factor=2 if WORDS <= 4096 else 1):  # more would spill
        if (peer == mail.rank) & (not SENT):
            elements = tl.load(part_ptr + row * mail.length + places, mask=mask, other=0)
        else:
            slot_ptr = slot_of(mail.mail_ptr, peer, row, mail, WORLD)
            words = tl.load(slot_ptr + places, mask=mask, other=0, volatile=True)
            elements = words.to(tl.int32)
            missing |= tl.where(mask & ((words >> 32).to(tl.int32) != mail.stamp), 1 << peer, 0)
        total += _unpacked(elements, like_ptr)
    return total, missing


@triton.jit
def _unpacked(elements, like_ptr):
    """Return the elements of words of 32 bits, in float32; like int32: the bits."""
    TYPE: tl.constexpr = like_ptr.dtype.element_ty
    if TYPE.is_int32():
        return elements
    elif TYPE.primitive_bitwidth == 32:  # noqa: RET505  the compiler returns from each
        return elements.to(tl.float32, bitcast=True)
    else:
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
