"""That GemmReduceScatter launches the short way what it launches the long way, and only where that is so.

The compiler and the tuner are real, the device is pretended: what reaches the launcher is compared.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from launch_path import count_asking
from settled_path import (
    Launched,
    LaunchingDevice,
    allocator_of_the_caller,
    launched,
    launching,
    matrix,
    microseconds,
)

from dist_autotune import contextual_autotune
from dist_autotune.compilation import preflight as compiling
from dist_autotune.kernels import launch as launches
from dist_autotune.kernels.configs import candidate
from dist_autotune.kernels.gemm_rs import plain
from dist_autotune.kernels.gemm_rs.call import Held, Operands
from dist_autotune.kernels.gemm_rs.operation import GemmReduceScatter
from dist_autotune.kernels.gemm_rs.plain import gemm_reduce_scatter

pytestmark = pytest.mark.aot

BY_TMA = candidate((64, 64, 64), 8, warps=4, stages=2, tma=True)
BY_TMA_OTHERS = candidate((64, 128, 64), 4, warps=4, stages=3, tma=True)
BY_POINTERS = candidate((64, 64, 32), 8, warps=4, stages=2, tma=False)
DESCRIPTORS, DESCRIPTOR_BYTES = 2, 128  # of A and of B


@dataclass(frozen=True)
class Case:
    """What a call depends on; pads and shifts, in elements, are of a, weight, out and of what is held."""

    m: int = 256
    n: int = 256
    k: int = 128
    dtype: torch.dtype = torch.bfloat16
    world: int = 2
    capacity: int = 256
    programs: int = 132
    pads: tuple[int, int, int] = (0, 0, 0)
    shifts: tuple[int, int, int] = (0, 0, 0)
    held_shifts: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    rank: int = 1
    patience_ticks: int = 99
    has_tma: bool = True
    upcasts: bool = False


PLAIN = Case()
CHANGES = {
    "rows": {"m": 192},
    "rows that are no multiple of 16": {"m": 250},
    "columns": {"n": 192},
    "columns that are no multiple of 16": {"n": 250},
    "columns alone": {"n": 192, "pads": (0, 0, 64)},
    "one column": {"n": 1},
    "inner dimension": {"k": 192},
    "inner dimension alone": {"k": 64, "pads": (64, 64, 0)},
    "inner dimension that is no multiple of 16": {"k": 104},
    "inner dimension that TMA cannot address": {"k": 100},
    "inner dimension of one": {"k": 1},
    "float16": {"dtype": torch.float16},
    "world size": {"world": 4},
    "world of one": {"world": 1},
    "capacity": {"capacity": 131},
    "number of programs": {"programs": 3},
    "a's stride": {"pads": (64, 0, 0)},
    "a's stride, no multiple of 16": {"pads": (8, 0, 0)},
    "a's stride, which TMA cannot address": {"pads": (1, 0, 0)},
    "weight's stride": {"pads": (0, 64, 0)},
    "weight's stride, no multiple of 16": {"pads": (0, 8, 0)},
    "weight's stride, which TMA cannot address": {"pads": (0, 1, 0)},
    "out's stride": {"pads": (0, 0, 64)},
    "out's stride, no multiple of 16": {"pads": (0, 0, 1)},
    "a's alignment": {"shifts": (1, 0, 0)},
    "weight's alignment": {"shifts": (0, 1, 0)},
    "alignment of a and weight": {"shifts": (1, 1, 0)},
    "out's alignment": {"shifts": (0, 0, 1)},
    "alignment of the partial sums": {"held_shifts": (1, 0, 0, 0, 0)},
    "alignment of the staged sums": {"held_shifts": (0, 1, 0, 0, 0)},
    "alignment of the flags": {"held_shifts": (0, 0, 1, 0, 0)},
    "alignment of the counts": {"held_shifts": (0, 0, 0, 1, 0)},
    "alignment of the errors": {"held_shifts": (0, 0, 0, 0, 1)},
    "no TMA": {"has_tma": False},
    "products in float32": {"upcasts": True},
}
OTHERS = {name: replace(PLAIN, **changes) for name, changes in CHANGES.items()}


class Caller:
    """The part of an operation that launches, with the operands of a call."""

    def __init__(self, case: Case) -> None:
        world, slots = case.world, max(1, case.world - 1)
        a, weight, out = case.pads
        shifts, held = case.shifts, case.held_shifts
        self.operands = [
            matrix(case.m // world * world, case.k, case.dtype, a, shifts[0]),
            matrix(case.n, case.k, case.dtype, weight, shifts[1]),
            matrix(case.m // world, case.n, case.dtype, out, shifts[2]),
        ]
        self.held = Held(
            *(
                matrix(slots * case.capacity, case.n, case.dtype, shift=shift).unflatten(0, (slots, -1))
                for shift in held[:2]
            ),
            matrix(4, world, torch.int32, shift=held[2]),
            matrix(1, world, torch.int32, shift=held[3]),
            matrix(1, world, torch.int64, shift=held[4]),
        )
        op = self.operation = object.__new__(GemmReduceScatter)
        op._hold(self.held)
        op._capacity, op.rank, op.world_size = case.capacity, case.rank % world, world
        op._sms, op._has_tma, op._upcasts = case.programs, case.has_tma, case.upcasts
        op._patience_ticks, op._body = case.patience_ticks, "plain"
        self.body = op._make_body(Operands(*self.operands, None))

    def call(self) -> None:
        operands = Operands(*self.operands, None)
        self.operation._launch(self.body, operands)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaunchingDevice]:
    with launching(monkeypatch, plain, "_SETTLED", gemm_reduce_scatter, [BY_TMA, BY_POINTERS]) as made:
        yield made


def value(launch: Launched, name: str) -> object:
    return launch.arguments[gemm_reduce_scatter.arg_names.index(name)]


@pytest.fixture
def asked(device: LaunchingDevice, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_asking(monkeypatch, gemm_reduce_scatter)


# ---- what is launched


def test_no_call_takes_what_was_remembered_of_another_and_each_is_launched_as_the_long_way(
    device, asked, monkeypatch
):
    callers = {name: Caller(case) for name, case in {"plain": PLAIN, **OTHERS}.items()}
    first = {}
    for number, (name, caller) in enumerate(callers.items(), 1):
        first[name] = launched(device, caller.call)
        assert len(asked) == number, f"{name} took the launch of another"
    again = {name: launched(device, callers[name].call) for name in reversed(callers)}
    assert len(asked) == len(callers)  # the short way
    monkeypatch.setattr(launches, "is_tuning", lambda: True)
    long = {name: launched(device, caller.call) for name, caller in callers.items()}
    assert len(asked) == 2 * len(callers)
    for name in callers:
        assert again[name] == first[name] == long[name], name


def test_the_check_above_sees_kernels_grids_and_arguments_that_differ(device):
    """What is compared is not the same for all: the changes lead to other code, grids and arguments."""
    plain = launched(device, Caller(PLAIN).call)
    others = {name: launched(device, Caller(case).call) for name, case in OTHERS.items()}
    code = {name for name, other in others.items() if other.received[4] != plain.received[4]}
    assert {
        "inner dimension that TMA cannot address",
        "float16",
        "world size",
        "out's stride, no multiple of 16",
        "columns that are no multiple of 16",
        "a's alignment",
        "out's alignment",
        "alignment of the partial sums",
        "alignment of the staged sums",
        "no TMA",
    } <= code
    grids = {name for name, other in others.items() if other.received[:3] != plain.received[:3]}
    assert {"columns", "number of programs"} <= grids
    by_pointers = {name for name, other in others.items() if not value(other, "TMA")}
    assert {"no TMA", "a's alignment", "weight's stride, which TMA cannot address"} <= by_pointers
    assert "out's alignment" not in by_pointers  # no descriptor is made of it


def test_every_argument_is_where_the_kernel_expects_it(device):
    caller = Caller(replace(PLAIN, m=250, n=192, k=104, capacity=131, pads=(8, 16, 24)))
    a, weight, out = caller.operands
    for _ in range(2):  # the long way, then the short one
        made = launched(device, caller.call)
        assert dict(zip(gemm_reduce_scatter.arg_names, made.arguments, strict=True)) == {
            "a_ptr": a.data_ptr(),
            "b_ptr": weight.data_ptr(),
            "c_ptr": out.data_ptr(),
            **{f"{name}_ptr": tensor.data_ptr() for name, tensor in caller.held._asdict().items()},
            **{"M": 250, "N": 192, "K": 104, "capacity": 131, "rank": 1, "patience_ticks": 99},
            **{"first": 0, "chunks": 2, "size_class": 128},
            **{"stride_am": 112, "stride_b": 120, "stride_cm": 216},
            "addend_ptr": caller.held.partial.data_ptr(),  # which is not read
            **{"WORLD": 2, "TMA_LEGAL": True, "BY_COLUMNS": False, "HAS_ADDEND": False, "UPCAST": False},
            **BY_TMA.kwargs,
        }
        assert made.received[:4] == (2 * 2 * 3, 1, 1, 0)  # chunks, tiles of rows, of columns; the stream


def test_a_device_is_part_of_what_is_remembered(device):
    caller = Caller(PLAIN)
    caller.call()
    (shape,) = plain._SETTLED._of
    assert plain._SETTLED.find(shape) is not None
    other = shape._replace(device=torch.device("cuda:1"))
    assert plain._SETTLED.find(other) is None


def test_other_tensors_ranks_and_patience_take_the_short_way_with_their_own_values(device, asked):
    Caller(PLAIN).call()
    caller = Caller(replace(PLAIN, rank=0, patience_ticks=5))
    made = launched(device, caller.call)
    assert asked == [1]
    given = [tensor.data_ptr() for tensor in (*caller.operands, *caller.held)]
    assert list(made.arguments[: len(given)]) == given
    assert (value(made, "rank"), value(made, "patience_ticks")) == (0, 5)


def test_a_launch_is_on_the_stream_that_is_current_as_in_a_capture(device):
    caller = Caller(PLAIN)
    streams = []
    for device.stream in (0, 0, 7, 0):
        streams.append(launched(device, caller.call).received[3])
    assert streams == [0, 0, 7, 0]
    assert [stream for _, _, stream in device.allocated] == [0, 0, 7, 0]


def test_a_tensor_that_needs_a_gradient_is_launched_like_any(device, asked):
    caller = Caller(PLAIN)
    plain = launched(device, caller.call)
    for tensor in caller.operands[:2]:
        tensor.requires_grad_()
    assert launched(device, caller.call) == plain
    assert asked == [1]


# ---- scratch memory


def test_scratch_for_the_descriptors_is_allocated_anew_for_each_launch_and_the_allocator_stays_the_caller_s(
    device, asked
):
    caller = Caller(PLAIN)
    before = allocator_of_the_caller()
    for _ in range(3):
        made = launched(device, caller.call)
        assert made.scratch_bytes == made.received[0] * DESCRIPTORS * DESCRIPTOR_BYTES
        assert allocator_of_the_caller() is before
    assert asked == [1]
    assert [size for size, _, _ in device.allocated] == [made.scratch_bytes] * 3
    assert len(set(device.allocated)) == 1


def test_without_descriptors_there_is_no_scratch(device):
    caller = Caller(OTHERS["no TMA"])
    for _ in range(2):
        assert launched(device, caller.call).scratch_bytes == 0
    assert device.allocated == []


# ---- when the tuner is asked


def test_no_short_way_while_a_launch_may_be_a_trial(device, asked, monkeypatch):
    caller = Caller(PLAIN)
    caller.call()
    for tuning, wanted in ((True, 2), (False, 2), (True, 3)):
        monkeypatch.setattr(launches, "is_tuning", lambda now=tuning: now)
        caller.call()
        assert len(asked) == wanted


def test_another_choice_of_the_tuner_is_followed_at_once(device, asked, monkeypatch):
    caller = Caller(PLAIN)
    caller.call()
    ((key, choice),) = gemm_reduce_scatter.cache.items()
    assert choice is BY_TMA
    gemm_reduce_scatter.cache[key] = BY_TMA_OTHERS
    taken = [launched(device, caller.call) for _ in range(2)]
    assert len(asked) == 2  # and then the short way again
    assert [value(made, "BLOCK_N") for made in taken] == [128, 128]
    assert taken[0] == taken[1]
    assert taken[0].received[0] == 2 * 2 * 2


def test_it_is_tuned_in_context_and_then_settles(device, monkeypatch):
    monkeypatch.setattr(compiling, "current_device", lambda: 0)
    monkeypatch.setattr(gemm_reduce_scatter, "configs", [BY_TMA, BY_TMA_OTHERS, BY_POINTERS])
    caller = Caller(PLAIN)
    options = {"n_warmup": 0, "n_repeat": 1, "log_dir": None, "cache": False, "progress": False}
    tuned = contextual_autotune(caller.call, **options)
    tuned()
    (context,) = tuned.report.contexts
    assert (context.status, context.banned, len(context.timings)) == ("tuned", {}, 3)
    kinds = {(value(made, "TMA"), value(made, "BLOCK_N")) for made in device.launches}
    assert kinds == {(True, 64), (True, 128), (False, 64)}
    (choice,) = gemm_reduce_scatter.cache.values()
    after = [launched(device, caller.call) for _ in range(2)]  # the second is sure to be the short way
    for made in after:
        assert {name: value(made, name) for name in choice.kwargs} == choice.kwargs
    assert after[0] == after[1]


# ---- what it keeps, and what it costs


def test_nothing_keeps_the_callers_tensors(device):
    caller = Caller(PLAIN)
    for _ in range(2):
        caller.call()
    kept = [weakref.ref(tensor) for tensor in (*caller.operands, *caller.held)]
    device.launches.clear()
    del caller
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_the_short_way_is_less_python_than_the_long_one(device, monkeypatch):
    """With -s it prints how much."""
    caller = Caller(PLAIN)
    device.writes_down = False
    caller.call()
    short_us = microseconds(caller.call)
    monkeypatch.setattr(launches, "is_tuning", lambda: True)
    long_us = microseconds(caller.call)
    print(f"a launch, Python above Triton's launcher: {short_us:.1f} us, the long way {long_us:.1f} us")
    assert short_us < long_us
