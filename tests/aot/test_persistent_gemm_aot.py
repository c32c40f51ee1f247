"""persistent_matmul's bodies, compiled for GPUs that are not here, and the path to a launch."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
import triton
from compiled import BLACKWELL, CDNA3, CDNA4, HOPPER, REGISTERS, SHARED_BYTES, compile_for, resources
from gemm_compiled import OUT_BYTES, compile_gemm, in_parallel
from launch_path import arguments, count_asking, only_compiling

from dist_autotune import compile as compiling
from dist_autotune import contextual_autotune
from dist_autotune.kernels import settled_launch
from dist_autotune.kernels.matrices import LINE_BYTES
from dist_autotune.kernels.persistent_gemm import launch as launching
from dist_autotune.kernels.persistent_gemm import operation
from dist_autotune.kernels.persistent_gemm.blocks import blocks_of
from dist_autotune.kernels.persistent_gemm.candidates import GLUON_CANDIDATES, PLAIN_GPU_CANDIDATES
from dist_autotune.kernels.persistent_gemm.footprint import accumulator_registers, shared_bytes
from dist_autotune.kernels.persistent_gemm.mma import WIDEST_FROM_REGISTERS
from dist_autotune.kernels.persistent_gemm.plain import plain_gemm
from dist_autotune.kernels.settled_launch import SettledLaunches

pytestmark = pytest.mark.aot


def candidate(variant: str, **wanted: Any) -> triton.Config:
    """Return the first candidate of that variant with these values."""
    return next(
        config
        for config in GLUON_CANDIDATES
        if config.kwargs["VARIANT"] == variant
        and all({**config.kwargs, "warps": config.num_warps}[name] == value for name, value in wanted.items())
    )


# One of each kind of code; every candidate is in docs/benchmarks/persistent_gemm_compiled_*.md.
HOPPER_KERNELS: dict[str, tuple[triton.Config, dict[str, Any]]] = {
    "pipelined": (candidate("pipelined", BLOCK_N=64), {"dtype": "fp16", "out": "fp16"}),
    "persistent, fp32 out": (candidate("persistent", STORE_N=64), {"out": "fp32", "trans_a": True}),
    "stealing": (candidate("persistent_pipelined", STORE_BUFFERS=0), {"schedule": "contiguous"}),
    "cooperative": (candidate("cooperative"), {}),
    "stream-K": (candidate("cooperative", STREAM_K=8), {}),
    "stream-K, strided, fp32 out": (
        candidate("cooperative", STREAM_K=8, BLOCK_M=128, BLOCK_N=128, EXTRA_N=0),
        {"schedule": "strided", "out": "fp32", "trans_b": False},
    ),
    "stream-K, pingpong": (candidate("pingpong", STREAM_K=16, STORE_N=64), {}),
    "cooperative, B by rows": (
        candidate("cooperative", STORE_N=64),
        {"trans_b": False, "schedule": "chiplet"},
    ),
    "pingpong, dynamic": (candidate("pingpong"), {"schedule": "dynamic"}),
    "pingpong, 192 wide": (candidate("pingpong", EXTRA_N=64), {"trans_b": False}),
    "256 x 192": (candidate("cooperative", BLOCK_M=256, EXTRA_N=64), {"dtype": "fp16", "out": "fp16"}),
    "160 wide": (candidate("pingpong", EXTRA_N=32), {"out": "fp32"}),
    "rows through registers": (candidate("cooperative", BLOCK_M=128, EXTRA_N=32), {}),
    "rows through registers, alone": (candidate("pipelined", EXTRA_N=32), {"dtype": "fp16", "trans_a": True}),
    "256 x 160": (candidate("cooperative", BLOCK_M=256, EXTRA_N=32), {"trans_b": False}),
    "144 wide": (candidate("cooperative", EXTRA_N=16), {"trans_b": False, "dtype": "fp16", "out": "fp16"}),
    "256 and 288 wide": (candidate("cooperative", BLOCK_N=256, SPREAD=True), {"trans_a": True}),
    "128 and 192 wide, pingpong": (candidate("pingpong", EXTRA_N=64, SPREAD=True), {"dtype": "fp16"}),
    "few rows": (candidate("cooperative", BLOCK_K=128, BLOCK_M=64), {"sizes": {"M": 16, "N": 8192}}),
    "few columns": (
        candidate("cooperative", BLOCK_M=64, EXTRA_N=64, STREAM_K=0),
        {"sizes": {"M": 4096, "N": 72}},
    ),
    "64 x 64, staggered": (candidate("cooperative", BLOCK_N=64, STAGGER=True), {"trans_a": True}),
}
BLACKWELL_KERNELS: dict[str, tuple[triton.Config, dict[str, Any]]] = {
    "one partition": (candidate("persistent_pipelined", BLOCK_N=128), {"trans_b": False}),
    "cooperative, dynamic": (candidate("cooperative", warps=4), {"schedule": "dynamic"}),
    "stream-K": (candidate("cooperative", STREAM_K=8), {}),
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


def check_fits(compiled: Any, target: Any) -> dict[str, int]:
    used = resources(compiled, target)
    assert used["spilled"] == 0
    assert used["registers"] <= REGISTERS[target]
    assert used["shared_bytes"] <= SHARED_BYTES[target]
    return used


def estimated(config: triton.Config, options: dict[str, Any], *, tensor_memory: bool) -> int:
    return shared_bytes(config.kwargs, OUT_BYTES[options.get("out", "bf16")], tensor_memory=tensor_memory)


@pytest.mark.parametrize("kind", HOPPER_KERNELS)
def test_on_hopper_it_fits_and_uses_the_tensor_cores_and_tma(kernels, kind):
    compiled, (config, options) = kernels[f"Hopper: {kind}"], HOPPER_KERNELS[kind]
    used = check_fits(compiled, HOPPER)
    assert 0 <= estimated(config, options, tensor_memory=False) - used["shared_bytes"] <= 1024
    assert used["registers"] >= min(accumulator_registers(config), 168)
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned" in ptx
    assert "cp.async.bulk.tensor.2d.shared" in ptx
    assert "cp.async.bulk.tensor.2d.global.shared::cta" in ptx
    specialized = config.kwargs["VARIANT"] in ("cooperative", "pingpong")
    assert ("setmaxnreg.inc" in ptx) == ("setmaxnreg.dec" in ptx) == specialized
    assert compiled.metadata.global_scratch_size == 0  # descriptors come from the host


def test_registers_of_partitions_are_within_those_of_an_sm(kernels):
    """`setmaxnreg` would wait for more for ever. Two consumers and the loader have 128 lanes each."""
    ptx = kernels["Hopper: pingpong, dynamic"].asm["ptx"]
    wishes = {int(count) for count in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)}
    assert {24, 240} <= wishes
    assert (240 + 240 + 24) * 128 <= 65536


@pytest.mark.parametrize("kind", BLACKWELL_KERNELS)
def test_on_blackwell_it_fits_and_accumulates_in_tensor_memory(kernels, kind):
    compiled, (config, options) = kernels[f"Blackwell: {kind}"], BLACKWELL_KERNELS[kind]
    used = check_fits(compiled, BLACKWELL)
    assert 0 <= estimated(config, options, tensor_memory=True) - used["shared_bytes"] <= 1024
    ptx = compiled.asm["ptx"]
    pieces = config.kwargs["BLOCK_N"] // config.kwargs["STORE_N"]
    assert "tcgen05.mma" in ptx
    once_more = 2 if config.kwargs["STREAM_K"] else 1  # a tile is stored, or written as a part
    assert len(re.findall(r"tcgen05\.ld\.", ptx)) == once_more * pieces
    assert compiled.metadata.tmem_size == 2 * config.kwargs["BLOCK_N"]  # two accumulators


def test_the_machine_code_has_the_instructions_of_hopper(kernels):
    sass = kernels["Hopper: cooperative"].asm["sass"]
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in sass


THROUGH_REGISTERS = [
    name
    for name, (config, _) in HOPPER_KERNELS.items()
    if 0 < config.kwargs["EXTRA_N"] <= WIDEST_FROM_REGISTERS.value and config.num_warps == 8
]


@pytest.mark.parametrize("kind", HOPPER_KERNELS)
def test_no_row_is_loaded_into_registers_that_products_in_flight_read(kernels, kind):
    """The hardware reads the registers of wgmma's A until the group is waited for; ptxas may reuse them."""
    groups: list[set[int]] = [set()]  # the registers that each group in flight reads; the last is being made
    loads = products = 0
    for line in 2 * kernels[f"Hopper: {kind}"].asm["sass"].splitlines():  # twice: around the loop
        if found := re.search(r"HGMMA\S* R\d+, (R(\d+))?", line):
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
    "part written": r"st\.global\.",
    "count": r"atom\.global\.gpu\.acq_rel",
    "part read": r"ld\.global\.",
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


