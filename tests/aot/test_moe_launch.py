"""That the operations over experts launch the short way what they launch the long way, where that is so.

The compiler and the tuner are real, the device is pretended: what reaches the launcher is compared.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
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
from dist_autotune.kernels.moe import ag_moe, moe_rs
from dist_autotune.kernels.moe.ag_moe_kernel import all_gather_moe
from dist_autotune.kernels.moe.launch import GPU_TILES, HEIGHTS, HIGHEST_HEIGHT, Shape, counted, ordered
from dist_autotune.kernels.moe.moe_rs_kernel import moe_reduce_scatter

pytestmark = pytest.mark.aot

TILES = [
    candidate((32, 64, 64), 8, warps=4, stages=2, tma=True),
    candidate((32, 64, 64), 8, warps=4, stages=2, tma=False),
]
OTHER_TILES = candidate((16, 128, 64), 4, warps=4, stages=2, tma=True)
DESCRIPTOR_BYTES = 128  # of B's; the scatter has one of A's beside it where rows are sorted


@dataclass(frozen=True)
class Case:
    """What a call depends on; pads and shifts are elements, `shifted` names tensors that are not aligned."""

    choices: int = 256
    n: int = 256
    k: int = 128
    experts: int = 4
    dtype: torch.dtype = torch.bfloat16
    world: int = 2
    programs: int = 132
    row_pad: int = 0  # of the weight
    expert_pad: int = 0  # rows between experts
    y_pad: int = 0
    out_pad: int = 0
    shifted: frozenset[str] = frozenset()
    rank: int = 1
    topk: int = 2
    table_blocks: int = 77
    tokens_per_rank: int = 64
    patience_ticks: int = 99
    has_tma: bool = True
    upcasts: bool = False
    is_sorted: bool = False


PLAIN = Case()
TENSORS = {
    "ag": ["a", "b", "c", "rows", "sources", "ends", "tables", "flags", "errors"],
    "rs": [
        *("a", "b", "c", "products", "partial", "staged", "weights", "rows", "sources", "offsets"),
        *("ends", "tables", "counters", "flags", "errors"),
    ],
}
MADE_IN_A_CALL = "products"
CHANGES = {
    "choices of another size": {"choices": 300},
    "choices of the same size, fewer tiles": {"choices": 160},
    "many choices": {"choices": 300, "programs": 1},
    "many choices of another size": {"choices": 600, "programs": 1},
    "columns": {"n": 192},
    "columns alone": {"n": 192, "expert_pad": 64, "out_pad": 64},
    "columns that are no multiple of 16": {"n": 250},
    "inner dimension": {"k": 192},
    "inner dimension alone": {"k": 64, "row_pad": 64, "y_pad": 64},
    "inner dimension that TMA cannot address": {"k": 100},
    "experts": {"experts": 3},
    "one expert": {"experts": 1},
    "float16": {"dtype": torch.float16},
    "world size": {"world": 4},
    "number of programs": {"programs": 3},
    "a weight's rows apart": {"row_pad": 64},
    "a weight's rows apart, which TMA cannot address": {"row_pad": 1},
    "experts apart": {"expert_pad": 64},
    "a stride of out": {"out_pad": 64},
    "a stride of out, no multiple of 16": {"out_pad": 1},
    "no TMA": {"has_tma": False},
    "products in float32": {"upcasts": True},
    "rows in the order of experts": {"is_sorted": True},
}
OF_Y = {
    "sorted rows of y that TMA cannot address": {"is_sorted": True, "y_pad": 1},
    "a stride of y": {"y_pad": 64},
    "a stride of y, no multiple of 16": {"y_pad": 1},
}


def cases(name: str) -> dict[str, Case]:
    """Return calls each of which differs from the others in something that its launch depends on."""
    changes = {**CHANGES, **(OF_Y if name == "rs" else {})}
    shifts = [tensor for tensor in TENSORS[name] if tensor != MADE_IN_A_CALL]
    shifted = {f"alignment of {tensor}": {"shifted": frozenset({tensor})} for tensor in shifts}
    found = {"plain": PLAIN}
    for label, change in {**changes, **shifted}.items():
        found[label] = replace(PLAIN, **change)
    return found


class Caller:
    """The part of an operation that launches, with the operands of a call."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.case = name, case
        self.operation = object.__new__(ag_moe.AllGatherMoE if name == "ag" else moe_rs.MoEReduceScatter)
        slots = max(1, case.world - 1) * case.tokens_per_rank
        shapes = {
            "a": (case.choices, case.k, case.dtype, case.y_pad if name == "rs" else 0),
            "b": (case.experts * (case.n + case.expert_pad), case.k, case.dtype, case.row_pad),
            "c": (case.choices if name == "ag" else case.tokens_per_rank, case.n, case.dtype, case.out_pad),
            "partial": (slots, case.n, case.dtype),
            "staged": (slots, case.n, case.dtype),
            "weights": (1, case.choices, torch.float32),
            "errors": (1, case.world, torch.int64),
        }
        self.tensors = {
            each: matrix(*shapes.get(each, (1, 512, torch.int32)), shift=int(each in case.shifted))
            for each in TENSORS[name]
            if each != MADE_IN_A_CALL
        }
        rows, pitch = case.n + case.expert_pad, case.k + case.row_pad
        flat = self.tensors["b"]
        self.weight = flat.as_strided((case.experts, case.n, case.k), (rows * pitch, pitch, 1))
        assert self.weight.data_ptr() == flat.data_ptr()
        self.plan = types.SimpleNamespace(capacity=case.table_blocks, **self.tensors)
        self._furnish()

    def _furnish(self) -> None:
        op, case = self.operation, self.case
        op.rank, op.world_size, op._patience_ticks = case.rank, case.world, case.patience_ticks
        op._sms, op._has_tma, op._upcasts = case.programs, case.has_tma, case.upcasts
        op._capacity, op._n, op._errors = case.tokens_per_rank, case.n, self.tensors["errors"]

        def symmetric(name: str) -> Any:
            return types.SimpleNamespace(local=self.tensors[name])

        op._flags = symmetric("flags")
        if self.name == "ag":
            op._gather = symmetric("a")
        else:
            op._partial, op._staged = self.tensors["partial"], symmetric("staged")
            op._weights = symmetric("weights")

    def call(self) -> None:
        operands = (self.weight, self.tensors["c"], self.plan, self.case.topk)
        if self.name == "ag":
            self.operation._launch(*operands, is_sorted=self.case.is_sorted)
        else:
            weight, out, plan, topk = operands
            products = out.new_empty((self.case.choices, self.case.n))
            of_plan = (plan, self.tensors["weights"], plan.offsets, plan.ends, plan.tables, plan.counters)
            choices = moe_rs._Choices(*of_plan, (), topk, self.case.is_sorted)
            self.operation._launch(self.tensors["a"], weight, out, products, choices)


