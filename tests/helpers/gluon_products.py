"""Launches of the Gluon body in the model: what they must leave behind, and how to break its source."""

from __future__ import annotations

import importlib
from typing import Any

import gluon_model
import numpy as np
import pytest
import torch
from gluon_model import Descriptor, Pointer

from dist_autotune.kernels.epilogues import NO_ACTIVATION, Epilogue, result_columns, sums_of_a_result
from dist_autotune.kernels.gemm.configs import box_of

BODY = gluon_model.load_kernel_module("gemm.body")


def multiply(
    variant: str,
    m: int,
    n: int,
    k: int,
    *,
    programs: int = 2,
    blocks: tuple[int, int, int] = (4, 8, 2),
    buffers: int = 3,
    extra_n: int = 0,
    store: tuple[int, int] = (4, 1),
    transposed: tuple[bool, bool] = (False, False),
    tensor_memory: bool = False,
    joined: bool = False,
    swap_ab: bool = False,
    bias_along: str | None = None,
    activation: str = NO_ACTIVATION,
    dtype: str = "fp16",
    scaled: tuple[bool, bool] = (False, False),
    loaded: tuple[int, int, int] | None = None,
    warps: int = 4,
    seed: int = 0,
) -> None:
    """Check one launch: that it ends and writes what it should everywhere.

    That is activation(row scales * (a @ b) * column scales + bias); `scaled`: which scales there are.

    A gated activation wants n, STORE_N and the widths of tiles to be multiples of 16.

    bias_along: "column", or "row" as for a product that is computed transposed; None: there is none. loaded:
    how many rows of A, of B and of B's further columns come of a block, if not all.
    """
    (block_m, block_n, words_k), (store_n, store_buffers) = blocks, store
    itemsize = 1 if dtype == "fp8e4nv" else 2
    block_k = words_k * 2 // itemsize
    numbers = np.random.default_rng(seed)
    a = numbers.integers(-3, 4, (m, k)).astype(float)
    b = numbers.integers(-3, 4, (k, n)).astype(float)
    sides = (n, m) if swap_ab else (m, n)  # which a tile's rows and columns divide
    bias = numbers.integers(-3, 4, m if bias_along == "row" else n).astype(float)
    row_scales, column_scales = (2.0 ** numbers.integers(-3, 4, side) for side in (m, n))
    c = np.full((m, result_columns(activation, n)), np.nan)
    sums = sums_of_a_result(activation)
    if joined:
        loaded = (block_m, box_of(block_n), box_of(extra_n or block_n))
    a_rows, b_rows_loaded, extra_rows = loaded or (block_m, block_n, extra_n or block_n)

    a_memory, a_block = (a.T.copy(), [block_k, block_m]) if transposed[0] else (a, [a_rows, block_k])
    b_rows = b.T.copy() if transposed[1] else b

    def b_descriptor(width: int, loaded: int) -> Descriptor:
        return Descriptor(b_rows, [loaded, block_k] if transposed[1] else [block_k, width], itemsize)

    c_desc = Descriptor(c, [block_m, store_n // sums])
    operands = [
        Descriptor(a_memory, a_block, itemsize),
        b_descriptor(block_n, b_rows_loaded),
        b_descriptor(extra_n or block_n, extra_rows),
    ]
    if swap_ab:
        c_desc = Descriptor(c, [store_n, block_m // sums])
        operands = [
            Descriptor(a, [b_rows_loaded, block_k], itemsize),
            Descriptor(b_rows, [a_rows, block_k], itemsize),
            Descriptor(a, [extra_rows, block_k], itemsize),
        ]
    tiles = -(-sides[0] // block_m) * -(-sides[1] // (block_n + extra_n))
    gluon_model.launch(
        BODY.gemm,
        tiles if variant == "pipelined" else programs,
        *operands,
        c_desc,
        m,
        n,
        k,
        0,
        programs,
        16,
        16,
        m,
        n,
        Pointer(row_scales) if scaled[0] else None,
        Pointer(column_scales) if scaled[1] else None,
        Pointer(bias) if bias_along == "row" else None,
        Pointer(bias) if bias_along == "column" else None,
        seed=seed,
        haste=(None, 0.05, 0.9)[seed % 3],
        warps=warps,
        TRANS_A=transposed[0],
        TRANS_B=transposed[1],
        TENSOR_MEMORY=tensor_memory,
        OUT="fp16",
        DTYPE=dtype,
        ACTIVATION=activation,
        VARIANT=variant,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        EXTRA_N=extra_n,
        BLOCK_K=words_k,
        NUM_BUFFERS=buffers,
        STORE_N=store_n,
        STORE_BUFFERS=store_buffers,
        GROUP_M=2,
        JOINED=joined,
        SWAP_AB=swap_ab,
    )
    expected = a @ b
    expected *= (row_scales[:, None] if scaled[0] else 1) * (column_scales if scaled[1] else 1)
    if bias_along is not None:
        expected += bias[:, None] if bias_along == "row" else bias
    if activation != NO_ACTIVATION:
        expected = Epilogue(activation=activation).of(torch.from_numpy(expected)).numpy()
    tolerance = 0 if activation in (NO_ACTIVATION, "relu", "reglu") else 1e-9
    expected = expected if k else np.full(c.shape, np.nan)
    np.testing.assert_allclose(c, expected, rtol=tolerance, atol=tolerance)
    writes = c_desc.writes
    most = 2 if (block_n + extra_n) % store_n else 1  # the last piece of a tile is moved back
    if not sides[0] % block_m == sides[1] % (block_n + extra_n) == 0:
        most *= 4  # and so are the last tiles
    assert ((writes >= 1) & (writes <= most)).all() if k else not writes.any()


def fails(**options: Any) -> str:
    """Return the first failure among a few launches in different orders; empty if there is none."""
    options = {"m": 11, "n": 30, "k": 9} | options
    return gluon_model.first_failure(lambda seed: multiply(**options, seed=seed), 40)


def change(monkeypatch: pytest.MonkeyPatch, module: str, name: str, value: Any) -> None:
    """Put something else into a module of the body, until the test ends."""
    found = importlib.import_module(f"kernels_in_the_model.gemm.{module}")
    target, _, attribute = name.rpartition(".")
    monkeypatch.setattr(getattr(found, target) if target else found, attribute, value)
