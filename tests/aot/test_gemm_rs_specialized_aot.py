"""GemmReduceScatter's warp-specialised kernel, compiled for GPUs that are not here, and its launch."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from compiled import HOPPER
from launch_path import LaunchingDevice, count_asking, launching
from specialized_kernels import SCATTER, TARGETS

from dist_autotune.kernels.gemm.roles import LOADER_REGISTERS
from dist_autotune.kernels.gemm_rs import specialized
from dist_autotune.kernels.gemm_rs.call import ScatterCall, ScatterMemory, ScatterOperands
from dist_autotune.kernels.gemm_rs.specialized import blocks_of_all

SMALL = next(config for config in SCATTER.candidates if config.kwargs["BLOCK_M"] == 64)
SCALARS = ("M", "N", "K", "capacity", "first", "chunks", "rank", "patience_ticks", "size_class")


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
        assert len(re.findall(r"atom\.global\.gpu\.acq_rel\.add", ptx)) == 2, (
            config
        )  # tiles; who claims no more
        polls = partition_that_polls(compiled.asm["sass"])
        assert "ATOMG.E.EXCH.STRONG.SYS" in polls, config  # DONE
        assert not re.search(r"UTMASTG|UTMALDG|HGMMA|UTCHMMA", polls), config
        assert max(map(int, re.findall(r"\bR(\d+)\b", polls))) < LOADER_REGISTERS.value, config


def test_what_the_peers_have_sent_is_loaded_two_elements_at_a_time():
    """A thread has two neighbours of a row; so the compiler must know that pairs begin at 4 bytes."""
    (_config, compiled), *_ = SCATTER.compiled_for(HOPPER)
    loads = re.findall(r"ld\.global\.(\w+) ", compiled.asm["ptx"])
    assert loads.count("b32") > 8
    assert "b16" not in loads


# ---- the launch path, on a device that compiles and does not run

WORLD, ROWS, CAPACITY, N, K = 2, 192, 256, 512, 128


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchingDevice]:
    with launching(monkeypatch, specialized, specialized.tuned, [SMALL], blocks_of_all) as made:
        yield made


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def tensors() -> tuple[ScatterOperands, ScatterMemory]:
    flags, counts = zeros(7, WORLD, dtype=torch.int32), zeros(WORLD + 2, dtype=torch.int32)
    sums = (zeros(WORLD - 1, CAPACITY, N), zeros(WORLD - 1, CAPACITY, N))
    held = ScatterMemory(*sums, flags, counts, zeros(WORLD, dtype=torch.int64))
    return ScatterOperands(zeros(WORLD * ROWS, K), zeros(N, K), zeros(ROWS, N), None), held


def launch(operands: ScatterOperands, held: ScatterMemory, first: int = 0, chunks: int = WORLD) -> None:
    call = ScatterCall(1, WORLD, CAPACITY, first, chunks, 132)
    specialized.SpecializedBody(operands, held).launch(operands, call, 99)


def test_the_short_way_launches_what_the_long_one_does_with_its_own_numbers(device, monkeypatch):
    operands, held = tensors()
    launch(operands, held)
    asked = count_asking(monkeypatch, specialized.tuned)
    launch(operands, held)
    first, second = (each.arguments for each in device.launches)
    assert asked == []
    assert first == second
    a, weight, out, *_ = operands
    described = (a, weight, weight, out, held.partial)
    assert [value[0] for value in first[:5]] == [tensor.data_ptr() for tensor in described]
    assert first[4][1:3] == ((WORLD - 1) * CAPACITY, N)  # the partial sums of all peers
    names = specialized.tuned.arg_names
    named = dict(zip(names, first, strict=True))
    assert [named[name] for name in SCALARS] == [WORLD * ROWS, N, K, CAPACITY, 0, WORLD, 1, 99, ROWS]
    assert named["staged_ptr"] == held.staged.data_ptr()
    assert device.launches[0].grid == (WORLD * (ROWS // 64) * (N // SMALL.kwargs["BLOCK_N"]), 1, 1)


def test_one_chunk_alone_has_its_own_grid_and_the_same_tuning(device):
    operands, held = tensors()
    for first in range(WORLD):
        launch(operands, held, first, 1)
    tiles = (ROWS // 64) * (N // SMALL.kwargs["BLOCK_N"])
    assert [made.grid[0] for made in device.launches] == [tiles] * WORLD
    at = specialized.tuned.arg_names.index("first")
    assert [made.arguments[at] for made in device.launches] == list(range(WORLD))


@pytest.mark.parametrize(
    ("major", "rows", "n", "shift", "expected"),
    [
        *((9, 64, 512, 0, True), (10, 64, 512, 0, False), (10, 128, 512, 0, True), (8, 64, 512, 0, False)),
        *((9, 63, 512, 0, False), (9, 64, 516, 0, False), (9, 64, 512, 1, False)),
    ],
)
def test_it_takes_calls_on_its_devices_whose_rows_tma_can_address(
    major, rows, n, shift, expected, monkeypatch
):
    monkeypatch.setattr(specialized, "capability", lambda device: major)
    addend = zeros(2 * rows * n + shift)[shift:].view(2 * rows, n)
    sums = zeros(1, rows, n)
    held = ScatterMemory(sums, sums, *(zeros(4, dtype=torch.int32) for _ in range(3)))
    operands = ScatterOperands(zeros(2 * rows, K), zeros(n, K), zeros(rows, n), addend)
    assert specialized.can_run(operands, held) is expected
