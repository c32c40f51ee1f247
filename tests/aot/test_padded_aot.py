"""Copies in padded scratch memory, compiled for Hopper, and their way to a launch beside the product's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled import CDNA3, HOPPER, compile_for, resources
from gemm_runs import always_copied, multiply
from launch_path import LaunchingDevice, matrix
from launch_path import launching as launching_on

from dist_autotune.kernels.gemm import copies
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.gemm.configs import GLUON_CANDIDATES, blocks_of

# ---- the code


def compile_copy(dtype: str, vector: int, *, aligned: bool, target: Any = HOPPER) -> Any:
    types = {"source_ptr": f"*{dtype}", "target_ptr": f"*{dtype}"}
    sizes = dict.fromkeys(("rows", "columns", "from_row", "to_row"), "i32")
    elements = copies.BLOCK_ELEMENTS if vector > 1 else copies.NARROW_BLOCK_ELEMENTS
    block = {"BLOCK_ROWS": elements // copies.WIDEST_BLOCK, "BLOCK_COLUMNS": copies.WIDEST_BLOCK}
    constants = {"from_column": 1, "to_column": 1, "VECTOR": vector, **block}
    any_value = (*sizes, *(() if aligned else ("source_ptr",)))
    return compile_for(
        target, copies.copy_rows, types | sizes, constants, any_value=any_value, num_warps=copies.WARPS
    )


@pytest.mark.parametrize(
    ("dtype", "vector", "aligned", "load", "store"),
    [
        pytest.param("bf16", 8, True, "LDG.E.128", "STG.E.128", id="halves, 16 bytes"),
        pytest.param("fp32", 4, True, "LDG.E.128", "STG.E.128", id="fp32, 16 bytes"),
        pytest.param("bf16", 2, True, "LDG.E", "STG.E", id="halves, 4 bytes"),
        pytest.param("fp16", 1, False, "LDG.E.U16", "STG.E.U16", id="halves at any address"),
        pytest.param("fp32", 1, False, "LDG.E", "STG.E", id="fp32 at any address"),
    ],
)
def test_as_much_is_moved_at_a_time_as_rows_are_multiples_of(dtype, vector, aligned, load, store):
    compiled = compile_copy(dtype, vector, aligned=aligned)
    found = re.findall(r"\b(LDG|STG|LDL|STL)([.\w]*)", compiled.asm["sass"])
    kinds = [kind + options for kind, options in found]
    elements = copies.BLOCK_ELEMENTS if vector > 1 else copies.NARROW_BLOCK_ELEMENTS
    each = elements // (32 * copies.WARPS * vector)
    assert kinds.count(load) == kinds.count(store) == each
    assert len(kinds) == 2 * each
    last_load, first_store = len(kinds) - 1 - kinds[::-1].index(load), kinds.index(store)
    assert last_load < first_store  # all loads are in flight together
    used = resources(compiled, HOPPER)
    assert used["spilled"] == used["shared_bytes"] == 0
    assert used["registers"] <= 80  # 24 warps of an SM


def test_the_copy_compiles_for_amd():
    assert "global_load" in compile_copy("bf16", 8, aligned=True, target=CDNA3).asm["amdgcn"]


# ---- the path to its launch, on a device that compiles and does not run

PIPELINED = next(
    c for c in GLUON_CANDIDATES if c.kwargs["VARIANT"] == "pipelined" and c.kwargs["BLOCK_N"] == 64
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchingDevice]:
    monkeypatch.setattr(copies, "_LAUNCHES", {})
    copies.copy_rows.device_caches.clear()
    with launching_on(monkeypatch, launching, launching.tuned_gemm, [PIPELINED], blocks_of) as made:
        yield made
        copies._LAUNCHES.clear()
        copies.copy_rows.device_caches.clear()


@pytest.fixture
def all_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have everything copied that may be."""

    monkeypatch.setattr(launching, "what_to_copy", always_copied)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the list of all scratch memory; kept, so that no two have one address."""
    made: list[torch.Tensor] = []
    room_for = copies.room_for

    def kept(*args: Any) -> torch.Tensor:
        made.append(room_for(*args))
        return made[-1]

    monkeypatch.setattr(copies, "room_for", kept)
    monkeypatch.setattr(launching, "room_for", kept)
    return made


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (matrix(m, k, torch.float16), matrix(n, k, torch.float16).T, matrix(m, n, torch.float16))


def test_a_settled_call_copies_to_new_scratch_memory_and_asks_nobody(device, all_copied, rooms, monkeypatch):
    a, b, out = operands(250, 333, 67)
    assert multiply(a, b, out)
    for tuner in (type(launching.tuned_gemm), type(copies.copy_rows)):
        monkeypatch.setattr(tuner, "run", lambda *args, **kwargs: pytest.fail("the dispatch was asked"))
    assert multiply(a, b, out)
    shapes = [room.shape for room in rooms]
    assert shapes == [(250, 67), (333, 67), (250, 333)] * 2
    launches = [launched.arguments for launched in device.launches]
    for number in range(2):
        of_a, of_b, product, of_out = launches[4 * number : 4 * number + 4]
        left, right, result = rooms[3 * number : 3 * number + 3]
        assert of_a[:2] == [a.data_ptr(), left.data_ptr()]
        assert of_b[:2] == [b.data_ptr(), right.data_ptr()]
        assert of_out[:2] == [result.data_ptr(), out.data_ptr()]
        descriptors = [(left.data_ptr(), 250, 67, 128, 1), *[(right.data_ptr(), 333, 67, 128, 1)] * 2]
        assert [given[:5] for given in product[:4]] == [*descriptors, (result.data_ptr(), 250, 333, 384, 1)]
        assert product[4:7] == [250, 333, 67]
        assert product[8:11] == [132, 128, 128]  # programs, alignments
    for number in range(4):
        assert launches[number][2:] == launches[4 + number][2:] or number == 2
        assert device.launches[number].grid == device.launches[4 + number].grid
