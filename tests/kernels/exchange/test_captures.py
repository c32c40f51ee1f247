"""That captured calls join the streams they have forked and no others, on a driver that follows captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from operations import HALF
from pretended_cuda import CapturingDriver, install_for_operations

from dist_autotune.kernels.ag_gemm import AllGatherGemm
from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.agreement.collective import Collective
from dist_autotune.kernels.exchange.operation import Operation
from dist_autotune.kernels.gemm_ar import GemmAllReduce
from dist_autotune.kernels.gemm_rs import GemmReduceScatter
from dist_autotune.kernels.moe_rs import MoEReduceScatter

ROWS, SIZE, EXPERTS, TOPK = 64, 64, 2, 2
WAYS_OF_REDUCING = ("one-shot", "two-shot", "low-latency", "overlapped")
Calls = dict[str, Callable[[], Any]]


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=HALF)


def dense(stack: ExitStack, world: int, collective: bool) -> Calls:
    """Open what multiplies by a matrix; calls for a GPU's kernel, and for the plain one."""
    a, w, odd = half(ROWS, SIZE), half(SIZE, SIZE), half(ROWS, SIZE + 1)[:, 1:]
    of_all = half(world * ROWS, SIZE)
    gather = stack.enter_context(AllGatherGemm(ROWS, SIZE, HALF, collective=collective))
    scatter = stack.enter_context(GemmReduceScatter(world * ROWS, SIZE, HALF, collective=collective))
    calls: Calls = {
        "gather": lambda: gather(a, w),
        "gather, plain": lambda: gather(odd, half(SIZE, SIZE + 1)[:, 1:]),
        "gather, fewer rows": lambda: gather.with_gathered(a[:3], w),
        "scatter": lambda: scatter(of_all, w),
        "scatter, plain": lambda: scatter(of_all[: world * 3], w),
        "scatter, an addend": lambda: scatter(of_all, w, addend=of_all),
    }
    for way in () if collective else WAYS_OF_REDUCING:
        reduce = stack.enter_context(GemmAllReduce(world * ROWS, SIZE, HALF, way=way))
        calls[f"reduce, {way}"] = lambda reduce=reduce: reduce(of_all[: world * 16], w)
    return calls


def over_experts(stack: ExitStack, world: int, collective: bool) -> Calls:
    tokens, choices = [ROWS] * world, world * ROWS * TOPK
    x, w, y = half(ROWS, SIZE), half(EXPERTS, SIZE, SIZE), half(choices, SIZE)
    ids, weights = torch.zeros((ROWS, TOPK), dtype=torch.int64), torch.zeros((ROWS, TOPK))
    of = {"max_topk": TOPK, "collective": collective}
    dispatch = stack.enter_context(AllGatherMoE(ROWS, SIZE, HALF, **of))
    combine = stack.enter_context(MoEReduceScatter(ROWS, SIZE, HALF, **of))
    none = [0] * world

    def routed() -> None:
        hidden, routing = dispatch.route(x, w, ids, weights, tokens=tokens)
        dispatch.by_expert(x, w, routing)
        combine.by_expert(hidden, w, routing)

    return {
        "experts": lambda: dispatch(x, w, ids, tokens=tokens),
        "experts, no tokens": lambda: dispatch(x[:0], w, ids[:0], tokens=none),
        "sums of experts": lambda: combine(y, w, ids, weights, tokens=tokens),
        "sums of experts, no tokens": lambda: combine(y[:0], w, ids[:0], weights[:0], tokens=none),
        "a shared sorting": routed,
    }


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch, world: int, collective: bool) -> Iterator[tuple[Any, Calls]]:
    driver = CapturingDriver()
    install_for_operations(monkeypatch, driver, world)
    nothing = lambda *_, **__: None  # noqa: E731
    monkeypatch.setattr(Collective, "_open_ballots", nothing)
    if collective:  # all ranks agree, and NCCL captures its own streams
        monkeypatch.setattr(Collective, "agree", lambda *_, **__: True)
        monkeypatch.setattr(Collective, "_make", nothing)
        monkeypatch.setattr(Collective, "_start", lambda *_: nothing)
    with ExitStack() as stack, torch.no_grad():
        yield driver, dense(stack, world, collective) | over_experts(stack, world, collective)


def make(driver: CapturingDriver, call: Callable[[], Any]) -> None:
    """Make eager calls, captured ones and eager ones again."""
    call()
    with mock.patch.object(Operation, "_in_steps", return_value=True):
        call()
    for calls in (1, 2):
        with driver.capture():
            for _ in range(calls):
                call()
        call()


def faults(monkeypatch: pytest.MonkeyPatch, world: int, *, collective: bool = False) -> dict[str, str]:
    """Return which calls cannot be captured, and why; each is the first that its operation makes."""
    found: dict[str, str] = {}
    names: list[str] = []
    with opened(monkeypatch, world, collective) as (_, calls):
        names += calls
    for name in names:
        with opened(monkeypatch, world, collective) as (driver, calls):
            try:
                make(driver, calls[name])
            except (AssertionError, RuntimeError) as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize("collective", [False, True], ids=["overlapped", "by collectives"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_captured_call_joins_what_it_has_forked_and_nothing_else(monkeypatch, world, collective):
    assert faults(monkeypatch, world, collective=collective) == {}


@pytest.mark.parametrize(
    ("name", "value", "in_steps"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("LD_PRELOAD", "/usr/lib/libsanitizer-collection.so", True),
    ],
)
def test_where_launches_block_no_kernel_waits_for_a_push_behind_it(monkeypatch, name, value, in_steps):
    monkeypatch.setenv(name, value)
    install_for_operations(monkeypatch, CapturingDriver(), 2)
    with GemmReduceScatter(ROWS, SIZE, HALF, collective=False) as op:
        assert op._in_steps(is_capturing=False) is in_steps  # each push is enqueued behind its chunk's launch