@dataclass(frozen=True)
class World:
    """One of the operations, on the pretended device."""

    name: str
    kernel: Any
    module: Any
    tiles: list[triton.Config]
    others: triton.Config
    device: LaunchingDevice

    def caller(self, case: Case = PLAIN) -> Caller:
        return Caller(self.name, case)

    def launched(self, caller: Caller) -> Launched:
        return launched(self.device, caller.call)

    def named(self, launch: Launched) -> dict[str, Any]:
        return dict(zip(self.kernel.arg_names, launch.arguments, strict=True))

    def but_for_products(self, launch: Launched) -> tuple[Any, ...]:
        """Return what the launcher was given, but for the memory that each call allocates."""
        values = list(launch.received)
        if self.name == "rs":
            values[len(values) - len(launch.arguments) + self.kernel.arg_names.index("products_ptr")] = None
        return (*values, launch.scratch_bytes)


@pytest.fixture(params=["ag", "rs"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    name = request.param
    module, kernel = (ag_moe, all_gather_moe) if name == "ag" else (moe_rs, moe_reduce_scatter)
    tiles, others = TILES, OTHER_TILES
    if name == "ag":
        tiles, others = [ordered(each, by_arrival=True) for each in tiles], ordered(others, by_arrival=False)
    with launching(monkeypatch, module, "_SETTLED", kernel, tiles) as device:
        yield World(name, kernel, module, tiles, others, device)


@pytest.fixture
def asked(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_asking(monkeypatch, world.kernel)


def test_no_call_takes_what_was_remembered_of_another_and_each_is_launched_as_the_long_way(
    world, asked, monkeypatch
):
    callers = {label: world.caller(case) for label, case in cases(world.name).items()}
    first = {}
    for number, (label, caller) in enumerate(callers.items(), 1):
        first[label] = world.but_for_products(world.launched(caller))
        assert len(asked) == number, f"{label} took the launch of another"
    again = {label: world.but_for_products(world.launched(callers[label])) for label in reversed(callers)}
    assert len(asked) == len(callers)  # the short way
    monkeypatch.setattr(launches, "is_tuning", lambda: True)
    long = {label: world.but_for_products(world.launched(caller)) for label, caller in callers.items()}
    assert len(asked) == 2 * len(callers)
    for label in callers:
        assert again[label] == first[label] == long[label], label


def test_a_device_is_part_of_what_is_remembered(world):
    world.caller().call()
    settled = world.module._SETTLED
    (shape,) = settled._of
    assert settled.find(shape) is not None
    assert settled.find(shape._replace(device=torch.device("cuda:1"))) is None


def test_every_argument_is_where_the_kernel_expects_it(world, asked):
    case = replace(PLAIN, n=192, k=104, row_pad=8, y_pad=16, out_pad=24)
    caller = world.caller(case)
    pointers = {f"{name}_ptr": tensor.data_ptr() for name, tensor in caller.tensors.items()}
    of_rs = {"tokens_per_rank": 64, "stride_am": 120, "first_part": 0, "parts": 3}
    for _ in range(2):  # the long way, then the short one
        made = world.launched(caller)
        values = world.named(made)
        if world.name == "rs":
            assert values.pop("products_ptr") % 16 == 0
        assert values == {
            **pointers,
            **{"size_class": 256, "N": 192, "K": 104, "experts": 4, "topk": 2, "capacity": 77},
            **(of_rs if world.name == "rs" else {"HEIGHTS": HEIGHTS}),
            **{"stride_be": 192 * 112, "stride_b": 112, "stride_cm": 216, "rank": 1, "patience_ticks": 99},
            **{"WORLD": 2, "TMA_LEGAL": True, "BY_COLUMNS": False, "UPCAST": False},
            "SORTED": case.is_sorted,
            **({"A_TMA_LEGAL": False} if world.name == "rs" else {}),
            **world.tiles[0].kwargs,
        }
        blocks = 256 // 32 + case.experts + 1
        assert made.received[:4] == (min(132, blocks * 3), 1, 1, 0)
    assert asked == [1]


def test_calls_of_other_tokens_ranks_and_plans_take_the_short_way_with_their_own_values(world, asked):
    world.caller().call()
    changes = {"rank": 0, "topk": 3, "table_blocks": 5, "patience_ticks": 7}
    if world.name == "rs":
        changes["tokens_per_rank"] = 32
    caller = world.caller(replace(PLAIN, **changes))
    values = world.named(world.launched(caller))
    assert asked == [1]
    renamed = {"table_blocks": "capacity"}
    assert {name: values[renamed.get(name, name)] for name in changes} == changes
    assert [values[f"{name}_ptr"] for name in caller.tensors] == [
        t.data_ptr() for t in caller.tensors.values()
    ]


def test_large_calls_of_one_size_class_share_a_launch_whatever_their_choices(world, asked):
    few = replace(PLAIN, programs=2)
    grids = [
        world.launched(world.caller(replace(few, choices=choices))).received[0] for choices in (260, 400, 512)
    ]
    assert grids == [2, 2, 2]
    assert asked == [1]


@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize("n", [1, 100, 4096])
def test_the_choices_that_are_counted_lead_to_the_same_grid_as_all(programs, n):
    assert max(config.kwargs["BLOCK_M"] for config in GPU_TILES) == HIGHEST_HEIGHT
    edge = programs * HIGHEST_HEIGHT
    for choices in (0, 1, 15, 200, edge - 1, edge, edge + 1, 3 * edge + 5):
        for config in GPU_TILES:
            grids = {
                Shape(
                    counting,
                    *(0, n, 64, 8, (), 2, programs),
                    *(torch.float16, torch.device("cpu"), (), True, False, False, False),
                ).grid(config.kwargs)
                for counting in (choices, counted(choices, programs))
            }
            assert len(grids) == 1, (choices, config)


def test_a_launch_is_on_the_stream_that_is_current_as_in_a_capture(world):
    caller = world.caller()
    streams = []
    for world.device.stream in (0, 0, 7, 0):
        streams.append(world.launched(caller).received[3])
    assert streams == [0, 0, 7, 0]
    assert [stream for _, _, stream in world.device.allocated] == [0, 0, 7, 0]


def test_scratch_is_allocated_anew_for_each_launch_and_the_allocator_stays_the_caller_s(world, asked):
    caller = world.caller()
    before = allocator_of_the_caller()
    for _ in range(3):
        made = world.launched(caller)
        assert made.scratch_bytes == made.received[0] * DESCRIPTOR_BYTES
        assert allocator_of_the_caller() is before
    assert asked == [1]
    assert [size for size, _, _ in world.device.allocated] == [made.scratch_bytes] * 3


def test_no_short_way_while_a_launch_may_be_a_trial(world, asked, monkeypatch):
    caller = world.caller()
    caller.call()
    for tuning, wanted in ((True, 2), (False, 2), (True, 3)):
        monkeypatch.setattr(launches, "is_tuning", lambda now=tuning: now)
        caller.call()
        assert len(asked) == wanted


def test_another_choice_of_the_tuner_is_followed_at_once(world, asked):
    caller = world.caller()
    caller.call()
    ((key, choice),) = world.kernel.cache.items()
    assert choice is world.tiles[0]
    world.kernel.cache[key] = world.others
    taken = [world.launched(caller) for _ in range(2)]
    assert len(asked) == 2  # and then the short way again
    assert [world.named(made)["BLOCK_N"] for made in taken] == [128, 128]
    assert world.but_for_products(taken[0]) == world.but_for_products(taken[1])


def test_it_is_tuned_in_context_and_then_settles(world, monkeypatch):
    monkeypatch.setattr(compiling, "current_device", lambda: 0)
    monkeypatch.setattr(world.kernel, "configs", [*world.tiles, world.others])
    caller = world.caller()
    options = {"n_warmup": 0, "n_repeat": 1, "log_dir": None, "cache": False, "progress": False}
    tuned = contextual_autotune(caller.call, **options)
    tuned()
    (context,) = tuned.report.contexts
    assert (context.status, context.banned, len(context.timings)) == ("tuned", {}, 3)
    (choice,) = world.kernel.cache.values()
    after = [world.launched(caller) for _ in range(2)]
    for made in after:
        values = world.named(made)
        assert {name: values[name] for name in choice.kwargs} == choice.kwargs
    assert world.but_for_products(after[0]) == world.but_for_products(after[1])


def test_the_short_way_is_less_python_than_the_long_one(world, monkeypatch):
    """With -s it prints how much."""
    caller = world.caller()
    world.device.writes_down = False
    caller.call()
    short_us = microseconds(caller.call)
    monkeypatch.setattr(launches, "is_tuning", lambda: True)
    long_us = microseconds(caller.call)
    print(f"{world.name}: Python above Triton's launcher: {short_us:.1f} us, the long way {long_us:.1f} us")
    assert short_us < long_us