@pytest.mark.parametrize(
    ("kind", "counting"),
    [
        ("Hopper: stream-K", 1),
        ("Hopper: stream-K, strided, fp32 out", 1),
        ("Hopper: stream-K, pingpong", 2),
        ("Blackwell: stream-K", 1),
    ],
)
def test_a_part_is_written_by_all_warps_before_it_is_counted_and_read_by_all_behind_that(
    kernels, kind, counting
):
    ptx = kernels[kind].asm["ptx"]
    order = steps(ptx)
    counts = [i for i, step in enumerate(order) if step == "count"]
    assert len(counts) == counting
    for at in counts:
        last_write = max(i for i in range(at) if order[i] == "part written")
        first_read = order.index("part read", at)
        assert "all warps" in order[last_write:at]
        assert "all warps" in order[at:first_read]
        assert "part written" not in order[at:first_read]
    assert "part read" not in order[: counts[0]]
    assert "ld.global.nc" not in ptx  # a cache that no acquire empties


@pytest.mark.parametrize("kind", HOPPER_KERNELS)
def test_a_piece_is_fenced_and_complete_before_tma_reads_it(kernels, kind):
    order = steps(kernels[f"Hopper: {kind}"].asm["ptx"])
    stores = [i for i, step in enumerate(order) if step == "store"]
    for at in stores:
        before = order[:at]
        assert before[-2:] == ["proxy fence", "all warps"]
        written = [i for i, step in enumerate(before) if step == "write"]
        assert written
        assert "stores read" in before[: written[-1]] or kind == "stealing"
    assert "stores read" in order[stores[-1] :] or "stores read" in order[: stores[0]]


