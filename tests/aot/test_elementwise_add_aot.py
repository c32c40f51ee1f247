"""elementwise_add, compiled for GPUs that are not here."""

from __future__ import annotations

import pytest
from compiled import CDNA3, HOPPER, SHARED_BYTES, compile_for, resources

from dist_autotune.kernels.elementwise_add.operation import pipelined_add

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("target", [HOPPER, CDNA3], ids=["hopper", "cdna3"])
def test_the_pipelined_kernel_fits(target):
    types = {"a_ptr": "*fp32", "b_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
    kernel = compile_for(target, pipelined_add.fn, types, {"BLOCK": 2048, "STAGES": 4}, num_warps=4)
    used = resources(kernel, target)
    assert used["spilled"] == 0
    assert used["shared_bytes"] <= SHARED_BYTES[target]
    if target is HOPPER:  # two loads, three blocks ahead and one in the loop
        assert kernel.asm["ttgir"].count("async_copy_global_to_local") == 2 * 4
