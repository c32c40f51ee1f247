"""The barrier over ranks, compiled for GPUs that are not here: released before, acquired while it polls."""

from __future__ import annotations

import re

import pytest
from compiled import BLACKWELL, CDNA3, HOPPER, REGISTERS, compile_for, resources

from dist_autotune.kernels.signals import barrier_all

TYPES = {"signals_ptr": "*i64", "errors_ptr": "*i64", "rank": "i32", "epoch": "i32", "budget": "i32"}


def compiled_for(target, world):
    fence = target.backend == "cuda"
    return compile_for(
        target, barrier_all, TYPES, {"WORLD": world, "FENCE": fence}, any_value=("rank", "epoch", "budget")
    )


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("target", [HOPPER, BLACKWELL, CDNA3], ids=lambda target: str(target.arch))
def test_the_barrier_fits_and_spills_nothing(target, world):
    used = resources(compiled_for(target, world), target)
    assert used["spilled"] == 0
    assert used["registers"] <= REGISTERS[target]


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=lambda target: str(target.arch))
def test_the_barrier_releases_before_it_acquires_and_fences_last(target):
    text = compiled_for(target, 2).asm["ptx"]
    found = re.findall(
        r"atom\.global\.sys\.release|ld\.global\.sys\.acquire|fence\.proxy\.async\.global", text
    )
    release, acquire, fence = (
        [index for index, name in enumerate(found) if word in name]
        for word in ("release", "acquire", "fence")
    )
    assert release
    assert acquire
    assert fence
    assert max(release[:2]) < min(acquire)  # both peers are told before either is waited for
    assert max(fence) > max(acquire)
