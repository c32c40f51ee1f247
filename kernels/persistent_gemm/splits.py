"""K in as many parts as the caller says: more tiles, and a sum over the parts at the end.

Each part's product goes to rows of its own of a float32 workspace, from which a second kernel writes the sum:
always in the same order, so the result is the same each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .candidates import GLUON_CANDIDATES, PLAIN_CANDIDATES

TILE_ROWS = frozenset(config.kwargs["BLOCK_M"] for config in (*GLUON_CANDIDATES, *PLAIN_CANDIDATES))


def rows_of_a_part(rows: int) -> int:
    """Return how many rows a part of K has for the product's.

    So many that the tiles of one part end before the rows of the next begin, whichever config is chosen.
    """
    return max(triton.cdiv(rows, of_a_tile) * of_a_tile for of_a_tile in TILE_ROWS)


def workspace_of(out: torch.Tensor, splits: int) -> torch.Tensor:
    """Return room for the parts' products, one below the other."""
    rows, columns = out.shape
    pitch = triton.cdiv(columns, 4) * 4  # TMA wants rows of a multiple of 16 bytes
    room = torch.empty(splits * rows_of_a_part(rows), pitch, dtype=torch.float32, device=out.device)
    return room[:, :columns]


def sum_splits(workspace: torch.Tensor, splits: int, out: torch.Tensor) -> None:
    """Write the sum of the parts' products to `out`."""
    rows, columns = out.shape
    grid = (triton.cdiv(rows, 8), triton.cdiv(columns, 128))
    _sum_parts[grid](
        workspace,
        out,
        rows,
        columns,
        workspace.stride(0),
        rows_of_a_part(rows) * workspace.stride(0),
        *out.stride(),
        SPLITS=splits,
        BLOCK_M=8,
        BLOCK_N=128,
    )


@triton.jit
def _sum_parts(
    parts_ptr,
    out_ptr,
    rows,
    columns,
    stride_row,
    stride_part,
    stride_om,
    stride_on,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.cast(tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.int64)[:, None]
    col = tl.cast(tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.int64)[None, :]
    mask = (row < rows) & (col < columns)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for part in tl.static_range(SPLITS):
        at = parts_ptr + part * tl.cast(stride_part, tl.int64) + row * stride_row + col
        total += tl.load(at, mask=mask, other=0.0)
    tl.store(out_ptr + row * stride_om + col * stride_on, total.to(out_ptr.dtype.element_ty), mask=mask)
