"""AllGatherMoE's kernel for Hopper, compiled for a GPU that is not here, and the path to a launch."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import triton
from compiled import HOPPER, REGISTERS, SHARED_BYTES, compile_for, of_each_value, resources
from gemm_compiled import descriptor_type, in_parallel

from dist_autotune.kernels.gemm.roles import LOADER_REGISTERS
from dist_autotune.kernels.grouped.body import GATHER_REGISTERS
from dist_autotune.kernels.grouped.configs import blocks_of, shared_bytes
from dist_autotune.kernels.moe import ag_moe_kernel
from dist_autotune.kernels.moe.ag_moe_kernel import SPECIALIZED_CANDIDATES as CANDIDATES
from dist_autotune.kernels.moe.specialized_kernel import specialized_all_gather_moe

pytestmark = pytest.mark.aot

POINTERS = {
    **dict.fromkeys(("rows_ptr", "sources_ptr", "ends_ptr", "tables_ptr", "flags_ptr"), "*i32"),
    "errors_ptr": "*i64",
}
NUMBERS = ("size_class", "N", "K", "experts", "topk", "capacity", "stride_cm", "rank", "patience_ticks")


def compile_candidate(
    config: triton.Config, *, dtype: str = "bf16", by_columns: bool = False, is_sorted: bool = False
) -> Any:
    constants = {"WORLD": 4, "HEIGHTS": 4, "BY_COLUMNS": by_columns, "SORTED": is_sorted, **config.kwargs}
    types = {name: descriptor_type(dtype, block) for name, block in blocks_of(constants).items()}
    types |= {"a_ptr": f"*{dtype}", "c_ptr": f"*{dtype}", **POINTERS, **dict.fromkeys(NUMBERS, "i32")}
    kernel = specialized_all_gather_moe
    return compile_for(HOPPER, kernel, types, constants, any_value=NUMBERS, num_warps=config.num_warps)


@functools.cache
def compiled() -> list[tuple[triton.Config, Any]]:
    """Return candidates of a large call with what they compile to."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ag_moe_kernel, "shared_memory_bytes", lambda: SHARED_BYTES[HOPPER])
        usable = ag_moe_kernel._prune(CANDIDATES, {"size_class": 16384, "N": 4096})
    assert usable == CANDIDATES
    configs = of_each_value(usable)  # it costs seconds
    jobs = [lambda config=config: compile_candidate(config) for config in configs]
    return list(zip(configs, in_parallel(jobs), strict=True))


def test_candidates_fit_the_device_without_spills():
    for config, kernel in compiled():
        used = resources(kernel, HOPPER)
        assert used["spilled"] == 0, config
        assert used["registers"] <= REGISTERS[HOPPER], config
        assert used["shared_bytes"] <= SHARED_BYTES[HOPPER], config
        assert 0 <= shared_bytes(config) - used["shared_bytes"] <= 1024, config
        assert kernel.metadata.global_scratch_size == 0, config  # the descriptor comes from the host


@pytest.mark.parametrize("changes", [{"by_columns": True}, {"is_sorted": True}, {"dtype": "fp16"}], ids=str)
def test_other_layouts_need_no_more_of_the_device(changes):
    used = resources(compile_candidate(CANDIDATES[0], **changes), HOPPER)
    assert used["spilled"] == 0
    assert used["shared_bytes"] <= SHARED_BYTES[HOPPER]


def test_rows_are_gathered_and_stored_16_bytes_at_a_time_and_each_thread_arrives():
    for config, kernel in compiled():
        ptx = kernel.asm["ptx"]
        copies = re.findall(r"cp\.async\.(c[ag])\.shared\.global \[.*?\], \[.*?\], (0x\w+)", ptx)
        assert set(copies) == {("cg", "0x10")}, config
        assert len(copies) == config.kwargs["BLOCK_M"] * config.kwargs["BLOCK_K"] // 8 // 64, config
        assert "cp.async.mbarrier.arrive.noinc" in ptx, config
        (initial,) = set(re.findall(r"mbarrier\.init\.shared::cta\.b64 \[%r\d+\], (\d{2,});", ptx))
        assert initial == "65", config
        of_tiles = set(re.findall(r"st\.global\.(v\d)\.b32", ptx))
        assert of_tiles == {"v4"}, config
        assert not re.search(r"st\.global\.b(16|32)", ptx), config


def test_the_tensor_cores_read_behind_a_fence_that_is_behind_the_wait():
    for config, kernel in compiled():
        order = re.findall(
            r"mbarrier\.try_wait|fence\.proxy\.async\.shared::cta|wgmma\.mma_async|setmaxnreg",
            kernel.asm["ptx"],
        )
        found = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
        at = [i for i, name in enumerate(found) if name == "wgmma.mma_async"]
        assert at, config
        for i in at:
            assert found[i - 1] == "fence.proxy.async.shared::cta", config
            assert found[i - 2] == "mbarrier.try_wait", config


def test_only_the_load_warp_polls_and_each_keeps_to_its_registers():
    for config, kernel in compiled():
        parts = re.split(r"USETMAXREG", kernel.asm["sass"])
        (loading,) = [part for part in parts if "UTMALDG" in part]
        (gathering,) = [part for part in parts if "LDGSTS" in part]
        for part, most in ((loading, LOADER_REGISTERS.value), (gathering, GATHER_REGISTERS.value)):
            assert max(map(int, re.findall(r"\bR(\d+)\b", part))) < most, config
        assert "LDG.E.STRONG.SYS" in loading, config
        assert "LDG.E.STRONG.SYS" not in gathering, config
        assert not re.search(r"atom\.\S*add", kernel.asm["ptx"]), config
