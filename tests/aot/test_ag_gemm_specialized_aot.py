"""AllGatherGemm's warp-specialised kernel, compiled for GPUs that are not here, and the path to a launch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compiled import events
from specialized_kernels import GATHER, TARGETS

from dist_autotune.kernels.ag_gemm import specialized
from dist_autotune.kernels.gemm.configs import box_of
from dist_autotune.kernels.gemm.roles import LOADER_REGISTERS


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
def test_nobody_else_polls(target):
    for config, compiled in GATHER.compiled_for(target):
        ttgir = compiled.asm["ttgir"]
        assert ttgir.count("atomic_rmw") == load_partition(ttgir).count("atomic_rmw") > 0, config


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


# ---- what the family takes


WORLD, ROWS, CAPACITY, N, K = 2, 192, 256, 512, 128


def tensors(n: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((WORLD, CAPACITY, K), (n, K), (WORLD * ROWS, n))
    return tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)


def as_it_is(gather, weight, out):
    return gather, weight, out


TAKES = {  # capability, rows, what is changed of the tensors, whether it can run
    "no GPU": (0, ROWS, as_it_is, False),
    "Hopper": (9, ROWS, as_it_is, True),
    "the lowest tile": (9, 64, as_it_is, True),
    "below a tile": (9, 63, as_it_is, False),
    "below one of Blackwell": (10, 127, as_it_is, False),
    "rows of out that are no multiple of 16 bytes apart": (9, ROWS, lambda *_: tensors(N + 4), False),
    "out at an odd address": (
        *(9, ROWS),
        lambda a, b, out: (a, b, torch.zeros(out.numel() + 1, dtype=out.dtype)[1:].view_as(out)),
        False,
    ),
    "an expanded weight": (9, ROWS, lambda a, b, out: (a, b[:1].expand(N, K), out), False),
    "one column": (9, ROWS, lambda a, b, out: (a, b[:1], out[:, :1]), False),
}


@pytest.mark.parametrize(("major", "rows", "change", "expected"), TAKES.values(), ids=TAKES)
def test_it_takes_calls_on_its_devices_whose_rows_tma_can_address(major, rows, change, expected, monkeypatch):
    if major:
        monkeypatch.setattr(specialized, "capability", lambda device: major)
    assert specialized.can_run(*change(*tensors()), rows) is expected
