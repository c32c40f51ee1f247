"""NaN in place of results that lack a peer, by a small kernel behind kernels that cannot write it themselves.

The kernels in plain Triton know for each tile whether its peer is given up. cuBLAS does not know; in the
warp-specialized kernels only the load warp does; and without a peer's choices of experts no row has a place.
The host learns of a failure too late.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..launches.prepared import PlainLaunches
from .chunks import ChunkExchange, is_lost
from .flags import AFTER, TOLD
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


@triton.jit(do_not_specialize=["out_ptr", "flags_ptr", "N", "stride", "rank", "m", "epoch", "base", "pushed"])
def spoil_lost_chunks(
    out_ptr,  # [WORLD * m, N], rows stride apart
    flags_ptr,  # int32 [FLAGS, WORLD] of `flags`
    N,
    stride,
    rank,
    m,
    epoch,
    base,
    pushed,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill the rows of chunks whose ranks are given up; a program a peer."""
    chunk = (rank + 1 + tl.program_id(0)) % WORLD
    if is_lost(chunk, ChunkExchange(flags_ptr, flags_ptr, rank, epoch, base, pushed, 0), WORLD) != 0:
        _fill(out_ptr, chunk * m, (chunk + 1) * m, 1, N, stride, BLOCK)


@triton.jit(do_not_specialize=["out_ptr", "flags_ptr", "N", "stride", "rank", "M"])
def spoil_without_peers(
    out_ptr,  # [M, N], rows stride apart
    flags_ptr,  # int32 [FLAGS, WORLD] of `peers`
    N,
    stride,
    rank,
    M,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill the result if a peer is given up, and put back the flags that pushes have raised."""
    if tl.program_id(0) == 0:
        for place in range(0, 2 * WORLD):  # TOLD and ARRIVED, which no program reads here
            after = tl.load(flags_ptr + AFTER * WORLD + place)
            tl.store(flags_ptr + TOLD * WORLD + place, after)
    if is_any_lost(Peers(flags_ptr, flags_ptr, rank, 0), WORLD) != 0:
        _fill(out_ptr, tl.program_id(0), M, tl.num_programs(0), N, stride, BLOCK)


_LOST_CHUNKS, _ALL = PlainLaunches(spoil_lost_chunks), PlainLaunches(spoil_without_peers)


def spoil_chunks(
    out: torch.Tensor, flags: torch.Tensor, world_size: int, call: tuple[int, ...], *, only_load: bool = False
) -> None:
    """Enqueue that rows of `out` are NaN whose ranks a call has given up, or load what does.

    call: its rank, rows of a chunk, epoch, base, and whether chunks are pushed.
    """
    _enqueue(_LOST_CHUNKS, world_size - 1, out, flags, world_size, call, only_load)


def spoil_all(
    out: torch.Tensor, flags: torch.Tensor, rank: int, world_size: int, *, only_load: bool = False
) -> None:
    """Enqueue a kernel that fills `out` with NaN if a peer is given up; only_load: only load it.

    It puts the flags back, too: `Pushes.end` is what is left of `Pushes.finish` behind it.
    """
    programs = max(1, min(PROGRAMS, out.shape[0])) if world_size > 1 else 0
    _enqueue(_ALL, programs, out, flags, world_size, (rank, out.shape[0]), only_load)


def _enqueue(
    launches: PlainLaunches,
    programs: int,
    out: torch.Tensor,
    flags: torch.Tensor,
    world_size: int,
    numbers: tuple[int, ...],
    only_load: bool,
) -> None:
    if programs == 0:
        return
    constants = {"WORLD": world_size, "BLOCK": COLUMNS}
    scalars = (out.shape[1], out.stride(0), *numbers)
    kind = (programs, world_size, out.device, out.dtype)
    launches.launch(kind, programs, (out, flags), scalars, constants, only_load=only_load)
