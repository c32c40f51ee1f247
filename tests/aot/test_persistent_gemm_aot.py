"""persistent_matmul's bodies, compiled for GPUs that are not here, and the path to a launch."""

import re
from typing import Any

import pytest
import triton
from compiled import BLACKWELL, CDNA3, CDNA4, HOPPER, check_fits, compile_for
from gemm_compiled import OUT_BYTES, candidate, compile_gemm, in_parallel

from dist_autotune.kernels.epilogues import sums_of_a_result
from dist_autotune.kernels.gemm.configs import PLAIN_GPU_CANDIDATES, accumulator_registers, shared_bytes
from dist_autotune.kernels.gemm.mma import WIDEST_FROM_REGISTERS
from dist_autotune.kernels.gemm.operation import plain_gemm

# One of each kind of code.
HOPPER_KERNELS: dict[str, tuple[triton.Config, dict[str, Any]]] = {
    "pipelined": (candidate("pipelined", BLOCK_N=64), {"dtype": "fp16", "out": "fp16"}),
    "persistent, fp32 out": (candidate("persistent", STORE_N=64), {"out": "fp32", "trans_a": True}),
    "cooperative": (candidate("cooperative"), {}),
    "pingpong": (candidate("pingpong"), {}),
    "pingpong, 192 wide": (candidate("pingpong", EXTRA_N=64), {"trans_b": False}),
    "256 x 192": (candidate("cooperative", BLOCK_M=256, EXTRA_N=64), {"dtype": "fp16", "out": "fp16"}),
    "bias and GELU": (candidate("cooperative"), {"bias": "bf16", "activation": "gelu"}),
    "bias of rows": (
        candidate("persistent_pipelined"),
        {"bias": "fp32", "bias_along": "row", "activation": "silu"},
    ),
    "SwiGLU": (candidate("cooperative"), {"activation": "swiglu"}),
    "GLU by tanh, 192 wide": (candidate("pingpong", EXTRA_N=64), {"out": "fp32", "activation": "geglu_tanh"}),
    "fp8, rows through registers": (
        candidate("cooperative", BLOCK_M=128, EXTRA_N=32),
        {"dtype": "fp8e4nv", "scaled": True, "bias": "bf16", "activation": "gelu_tanh"},
    ),
    "few rows": (candidate("cooperative", BLOCK_K=128, BLOCK_M=64), {"sizes": {"M": 16, "N": 8192}}),
}
BLACKWELL_KERNELS: dict[str, tuple[triton.Config, dict[str, Any]]] = {
    "one partition": (candidate("persistent_pipelined", BLOCK_N=128), {"trans_b": False}),
    "cooperative": (candidate("cooperative", warps=4), {}),
    "SwiGLU": (candidate("cooperative", warps=4), {"activation": "swiglu"}),
    "fp8, bias and SiLU": (
        candidate("cooperative", warps=4),
        {"dtype": "fp8e4nv", "scaled": True, "bias": "fp16", "activation": "silu"},
    ),
}


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """Return all compiled kernels of the Gluon body by name."""
    named = [("Hopper", HOPPER, HOPPER_KERNELS), ("Blackwell", BLACKWELL, BLACKWELL_KERNELS)]
    jobs = {
        f"{name}: {kind}": (
            lambda config=config, target=target, options=options: compile_gemm(config, target, **options)
        )
        for name, target, chosen in named
        for kind, (config, options) in chosen.items()
    }
    return dict(zip(jobs, in_parallel([*jobs.values()]), strict=True))


def estimated(config: triton.Config, options: dict[str, Any], *, tensor_memory: bool) -> int:
    out_bytes = OUT_BYTES[options.get("out", "bf16")] // sums_of_a_result(options.get("activation"))
    return shared_bytes(config.kwargs, out_bytes, tensor_memory=tensor_memory)


@pytest.mark.parametrize("kind", HOPPER_KERNELS)
def test_on_hopper_it_fits_and_uses_the_tensor_cores_and_tma(kernels, kind):
    compiled, (config, options) = kernels[f"Hopper: {kind}"], HOPPER_KERNELS[kind]
    used = check_fits(compiled, HOPPER)
    assert 0 <= estimated(config, options, tensor_memory=False) - used["shared_bytes"] <= 1024
    assert used["registers"] >= min(accumulator_registers(config), 168)
    ptx = compiled.asm["ptx"]
    operands = r"k32\.f32\.e4m3\.e4m3" if options.get("dtype") == "fp8e4nv" else r"k16\.f32\.(bf|f)16"
    assert re.search(rf"wgmma\.mma_async\.sync\.aligned\.m64n\d+{operands}", ptx)
    assert "cp.async.bulk.tensor.2d.shared" in ptx
    assert "cp.async.bulk.tensor.2d.global.shared::cta" in ptx
    specialized = config.kwargs["VARIANT"] in ("cooperative", "pingpong")
    assert ("setmaxnreg.inc" in ptx) == ("setmaxnreg.dec" in ptx) == specialized
    assert compiled.metadata.global_scratch_size == 0  # descriptors come from the host


@pytest.mark.parametrize("kind", BLACKWELL_KERNELS)
def test_on_blackwell_it_fits_and_accumulates_in_tensor_memory(kernels, kind):
    compiled, (config, options) = kernels[f"Blackwell: {kind}"], BLACKWELL_KERNELS[kind]
    used = check_fits(compiled, BLACKWELL)
    assert 0 <= estimated(config, options, tensor_memory=True) - used["shared_bytes"] <= 1024
    ptx = compiled.asm["ptx"]
    pieces = config.kwargs["BLOCK_N"] // config.kwargs["STORE_N"]
    assert "tcgen05.mma" in ptx
    assert len(re.findall(r"tcgen05\.ld\.", ptx)) == pieces
    assert compiled.metadata.tmem_size == 2 * config.kwargs["BLOCK_N"]  # two accumulators