# ---- AMD and the fallback


PLAIN_TYPES = {
    **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16"),
    "counter_ptr": "*i32",
    **dict.fromkeys(("M", "N", "K", "stride_am", "stride_bn", "stride_cm", "programs"), "i32"),
}


def compile_plain(config: triton.Config, target: Any, schedule: str) -> Any:
    constants = {"SCHEDULE": schedule, "CHIPLETS": 8, "UPCAST": False}
    constants |= {"stride_ak": 1, "stride_bk": 1, "stride_cn": 1, **config.kwargs}
    return compile_for(
        target,
        plain_gemm.fn,
        PLAIN_TYPES,
        constants,
        any_value=("M", "N", "programs"),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@pytest.mark.parametrize(
    ("target", "instruction", "schedule"),
    [
        pytest.param(CDNA3, "v_mfma_f32_", "chiplet", id="gfx942"),
        pytest.param(CDNA4, "v_mfma_f32_", "dynamic", id="gfx950"),
        pytest.param(HOPPER, "wgmma.mma_async", "grouped", id="sm_90"),
    ],
)
def test_the_plain_body_compiles_and_uses_the_matrix_units(target, instruction, schedule):
    sides = {"BLOCK_M": 128, "BLOCK_N": 128}
    config = next(c for c in PLAIN_GPU_CANDIDATES if sides.items() <= c.kwargs.items() and c.num_stages == 2)
    compiled = compile_plain(config, target, schedule)
    check_fits(compiled, target)
    assert instruction in compiled.asm["ptx" if target is HOPPER else "amdgcn"]


# ---- the launch path, on a device that compiles and does not run


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    config = candidate("pipelined", BLOCK_N=64)
    with only_compiling(monkeypatch, launching, launching.tuned_gemm, config) as made:
        yield made


def call(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, programs: int = 132) -> bool:
    return operation._run_gluon(a, b, out, "auto", "auto", programs, tensor_memory=False)


def zeros(rows: int, columns: int) -> torch.Tensor:
    """Return a matrix that begins where a GPU's does, at a multiple of a cache line."""
    room = torch.zeros(rows * columns + LINE_BYTES // 2, dtype=torch.float16)
    return room[-room.data_ptr() % LINE_BYTES // 2 :][: rows * columns].view(rows, columns)


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (zeros(m, k), zeros(k, n), zeros(m, n))


def test_a_settled_call_launches_what_the_first_one_launched_and_asks_no_tuner(device, monkeypatch):
    a, b, out = operands(256, 192, 64)
    assert call(a, b, out)
    monkeypatch.setattr(
        type(launching.tuned_gemm), "run", lambda *args, **kwargs: pytest.fail("the tuner was asked")
    )
    assert call(a, b, out)
    first, second = device.launched
    assert arguments(first) == arguments(second)
    assert first[:3] == second[:3] == (4 * 3, 1, 1)  # tiles of 64 x 64


def test_other_tensors_of_the_same_shape_take_the_short_way_with_their_own_addresses(device, monkeypatch):
    call(*operands(256, 192, 64))
    monkeypatch.setattr(
        type(launching.tuned_gemm), "run", lambda *args, **kwargs: pytest.fail("the tuner was asked")
    )
    a, b, out = operands(256, 192, 64)
    call(a, b, out)
    launched = arguments(device.launched[-1])
    assert [descriptor[0] for descriptor in launched[:4]] == [tensor.data_ptr() for tensor in (a, b, b, out)]


def test_nothing_keeps_the_callers_tensors(device):
    import gc
    import weakref

    tensors = [*operands(256, 192, 64)]
    for _ in range(2):
        call(*tensors)
    kept = [weakref.ref(tensor) for tensor in tensors]
    device.launched.clear()
    tensors.clear()
    gc.collect()
    assert [ref() for ref in kept] == [None, None, None]


def test_another_choice_of_the_tuner_is_followed_at_once(device, monkeypatch):
    a, b, out = operands(256, 192, 64)
    call(a, b, out)
    monkeypatch.setattr(launching.tuned_gemm, "configs", [candidate("pipelined", BLOCK_M=64, BLOCK_N=128)])
    call(a, b, out)
    call(a, b, out)
    assert [launched[0] for launched in device.launched] == [4 * 3, 4 * 2, 4 * 2]


def test_no_short_way_while_a_launch_may_be_a_trial(device, monkeypatch):
    a, b, out = operands(256, 192, 64)
    call(a, b, out)
    asked = count_asking(monkeypatch, launching.tuned_gemm)
    monkeypatch.setattr(settled_launch, "is_tuning", lambda: True)
    call(a, b, out)
    assert asked == [1]


def test_what_is_kept_is_bounded(device, monkeypatch):
    monkeypatch.setattr(launching, "_SETTLED", SettledLaunches(launching.tuned_gemm, blocks_of, kept=2))
    for m in (64, 128, 192, 256):
        call(*operands(m, 192, 64))
    assert [shape.m for shape in launching._SETTLED._of] == [192, 256]


def test_a_result_contiguous_along_columns_is_the_transposed_product(device):
    a, b, _ = operands(256, 192, 64)
    out = zeros(192, 256).T
    call(a, b, out)
    launched = arguments(device.launched[-1])
    assert [descriptor[0] for descriptor in launched[:4]] == [t.data_ptr() for t in (b, a, a, out)]
    assert launched[5:8] == [192, 256, 64]  # M, N, K of the product that runs


def test_strides_that_tma_cannot_take_are_left_to_the_plain_body(device):
    a, b, out = operands(256, 192, 60)
    assert not call(a[:, 1:], b[1:], out)
    assert device.launched == []


def test_it_is_tuned_in_context_with_each_config_s_own_descriptors(device, monkeypatch):
    """The blocks are set by the config's `pre_hook`, which the tuner calls as Triton does."""
    monkeypatch.setattr(compiling, "current_device", lambda: 0)
    configs = [candidate("pipelined", BLOCK_N=64), candidate("pipelined", BLOCK_M=64, BLOCK_N=128)]
    monkeypatch.setattr(launching.tuned_gemm, "configs", configs)
    monkeypatch.setattr(launching.tuned_gemm, "cache", {})
    a, b, out = operands(256, 192, 128)
    options = {"n_warmup": 0, "n_repeat": 1, "log_dir": None, "cache": False, "progress": False}
    tuned = contextual_autotune(lambda: call(a, b, out), **options)
    tuned()
    (context,) = tuned.report.contexts
    assert (context.kernel, context.status, context.banned) == ("gemm", "tuned", {})
    assert len(context.timings) == 2
    blocks = [arguments(launched)[0][5:7] for launched in device.launched]
    assert set(blocks) == {(64, 128), (64, 64)}  # of A: BLOCK_M x BLOCK_K
    tiles = {(64, 128): 4 * 3, (64, 64): 4 * 2}
    assert [launched[0] for launched in device.launched] == [tiles[block] for block in blocks]
    (choice,) = launching.tuned_gemm.cache.values()
    assert choice is launching.tuned_gemm.best_config
    call(a, b, out)  # outside: this one asks the tuner and remembers
    monkeypatch.setattr(type(launching.tuned_gemm), "run", lambda *args, **kwargs: pytest.fail("asked again"))
    call(a, b, out)
    assert arguments(device.launched[-1]) == arguments(device.launched[-2])


def test_parts_of_k_go_to_a_workspace_and_their_sum_to_the_result(device, monkeypatch):
    sums: list[Any] = []
    monkeypatch.setattr(operation, "sum_splits", lambda *args: sums.append(args))
    a, b, out = operands(300, 192, 640)
    assert operation._run_gluon(a, b, out, "auto", "auto", 132, 3, tensor_memory=False)
    ((workspace, split_rows, splits, target),) = sums
    assert (split_rows, splits, target) == (512, 3, out)
    assert workspace.shape == (3 * 512, 192)
    assert workspace.dtype is torch.float32
    (launched,) = device.launched
    assert launched[0] == 5 * 3 * 3  # tiles of 64 x 64, three times
    descriptor, sizes = arguments(launched)[3], arguments(launched)[5:11]
    assert descriptor[:5] == (workspace.data_ptr(), 3 * 512, 192, 192, 1)
    assert sizes[:5] == [300, 192, 640, 3, 512]


def test_stream_k_runs_on_all_sms_with_room_for_two_parts_each_and_counts_of_its_own(device, monkeypatch):
    monkeypatch.setattr(launching.tuned_gemm, "configs", [candidate("cooperative", STREAM_K=8)])
    monkeypatch.setattr(launching, "_COUNTERS", OrderedDict())
    made: list[torch.Tensor] = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *args, **options: made.append(empty(*args, **options)) or made[-1]
    )
    a, b, out = operands(300, 520, 4096)
    for _ in range(2):  # asked of the tuner, then the short way
        assert operation._run_gluon(a, b, out, "stream_k", "auto", 132, tensor_memory=False)
    first, second = device.launched
    assert first[0] == second[0] == 132  # for 9 tiles of 128 x 256
    parts = [tensor for tensor in made if tensor.dtype is torch.float32]
    assert [tensor.numel() for tensor in parts] == [2 * 132 * 128 * 256] * 2
    (counter,) = launching._COUNTERS.values()
    assert counter.numel() == 2 + 132
    for launched, room in zip((first, second), parts, strict=True):
        assert arguments(launched)[4] == counter.data_ptr()
        assert arguments(launched)[14] == room.data_ptr()
