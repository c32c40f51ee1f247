"""That operations launch the short way what they launch the long way, and only where that is so.

The tuner and Triton's IR are real, the device is pretended: what reaches the launcher is compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from launch_path import Launched, LaunchingDevice, count_asking, launched, launching
from settled_cases import ALL, Caller, Launches

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.launches import settled as settled_launches
from dist_autotune.kernels.symm import SymmetricMemoryError


@dataclass(frozen=True)
class World:
    """One of the operations, on the pretended device."""

    of: Launches
    device: LaunchingDevice

    def caller(self, rank: int = 1) -> Caller:
        return self.of.make(rank)

    def launched(self, caller: Caller) -> Launched:
        return launched(self.device, caller.call)

    def named(self, launch: Launched) -> dict[str, Any]:
        return dict(zip(self.of.kernel.arg_names, launch.arguments, strict=True))

    def compared(self, launch: Launched) -> tuple[Any, ...]:
        """Return what the launcher was given, but for the memory that each call allocates."""
        values = list(launch.received)
        for name in self.of.unlike:
            values[len(values) - len(launch.arguments) + self.of.kernel.arg_names.index(name)] = None
        return (*values, launch.scratch_bytes)


@pytest.fixture(params=ALL.values(), ids=ALL)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    of: Launches = request.param
    with launching(monkeypatch, of.module, of.kernel, of.tiles, of.blocks_of) as device:
        yield World(of, device)


@pytest.fixture
def asked(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_asking(monkeypatch, world.of.kernel)


# ---- what is launched


def test_another_operation_launches_with_its_own_tensors_and_rank_and_shares_what_is_tuned(world):
    world.caller().call()
    caller = world.caller(rank=0)
    values = world.named(world.launched(caller))
    assert values["rank"] == 0
    assert len(world.of.kernel.cache) == 1
    for name, tensor in caller.tensors.items():
        address = values[f"{name}_desc"][0] if f"{name}_desc" in values else values[f"{name}_ptr"]
        assert address == tensor.data_ptr(), name


# ---- when the tuner is asked


def test_no_short_way_while_a_launch_may_be_a_trial(world, asked, monkeypatch):
    caller, settled_config = world.caller(), settled_launches.settled_config
    caller.call()
    for tuning, wanted in ((True, 2), (False, 2), (True, 3)):
        answer = (lambda *of: None) if tuning else settled_config
        monkeypatch.setattr(settled_launches, "settled_config", answer)
        caller.call()
        assert len(asked) == wanted


def test_another_choice_of_the_tuner_is_followed_at_once(world, asked):
    caller = world.caller()
    caller.call()
    ((key, choice),) = world.of.kernel.cache.items()
    assert choice is world.of.tiles[0]
    world.of.kernel.cache[key] = world.of.others
    taken = [world.launched(caller) for _ in range(2)]
    assert len(asked) == 2  # and then the short way again
    assert [world.named(made)["BLOCK_N"] for made in taken] == [world.of.others.kwargs["BLOCK_N"]] * 2
    assert world.compared(taken[0]) == world.compared(taken[1])


def test_an_operation_where_there_is_no_gpu_says_what_runs_it_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SymmetricMemoryError, match="kernels need TRITON_INTERPRET=1 before"):
        AllGatherGemm(8, 16, torch.float16)
