"""That a prepared launch hands to the driver what Triton's own way does, and knows when to leave it to that.

Triton's IR, launcher and encoding of descriptors are real; what the function in C gets is written down.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from gemm_runs import always_copied
from launch_path import active, leave
from settled_cases import STAMPED, RowsCaller
from triton import knobs

from benchmarks.common.pretended_device import DeviceUnderTriton
from dist_autotune.kernels.ag_gemm import plain, specialized
from dist_autotune.kernels.ag_gemm.call import Consumer, GatherMemory, Product
from dist_autotune.kernels.ag_gemm.plain import PlainConsumer
from dist_autotune.kernels.ag_gemm.specialized import SpecializedConsumer
from dist_autotune.kernels.epilogues import ONLY_SUMS
from dist_autotune.kernels.exchange import absence, fill_nan
from dist_autotune.kernels.gemm import copies, operation
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.gemm.configs import blocks_of
from dist_autotune.kernels.gemm_ar.ways import LOW_LATENCY
from dist_autotune.kernels.launches import loading
from dist_autotune.kernels.launches import prepared as preparing
from dist_autotune.kernels.launches.prepared import bare_launch
from dist_autotune.kernels.moe import plan as plans
from dist_autotune.kernels.persistent_gemm import persistent_matmul

IS_KNOWN = triton.__version__.startswith(("3.6.", "3.9."))
NEEDS_BARE = pytest.mark.skipif(
    not IS_KNOWN, reason="what this Triton's function that launches takes is not known"
)
ROWS, CAPACITY, N, K, WORLD = 192, 256, 512, 128, 2
CALL = launching.ChunkCall(WORLD, WORLD, 132, (1,))


class Device(DeviceUnderTriton):
    """Writes down what the function in C gets, tensors as addresses, and what is encoded and allocated."""

    def __init__(self) -> None:
        super().__init__(self._hand)
        self.handed: list[tuple[Any, ...]] = []
        self.fillers: list[tuple[Any, ...]] = []  # the same, of what fills results without a peer
        self.hooked: list[bool] = []  # whether hooks were handed over: the function in C calls them
        self.encoded: list[int] = []  # addresses
        self.allocated: list[tuple[int, int, int]] = []  # bytes, alignment, stream
        self.stream = 0
        self.writes_down = True  # else the function in C returns at once
        self._scratch = torch.zeros(1, dtype=torch.int8)
        self.utils.fill_tma_descriptor = self.utils.fill_tma_descriptor_tiled = self._encode

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def allocate(self, size: int, alignment: int, stream: int) -> torch.Tensor:
        self.allocated.append((size, alignment, stream))
        return self._scratch

    def _hand(self, *given: Any) -> None:
        if not self.writes_down:
            return
        plain = tuple(map(plain_value, given))
        if fill_nan.fill_nan_in_lost_chunks.__name__ in plain:
            self.fillers.append(plain)
            return
        self.hooked.append(any(map(callable, given)))
        self.handed.append(plain)

    def _encode(self, address: int, *given: Any) -> tuple[Any, ...]:
        self.encoded.append(address)
        return ("tensor map", address, *map(plain_value, given))


def plain_value(value: Any) -> Any:
    """Return a value that can be compared: hooks and what they are told are not the kernel's."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, list | tuple):
        return tuple(map(plain_value, value))
    is_for_hooks = callable(value) or isinstance(value, triton.compiler.compiler.LazyDict)
    return None if is_for_hooks else value


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(loading, "allocate_scratch", made.allocate)
    for owner, tuner, blocks in (
        (specialized, specialized.tuned, blocks_of),
        (plain, plain.all_gather_gemm, lambda constants: {}),
    ):
        leave(monkeypatch, owner, tuner, tuner.configs[:1], blocks)
    kernels = [specialized.tuned.fn, plain.all_gather_gemm.fn]
    kernels += [launching.tuned_gemm.fn, STAMPED.kernel.fn]
    with active(monkeypatch, made, kernels):
        yield made


def plain_by(tma: bool) -> Callable[..., Consumer]:
    return lambda *given: PlainConsumer(*given, has_tma=tma, needs_fence=True, upcasts=False)


CONSUMERS = {
    "specialized, with descriptors": SpecializedConsumer,
    "plain, with scratch memory": plain_by(tma=True),
    "plain, with neither": plain_by(tma=False),
}
consumers = pytest.mark.parametrize("consumer", CONSUMERS.values(), ids=CONSUMERS)


