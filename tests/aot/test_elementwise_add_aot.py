"""elementwise_add, compiled for GPUs that are not here: the order of reads, fences and arrivals."""

from __future__ import annotations

import re
from typing import Any

import pytest
from compiled import BLACKWELL, CDNA3, HOPPER, REGISTERS, SHARED_BYTES, compile_for, resources
from gemm_compiled import descriptor_type, in_parallel

from dist_autotune.kernels.elementwise_add.operation import ADD_CANDIDATES, pipelined_add
from dist_autotune.kernels.elementwise_add.specialized import warp_specialized_add
from dist_autotune.kernels.matrices import Block

pytestmark = pytest.mark.aot


def compile_specialized(config: Any, target: Any, dtype: str) -> Any:
    kind = descriptor_type(dtype, Block(config.kwargs["ROWS"], config.kwargs["COLUMNS"]))
    types = {**dict.fromkeys(("a_desc", "b_desc", "out_desc"), kind), "rows": "i32", "columns": "i32"}
    return compile_for(
        target,
        warp_specialized_add,
        types,
        {"DTYPE": dtype, **config.kwargs},
        any_value=tuple(types),
        num_warps=config.num_warps,
        maxnreg=config.maxnreg,
    )


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    jobs = {
        f"{target.arch} {dtype} {config.kwargs}": (target, dtype, config)
        for target, dtypes in ((HOPPER, ("fp32", "bf16")), (BLACKWELL, ("fp16",)))
        for dtype in dtypes
        for config in (ADD_CANDIDATES if dtype == "fp32" else ADD_CANDIDATES[:1])
    }
    done = in_parallel(
        [
            lambda target=target, dtype=dtype, config=config: (
                target,
                compile_specialized(config, target, dtype),
            )
            for target, dtype, config in jobs.values()
        ]
    )
    return dict(zip(jobs, done, strict=True))


def test_the_warp_specialised_kernel_fits_and_moves_by_tma(compiled):
    for name, (target, kernel) in compiled.items():
        used, ptx = resources(kernel, target), kernel.asm["ptx"]
        assert used["spilled"] == 0, name
        assert used["registers"] <= min(REGISTERS[target], 128), name
        assert used["shared_bytes"] <= SHARED_BYTES[target] // 2, name  # two programs on an SM
        assert kernel.metadata.num_warps == 8, name
        pieces = 2 if " fp32 " in name else 1  # of 128 bytes, a row of a block
        assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx)) == 2 * pieces, name
        assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.global", ptx)) == pieces, name
        assert "setmaxnreg.dec" in ptx, name


STEPS = {
    "read": r"ld\.shared\.(v\d\.)?b\d+|ldmatrix",
    "write": r"st\.shared\.(v\d\.)?b\d+|stmatrix",
    "fence": r"fence\.proxy\.async\.shared::cta",
    "all warps": r"bar\.sync",
    "arrive": r"mbarrier\.arrive\.shared",
}


def test_the_adder_fences_and_gathers_its_warps_before_it_hands_a_slot_on(compiled):
    for name, (_, kernel) in compiled.items():
        ptx = kernel.asm["ptx"]
        found = re.finditer("|".join(f"(?P<s{i}>{text})" for i, text in enumerate(STEPS.values())), ptx)
        order = [[*STEPS][int(next(g for g, text in m.groupdict().items() if text)[1:])] for m in found]
        fences = [i for i, step in enumerate(order) if step == "fence"][1:]  # the first is for the mbarriers
        handed_on = [(order[i - 1], order[i + 1 : i + 3]) for i in fences]
        assert ("read", ["all warps", "arrive"]) in handed_on, name
        assert ("write", ["all warps", "arrive"]) in handed_on, name


@pytest.mark.parametrize("target", [HOPPER, CDNA3], ids=["hopper", "cdna3"])
def test_the_pipelined_kernel_fits(target):
    types = {"a_ptr": "*fp32", "b_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
    kernel = compile_for(target, pipelined_add.fn, types, {"BLOCK": 2048, "STAGES": 4}, num_warps=4)
    used = resources(kernel, target)
    assert used["spilled"] == 0
    assert used["shared_bytes"] <= SHARED_BYTES[target]
    if target is HOPPER:  # two loads, three blocks ahead and one in the loop
        assert kernel.asm["ttgir"].count("async_copy_global_to_local") == 2 * 4
