"""Warp-specialised kernels of all operations, compiled for GPUs that are not here, and what they take."""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
from compiled import BLACKWELL, HOPPER, SHARED_BYTES, check_fits, compile_for, compiled_on, events
from gemm_compiled import descriptor_type, in_parallel

from dist_autotune.kernels.ag_gemm import specialized as gathering
from dist_autotune.kernels.ag_gemm.specialized_kernel import specialized_all_gather_gemm
from dist_autotune.kernels.compat import HAS_INLINE_PTX
from dist_autotune.kernels.epilogues import NO_ACTIVATION
from dist_autotune.kernels.gemm import launch, pruning
from dist_autotune.kernels.gemm.configs import blocks_of, box_of, shared_bytes
from dist_autotune.kernels.gemm.pruning import prune_chunks
from dist_autotune.kernels.gemm.roles import LOADER_REGISTERS
from dist_autotune.kernels.gemm_rs import specialized as scattering
from dist_autotune.kernels.gemm_rs.call import ScatterMemory, ScatterOperands
from dist_autotune.kernels.gemm_rs.specialized_kernel import specialized_gemm_reduce_scatter

TARGETS = pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["hopper", "blackwell"])
SCALED = dict.fromkeys(("row_scale_ptr", "column_scale_ptr"), "*fp32")
OF_A_CALL = ("M", "N", "K", "capacity", "rank", "patience_ticks", "size_class")


