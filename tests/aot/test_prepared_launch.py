"""That a prepared launch hands to the driver what Triton's own way does, and knows when to leave it to that.

Triton's IR, launcher and encoding of descriptors are real; what the function in C gets is written down.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from gemm_runs import always_copied
from launch_path import active, leave
from launch_path import launching as on_device
from settled_cases import ALL, DTYPE, STAMPED, WORLD, Launches, MemoryOfAGroup, RowsCaller
from triton import knobs

from benchmarks.common.pretended_device import DeviceUnderTriton
from dist_autotune.kernels.ep import launches as ep
from dist_autotune.kernels.exchange import absence
from dist_autotune.kernels.gemm import copies, operation
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.gemm.configs import blocks_of
from dist_autotune.kernels.gemm_ar.ways import LOW_LATENCY
from dist_autotune.kernels.launches import loading
from dist_autotune.kernels.launches import prepared as preparing
from dist_autotune.kernels.launches.prepared import bare_launch
from dist_autotune.kernels.persistent_gemm import persistent_matmul

IS_KNOWN = triton.__version__.startswith(("3.6.", "3.9."))
NEEDS_BARE = pytest.mark.skipif(
    not IS_KNOWN, reason="what this Triton's function that launches takes is not known"
)
OPERATIONS = {name: of for name, of in ALL.items() if not of.unlike}  # whose calls allocate nothing


class Device(DeviceUnderTriton):
    """Writes down what the function in C gets, tensors as addresses, and what is encoded and allocated."""

    def __init__(self) -> None:
        super().__init__(self._hand)
        self.handed: list[tuple[Any, ...]] = []
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
        self.hooked.append(any(map(callable, given)))
        self.handed.append(tuple(map(plain_value, given)))

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
    with active(monkeypatch, made, [launching.tuned_gemm.fn, operation.plain_gemm.fn, STAMPED.kernel.fn]):
        yield made


class Calls:
    """An operation, on such a device; each call has another patience."""

    def __init__(self, of: Launches, device: Device) -> None:
        self.device, self._caller = device, of.make(1)

    def make(self, count: int) -> list[list[tuple[Any, ...]]]:
        """Return what each of so many calls hands to the driver."""
        made = []
        for patience_ticks in range(1, count + 1):
            before = len(self.device.handed)
            self._caller.operation._patience_ticks = patience_ticks
            self._caller.call()
            made.append(self.device.handed[before:])
        return made


@pytest.fixture(params=OPERATIONS.values(), ids=OPERATIONS)
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    of: Launches = request.param
    launches = of.module, of.kernel, of.tiles[:1], of.blocks_of
    with on_device(monkeypatch, *launches, device=Device) as device:
        yield Calls(of, device)


def test_a_prepared_launch_hands_over_what_triton_s_own_way_does(calls, monkeypatch):
    calls.make(1)  # the tuner's
    prepared = calls.make(3)
    monkeypatch.setattr(preparing, "_are_watched", lambda: True)
    assert prepared == calls.make(3)
    assert len(set(map(tuple, prepared))) == 3  # patiences


# ---- whole calls

PRODUCTS = {  # m, n and k, options of the call
    "descriptors": ((512, 512, 512), {}),
    "a bias at an odd address": ((512, 512, 512), {"bias": torch.zeros(513)[1:]}),
    "copies": ((250, 333, 67), {}),
    "plain": ((250, 333, 67), {"activation": "gelu", "bias": torch.zeros(333)}),
}


def product(monkeypatch: pytest.MonkeyPatch, name: str) -> Callable[[], Any]:
    """Return a call of `persistent_matmul`, which takes its tensors for a GPU's."""
    (m, n, k), options = PRODUCTS[name]
    tuner, room_for = launching.tuned_gemm, functools.cache(copies.room_for)  # the same memory in each call
    cooperative = [config for config in tuner.configs if config.kwargs["VARIANT"] == "cooperative"]
    leave(monkeypatch, launching, tuner, cooperative[:1], blocks_of)
    leave(monkeypatch, operation, operation.plain_gemm, operation.plain_gemm.configs[:1])
    major = 8 if name == "plain" else 9
    on_gpu = {"_is_on_gpu": lambda tensor: True, "_on": lambda device: contextlib.nullcontext()}
    changes: dict[Any, dict[str, Any]] = {
        launching: {"copies_pay": always_copied, "room_for": room_for},
        operation: {"_PLANS": {}, "_device": lambda device: (major, 132), **on_gpu},
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
    assert len(own) == (4 if name == "copies" else 1)
    if IS_KNOWN:
        assert encoded == 0
        assert functions < (0.8 * functions_of_own if name in PRODUCTS else 80)


def exchanges_of_experts() -> dict[str, Callable[[], None]]:
    """Return the launches of rank 1 of two, in memory that no call allocates."""
    launches = ep.Launches(
        MemoryOfAGroup(1, WORLD), torch.zeros(WORLD, dtype=torch.int64), ep.Sizes(16, 256, 2, 2, 64), DTYPE
    )
    launches._sms, ids = 132, torch.zeros(16, 2, dtype=torch.int64)
    x, weights, dots = torch.zeros(16, 256, dtype=DTYPE), torch.zeros(16, 2), torch.zeros(16, 2)
    d = launches.new_dispatch(ids, 256)
    weight, products, rows, ticks = torch.zeros(2, 64, 256, dtype=DTYPE), launches.new_rows(64), d.rows, 2**40
    return {
        "send": lambda: launches.send(x, d, None, ticks),
        "send and place": lambda: launches.send(x[:5], d, None, ticks, at_once=True),
        "sort": lambda: launches.sort(d, ticks),
        "gather": lambda: launches.gather(x[1:], d),
        "return": lambda: launches.combine(rows, d, weights, x, ticks, returns=True, sums=False),
        "return and add": lambda: launches.combine(rows, d, weights, x, ticks, returns=True, sums=True),
        "grade": lambda: launches.grade(x, rows, d, rows, ticks),
        "collect": lambda: launches.collect(ids, dots, ticks),
        "multiply": lambda: launches.multiply(rows, weight, d, products),
    }


def test_exchanges_of_experts_are_launched_the_short_way_as_the_long_way(monkeypatch):
    device, tuned = Device(), (ep._SEND, ep._GATHER, ep._COMBINE, ep._GRADE, ep._MULTIPLY)
    monkeypatch.setattr(loading, "allocate_scratch", device.allocate)
    for kernel in tuned:
        monkeypatch.setattr(kernel.tuner, "configs", kernel.tuner.configs[:1])
        monkeypatch.setattr(kernel.tuner, "cache", {})
    others = ep._COUNT, ep._PLACE, ep._COLLECT
    kernels = [kernel.tuner.fn for kernel in tuned] + [kernel._kernel for kernel in others]
    with active(monkeypatch, device, kernels, *others):
        for name, call in exchanges_of_experts().items():
            call()
            ways = []
            for watched in (False, True):
                monkeypatch.setattr(preparing, "_are_watched", lambda watched=watched: watched)
                device.handed.clear()
                call()
                ways.append([*device.handed])
            assert ways[0] == ways[1], name
            assert len(ways[0]) == (2 if name == "sort" else 1), name


def test_each_launch_goes_to_the_stream_that_is_current_then(calls):
    for calls.device.stream in (0, 7, 7, 8, 0):
        ((*handed,),) = calls.make(1)
        assert {each[3] for each in handed} == {calls.device.stream}
    assert {stream for *_, stream in calls.device.allocated} in ({0, 7, 8}, set())


@NEEDS_BARE
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_handed_over_while_there_are_any(calls, name):
    hook, hooked = (lambda told: None), calls.device.hooked
    calls.make(2)
    chain = getattr(knobs.runtime, name)
    for change, has_hooks in ((chain.add, True), (chain.remove, False)):
        change(hook)
        hooked.clear()
        calls.make(1)
        assert set(hooked) == {has_hooks}


@NEEDS_BARE
def test_the_way_below_is_known_of_this_triton_and_of_nothing_else(device, monkeypatch):
    tensors = torch.zeros(6, WORLD, dtype=torch.int32), torch.zeros(WORLD, dtype=torch.int64)
    constants = {"WORLD": WORLD, "COUNTED": True, "ANNOUNCED": False}
    compiled = absence.await_parts[(1, 1, 1)](*tensors, 0, 0, **constants, num_warps=1)
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