class Caller:
    """Calls a consumer with tensors of its own; each call has another patience."""

    def __init__(self, consumer: Callable[..., Consumer]) -> None:
        shapes = ((WORLD, CAPACITY, K), (N, K), (WORLD * ROWS, N))
        self.tensors = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
        flags = torch.zeros(6, WORLD, dtype=torch.int32), torch.zeros(WORLD, dtype=torch.int64)
        of_stores = torch.zeros(2 * WORLD, dtype=torch.int64), torch.zeros(WORLD + 2, dtype=torch.int32)
        held = GatherMemory(*of_stores, self.tensors[0], *flags, 1, WORLD)
        self.consumer = consumer(self.product(), held)
        self.fill_nan = fill_nan.filler_of_chunks(self.tensors[2], flags[0], 1, ROWS)
        self.patience_ticks = 0

    def product(self) -> Product:
        gather, weight, out = self.tensors
        return Product(gather[1], weight, out, ONLY_SUMS, None)

    def call(self) -> None:
        self.patience_ticks += 1
        self.consumer.launch(self.product(), CALL, self.patience_ticks)
        self.fill_nan(self.tensors[2])


def calls(device: Device, caller: Caller, count: int) -> list[tuple[Any, ...]]:
    """Return what so many calls hand to the driver."""
    before = len(device.handed)
    for _ in range(count):
        caller.call()
    return device.handed[before:]


@consumers
def test_a_prepared_launch_hands_over_what_triton_s_own_way_does(device, consumer, monkeypatch):
    caller = Caller(consumer)
    calls(device, caller, 1)  # the tuner's
    prepared = calls(device, caller, 3)
    monkeypatch.setattr(preparing, "_are_watched", lambda: True)
    caller.patience_ticks = 1
    assert prepared == calls(device, caller, 3)
    assert len(set(prepared)) == 3  # patiences
    first, again = device.fillers[1:4], device.fillers[4:]
    assert first == again


# ---- whole calls

PRODUCTS = {  # m, n and k, options of the call
    "descriptors": ((512, 512, 512), {}),
    "a bias at an odd address": ((512, 512, 512), {"bias": torch.zeros(513)[1:]}),
    "copies": ((250, 333, 67), {}),
}


def product(monkeypatch: pytest.MonkeyPatch, name: str) -> Callable[[], Any]:
    """Return a call of `persistent_matmul`, which takes its tensors for a GPU's."""
    (m, n, k), options = PRODUCTS[name]
    tuner, room_for = launching.tuned_gemm, functools.cache(copies.room_for)  # the same memory in each call
    cooperative = [config for config in tuner.configs if config.kwargs["VARIANT"] == "cooperative"]
    leave(monkeypatch, launching, tuner, cooperative[:1], blocks_of)
    on_gpu = {"_is_on_gpu": lambda tensor: True, "_on": lambda device: contextlib.nullcontext()}
    changes: dict[Any, dict[str, Any]] = {
        launching: {"copies_pay": always_copied, "room_for": room_for},
        copies: {"room_for": room_for},
        operation: {"_PLANS": {}, "_device": lambda device: (9, 132), **on_gpu},
    }
    for owner, values in changes.items():
        for attribute, value in values.items():
            monkeypatch.setattr(owner, attribute, value)
    a, b, out = (torch.zeros(size, dtype=torch.float16) for size in ((m, k), (n, k), (m, n)))
    return lambda: persistent_matmul(a, b.T, out, **options)


def rows_of_all(monkeypatch: pytest.MonkeyPatch, name: str) -> Callable[[], Any]:
    """Return a call of `GemmAllReduce`, its product included."""
    leave(monkeypatch, STAMPED.module, STAMPED.kernel, STAMPED.tiles[:1])
    return RowsCaller(LOW_LATENCY, 1, has_norm=False).call


def functions_called(device: Device, call: Callable[[], Any]) -> int:
    """Return how many functions a call runs, Python's and those in C that Python calls."""
    events: list[str] = []
    device.writes_down = False
    sys.setprofile(lambda frame, event, argument: events.append(event))
    call()
    sys.setprofile(None)
    device.writes_down = True
    return events.count("call") + events.count("c_call")