THROUGH_REGISTERS = [
    name
    for name, (config, _) in HOPPER_KERNELS.items()
    if 0 < config.kwargs["EXTRA_N"] <= WIDEST_FROM_REGISTERS.value and config.num_warps == 8
]


@pytest.mark.parametrize("kind", ["cooperative", *THROUGH_REGISTERS])
def test_no_row_is_loaded_into_registers_that_products_in_flight_read(kernels, kind):
    """The hardware reads the registers of wgmma's A until the group is waited for; ptxas may reuse them."""
    groups: list[set[int]] = [set()]  # the registers that each group in flight reads; the last is being made
    loads = products = 0
    for line in 2 * kernels[f"Hopper: {kind}"].asm["sass"].splitlines():  # twice: around the loop
        if found := re.search(r"[HQ]GMMA\S* R\d+, (R(\d+))?", line):
            products += found[1] is not None
            groups[-1] |= {int(found[2]) + i for i in range(4)} if found[1] else set()
            if "gsb0" in line:
                groups.append(set())
        elif found := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d+)", line):
            groups = (
                groups[len(groups) - 1 - int(found[1], 16) :] if len(groups) > int(found[1], 16) else groups
            )
        elif found := re.search(r"LDSM\.\S*\.4 R(\d+),", line):
            loads += 1
            written = {int(found[1]) + i for i in range(4)}
            assert not any(written & read for read in groups), line
    assert (loads > 0) == (products > 0) == (kind in THROUGH_REGISTERS)


# ---- the order of what must not pass one another

STEPS = {
    "products done": r"wgmma\.wait_group",
    "all warps": r"bar\.sync|bar\.warp\.sync",
    "arrive": r"mbarrier\.arrive\.shared",
    "write": r"stmatrix|st\.shared\.(v\d|b16)",
    "proxy fence": r"fence\.proxy\.async\.shared::cta",
    "store": r"cp\.async\.bulk\.tensor\.\dd\.global\.shared",
    "stores read": r"cp\.async\.bulk\.wait_group\.read",
    "load": r"cp\.async\.bulk\.tensor\.\dd\.shared",
}


def steps(ptx: str) -> list[str]:
    """Return the steps in the order in which they stand; PTX keeps it within a block of code."""
    found = re.finditer("|".join(f"(?P<s{i}>{pattern})" for i, pattern in enumerate(STEPS.values())), ptx)
    return [[*STEPS][int(str(match.lastgroup)[1:])] for match in found]


@pytest.mark.parametrize("kind", HOPPER_KERNELS)
def test_a_slot_is_given_back_when_all_warps_have_read_it(kernels, kind):
    order = steps(kernels[f"Hopper: {kind}"].asm["ptx"])
    after_products = [order[i + 1 : i + 3] for i, step in enumerate(order) if step == "products done"]
    given_back = [following == ["all warps", "arrive"] for following in after_products]
    assert sum(given_back) >= 2  # in the K loop and behind it
    assert all(given_back) or kind in THROUGH_REGISTERS  # which wait for each half of a block
    for at in (i for i, step in enumerate(order) if step == "arrive" and "products done" in order[:i]):
        assert order[at - 1] == "all warps"


@pytest.mark.parametrize("kind", HOPPER_KERNELS)
def test_a_piece_is_fenced_and_complete_before_tma_reads_it(kernels, kind):
    order = steps(kernels[f"Hopper: {kind}"].asm["ptx"])
    stores = [i for i, step in enumerate(order) if step == "store"]
    for at in stores:
        before = order[:at]
        assert before[-2:] == ["proxy fence", "all warps"]
        written = [i for i, step in enumerate(before) if step == "write"]
        assert written
        assert "stores read" in before[: written[-1]]
    assert "stores read" in order[stores[-1] :] or "stores read" in order[: stores[0]]


# ---- AMD and the fallback


PLAIN_TYPES = {
    **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16"),
    **dict.fromkeys(("M", "N", "K", "stride_am", "stride_bn", "stride_cm", "programs", "m_class"), "i32"),
}


def compile_plain(config: triton.Config, target: Any, schedule: str) -> Any:
    constants = {"SCHEDULE": schedule, "CHIPLETS": 8, "UPCAST": False, "ACTIVATION": "none", "bias_ptr": None}
    constants |= dict.fromkeys(("row_scale_ptr", "column_scale_ptr"))
    constants |= {"stride_ak": 1, "stride_bk": 1, "stride_cn": 1, **config.kwargs}
    return compile_for(
        target,
        plain_gemm.fn,
        PLAIN_TYPES,
        constants,
        any_value=("M", "N", "programs", "m_class"),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@pytest.mark.parametrize(
    ("target", "instruction", "schedule"),
    [
        pytest.param(CDNA3, "v_mfma_f32_", "chiplet", id="gfx942"),
        pytest.param(CDNA4, "v_mfma_f32_", "chiplet", id="gfx950"),
        pytest.param(HOPPER, "wgmma.mma_async", "grouped", id="sm_90"),
    ],
)
def test_the_plain_body_compiles_and_uses_the_matrix_units(target, instruction, schedule):
    sides = {"BLOCK_M": 128, "BLOCK_N": 128}
    config = next(c for c in PLAIN_GPU_CANDIDATES if sides.items() <= c.kwargs.items() and c.num_stages == 2)
    compiled = compile_plain(config, target, schedule)
    check_fits(compiled, target)
    assert instruction in compiled.asm["ptx" if target is HOPPER else "amdgcn"]
