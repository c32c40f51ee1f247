"""Tiles of any width (`JOINED`), compiled for a GPU that is not here.

Each is compiled once, with the next of OPTIONS. All candidates with all types would take minutes, so one with
each number of further columns is compiled, and the widest of each kind, which has the fewest registers left.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
import triton
from compiled import HOPPER, SHARED_BYTES, check_fits
from gemm_compiled import OUT_BYTES, compile_gemm, in_parallel

from dist_autotune.compilation import pre_hooks
from dist_autotune.kernels.compat import HAS_INLINE_PTX
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.gemm.configs import GLUON_CANDIDATES, shared_bytes
from dist_autotune.kernels.gemm.pruning import fits
from dist_autotune.kernels.matrices import Block, matrix_of_rows
from dist_autotune.kernels.matrices import describe as describe_matrix
from dist_autotune.triton_api.launch import Launch

pytestmark = pytest.mark.skipif(
    not HAS_INLINE_PTX, reason="no inline PTX with shared memory before Triton 3.9"
)

OPTIONS = [
    {"dtype": "bf16", "out": "bf16"},
    {"dtype": "fp16", "out": "fp16"},
    {"dtype": "bf16", "out": "fp32"},
    {"dtype": "fp16", "out": "fp32"},
    {"dtype": "fp8e4nv", "out": "bf16", "scaled": True},
]
PTX_TYPES = {"bf16": "k16.f32.bf16.bf16", "fp16": "k16.f32.f16.f16", "fp8e4nv": "k32.f32.e4m3.e4m3"}
INSTRUCTIONS = {
    "bf16": "HGMMA.64x{}x16.F32.BF16",
    "fp16": "HGMMA.64x{}x16.F32",
    "fp8e4nv": "QGMMA.64x{}x32.F32.E4M3.E4M3",
}


def chosen() -> dict[str, tuple[triton.Config, dict[str, Any]]]:
    """Return candidates and the types with which they are compiled, by their lines in the table of all."""
    found: dict[str, tuple[triton.Config, dict[str, Any]]] = {}
    turns = itertools.cycle(OPTIONS)
    joined = [config for config in GLUON_CANDIDATES if config.kwargs["JOINED"]]
    widest = {_kind(config): width_of(config) for config in sorted(joined, key=width_of)}
    further = set()
    for config in joined:
        if config.kwargs["EXTRA_N"] not in further or width_of(config) == widest[_kind(config)]:
            further.add(config.kwargs["EXTRA_N"])
            code = re.sub(r", GROUP_M: \d+", "", str(config))  # which changes none
            found[code] = config, next(types for types in turns if _fits(config, types["out"]))
    return found


def width_of(config: triton.Config) -> int:
    return int(config.kwargs["BLOCK_N"] + config.kwargs["EXTRA_N"])


def _kind(config: triton.Config) -> tuple[Any, ...]:
    return config.kwargs["VARIANT"], config.kwargs["BLOCK_M"], config.kwargs["SWAP_AB"]


def _fits(config: triton.Config, out: str) -> bool:
    return fits(config, OUT_BYTES[out], SHARED_BYTES[HOPPER], tensor_memory=False)


CHOSEN = chosen()


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """Return all compiled kernels by name, taken apart as well."""

    def compile_one(config: triton.Config, types: dict[str, Any]) -> Any:
        compiled = compile_gemm(config, HOPPER, **types)
        assert compiled.asm["sass"]  # it is kept
        return compiled

    jobs = [lambda job=job: compile_one(*job) for job in CHOSEN.values()]
    return dict(zip(CHOSEN, in_parallel(jobs), strict=True))


STEPS = (4, 1, 2, 4)  # instructions along K: in the loop, and of the last k block, which may be 1, 2 or all


def products(kwargs: dict[str, Any], warps: int) -> int:
    """Return how many instructions a warpgroup needs for a k block."""
    rows_of_a_warpgroup = kwargs["BLOCK_M"] * 4 // warps
    return rows_of_a_warpgroup // 64 * kwargs["BLOCK_K"] // 16


def consumers(kwargs: dict[str, Any]) -> int:
    """Return how many times the code that multiplies is there."""
    return 2 if kwargs["VARIANT"] == "pingpong" else 1


@pytest.mark.parametrize("code", CHOSEN)
def test_it_fits_the_device_without_spills_and_takes_what_is_said_of_it(kernels, code):
    compiled, (config, types) = kernels[code], CHOSEN[code]
    used = check_fits(compiled, HOPPER)
    estimate = shared_bytes(config.kwargs, OUT_BYTES[types["out"]], tensor_memory=False)
    assert 0 <= estimate - used["shared_bytes"] <= 1024
    assert compiled.metadata.global_scratch_size == 0  # descriptors come from the host


# ---- what they are compiled to


@pytest.mark.parametrize("code", CHOSEN)
def test_one_instruction_is_as_wide_as_the_tile_and_there_is_no_other(kernels, code):
    config, types = CHOSEN[code]
    width = width_of(config)
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", kernels[code].asm["ptx"])
    assert set(found) == {f"m64n{width}{PTX_TYPES[types['dtype']]}"}
    each = products(config.kwargs, config.num_warps)
    assert len(found) == consumers(config.kwargs) * sum(each * steps // 4 for steps in STEPS)


def groups_of_products(sass: str) -> list[list[str]]:
    """Return the products, and what waits for them, from each fence in front of products to the next one."""
    names = r"(WARPGROUP\.ARRIVE|[HQ]GMMA\.\S+|gsb0, 0x\d+|gsb0;)"
    groups: list[list[str]] = []
    for name in re.findall(names, sass):
        if name == "WARPGROUP.ARRIVE":
            groups.append([])
        else:
            groups[-1].append(name)
    return groups


@pytest.mark.parametrize("code", CHOSEN)
def test_ptxas_waits_for_no_product_before_all_of_a_k_block_are_under_way(kernels, code):
    """Where it cannot see that nobody touches the registers of products in flight, it waits for each."""
    config, types = CHOSEN[code]
    instruction = INSTRUCTIONS[types["dtype"]].format(width_of(config))
    each = products(config.kwargs, config.num_warps)
    groups = [[instruction] * (each * steps // 4) + ["gsb0;", "gsb0, 0x1"] for steps in STEPS]
    found = groups_of_products(kernels[code].asm["sass"])
    ends = [group for group in found if group[-1] == "gsb0, 0x0"]  # each group waits for the one before it
    assert len(ends) == consumers(config.kwargs)
    for group in ends:
        group.remove("gsb0, 0x0")  # behind the last one
    assert sorted(found) == sorted(groups * consumers(config.kwargs))


def products_with_their_loops(lines: list[str]) -> list[tuple[int, int]]:
    """Return the first line of each K loop, and the one behind it that waits for a tile's last product."""
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"\s*(\w+):", line))}
    loops, begin = [], 0
    for end in [at for at, line in enumerate(lines) if "gsb0, 0x0" in line]:
        product = next(at for at in range(begin, end) if "GMMA." in lines[at])
        targets = [labels[name] for name in re.findall(r"BRA (\w+)", "\n".join(lines[product:end]))]
        loops.append((max(at for at in targets if at < product), end))  # the loop of which it is the first
        begin = end
    return loops


