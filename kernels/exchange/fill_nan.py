"""NaN in place of results that lack a peer, by a small kernel behind others; it puts the flags back, too.

cuBLAS does not know of peers; in the warp-specialized kernels only the load warp knows who is given up; and
without a peer's choices of experts no row has a place. The host learns of a failure too late.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launches.prepared import PlainLaunch, PlainLaunches
from .flags import AFTER, ROWS_SENT
from .peers import Peers, is_any_lost

COLUMNS = 1024  # at once
PROGRAMS = 16  # that fill a whole result


@triton.jit
def _fill(out_ptr, first, end, step, N, stride, BLOCK: tl.constexpr):
    for row in range(first, end, step):
        row_ptr = out_ptr + tl.cast(row, tl.int64) * stride
        for begin in range(0, N, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            tl.store(row_ptr + columns, float("nan"), mask=columns < N)


@triton.jit(do_not_specialize=["out_ptr", "flags_ptr", "N", "stride", "rank", "m"])
def fill_nan_in_lost_chunks(
    out_ptr,  # [WORLD * m, N], rows stride apart
    flags_ptr,  # int32 [FLAGS, WORLD] of `flags`
    N,
    stride,
    rank,
    m,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill the rows of a chunk if its rank is given up, and put back its flags; a program a chunk."""
    chunk = tl.program_id(0)
    if (chunk != rank) & (tl.load(flags_ptr + AFTER * WORLD + chunk) != 0):
        _fill(out_ptr, chunk * m, (chunk + 1) * m, 1, N, stride, BLOCK)
    _put_back(flags_ptr + chunk, WORLD)
    _put_back(flags_ptr + WORLD + chunk, WORLD)


@triton.jit
def _put_back(flag_ptr, WORLD: tl.constexpr):
    """Give a flag its value after a call; flag_ptr: ROWS_SENT or ARRIVED, less the rows of flags before."""
    tl.store(flag_ptr + ROWS_SENT * WORLD, tl.load(flag_ptr + AFTER * WORLD))


@triton.jit(do_not_specialize=["out_ptr", "flags_ptr", "N", "stride", "rank", "M"])
def fill_nan_without_peers(
    out_ptr,  # [M, N], rows stride apart
    flags_ptr,  # int32 [FLAGS, WORLD] of `peers`
    N,
    stride,
    rank,
    M,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill the result if a peer is given up, and put back the flags, which no program reads here."""
    if tl.program_id(0) == 0:
        for place in range(0, 2 * WORLD):
            _put_back(flags_ptr + place, WORLD)
    if is_any_lost(Peers(flags_ptr, flags_ptr, rank, 0), WORLD) != 0:
        _fill(out_ptr, tl.program_id(0), M, tl.num_programs(0), N, stride, BLOCK)


_LOST_CHUNKS, _ALL = PlainLaunches(fill_nan_in_lost_chunks), PlainLaunches(fill_nan_without_peers)


def _filler(
    launches: PlainLaunches, programs: int, out: torch.Tensor, flags: torch.Tensor, rank: int, rows: int
) -> PlainLaunch:
    """Return the launch of a kernel that fills results of one layout; on a lone rank it launches nothing.

    flags: the operation's. The kernel puts them back, too, in place of `Pushes.put_back`.
    """
    world = flags.shape[1]
    kind, numbers = (programs, world, out.device, out.dtype), (out.shape[1], out.stride(0), rank, rows)
    constants = {"WORLD": world, "BLOCK": COLUMNS}
    return PlainLaunch(launches, kind, programs if world > 1 else 0, numbers, constants, held=(flags,))


def filler_of_chunks(out: torch.Tensor, flags: torch.Tensor, rank: int, rows: int) -> PlainLaunch:
    """Return the launch that fills the chunks, of so many rows, of ranks that the call has given up."""
    return _filler(_LOST_CHUNKS, flags.shape[1], out, flags, rank, rows)


def filler_of_all(out: torch.Tensor, flags: torch.Tensor, rank: int) -> PlainLaunch:
    """Return the launch that fills a whole result if any peer is given up."""
    return _filler(_ALL, max(1, min(PROGRAMS, out.shape[0])), out, flags, rank, out.shape[0])
