"""The source of the Gluon body, run on the CPU: it ends, no buffer is overwritten too early, C is right."""

import importlib
from typing import Any

import gluon_model
import numpy as np
import pytest
import torch
from gluon_model import Descriptor, Pointer
from gluon_tiles import Tile
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_autotune.kernels.epilogues import (
    ACTIVATIONS,
    GATED,
    NO_ACTIVATION,
    Epilogue,
    result_columns,
    sums_of_a_result,
)
from dist_autotune.kernels.gemm.configs import box_of

BODY = gluon_model.load_kernel_module("gemm.body")


def multiply(
    variant: str,
    m: int,
    n: int,
    k: int,
    *,
    programs: int = 2,
    transposed: tuple[bool, bool] = (False, False),
    swap_ab: bool = False,
    bias_along: str | None = None,
    activation: str = NO_ACTIVATION,
    dtype: str = "fp16",
    scaled: tuple[bool, bool] = (False, False),
    loaded: tuple[int, int, int] | None = None,
    seed: int = 0,
    **of_tile: Any,
) -> None:
    """Check one launch: that it ends and writes what it should everywhere.

    That is activation(row scales * (a @ b) * column scales + bias); `scaled`: which scales there are.

    A gated activation wants n, STORE_N and the widths of tiles to be multiples of 16.

    bias_along: "column", or "row" as for a product that is computed transposed; None: there is none. loaded:
    how many rows of A, of B and of B's further columns come of a block, if not all. of_tile: see `Tile`.
    """
    tile = Tile(variant, by_columns=not transposed[1], **of_tile)
    (block_m, block_n, words_k), (store_n, _), extra_n = tile.blocks, tile.store, tile.extra_n
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
    if tile.joined:
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
    tiles = -(-sides[0] // block_m) * -(-sides[1] // tile.width)
    sizes = (m, n, k, 0, programs, 16, 16, m, n)
    scales = (row_scales if scaled[0] else None, column_scales if scaled[1] else None)
    biases = (bias if bias_along == along else None for along in ("row", "column"))
    gluon_model.launch(
        BODY.gemm,
        tiles if variant == "pipelined" else programs,
        *(*operands, c_desc),
        *(None if each is None else Pointer(each) for each in (*scales, *biases)),
        *sizes,
        seed=seed,
        haste=(None, 0.05, 0.9)[seed % 3],
        TRANS_A=transposed[0],
        OUT="fp16",
        DTYPE=dtype,
        ACTIVATION=activation,
        SWAP_AB=swap_ab,
        **tile.constants(),
    )
    expected = a @ b
    expected *= (row_scales[:, None] if scaled[0] else 1) * (column_scales if scaled[1] else 1)
    if bias_along is not None:
        expected += bias[:, None] if bias_along == "row" else bias
    if activation != NO_ACTIVATION:
        expected = Epilogue(activation=activation).of(torch.from_numpy(expected)).numpy()
    tolerance = 0 if activation in (NO_ACTIVATION, "relu") else 1e-9
    expected = expected if k else np.full(c.shape, np.nan)
    np.testing.assert_allclose(c, expected, rtol=tolerance, atol=tolerance)
    writes = c_desc.writes
    most = 2 if tile.width % store_n else 1  # the last piece of a tile is moved back
    if not sides[0] % block_m == sides[1] % tile.width == 0:
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


pytestmark = pytest.mark.usefixtures("one_core", "narrow_tiles")  # its tasks are threads that take turns

PROBLEM = importlib.import_module("kernels_in_the_model.gemm.problem")
TMA_BEGINS_AT = PROBLEM.ALIGNED


HOPPER = ("pipelined", "persistent", "persistent_pipelined", "cooperative", "pingpong")
BLACKWELL = HOPPER[:-1]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in HOPPER}
KINDS |= {f"{name}, Blackwell": (name, {"tensor_memory": True}) for name in BLACKWELL}
KINDS |= {f"{name}, two widths": (name, {"extra_n": 4}) for name in HOPPER if name != "persistent"}
KINDS |= {f"{name}, through registers": (name, {"extra_n": 4, "warps": 8}) for name in BLACKWELL}
EACH_KIND = pytest.mark.parametrize(("variant", "options"), KINDS.values(), ids=KINDS)
SEEDS = st.integers(0, 10**6)
BIASES = st.sampled_from([None, "row", "column"])
SCALES = st.sampled_from([(False, False), (True, False), (False, True), (True, True)])


@EACH_KIND
@settings(max_examples=12)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 23)),
    programs=st.integers(1, 5),
    buffers=st.integers(2, 5),
    store=st.sampled_from([(4, 1), (4, 2), (4, 3), (8, 1), (2, 4)]),
    transposed=st.tuples(st.booleans(), st.booleans()),
    bias_along=BIASES,
    activation=st.sampled_from([NO_ACTIVATION, NO_ACTIVATION, *ACTIVATIONS]),
    scaled=SCALES,
    seed=SEEDS,
)
def test_every_variant_ends_with_the_right_product(
    variant, options, sizes, store, transposed, scaled, **drawn
):
    if options.get("extra_n"):  # which a piece divides
        store = 4, store[1]
    if any(scaled):  # in fp8, whose operands lie along K
        transposed, drawn = (False, True), drawn | {"dtype": "fp8e4nv"}
    multiply(variant, *sizes, store=store, transposed=transposed, scaled=scaled, **options, **drawn)


