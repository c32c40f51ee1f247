"""The kernel that adds the rows of all ranks: it publishes, waits, reads, adds, and tells that it has read.

One launch is one call c of the exchange below. What a rank holds for it, W ranks:

    words   int64 [2, W], symmetric
            READY[p] := c * 2**24 + rows, by rank p: its rows of call c may be read
            READ[p] += SHARES in a call, by the programs of rank p: they have read this rank's rows
    ticket  int64 [1]: SHARES for each call that has begun, and 1 for each program of this one that has

Why it ends, and reads no row too early or too late: docs/protocol.md, A pull. The sum of an element has the
same bits on all ranks: it is in float32, in the order of the ranks, of parts that are rounded to the type,
then the residual; then it is rounded once.

Measured (two H200, 2026-11-26, in graphs, product included): 256 x 8192 x 8192 takes 0.050 ms in one shot,
0.058 in two, 0.070 by NCCL; 16384 x 8192 x 28672 5.752, 5.825 and 5.821. With two ranks one shot was ahead of
two at every shape; more ranks, for which two shots read less, have not been measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..configs import take_first
from ..exchange.flags import NOT_PUSHED, NOT_READ, OTHER_ROWS
from ..launches.settled import TunedKernel
from ..signals import notify, poll_until, record_failure
from ..symm import SymmetricTensor
from .rows import MOST_PROGRAMS, Ends, Place, RowsLaunch, Tail, candidate, end_row, prune, with_norms

WORDS = 2  # rows of `words`
READY = tl.constexpr(0)
READ = tl.constexpr(1)
ROW_BITS = tl.constexpr(24)
SHARE_BITS = tl.constexpr(12)
MOST_ROWS = tl.constexpr((1 << 24) - 2)
ROWS_MASK = tl.constexpr((1 << 24) - 1)
REFUSED = ROWS_MASK  # in place of the rows of a rank that refuses the call
SHARES = tl.constexpr(MOST_PROGRAMS)
FAR = tl.constexpr(1 << 30)  # calls ahead: of a peer that has been given up

CANDIDATES = with_norms(
    [
        candidate(2048, 1, 8),
        candidate(1024, 1, 4),
        candidate(1024, 2, 4),
        candidate(2048, 2, 8),
        candidate(4096, 1, 16),
        candidate(4096, 1, 8),
        candidate(8192, 1, 16),
    ]
)


class PullCall(NamedTuple):
    """One call, as a program knows it."""

    words_table_ptr: Any  # int64 [WORLD]: where the words of each rank lie
    words_ptr: Any  # int64 [WORDS, WORLD], this rank's
    errors_ptr: Any  # int64 [WORLD], in memory that the host reads without waiting
    rank: Any
    call: Any
    order: Any  # how many programs began before
    programs: Any
    patience_ticks: Any


@triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "WORLD", "OWNER", "NORM"],
    prune_configs_by={"early_config_prune": prune},
    do_bench=take_first,  # outside a tuned function: a launch ends when the peers have come, after theirs
)
@triton.jit(do_not_specialize=["first", "rows", "m", "chunk", "size_class", "rank", "patience_ticks", "eps"])
def add_rows(
    table_ptr,  # int64 [WORLD]: where the rows of each rank lie
    words_table_ptr,
    words_ptr,
    ticket_ptr,  # int64 [1]
    errors_ptr,
    residual_ptr,  # [m, N], rows stride_residual apart, if HAS_RESIDUAL
    weight_ptr,  # [N], if NORM
    out_ptr,  # [rows, N], rows stride_out apart: the norm, or else the sum
    sum_ptr,  # [rows, N], contiguous: the sum, if NORM
    first,  # of the rows that this launch writes
    rows,  # how many it writes
    m,  # how many there are
    chunk,  # how many of them a rank owns; rank p owns those from p * chunk on
    size_class,  # of m
    N,
    stride_residual,
    stride_out,
    rank,
    patience_ticks,
    eps,
    WORLD: tl.constexpr,
    OWNER: tl.constexpr,  # read a row where its owner has it, and not the sum of all ranks' rows
    HAS_RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    ROW: tl.constexpr,  # the least power of 2 that is N or more, if NORM
    BLOCK_N: tl.constexpr,
    PER_SM: tl.constexpr,  # the grid's: programs on an SM, at most
):
    """Write, for rows first, first + 1, ..., the sum over ranks + residual; and its RMSNorm if NORM."""
    exchange, is_lost = _begin(
        words_table_ptr, words_ptr, ticket_ptr, errors_ptr, m, rank, patience_ticks, WORLD
    )
    tail = Tail(residual_ptr, stride_residual, weight_ptr, sum_ptr, out_ptr, stride_out, eps)
    WIDTH: tl.constexpr = ROW if NORM else BLOCK_N
    blocks = tl.cdiv(N, WIDTH)
    for item in range(exchange.order, rows * blocks, exchange.programs):
        row = item // blocks
        cols = item % blocks * WIDTH + tl.arange(0, WIDTH)
        mask = cols < N
        at = first + row
        if OWNER:
            total = _load_row(table_ptr, at // chunk, at % chunk, cols, mask, N, out_ptr)
        else:
            total = _load_row(table_ptr, 0, at, cols, mask, N, out_ptr)
            for peer in tl.static_range(1, WORLD):
                total += _load_row(table_ptr, peer, at, cols, mask, N, out_ptr)
        end_row(total, at, row, cols, mask, N, is_lost, tail, HAS_RESIDUAL, NORM)
    _end(exchange, WORLD)


@triton.jit
def _load_row(table_ptr, peer, row, cols, mask, N, like_ptr):
    """Return columns of a row that a rank has, in float32; `like_ptr` has its type."""
    base_ptr = tl.load(table_ptr + peer).to(tl.pointer_type(like_ptr.dtype.element_ty))
    base_ptr = tl.multiple_of(base_ptr, 16)  # as all that is allocated
    return tl.load(base_ptr + tl.cast(row, tl.int64) * N + cols, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _begin(words_table_ptr, words_ptr, ticket_ptr, errors_ptr, m, rank, patience_ticks, WORLD: tl.constexpr):
    """Return the exchange of this launch, once all ranks' rows may be read, and whether some are lost."""
    programs = tl.num_programs(0)
    order = tl.program_id(0)
    call = tl.cast(0, tl.int64)
    if WORLD > 1:
        ticket = tl.atomic_add(ticket_ptr, 1, sem="relaxed", scope="gpu")
        call = (ticket >> SHARE_BITS) + 1
        order = tl.cast(ticket & (SHARES - 1), tl.int32)
        if order == programs - 1:
            tl.atomic_add(ticket_ptr, -programs + SHARES, sem="relaxed", scope="gpu")
    exchange = PullCall(words_table_ptr, words_ptr, errors_ptr, rank, call, order, programs, patience_ticks)
    is_lost = 0
    if WORLD > 1:
        if order == 0:
            for peer in range(0, WORLD):
                if peer != rank:
                    notify(_word_of(peer, READY, exchange, WORLD), (call << ROW_BITS) + m)
        for peer in range(0, WORLD):
            if peer != rank:
                is_lost += _wait_for_rows(peer, m, exchange, WORLD)
    return exchange, is_lost