@pytest.mark.parametrize("name", [*PRODUCTS, "rows of all ranks"])
def test_a_settled_call_hands_over_what_triton_s_own_way_does_and_does_less(device, monkeypatch, name):
    call = (product if name in PRODUCTS else rows_of_all)(monkeypatch, name)
    for _ in range(2):
        call()
    ways = []
    for watched in (False, True):
        monkeypatch.setattr(preparing, "_are_watched", lambda watched=watched: watched)
        device.handed.clear()
        device.encoded.clear()
        call()
        ways.append(([*device.handed], len(device.encoded), functions_called(device, call)))
    (prepared, encoded, functions), (own, _, functions_of_own) = ways
    assert prepared == own
    assert len(own) == 1
    if IS_KNOWN:
        assert encoded == 0
        assert functions < (0.8 * functions_of_own if name in PRODUCTS else 80)


@pytest.mark.parametrize("is_shared", [False, True], ids=["of one call", "shared"])
def test_prepared_launches_of_a_sorting_hand_over_what_triton_s_own_do(device, is_shared, monkeypatch):
    place = {"by_first": False, "device": torch.device("cpu")}
    plan = plans.Plan(world_size=WORLD, experts=4, most=256, orders=3 if is_shared else 2, **place)
    ids, odd_ids = torch.zeros(256, dtype=torch.int64), torch.zeros(257, dtype=torch.int64)[1:]
    flags = torch.zeros(7, WORLD, dtype=torch.int32), torch.zeros(WORLD, dtype=torch.int64)
    weights = torch.zeros(256) if is_shared else None

    def sort(choices: torch.Tensor, tokens: int, patience_ticks: int) -> list[tuple[Any, ...]]:
        before = len(device.handed)
        numbers = {"pairs": 4 * tokens, "topk": 2, "stride": 128, "tokens": tokens, "told": 9 * tokens}
        of_rank = {"rank": 1, "first": 1, "patience_ticks": patience_ticks}
        plan.sort(choices, *flags, **numbers, **of_rank, weights=weights)
        return device.handed[before:]

    cases = list(itertools.product((ids, odd_ids), (1, 16, 33), (99, 2**40)))
    prepared = [[sort(*case) for case in cases] for _ in range(2)][1]
    monkeypatch.setattr(preparing, "remember", lambda known, kind, made: made)
    for untuned in (plans._COUNT, plans._PLACE):
        untuned._of.clear()
    assert prepared == [sort(*case) for case in cases]
    assert all(len(handed) == 2 for handed in prepared)


@consumers
def test_each_launch_goes_to_the_stream_that_is_current_then(device, consumer):
    caller = Caller(consumer)
    for device.stream in (0, 7, 7, 8, 0):
        calls(device, caller, 1)
    assert [handed[3] for handed in device.handed] == [0, 7, 7, 8, 0]
    assert {stream for *_, stream in device.allocated} in ({0, 7, 8}, set())


@NEEDS_BARE
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@consumers
def test_hooks_are_handed_over_while_there_are_any(device, consumer, name):
    caller, hook = Caller(consumer), lambda told: None
    calls(device, caller, 2)
    chain = getattr(knobs.runtime, name)
    chain.add(hook)
    try:
        calls(device, caller, 2)
    finally:
        chain.remove(hook)
    calls(device, caller, 1)
    assert device.hooked == [True, False, True, True, False]  # the first launch is the tuner's


@NEEDS_BARE
def test_the_way_below_is_known_of_this_triton_and_of_nothing_else(device, monkeypatch):
    tensors = torch.zeros(6, WORLD, dtype=torch.int32), torch.zeros(WORLD, dtype=torch.int64)
    compiled = absence.await_parts[(1, 1, 1)](*tensors, 0, 0, WORLD=WORLD, COUNTED=True, num_warps=1)
    assert bare_launch(compiled, (1, 1, 1), 0, ()) is not None
    changes = [
        {
            (preparing.nvidia, "_BASE_ARGS_FORMAT"): "iiiKKppOOOOO",
            (preparing, "IS_3_9"): False,
        },  # another release
        {(compiled.run, "profile_scratch_size"): 16},
        {(preparing, "nvidia"): None},
    ]
    if hasattr(compiled.run, "gsan_enabled"):  # it has arguments of its own
        changes.append({(compiled.run, "gsan_enabled"): True})
    for change in changes:
        with monkeypatch.context() as changed:
            for (owner, name), value in change.items():
                changed.setattr(owner, name, value, raising=False)
            assert bare_launch(compiled, (1, 1, 1), 0, ()) is None
    compiled._run = lambda *args: None  # another backend's
    assert bare_launch(compiled, (1, 1, 1), 0, ()) is None