JOINED = {"transposed": (False, True), "store": (32, 2), "joined": True}
OF_GATES: dict[str, tuple[str, dict[str, Any]]] = {
    "pipelined": ("pipelined", {"blocks": (4, 16, 2), "store": (16, 1)}),
    "two widths": ("cooperative", {"blocks": (4, 32, 2), "store": (16, 2), "extra_n": 16}),
    "pingpong": ("pingpong", {"blocks": (4, 32, 2), "store": (16, 1)}),
    "Blackwell": ("cooperative", {"blocks": (4, 16, 2), "store": (16, 1), "tensor_memory": True}),
    "any width": ("cooperative", {"blocks": (64, 64, 64), "extra_n": 16, **JOINED}),
    "any width, swapped": ("cooperative", {"blocks": (64, 64, 64), "extra_n": 8, "swap_ab": True, **JOINED}),
}


@pytest.mark.parametrize(("variant", "options"), OF_GATES.values(), ids=OF_GATES)
@settings(max_examples=4)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 6).map(lambda n: 16 * n), st.integers(1, 11)),
    bias_along=st.sampled_from([None, "column"]),
    is_scaled=st.booleans(),
    activation=st.sampled_from(GATED),
    seed=SEEDS,
)
def test_every_variant_multiplies_gates_with_their_ups(variant, options, sizes, is_scaled, **drawn):
    multiply(variant, *sizes, scaled=(is_scaled, is_scaled), **options, **drawn)


WIDTHS = [(64, 0), (64, 8), (128, 24), (128, 16), (32, 8)]


@pytest.mark.parametrize("variant", HOPPER)
@settings(max_examples=12)
@given(
    sizes=st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(1, 500)),
    widths=st.sampled_from(WIDTHS),
    rows_warps=st.sampled_from([(64, 4), (128, 4), (128, 8), (256, 8)]),
    store=st.sampled_from([(8, 1), (16, 3), (32, 1), (32, 2)]),
    programs=st.integers(1, 3),
    buffers=st.integers(2, 4),
    swap_ab=st.booleans(),
    bias_along=BIASES,
    scaled=SCALES,
    seed=SEEDS,
)
def test_a_tile_of_any_width_is_one_product(variant, sizes, widths, rows_warps, store, scaled, **drawn):
    (block_n, extra_n), (block_m, warps) = widths, rows_warps
    of_tile = {"blocks": (block_m, block_n, 64), "extra_n": extra_n, "warps": warps, "scaled": scaled}
    of_tile |= JOINED | {"store": store, "dtype": "fp8e4nv" if any(scaled) else "fp16"}
    multiply(variant, *sizes, **of_tile, **drawn)


@EACH_KIND
@settings(max_examples=4)
@given(
    sizes=st.tuples(st.integers(1, 8), st.integers(1, 12), st.integers(1, 11)),
    programs=st.integers(1, 3),
    trans_a=st.booleans(),
    seed=SEEDS,
)
def test_rows_that_a_small_matrix_has_not_need_not_be_loaded(variant, options, sizes, trans_a, **drawn):
    (m, n, _), extra_n = sizes, options.get("extra_n", 0)
    further = max(min(n - 8, extra_n), 1) if extra_n else min(n, 8)
    of_block = {"blocks": (8, 8, 2), "loaded": (m, min(n, 8), further), "transposed": (trans_a, True)}
    multiply(variant, *sizes, **of_block, **options, **drawn)


@pytest.mark.parametrize(
    ("size", "inside_rows", "expected"),
    [(336, True, 80), (333, True, 333), (333, False, 77), (256, True, 0), (16, True, 0), (15, True, 15)],
)
def test_a_tile_is_moved_only_to_where_tma_can_begin(size, inside_rows, expected, monkeypatch):
    monkeypatch.setattr(PROBLEM, "ALIGNED", TMA_BEGINS_AT)
    assert PROBLEM.last_start(size, 256, inside_rows) == expected


# ---- that the model finds what it is there to find


WAIT = importlib.import_module("kernels_in_the_model.gemm.mma").warpgroup_mma_wait
THROUGH_REGISTERS = {"extra_n": 4, "warps": 8, "buffers": 2}


def wait_only(self, operands, step):
    WAIT(num_outstanding=0, deps=(self.main,))
    return self


FAULTS: dict[str, tuple[str, str, Any, str, dict[str, Any]]] = {  # what is put where, what is told, in which
    "a slot is never given back": ("mma", "WgmmaAccumulator.end", wait_only, "deadlock", {}),
    "it ends under its stores": (
        *("epilogue", "StoreBuffers.finish", lambda self: None, "ends with stores in flight", {}),
    ),
    "a proxy fence is missing": ("epilogue", "fence_async_shared", lambda: None, "proxy fence", {}),
    "a half is given back before its products": (
        *("mma", "warpgroup_mma_wait", lambda num_outstanding, deps: WAIT(num_outstanding * 2, deps)),
        *("not equal", THROUGH_REGISTERS),
    ),
}


@pytest.mark.parametrize(("module", "name", "fault", "told", "options"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(monkeypatch, module, name, fault, told, options):
    change(monkeypatch, module, name, fault)
    assert told in fails(variant="cooperative", **options).lower()
