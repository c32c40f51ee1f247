"""Tiles of any width (`JOINED`), compiled for a GPU that is not here.

Each is compiled once, with the next of OPTIONS. All candidates with all types would take minutes, so one with
each number of further columns is compiled, and the widest of each kind, which has the fewest registers left.
"""

import itertools
import re
from typing import Any

import pytest
import triton
from compiled import HOPPER, SHARED_BYTES, check_fits
from gemm_compiled import OUT_BYTES, compile_gemm, in_parallel

from dist_autotune.kernels.compat import HAS_INLINE_PTX
from dist_autotune.kernels.gemm.configs import GLUON_CANDIDATES, shared_bytes
from dist_autotune.kernels.gemm.pruning import fits

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