@dataclass(frozen=True, eq=False)
class SpecializedKernel:
    """A kernel with the types of its arguments, descriptors apart, and its constants besides a config's."""

    kernel: Any
    candidates: list[triton.Config]
    blocks_of: Callable[[dict[str, Any]], dict[str, Any]]
    types: dict[str, str]
    optional: tuple[str, ...]  # pointers that a plain call does not pass
    constants: dict[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()  # arguments that are multiples of 16
    spilled_bytes: int = 0  # of a thread of four warps that share a tile on Hopper

    def compile(
        self,
        config: triton.Config,
        target: Any = HOPPER,
        *,
        dtype: str = "bf16",
        types: dict[str, str] | None = None,
        **constants: Any,
    ) -> Any:
        """Return the compiled kernel; `types` and `constants` are what differs from a plain call."""
        made = {"WORLD": 4, "TENSOR_MEMORY": target is BLACKWELL, "DTYPE": dtype, "TRANS_B": True}
        made |= self.constants | config.kwargs | constants
        out = "bf16" if dtype == "fp8e4nv" else dtype
        all_types = {
            name: descriptor_type(out if name in ("c_desc", "partial_desc") else dtype, block)
            for name, block in self.blocks_of(made).items()
        }
        all_types |= self.types | (types or {})
        made |= {name: None for name in self.optional if name not in all_types}
        any_value = tuple(name for name in all_types if name not in self.aligned)
        warps = config.num_warps
        return compile_for(target, self.kernel, all_types, made, any_value=any_value, num_warps=warps)

    def usable_on(
        self, target: Any, rows: int, n: int = 8192, *, by_rows: bool = True
    ) -> list[triton.Config]:
        """Return the candidates of a call with so many rows of each rank."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(pruning, "shared_memory_bytes", lambda: SHARED_BYTES[target])
            args = {"M": 4 * rows, "N": n, "K": 8192, "TRANS_B": by_rows}
            return prune_chunks(self.candidates, args, WORLD=4, TENSOR_MEMORY=target is BLACKWELL)

    @functools.cache  # noqa: B019 - there are two
    def compiled_for(self, target: Any) -> list[tuple[triton.Config, Any]]:
        """Return candidates of a large call with what they compile to."""
        configs = compiled_on(target, self.usable_on(target, 2048), "num_warps")
        jobs = [lambda config=config: self.compile(config, target) for config in configs]
        return list(zip(configs, in_parallel(jobs), strict=True))

    def check_fits(
        self,
        config: triton.Config,
        compiled: Any,
        target: Any,
        *,
        is_estimated: bool = True,
        spilled_bytes: int = 0,
    ) -> None:
        shares = target is HOPPER and config.kwargs["VARIANT"] == "cooperative" and config.num_warps == 4
        allowed = self.spilled_bytes if shares else spilled_bytes
        used = check_fits(compiled, target, config, spilled=allowed)
        estimate = shared_bytes(config.kwargs, 2, tensor_memory=target is BLACKWELL)
        assert not is_estimated or 0 <= estimate - used["shared_bytes"] <= 1024, config
        assert compiled.metadata.global_scratch_size == 0, config  # descriptors come from the host


GATHER = SpecializedKernel(
    specialized_all_gather_gemm,
    gathering.CANDIDATES,
    blocks_of,
    {**{"flags_ptr": "*i32", "errors_ptr": "*i64"}, **dict.fromkeys(OF_A_CALL, "i32")},
    (*SCALED, "bias_ptr"),
    {"ACTIVATION": NO_ACTIVATION},
)
SCATTER = SpecializedKernel(
    specialized_gemm_reduce_scatter,
    scattering.CANDIDATES,
    lambda made: blocks_of({**made, "partial_desc": None}),
    {
        **{"staged_ptr": "*bf16", "flags_ptr": "*i32", "counts_ptr": "*i32", "errors_ptr": "*i64"},
        "table_ptr": "*i64",
        **dict.fromkeys((*OF_A_CALL, "first", "chunks"), "i32"),
    },
    (*SCALED, "addend_ptr"),
    {"STORES": False},
    aligned=("staged_ptr", "addend_ptr", "counts_ptr", "N"),
    spilled_bytes=16 if HAS_INLINE_PTX else 8,  # numbers that are needed once a tile
)
EACH = pytest.mark.parametrize("kernel", [GATHER, SCATTER], ids=["gather", "scatter"])


def candidate(
    kernel: SpecializedKernel, variant: str, blocks: tuple[int, int, int], warps: int
) -> triton.Config:
    """Return the first candidate like that."""

    def values(config: triton.Config) -> tuple[Any, ...]:
        kwargs = config.kwargs
        return kwargs["VARIANT"], kwargs["BLOCK_M"], kwargs["BLOCK_N"], kwargs["BLOCK_K"], config.num_warps

    return next(config for config in kernel.candidates if values(config) == (variant, *blocks, warps))


LARGE = candidate(GATHER, "cooperative", (128, 256, 64), 8)
BLACKWELL_S = candidate(GATHER, "cooperative", (128, 256, 64), 4)
PINGPONG = candidate(GATHER, "pingpong", (128, 128, 64), 4)
SMALL_DEEP = candidate(GATHER, "cooperative", (64, 128, 128), 4)


@TARGETS
@EACH
def test_candidates_fit_the_device_without_spills(kernel, target):
    assert kernel.compiled_for(target)
    for config, compiled in kernel.compiled_for(target):
        kernel.check_fits(config, compiled, target)


def by_columns(variant):
    usable = SCATTER.usable_on(HOPPER, 2048, by_rows=False)
    return next(config for config in usable if config.kwargs["VARIANT"] == variant)


GELU = {"types": {"bias_ptr": "*fp32"}, "ACTIVATION": "gelu"}
OF_BACKWARD = {"types": {"addend_ptr": "*bf16"}, "TRANS_B": False}
FURTHER = {
    "gather, a weight by columns": (GATHER, PINGPONG, HOPPER, {"TRANS_B": False}),
    "gather, a weight by columns, Blackwell": (GATHER, BLACKWELL_S, BLACKWELL, {"TRANS_B": False}),
    "gather, GELU": (GATHER, LARGE, HOPPER, GELU),
    "gather, SwiGLU in float16": (GATHER, PINGPONG, HOPPER, {"ACTIVATION": "swiglu", "dtype": "fp16"}),
    # Four warps spill 24 bytes of a gelu of 128 x 256 sums; eight do not.
    "gather, GELU, Blackwell": (GATHER, LARGE, BLACKWELL, GELU),
    "scatter, a weight by columns and an addend": (SCATTER, by_columns("cooperative"), HOPPER, OF_BACKWARD),
    "scatter, the same, pingpong": (SCATTER, by_columns("pingpong"), HOPPER, OF_BACKWARD),
    **{
        f"scatter to the peers, {index}": (SCATTER, SCATTER.candidates[index], HOPPER, {"STORES": True})
        for index in (0, 3, 4, 7, 11, len(SCATTER.candidates) - 1)
    },
    "scatter to the peers, Blackwell": (SCATTER, SCATTER.candidates[6], BLACKWELL, {"STORES": True}),
}
# Triton 3.9 computes N less a tile's width once a program, before the partitions begin; two of them load it
# once, before their loops. `find` with that minimum the other way round spills nothing here, but 8 bytes of
# the same candidate without STORES on 3.6: all 255 registers are in use.
SPILLED_AT_THE_START = {"scatter to the peers, Blackwell": 8 if HAS_INLINE_PTX else 0}


@pytest.mark.parametrize("name", FURTHER)
def test_what_a_call_may_add_fits_beside_the_accumulator(name):
    kernel, config, target, options = FURTHER[name]
    compiled = kernel.compile(config, target, **options)
    at_the_start = SPILLED_AT_THE_START.get(name, 0)
    is_estimated = "ACTIVATION" not in options
    kernel.check_fits(config, compiled, target, is_estimated=is_estimated, spilled_bytes=at_the_start)
    if at_the_start:
        _start, *partitions = compiled.asm["sass"].split("USETMAXREG")
        assert not any(re.search(r"\bSTL\b", part) for part in partitions)
        assert sum(len(re.findall(r"\bLDL\b", part)) for part in partitions) <= 2


IN_FP8 = {
    "gather, pingpong": (GATHER, PINGPONG, {"types": {"bias_ptr": "*bf16"}}),
    "gather, small": (GATHER, SMALL_DEEP, {"types": {"bias_ptr": "*bf16"}}),
    **{
        f"scatter{' to the peers' * to_peers}, {i}": (SCATTER, SCATTER.candidates[i], {"STORES": to_peers})
        for i in (0, 3, 4, 7, 9, 11, len(SCATTER.candidates) - 1)
        for to_peers in (False, True)
    },
}
# Of the widest tile on Triton 3.9: numbers that are needed once a tile.
SPILLED_IN_FP8 = dict(zip(list(IN_FP8)[-2:], (32, 48), strict=True)) if HAS_INLINE_PTX else {}


@pytest.mark.parametrize("name", IN_FP8)
def test_in_fp8_with_scales_it_multiplies_bytes_and_no_product_waits_for_what_is_spilled(name):
    kernel, config, options = IN_FP8[name]
    types = SCALED | options.get("types", {})
    compiled = kernel.compile(config, **options | {"dtype": "fp8e4nv", "types": types})
    spilled = SPILLED_IN_FP8.get(name, 0)
    # Scales of columns pass through shared memory that the estimate of a scatter does not have.
    kernel.check_fits(config, compiled, HOPPER, is_estimated=kernel is GATHER, spilled_bytes=spilled)
    (products,) = re.findall(r"\bQGMMA\b.*\bQGMMA\b", compiled.asm["sass"], re.DOTALL)
    assert not re.search(r"\b(STL|LDL)\b", products)
    assert re.search(r"wgmma\.mma_async\S*k32\.f32\.e4m3\.e4m3", compiled.asm["ptx"])
    # Scales that peers write, and a cache that no acquire empties.
    assert "ld.global.nc" not in compiled.asm["ptx"]


@TARGETS
@EACH
def test_each_mbarrier_has_a_role(kernel, target):
    """One that is initialised and not used lies where the compiler puts operands, too."""
    for config, compiled in kernel.compiled_for(target):
        above, _, roles = compiled.asm["ttgir"].partition("ttg.warp_specialize")
        names = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\w+xi64", above)
        assert [name for name in names if re.search(rf"{name}\b", roles)] == names != [], config


# ---- AllGatherGemm


def load_partition(ttgir: str) -> str:
    """Return the text of the partition that loads."""
    partitions = re.split(r"^\s*(?:default|partition\d+\()", ttgir, flags=re.MULTILINE)
    (found,) = [text for text in partitions if "async_tma_copy_global_to_local" in text]
    return found


def loads_of_a_step(kwargs: dict[str, Any]) -> int:
    """Return how many there are: of A and of B, and for tiles of any width of each box in each slot."""
    of_b = [columns for columns in (kwargs["BLOCK_N"], kwargs["EXTRA_N"]) if columns]
    if kwargs["JOINED"]:
        return 1 + kwargs["NUM_BUFFERS"] * sum(columns // box_of(columns) for columns in of_b)
    return 1 + len(of_b)


@TARGETS
def test_the_load_warp_polls_and_fences_in_the_loop_over_tiles_before_it_loads(target):
    for config, compiled in GATHER.compiled_for(target):
        partition = load_partition(compiled.asm["ttgir"])
        before, tiles = partition.split("scf.while", 1)
        assert [name for _, name in events(before) if name != "loop"] == [], config
        names = [name for _, name in events(tiles) if name != "loop"]
        assert names[:3] == ["poll", "poll", "fence"], config
        loads = loads_of_a_step(config.kwargs)
        first = names.index("load")
        assert names.count("load") == loads, config
        assert names[first : first + loads] == ["load"] * loads, config
        assert "fence" not in names[first:], config  # behind the loads: it parts from the peers


@TARGETS
def test_a_poll_is_a_load_and_the_machine_code_has_its_fence(target):
    for config, compiled in GATHER.compiled_for(target):
        ptx, sass = compiled.asm["ptx"], compiled.asm["sass"]
        assert "ld.global.sys.acquire" in ptx, config
        assert "vote.sync.any" in ptx, config  # on the time, in the load warp; the others never come
        assert "barrier.cta.red" not in ptx, config
        assert not re.search(r"atom\.\S*add", ptx), config
        assert "fence.proxy.async.global" in ptx, config
        assert sass.index("LDG.E.STRONG.SYS") < sass.index("FENCE.VIEW.ASYNC.G") < sass.index("UTMALDG"), (
            config
        )


@TARGETS
def test_the_load_warp_lives_on_the_registers_that_it_keeps(target):
    for config, compiled in GATHER.compiled_for(target):
        parts = re.split(r"USETMAXREG", compiled.asm["sass"])
        (loading,) = [part for part in parts if "UTMALDG" in part]
        assert max(map(int, re.findall(r"\bR(\d+)\b", loading))) < LOADER_REGISTERS.value, config


# ---- GemmReduceScatter


@TARGETS
def test_stores_are_complete_before_a_barrier_and_the_arrival_that_tells_of_them(target):
    """All threads wait, not only one: of a piece of two boxes two threads start the copies."""
    order = re.compile(
        r"cp\.async\.bulk\.wait_group 0;(?P<between>.*?)mbarrier\.arrive\.shared::cta\.b64", re.DOTALL
    )
    for config, compiled in SCATTER.compiled_for(target):
        found = order.findall(compiled.asm["ptx"])
        storers = 2 if config.kwargs["VARIANT"] == "pingpong" and target is HOPPER else 1
        assert len(found) == 2 * storers, config  # at each tile, and at the end
        for between in found:
            assert re.search(r"bar(rier)?\.(cta\.)?sync", between), config
            assert "cp.async.bulk.tensor" not in between, config
            assert "wait_group" not in between, config


@pytest.mark.parametrize("index", [0, 7], ids=["cooperative", "pingpong"])
def test_sums_for_peers_are_stored_by_16_bytes_before_a_barrier_and_the_arrival_that_tells_of_them(index):
    config = SCATTER.candidates[index]
    ptx = SCATTER.compile(config, STORES=True).asm["ptx"]
    sums = config.kwargs["BLOCK_M"] * config.kwargs["BLOCK_N"]
    storers = 2 if config.kwargs["VARIANT"] == "pingpong" else 1
    assert ptx.count("st.global.v4.b32") == storers * sums // 8 // (32 * config.num_warps)
    told = re.findall(r"cp\.async\.bulk\.wait_group 0;(.*?)mbarrier\.arrive\.shared::cta", ptx, re.DOTALL)
    assert len(told) == 2 * storers
    assert all(re.search(r"bar(rier)?\.(cta\.)?sync", each) and "st.global" not in each for each in told)
    assert re.search(r"atom\.global\.sys\.acq_rel\.add", ptx)  # a tile
    assert re.search(r"atom\.global\.sys\.release\.exch", ptx)  # a chunk


def partition_that_polls(sass: str) -> str:
    parts = re.split(r"USETMAXREG|BRX", sass)
    return "".join(part for part in parts if "LDG.E.STRONG.SYS" in part)


@TARGETS
def test_one_warp_counts_and_waits_for_peers_and_nobody_else_does(target):
    for config, compiled in SCATTER.compiled_for(target):
        ptx = compiled.asm["ptx"]
        assert "ld.global.sys.acquire" in ptx, config
        assert "vote.sync.any" in ptx, config  # on the time, in one warp
        assert "barrier.cta.red" not in ptx, config
        counted = re.findall(r"atom\.global\.gpu\.acq_rel\.add", ptx)
        assert len(counted) == 2, config  # tiles; who claims no more
        polls = partition_that_polls(compiled.asm["sass"])
        assert "ATOMG.E.EXCH.STRONG.SYS" in polls, config  # DONE
        assert not re.search(r"UTMASTG|UTMALDG|HGMMA|UTCHMMA", polls), config
        assert max(map(int, re.findall(r"\bR(\d+)\b", polls))) < LOADER_REGISTERS.value, config


# ---- what they take

WORLD, ROWS, CAPACITY, N, K = 2, 192, 256, 512, 128


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def tensors_of_gather(n: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return zeros(WORLD, CAPACITY, K), zeros(n, K), zeros(WORLD * ROWS, n)


def as_it_is(gather, weight, out):
    return gather, weight, out


TAKEN_BY_GATHER = {  # capability, rows, what is changed of the tensors, whether it can run
    "no GPU": (0, ROWS, as_it_is, False),
    "Hopper": (9, ROWS, as_it_is, True),
    "the lowest tile": (9, 64, as_it_is, True),
    "below a tile": (9, 63, as_it_is, False),
    "below one of Blackwell": (10, 127, as_it_is, False),
    "rows of out, no multiple of 16 bytes apart": (9, ROWS, lambda *_: tensors_of_gather(N + 4), False),
    "out at an odd address": (
        *(9, ROWS, lambda a, b, out: (a, b, zeros(out.numel() + 1)[1:].view_as(out)), False),
    ),
    "an expanded weight": (9, ROWS, lambda a, b, out: (a, b[:1].expand(N, K), out), False),
    "one column": (9, ROWS, lambda a, b, out: (a, b[:1], out[:, :1]), False),
}


@pytest.mark.parametrize(
    ("major", "rows", "change", "expected"), TAKEN_BY_GATHER.values(), ids=TAKEN_BY_GATHER
)
def test_a_gather_takes_calls_on_its_devices_whose_rows_tma_can_address(
    major, rows, change, expected, monkeypatch
):
    if major:
        monkeypatch.setattr(launch, "capability", lambda device: major)
    assert gathering.can_run(*change(*tensors_of_gather()), rows) is expected


@pytest.mark.parametrize(
    ("rows", "n", "shift", "expected"),
    [(64, 512, 0, True), (63, 512, 0, False), (64, 516, 0, False), (64, 512, 1, False)],
)
def test_a_scatter_takes_calls_whose_rows_tma_can_address(rows, n, shift, expected, monkeypatch):
    monkeypatch.setattr(launch, "capability", lambda device: 9)
    addend = zeros(2 * rows * n + shift)[shift:].view(2 * rows, n)
    sums = zeros(1, rows, n)
    held = ScatterMemory(zeros(4), sums, sums, *(zeros(4, dtype=torch.int32) for _ in range(3)))
    operands = ScatterOperands(zeros(2 * rows, K), zeros(n, K), zeros(rows, n), addend)
    assert scattering.can_run(operands, held) is expected
