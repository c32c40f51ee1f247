"""The hash of outputs, compiled for GPUs that are not here."""

from __future__ import annotations

import pytest
from compiled import BLACKWELL, CDNA3, HOPPER, REGISTERS, compile_for, resources

from dist_autotune.bits.tensor_hash import BLOCK, hash_kernel


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("size", ["i32", "i64"])
@pytest.mark.parametrize("target", [HOPPER, BLACKWELL, CDNA3], ids=lambda target: str(target.arch))
def test_the_hash_fits_and_spills_nothing(target, bits, size):
    types = {"words_ptr": f"*i{bits}", "partial_ptr": "*i64", "n": size}
    compiled = compile_for(target, hash_kernel, types, {"BITS": bits, "BLOCK": BLOCK}, any_value=("n",))
    used = resources(compiled, target)
    assert used["spilled"] == 0
    assert used["registers"] <= REGISTERS[target]