@triton.jit
def _word_of(peer, WORD: tl.constexpr, exchange, WORLD: tl.constexpr):
    """Return where the word about this rank lies on a peer."""
    words_ptr = tl.load(exchange.words_table_ptr + peer).to(tl.pointer_type(tl.int64))
    return words_ptr + WORD * WORLD + exchange.rank


@triton.jit
def _wait_for_rows(peer, m, exchange, WORLD: tl.constexpr):
    """Return 0 once the peer's rows of this call may be read, and 1 if they do not come, or are others."""
    word_ptr, call = exchange.words_ptr + READY * WORLD + peer, exchange.call
    word = poll_until(word_ptr, call << ROW_BITS, exchange.patience_ticks, False)
    seen = word >> ROW_BITS
    rows = word & ROWS_MASK
    if seen < call:
        record_failure(exchange.errors_ptr + peer, NOT_PUSHED, call, seen)
        tl.atomic_xchg(word_ptr, (call + FAR) << ROW_BITS, sem="release", scope="sys")
    elif (seen == call) & (rows != m) & (m != REFUSED):
        record_failure(exchange.errors_ptr + peer, OTHER_ROWS, call, rows)
    return tl.where((seen != call) | (rows != m), 1, 0)


@triton.jit
def _end(exchange, WORLD: tl.constexpr):
    """Tell all peers that this program reads no more; the last to begin waits until no peer does."""
    if WORLD > 1:
        is_last = exchange.order == exchange.programs - 1
        shares = tl.cast(tl.where(is_last, 1 - exchange.programs + SHARES, 1), tl.int64)
        tl.debug_barrier()  # one thread tells, for the loads of all
        for peer in range(0, WORLD):
            if peer != exchange.rank:
                tl.atomic_add(_word_of(peer, READ, exchange, WORLD), shares, sem="release", scope="sys")
        if is_last:
            for peer in range(0, WORLD):
                if peer != exchange.rank:
                    _wait_until_read(peer, exchange, WORLD)


@triton.jit
def _wait_until_read(peer, exchange, WORLD: tl.constexpr):
    """Return once the peer has read this rank's rows, or is given up."""
    word_ptr, wanted = exchange.words_ptr + READ * WORLD + peer, exchange.call << SHARE_BITS
    # Twice the patience: the peer may be held up by a third rank, on which it gives up first.
    word = poll_until(word_ptr, wanted, 2 * exchange.patience_ticks, False)
    if word < wanted:
        record_failure(exchange.errors_ptr + peer, NOT_READ, exchange.call, word >> SHARE_BITS)
        tl.atomic_xchg(word_ptr, (exchange.call + FAR) << SHARE_BITS, sem="release", scope="sys")


class PullMemory(NamedTuple):
    """The tensors of one operation, which no call changes."""

    words_table: torch.Tensor
    words: torch.Tensor
    ticket: torch.Tensor
    errors: torch.Tensor


_KERNEL = TunedKernel(add_rows, operation="GemmAllReduce")


def leave(words: SymmetricTensor, rank: int) -> None:
    """Let each peer find this rank given up: its rows are of no call, and it reads none.

    To be enqueued after the last call, which has seen that no peer reads rows of it any more.
    """
    for peer, theirs in enumerate(words.peers):
        if peer != rank:
            theirs[READY.value, rank].fill_(FAR.value << ROW_BITS.value)
            theirs[READ.value, rank].fill_(FAR.value << SHARE_BITS.value)


def prepare(
    place: Place,
    table: torch.Tensor,
    memory: PullMemory,
    ends: Ends,
    *,
    rows: int,
    m: int,
    first: int = 0,
    chunk: int = 0,
) -> RowsLaunch:
    """Return one exchange, of `rows` rows, for calls whose tensors lie as those of `ends`.

    chunk: how many rows a rank owns, if they are read where their owner has them.
    """
    sizes = (first, rows, m, max(chunk, 1))
    held = (table, *memory)
    of_all = 1 if m == REFUSED.value else m
    return RowsLaunch(_KERNEL, place, held, sizes, ends, rows=rows, of_all=of_all, OWNER=chunk > 0)