@pytest.mark.parametrize("code", CHOSEN)
def test_nothing_touches_the_sums_of_products_in_flight(kernels, code):
    config, _ = CHOSEN[code]
    width = width_of(config)
    lines = kernels[code].asm["sass"].splitlines()
    loops = products_with_their_loops(lines)
    assert len(loops) == consumers(config.kwargs)
    for start, end in loops:
        inside = lines[start:end]
        each = products(config.kwargs, config.num_warps)
        assert sum("GMMA." in line for line in inside) == sum(each * steps // 4 for steps in STEPS)
        first = {int(found[1]) for line in inside if (found := re.search(r"[HQ]GMMA\S* R(\d+),", line))}
        sums = {at + i for at in first for i in range(width // 2)}
        assert len(sums) == len(first) * width // 2
        for line in inside:
            if "GMMA." not in line:
                assert not sums & {int(number) for number in re.findall(r"\bR(\d+)", line)}, line


# ---- the path to a launch


def test_what_a_config_makes_of_the_descriptors_is_known_before_its_launch():
    """So it is compiled beside the run, not at a launch: swapped ones change a matrix, not blocks alone."""
    configs = {code: config for code, (config, _) in CHOSEN.items()}
    a, b, c = (
        matrix_of_rows(torch.zeros(size, dtype=torch.bfloat16))
        for size in ((1000, 64), (2048, 64), (1000, 2048))
    )
    descriptors = tuple(describe_matrix(matrix, Block(8, 64)) for matrix in (a, b, b, c))
    sizes = {"M": 1000, "N": 2048, "K": 64, "TRANS_A": False, "TRANS_B": True}
    found = pre_hooks.rehearse(Launch(launching.tuned_gemm, descriptors, sizes), configs, 60.0)
    for code, config in configs.items():
        _a, b_desc, further, _c = found[code].args
        assert further.base == (a if config.kwargs["SWAP_AB"] else b)
        assert b_desc.block_shape != [8, 64]
