"""That operations launch the short way what they launch the long way, and only where that is so.

The tuner and Triton's IR are real, the device is pretended: what reaches the launcher is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from launch_path import (
    DESCRIPTOR_BYTES,
    Launched,
    LaunchingDevice,
    allocator_of_the_caller,
    count_asking,
    launched,
    launching,
    matrix,
)
from settled_cases import ALL, CAPACITY, PULLING, SPECIALIZED, STAMPED, WITH_DESCRIPTORS, Caller, Launches

from dist_autotune import contextual_autotune
from dist_autotune.compilation import preflight as compiling
from dist_autotune.kernels.launches import settled as settled_launches
from dist_autotune.kernels.moe.launch import GPU_TILES, HIGHEST_HEIGHT, counted, grid_of_experts


@dataclass(frozen=True)
class World:
    """One of the operations, on the pretended device."""

    of: Launches
    device: LaunchingDevice

    def caller(self, case: Any = None) -> Caller:
        return self.of.make(self.of.plain if case is None else case)

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


OF_EXPERTS = {name: of for name, of in WITH_DESCRIPTORS.items() if "MoE" in name}


@pytest.fixture(params=ALL.values(), ids=ALL)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    of: Launches = request.param
    with launching(monkeypatch, of.module, of.kernel, of.tiles, of.blocks_of) as device:
        yield World(of, device)


of_descriptors = pytest.mark.parametrize(
    "world", WITH_DESCRIPTORS.values(), ids=WITH_DESCRIPTORS, indirect=True
)


@pytest.fixture
def asked(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_asking(monkeypatch, world.of.kernel)


# ---- what is launched


def test_no_call_takes_what_was_remembered_of_another_and_each_is_launched_as_the_long_way(world, asked):
    callers = {label: world.caller(case) for label, case in world.of.cases.items()}
    long = {}
    for number, (label, caller) in enumerate(callers.items(), 1):
        long[label] = world.compared(world.launched(caller))
        assert len(asked) == number, f"{label} took the launch of another"
    for label in reversed(callers):
        assert world.compared(world.launched(callers[label])) == long[label], label
    assert len(asked) == len(callers)  # the short way


@pytest.mark.parametrize("world", [STAMPED, PULLING], ids=["low-latency", "one-shot"], indirect=True)
def test_an_operation_launches_where_tensors_are_now_and_tells_apart_how_they_lie(world, asked):
    case, caller = world.of.plain, world.caller()
    for known, shift in ((1, 0), (1, 8), (2, 1), (2, 9), (2, 16)):  # elements of two bytes
        out = caller.tensors["out"] = matrix(case.m, case.n, case.dtype, shift=shift)
        assert world.named(world.launched(caller))["out_ptr"] == out.data_ptr()
        assert len(asked) == known


def test_another_operation_launches_with_its_own_tensors_and_rank_and_shares_what_is_tuned(world):
    world.caller().call()
    caller = world.caller(replace(world.of.plain, rank=0))
    values = world.named(world.launched(caller))
    assert values["rank"] == 0
    assert len(world.of.kernel.cache) == 1
    for name, tensor in caller.tensors.items():
        address = values[f"{name}_desc"][0] if f"{name}_desc" in values else values[f"{name}_ptr"]
        assert address == tensor.data_ptr(), name


@pytest.mark.parametrize("world", OF_EXPERTS.values(), ids=OF_EXPERTS, indirect=True)
def test_large_calls_of_one_size_class_share_a_launch_whatever_their_choices(world, asked):
    few = replace(world.of.plain, programs=2)
    callers = [world.caller(replace(few, rows=rows)) for rows in (65, 100, 128)]
    for caller in callers:
        caller.operation = callers[0].operation
        assert world.launched(caller).received[0] == 2
    assert asked == [1]


@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize("n", [1, 100, 4096])
def test_the_choices_that_are_counted_lead_to_the_same_grid_as_all(programs, n):
    assert max(config.kwargs["BLOCK_M"] for config in GPU_TILES) == HIGHEST_HEIGHT
    edge = programs * HIGHEST_HEIGHT
    for choices in (0, 1, 15, 200, edge - 1, edge, edge + 1, 3 * edge + 5):
        for config in GPU_TILES:
            grids = {
                grid_of_experts(counting, n, 8, programs)(config.kwargs)
                for counting in (choices, counted(choices, programs))
            }
            assert len(grids) == 1, (choices, config)


@pytest.mark.parametrize("world", SPECIALIZED.values(), ids=SPECIALIZED, indirect=True)
def test_a_weight_by_columns_is_described_as_its_rows_lie(world):
    case = replace(world.of.plain, by_columns=True)
    by_rows, by_columns = (
        world.named(world.launched(world.caller(each)))["b_desc"] for each in (world.of.plain, case)
    )
    assert by_rows[1:7] == (case.n, case.k, case.k, 1, 128, 64)  # shape, strides, block
    assert by_columns[1:7] == (case.k, case.n, case.n, 1, 64, 128)


@pytest.mark.parametrize(
    "world", [SPECIALIZED["GemmReduceScatter, specialized"]], ids=["scatter"], indirect=True
)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_chunks_are_launched_at_once_or_each_alone_with_its_own_grid_and_the_same_tuning(
    world, asked, captured
):
    caller, case = world.caller(), world.of.plain
    op, (block_m, block_n) = caller.operation, (64, 128)
    for _ in range(2):  # the short way launches what the long one does
        with mock.patch.object(op, "_in_steps", return_value=captured):
            caller.call()
    launches = [world.named(made) for made in world.device.launches]
    chunks = [(0, 1), (1, 1)] if captured else [(0, 2)]
    assert [(each["first"], each["chunks"]) for each in launches] == chunks * 2
    assert len(asked) == len(chunks)
    assert len(world.of.kernel.cache) == 1
    capacity = CAPACITY // 2  # rows of a rank
    numbers = {"M": 2 * case.rows, "N": case.n, "K": case.k, "capacity": capacity, "size_class": case.rows}
    numbers |= {"patience_ticks": op._patience_ticks, "staged_ptr": op._staged.local.data_ptr()}
    for made, named in zip(world.device.launches, launches, strict=True):
        tiles = case.rows // block_m * (case.n // block_n)
        assert made.grid == (named["chunks"] * tiles, 1, 1)
        assert numbers.items() <= named.items()
        assert named["partial_desc"][:3] == (op._partial.data_ptr(), capacity, case.n)


# ---- scratch memory


@of_descriptors
def test_scratch_is_allocated_anew_for_each_launch_and_the_allocator_stays_the_caller_s(world, asked):
    caller, before = world.caller(), allocator_of_the_caller()
    for _ in range(3):
        made = world.launched(caller)
        assert made.scratch_bytes == made.received[0] * world.of.descriptors * DESCRIPTOR_BYTES
        assert allocator_of_the_caller() is before
    assert asked == [1]
    assert [size for size, _, _ in world.device.allocated] == [made.scratch_bytes] * 3
    assert len(set(world.device.allocated)) == 1


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


def test_it_is_tuned_in_context_and_then_settles(world, monkeypatch):
    monkeypatch.setattr(compiling, "current_device", lambda: 0)
    monkeypatch.setattr(world.of.kernel, "configs", [*world.of.tiles, world.of.others])
    caller = world.caller()
    options = {"n_warmup": 0, "n_repeat": 1, "log_dir": None, "cache": False, "progress": False}
    tuned = contextual_autotune(caller.call, **options)
    tuned()
    (context,) = [each for each in tuned.report.contexts if " " not in each.kernel]  # no choice of the host
    assert (context.status, context.banned, len(context.timings)) == ("tuned", {}, 3)
    tried = [
        {name: values[name] for name in world.of.others.kwargs}
        for values in map(world.named, world.device.launches)
    ]
    assert all(config.kwargs in tried for config in world.of.kernel.configs)
    (choice,) = world.of.kernel.cache.values()
    after = [world.launched(caller) for _ in range(2)]  # the second is sure to be the short way
    for values in map(world.named, after):
        assert {name: values[name] for name in choice.kwargs} == choice.kwargs
    assert world.compared(after[0]) == world.compared(after[1])


def test_threads_ask_a_tuner_one_at_a_time_as_it_keeps_the_arguments_of_its_launch():
    both, inside, most = threading.Barrier(2), [], []

    class Tuner:
        def __getitem__(self, grid):
            return self.launch

        def launch(self, **constants):
            inside.append(constants)
            second.wait(0.2)  # a thread that need not wait comes meanwhile
            if len(inside) > 1:
                second.set()
            most.append(len(inside))
            inside.pop()

    second = threading.Event()
    kernel = settled_launches.TunedKernel(Tuner())

    def ask(_):
        both.wait(10.0)
        launch = settled_launches.TunedLaunch(kernel, lambda meta: (1, 1, 1), {})
        launch._remember = lambda *given: None
        launch((), (), ())

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ask, range(2)))
    assert most == [1, 1]
