"""The kernel for few rows: it sends each peer its rows by mail, and adds what comes.

Who finds the stamp of its call in all words of a part adds it, ends the rows and writes them: see
`exchange.mail`. Sums have the same bits on all ranks, as in `pull`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..compat import compiled_for
from ..configs import capability, take_first
from ..exchange.mail import (
    TICKETS,
    Mail,
    MailMemory,
    elements_of_word,
    receive_part,
    send_parts,
    stamp_of,
    take_ticket,
)
from ..launches.settled import TunedKernel
from .rows import Ends, Place, RowsLaunch, Tail, candidate, end_row, prune, with_norms

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


@triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "WORLD", "SENT", "NORM"],
    prune_configs_by={"early_config_prune": prune},
    do_bench=take_first,  # outside a tuned function: a launch ends when the peers have come, after theirs
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
    call, part = take_ticket(ticket_ptr)
    stamp = stamp_of(call, rows)
    mail = Mail(table_ptr, mail_ptr, capacity, length, lost_ptr, errors_ptr, rank, stamp, patience_ticks)
    to_send = 0
    order = part  # how many programs came here before
    if not SENT:
        to_send = parts
        order = send_parts(part_ptr, part, parts, blocks, ticket_ptr, mail, WORLD, WIDTH // PACK)
    tail = Tail(residual_ptr, stride_residual, weight_ptr, sum_ptr, out_ptr, stride_out, eps)
    for part in range(order, parts, programs):
        row = part // blocks
        first = part % blocks * (WIDTH // PACK)
        cols = first * PACK + tl.arange(0, WIDTH)
        mask = cols < N
        total, is_lost = receive_part(
            part_ptr, row, first, mail, out_ptr, 0, WORLD, WORLD, WIDTH // PACK, SENT
        )
        end_row(total, row, row, cols, mask, N, is_lost, tail, HAS_RESIDUAL, NORM)
    if SENT and TARGET == "cuda":
        tl.extra.cuda.gdc_wait()  # the kernel before this one has ended, too, and read `ticket`
    if order == programs - 1:
        tl.atomic_add(ticket_ptr, -to_send - programs + TICKETS, sem="relaxed", scope="gpu")


_KERNEL = TunedKernel(exchange_rows, operation="GemmAllReduce")


def prepare(place: Place, part: torch.Tensor, memory: MailMemory, ends: Ends, *, sent: bool) -> RowsLaunch:
    """Return the exchange of `part` [M, N], contiguous, which is kept; as `pull.prepare`.

    sent: by `sending.multiply_and_send`, just before; `part` is not read then.
    """
    rows, tensors = len(part), (part.view(torch.int32), *memory)
    own = {"PACK": elements_of_word(part.dtype), "SENT": sent}
    if sent and capability(part.device):
        own["launch_pdl"] = True
    sizes = (rows, memory.mail.shape[2])
    return RowsLaunch(_KERNEL, place, tensors, sizes, ends, rows=rows, of_all=rows, **own)
