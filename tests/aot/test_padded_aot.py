"""Copies to padded scratch memory, compiled for Hopper."""

from __future__ import annotations

import re
from typing import Any

import pytest
from compiled import CDNA3, HOPPER, compile_for, resources

from dist_autotune.kernels.gemm import copies


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
