"""AllGatherMoE's kernel for Hopper, compiled for a GPU that is not here, and the path to a launch."""

from __future__ import annotations

import functools
import re
import types
from typing import Any

import pytest
import torch
import triton
from compiled import HOPPER, REGISTERS, SHARED_BYTES, compile_for, of_each_value, resources
from gemm_compiled import descriptor_type, in_parallel
from launch_path import arguments, only_compiling

from dist_autotune.kernels.gemm.roles import LOADER_REGISTERS
from dist_autotune.kernels.grouped.body import GATHER_REGISTERS
from dist_autotune.kernels.grouped.configs import blocks_of, shared_bytes
from dist_autotune.kernels.moe import ag_moe, ag_moe_kernel
from dist_autotune.kernels.moe import launch as launch_of_moe
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
    for config, kernel in compiled()[:2]:  # disassembling takes a second
        parts = re.split(r"USETMAXREG", kernel.asm["sass"])
        (loading,) = [part for part in parts if "UTMALDG" in part]
        (gathering,) = [part for part in parts if "LDGSTS" in part]
        for part, most in ((loading, LOADER_REGISTERS.value), (gathering, GATHER_REGISTERS.value)):
            assert max(map(int, re.findall(r"\bR(\d+)\b", part))) < most, config
        assert "LDG.E.STRONG.SYS" in loading, config
        assert "LDG.E.STRONG.SYS" not in gathering, config
        assert not re.search(r"atom\.\S*add", kernel.asm["ptx"]), config


# ---- the launch path, on a device that compiles and does not run

SMALL = next(config for config in CANDIDATES if config.kwargs["NUM_BUFFERS"] == 8)
PLAN = ("rows", "sources", "ends", "tables")
CHOICES, N, K, EXPERTS = 256, 256, 128, 4


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(launch_of_moe, "capability", lambda device: 9)
    tuner = ag_moe_kernel.specialized
    with only_compiling(monkeypatch, ag_moe, tuner, SMALL, "_SPECIALIZED", blocks_of) as made:
        yield made


class Call:
    """The part of an operation that launches, with the operands of a call."""

    def __init__(self, *, n: int = N, k: int = K, by_columns: bool = False, choices: int = CHOICES) -> None:
        self.gather = torch.zeros(2, 64, k, dtype=torch.bfloat16)
        weight = torch.zeros((EXPERTS, k, n) if by_columns else (EXPERTS, n, k), dtype=torch.bfloat16)
        self.weight = weight.mT if by_columns else weight
        self.out = torch.zeros(choices, n, dtype=torch.bfloat16)
        words = {name: torch.zeros(512, dtype=torch.int32) for name in PLAN}
        self.plan = types.SimpleNamespace(capacity=77, **words)
        self.flags, self.errors = torch.zeros(7, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)

    def operation(self, body: str) -> Any:
        op = object.__new__(ag_moe.AllGatherMoE)
        op.rank, op.world_size, op._patience_ticks, op._body, op._sms = 1, 2, 99, body, 132
        op._has_tma, op._upcasts, op._errors = True, False, self.errors
        op._gather, op._flags = (types.SimpleNamespace(local=local) for local in (self.gather, self.flags))
        return op

    def launch(self, *, is_sorted: bool = False) -> None:
        self.operation("auto")._launch(self.weight, self.out, self.plan, 2, is_sorted=is_sorted)

    def suits(self, body: str = "auto") -> bool:
        op, seen = self.operation(body), []
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(ag_moe, "_launch_specialized", lambda *given: seen.append(True))
            monkeypatch.setattr(ag_moe._SETTLED, "launch", lambda *given, **named: seen.append(False))
            op._launch(self.weight, self.out, self.plan, 2)
        return seen == [True]


@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
def test_every_argument_is_where_the_kernel_expects_it_both_ways(device, monkeypatch, by_columns):
    call = Call(n=192, by_columns=by_columns)
    call.launch()
    run = lambda *args, **kwargs: pytest.fail("the tuner was asked")  # noqa: E731
    monkeypatch.setattr(type(ag_moe_kernel.specialized), "run", run)
    call.launch()
    first, second = (arguments(launched) for launched in device.launched)
    assert first == second
    named = dict(zip(ag_moe_kernel.specialized.arg_names, first, strict=True))
    rows, columns = (K, 192) if by_columns else (192, K)
    block = (64, 128) if by_columns else (128, 64)
    described = (call.weight.data_ptr(), EXPERTS * rows, columns, columns, 1, *block)
    assert named.pop("b_desc")[:7] == described
    plan = {f"{name}_ptr": getattr(call.plan, name).data_ptr() for name in PLAN}
    assert named == {
        "a_ptr": call.gather.data_ptr(),
        "c_ptr": call.out.data_ptr(),
        **plan,
        **{"flags_ptr": call.flags.data_ptr(), "errors_ptr": call.errors.data_ptr()},
        **{"size_class": CHOICES, "N": 192, "K": K, "experts": EXPERTS, "topk": 2, "capacity": 77},
        **{"stride_cm": 192, "rank": 1, "patience_ticks": 99, "WORLD": 2, "HEIGHTS": 4},
        **{"BY_COLUMNS": by_columns, "SORTED": False, **SMALL.kwargs},
    }
    blocks = CHOICES // 64 + EXPERTS + 1
    assert [launched[:3] for launched in device.launched] == [(blocks * 2, 1, 1)] * 2


def test_sorted_calls_are_another_kernel(device):
    call = Call()
    for is_sorted in (False, True, False, True):
        call.launch(is_sorted=is_sorted)
    at = ag_moe_kernel.specialized.arg_names.index("SORTED")
    assert [arguments(launched)[at] for launched in device.launched] == [False, True, False, True]


@pytest.mark.parametrize(
    ("change", "suits"),
    [
        ({}, True),
        ({"n": 260}, False),
        ({"k": 100}, False),
        ({"k": 136}, True),
        ({"k": 136, "by_columns": True}, False),  # a k block would reach into the next expert
        ({"choices": 64 * EXPERTS // 2}, False),  # few rows for an expert
    ],
    ids=str,
)
def test_calls_that_it_does_not_suit_are_left_to_the_plain_kernel(device, change, suits):
    assert Call(**change).suits() == suits


def test_it_takes_no_call_of_the_plain_body_and_none_on_other_devices(device, monkeypatch):
    call = Call()
    assert call.suits()
    assert not call.suits(body="plain")
    monkeypatch.setattr(launch_of_moe, "capability", lambda device: 10)
    assert not call.suits()
