"""The active call belongs to the whole process, one at a time; settled calls run on any thread."""

import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from kernels_for_tests import KEY, double, launch, no_bench, numbers, out_of_resources, records

from dist_autotune import is_tuning
from dist_autotune.logs.records import SessionOpened
from dist_autotune.triton_api import interception, turn
from dist_autotune.triton_api.interception import propagate_to_autograd

LONG_S = 30.0  # longer than anything here takes; only a failure waits for it


def on_thread(function: Callable[[], Any]) -> Any:
    """Return what `function` returns on a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(LONG_S)


# ---- threads that work for the call


def test_what_autograd_s_threads_are_told_is_never_freed(monkeypatch):
    def given() -> int:
        return sys.getrefcount(kept.pop())

    kept: list[object] = []
    # As torch 2.11 keeps it: the object is not counted.
    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", lambda key, name: kept.append(name))
    on_thread(lambda: torch._C._stash_obj_in_tls("other", threading.get_ident()))
    uncounted = given()
    on_thread(propagate_to_autograd)
    assert given() == uncounted + 1


def test_a_thread_takes_back_what_torch_holds_for_it_before_it_can_be_joined():
    """Torch would free it later, waiting for the GIL, which aborts a process that ends meanwhile."""

    def tell() -> None:
        propagate_to_autograd()
        interception._OF_THREAD.stashed._remove = lambda key: removed.append((key, threading.get_ident()))

    removed: list[tuple[str, int | None]] = []
    thread = threading.Thread(target=tell)
    thread.start()
    thread.join(LONG_S)
    assert removed == [("dist_autotune", thread.ident)]


class Backward(torch.autograd.Function):
    """Its backward calls whatever it was given."""

    @staticmethod
    def forward(ctx, x, in_backward):
        ctx.in_backward = in_backward
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.in_backward()
        return gradient, None


def backward(in_backward: Callable[[], Any]) -> None:
    Backward.apply(numbers().requires_grad_(), in_backward).sum().backward()


@pytest.mark.parametrize(
    "threaded", [False, True], ids=["on the thread of the call", "on a thread of its own"]
)
def test_a_kernel_that_backward_launches_is_tuned(bench, kernel, threaded):
    def step():
        backward(lambda: launch(kernel, numbers()))

    tuned = bench.tune(lambda: on_thread(step) if threaded else step())
    tuned()
    assert bench.blocks() == [16, 32, 32]


def by_join(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive()


def by_queue(function: Callable[[], Any]) -> None:
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=lambda: done.put(function())).start()
    done.get(timeout=LONG_S)


@pytest.mark.parametrize("waits", [by_join, by_queue])
@pytest.mark.parametrize("mode", ["replay", "online"])
def test_a_tuned_function_on_a_thread_that_the_call_waits_for_goes_on_and_launches_for_its_session(
    bench, waits, mode, monkeypatch
):
    monkeypatch.setattr(turn, "WAIT_S", 0.05)
    inner = bench.tuned({16: 3.0, 32: 1.0}, name="inner")
    outer = bench.tune(lambda: (waits(inner), setattr(turn, "WAIT_S", 60.0)), name="outer", mode=mode)
    while not outer.settled:
        outer()
    blocks = bench.blocks()
    assert blocks[:2] == [16, 32]
    assert [record.thunk for record in records(SessionOpened)] == ["outer"]
    outer()  # no session that `inner` could wait for: it has its own, and finds what it launches known
    assert bench.blocks() == [*blocks, 32]
    assert [record.thunk for record in records(SessionOpened)] == ["outer", "inner"]


# ---- launches that belong to no run


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_what_another_thread_launches_between_the_runs_of_a_session_benchmarks_nothing(bench, mode):
    kernel = bench.kernel({16: 3.0, 32: 1.0}, do_bench=no_bench)
    other = bench.kernel({16: 1.0, 32: 3.0}, double, do_bench=no_bench)
    read_ms, seen = bench.clock.read_ms, []

    def read_beside(mark):
        seen.append(on_thread(lambda: (is_tuning(), torch.equal(launch(other, numbers()), numbers() * 2))))
        return read_ms(mark)

    bench.clock.read_ms = read_beside
    tuned = bench.tune(lambda: launch(kernel, numbers()), mode=mode)
    while not tuned.settled:
        tuned()
    assert seen
    assert set(seen) == {(False, True)}
    assert set(bench.blocks("double")) == {16}


def test_a_launch_that_belongs_to_no_run_replaces_a_config_that_fails(bench):
    kernel = bench.kernel({16: 3.0, 32: 1.0}, do_bench=no_bench)
    kernel.fn.failures[16] = out_of_resources
    tuned = bench.tune(lambda helps: helps and on_thread(lambda: launch(kernel, numbers())))
    tuned(False)
    assert torch.equal(tuned(True), numbers() + 1)
    assert bench.blocks() == [32]


@pytest.mark.parametrize("mode", ["tune", "off"])
def test_without_a_driver_an_untuned_launch_outside_takes_the_first_config_and_a_tuned_one_its_own(
    bench, monkeypatch, mode
):
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", mode)
    bench.tune(lambda: None)()
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    assert torch.equal(launch(kernel, numbers()), numbers() + 1)
    kernel.cache[KEY] = kernel.configs[1]
    launch(kernel, numbers())
    assert bench.blocks() == [16, 32]


# ---- threads that have calls of their own


def hand_over(reached: threading.Event, awaited: threading.Event) -> None:
    reached.set()
    assert awaited.wait(LONG_S)


def beside_a_settled_call(tuned: Any, n: int, inside: threading.Event, meanwhile: Callable[[], Any]) -> None:
    """Call it on another thread, whose result is right whatever is done once that is `inside`."""
    with ThreadPoolExecutor(1) as pool:
        settled = pool.submit(tuned, n)
        assert inside.wait(LONG_S)
        meanwhile()
        assert torch.equal(settled.result(LONG_S), numbers(n) + 1)


def test_settled_calls_run_on_any_number_of_threads_at_once(bench, kernel):
    together = threading.Barrier(4)

    def thunk():
        if tuned.settled:
            together.wait(LONG_S)  # all of them are inside
        return launch(kernel, numbers())

    tuned = bench.tune(thunk)
    tuned()
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, numbers() + 1) for y in pool.map(lambda _: tuned(), range(40)))
    assert tuned.settled
    assert set(bench.blocks()[3:]) == {32}


def test_a_call_whose_function_is_tuned_on_another_thread_goes_on_with_what_is_settled(bench, kernel):
    inside, in_session = threading.Event(), threading.Event()

    def thunk(n):
        if n == 64 and tuned.settled:
            hand_over(inside, in_session)
        elif n == 8:
            in_session.set()
        return launch(kernel, numbers(n))

    tuned = bench.tune(thunk)
    tuned(64)
    bench.forget()
    beside_a_settled_call(tuned, 64, inside, lambda: tuned(8))
    assert bench.blocks(n=64) == [32]
    assert sorted(bench.blocks(n=8)) == [16, 32, 32, 32]


def test_a_key_that_is_new_to_a_settled_call_is_tuned_behind_a_session_of_another_thread(bench, monkeypatch):
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    main, acquire = threading.get_ident(), turn.ProcessTurn.acquire
    has_launched, session_began, waits_for_turn = threading.Event(), threading.Event(), threading.Event()

    def noted_acquire(*args: Any) -> bool:
        if threading.get_ident() != main:
            waits_for_turn.set()
        return acquire(*args)

    def thunk(n):
        y = launch(kernel, numbers(n))
        if n == 8 and tuned.settled:
            hand_over(has_launched, session_began)
        elif n == 16 and is_tuning():
            hand_over(session_began, waits_for_turn)
        return y

    monkeypatch.setattr(turn.ProcessTurn, "acquire", noted_acquire)
    tuned = bench.tune(thunk)
    tuned(64)
    beside_a_settled_call(tuned, 8, has_launched, lambda: tuned(16))
    assert tuned.settled
    assert bench.blocks(n=8) == [32, 32, 16, 32]


def test_online_a_launch_of_a_thread_that_outlasts_its_run_says_nothing_of_later_ones(bench):
    def ms(made):
        if threading.current_thread() is not threading.main_thread():
            hand_over(inside, is_reported)
        return {16: 1.0, 32: 3.0}[made.block]

    def thunk():
        if bench.blocks() == [16, 16]:  # in this run, 32 is on trial
            beside.append(pool.submit(launch, kernel, numbers()))
            assert inside.wait(LONG_S)
        launch(kernel, numbers())
        launch(other, numbers())

    inside, is_reported, beside = threading.Event(), threading.Event(), []
    kernel = bench.kernel({16: ms, 32: ms})
    other = bench.kernel(dict.fromkeys((16, 32, 64, 128), 1.0), double)
    tuned = bench.tune(thunk, mode="online")
    with ThreadPoolExecutor(1) as pool:
        tuned()
        tuned()
        is_reported.set()
        beside[0].result(LONG_S)
        while not tuned.settled:
            tuned()
    assert bench.blocks("add") == [16, 32, 32, 16, 16]


def test_what_a_settled_call_launches_while_a_run_is_reported_is_no_part_of_the_session(bench, kernel):
    inside, is_reporting, has_launched = threading.Event(), threading.Event(), threading.Event()
    read_ms = bench.clock.read_ms

    def read_beside(mark):
        if inside.is_set() and not is_reporting.is_set():
            hand_over(is_reporting, has_launched)
        return read_ms(mark)

    def thunk(n):
        if n != 8:
            return launch(kernel, numbers(n))
        hand_over(inside, is_reporting)
        y = launch(kernel, numbers(n))
        has_launched.set()
        return y

    bench.clock.read_ms = read_beside
    tuned = bench.tune(thunk)
    tuned(64)
    beside_a_settled_call(tuned, 8, inside, lambda: tuned(16))
    assert [context.key[0] for context in tuned.report.contexts] == [16]
    assert bench.blocks(n=8) == [32]


def test_a_thread_without_a_call_launches_what_a_settled_call_knows_and_benchmarks_nothing(bench):
    one = bench.kernel({16: 3.0, 32: 1.0}, do_bench=no_bench)
    other = bench.kernel({16: 1.0, 32: 3.0}, double, do_bench=no_bench)
    inside, leave = threading.Semaphore(0), threading.Event()

    def tuned_alone(kernel, name):
        def thunk():
            launch(kernel, numbers())
            if tuned.settled:
                inside.release()
                assert leave.wait(LONG_S)

        tuned = bench.tune(thunk, name=name, watch=False)
        tuned()
        return tuned

    tuned = [tuned_alone(one, "first"), tuned_alone(other, "second")]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(each) for each in tuned]
        assert all(inside.acquire(timeout=LONG_S) for _ in calls)
        bench.forget()
        assert torch.equal(launch(one, numbers()), numbers() + 1)
        assert torch.equal(launch(other, numbers()), numbers() * 2)
        known = bench.blocks("add"), bench.blocks("double")
        assert torch.equal(launch(one, numbers(8)), numbers(8) + 1)  # new to both
        leave.set()
        assert [call.exception(LONG_S) for call in calls] == [None, None]
    assert known == ([32], [16])
