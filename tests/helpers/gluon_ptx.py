"""What the PTX of `persistent_gemm.any_width` says to the tensor cores, done by `gluon_model`.

Its instructions are taken out of the text and done with what they name: rows of a k block, at an address, and
registers. An address counts 16 bytes, of which a row has 8: 8 elements, or 16 in fp8. A
thread has a register for two columns of each 64 rows of a strip that its warpgroup has.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from gluon_machine import drain, now
from gluon_memory import Buffer, Tensor

ROW_BYTES = 128
PRODUCT = re.compile(
    r"add\.u32 rows, a, (\d+);.*?add\.u32 rows, b, (\d+);.*?wgmma\.mma_async\S*m64n(\d+)k(\d+)\S* \{(.*?)\}",
    re.DOTALL,
)
NEXT_WARPGROUP = re.compile(r"mad\.lo\.u32 a, rows, (\d+), a;")
WAIT = re.compile(r"wgmma\.wait_group\.sync\.aligned (\d+);")


class Product(NamedTuple):
    """An instruction: where it begins to read A and B, how many columns it reads, where its sums are."""

    a: int
    b: int
    columns: int
    depth: int  # elements along K
    registers: list[int]


def inline_asm(text: str, constraints: str, operands: tuple[Any, ...], results: tuple[Any, ...]) -> Any:
    """Start a k block's products, if there are any, and wait for all but so many k blocks."""
    sums: tuple[Tensor, ...] = operands
    if "wgmma.commit_group" in text:
        a, b_ring, b_bytes, *before = operands
        # Tensors are values, and may be one value; those with products in flight are registers already.
        sums = tuple(strip if strip.in_flight else Tensor(strip.array.copy()) for strip in before)
        _start(text, a, b_ring, b_bytes, sums)
    registers = sum(strip.array.size for strip in sums) // (32 * now().warps)
    expected = ["=f"] * registers + ["r"] * (len(operands) - len(sums)) + [*map(str, range(registers))]
    assert constraints.split(",") == expected, "registers are missing, or too many"
    assert len(results) == len(sums)
    (outstanding,) = WAIT.findall(text)
    drain(now().multiplying, int(outstanding))
    now().pause()
    return sums


def _start(text: str, a: Buffer, b_ring: Buffer, b_bytes: int, sums: tuple[Tensor, ...]) -> None:
    """Start the products of A's k block and of what lies so many bytes behind the beginning of B's ring."""
    products = [
        Product(*map(int, numbers), [int(name[1:]) for name in registers.split(", ")])
        for *numbers, registers in PRODUCT.findall(text)
    ]
    width = sum(strip.shape[1] for strip in sums)
    assert all(product.columns == width for product in products), "products of other columns than the sums"
    warpgroups = now().warps // 4
    next_warpgroup = int(NEXT_WARPGROUP.findall(text)[0]) if warpgroups > 1 else 0
    b_rows = b_ring.array.reshape(-1, b_ring.shape[-1])  # the boxes lie one behind the other

    def finish() -> None:
        for product in products:
            columns = _rows(b_rows, product.b + b_bytes // 16, product.columns, product.depth)
            for warpgroup in range(warpgroups):
                rows = _rows(a.array, product.a + warpgroup * next_warpgroup, 64, product.depth)
                _add(rows @ columns.T, sums, product.registers, warpgroup, warpgroups)
        for strip in sums:
            strip.in_flight -= 1

    for strip in sums:
        strip.in_flight += 1
    now().multiplying.append(finish)


def _rows(array: np.ndarray, address: int, rows: int, depth: int) -> np.ndarray:
    """Return so many elements, 32 bytes, of each of so many rows; NaNs for what is not there."""
    row, at = divmod(address, ROW_BYTES // 16)
    part = array[row : row + rows, at * depth // 2 : at * depth // 2 + depth]
    return np.pad(part, [(0, rows - part.shape[0]), (0, depth - part.shape[1])], constant_values=np.nan)


def _add(
    product: np.ndarray, sums: tuple[Tensor, ...], registers: list[int], warpgroup: int, warpgroups: int
) -> None:
    """Add 64 rows to the strips, where a warpgroup has them in these registers."""
    rows, columns = sums[0].shape
    reps, each = rows // (64 * warpgroups), columns // 2
    rep = registers[0] // each
    expected = [each * (strip * reps + rep) + i for strip in range(len(sums)) for i in range(each)]
    assert registers == expected, "sums are in other registers"
    first = 64 * (rep * warpgroups + warpgroup)
    for strip, further in zip(sums, np.split(product, len(sums), axis=1), strict=True):
        strip.array[first : first + 64] += further
