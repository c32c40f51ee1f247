"""What the tests of operations over symmetric memory share: how ranks start, run cases and are held up."""

import contextlib
import functools
import importlib.util
import inspect
import math
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_programs import wait_for

from dist_autotune.kernels.exchange.operation import Operation
from ranks import Init, Result, assert_all_ok, assert_killed, run_ranks

Cases = dict[str, Callable[[], Any]]
ON_GPUS = os.environ.get("DIST_AUTOTUNE_TEST_GPU") == "1"
DEVICE = "cuda" if ON_GPUS else "cpu"  # of a test that has no ranks
TWO = [2, pytest.param(2, marks=pytest.mark.gpu(devices=2), id="2 GPUs")]
# There a skip is a failure; that nvshmem4py is missing is told by test_symm.
GPU_BACKENDS = ["torch", "nvshmem"] if importlib.util.find_spec("nvshmem") or not ON_GPUS else ["torch"]


def results(
    fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0, init: Init = "file"
) -> list[Result]:
    """Return how fn(rank, *args) ended on each of `world` ranks."""
    backend = "cpu:gloo,cuda:nccl" if ON_GPUS else "gloo"
    return run_ranks(fn, world, *args, timeout_s=timeout_s, backend=backend, init=init)


def values(fn: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
    """Return what fn(rank, *args) returned on each of `world` ranks, all of which must end well."""
    return assert_all_ok(results(fn, world, *args, **options))


def on_ranks(
    world: int | None = None,
    *,
    within: Callable[[int], Any] | None = None,
    the_last_is_killed: bool = False,
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Return a decorator: the function is a test that runs on so many ranks; `rank` is its first argument.

    It asserts, or returns what is right, see `is_right`, or cases, which are run one after another. world:
    for None, that of its argument `world`. within: rank -> the context of it. options: of `results`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def run(rank: int, given: dict[str, Any]) -> None:
            with contextlib.nullcontext() if within is None else within(rank):
                found = function(rank, **given)
                failed = run_cases(found) if isinstance(found, dict) else []
            assert not failed, "\n".join(failed)
            assert found is None or isinstance(found, dict) or is_right(found), f"rank {rank}: {found}"

        @functools.wraps(function)
        def test(**given: Any) -> None:
            __tracebackhide__ = True
            ended = results(run, world or given["world"], given, **options)
            if the_last_is_killed:
                assert_killed(ended.pop())
            assert_all_ok(ended)

        parameters = [*inspect.signature(function).parameters.values()][1:]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # pytest's fixtures
        return test

    return decorate


# ---- on a rank


def device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def seed_and_leave_one(rank: int, kernel: Any, candidates: list[Any], candidate: int | None) -> None:
    """Seed this rank and leave its kernel one candidate: for None another one on each rank."""
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    kernel.configs = [candidates[(rank if candidate is None else candidate) % len(candidates)]]


@contextlib.contextmanager
def left_as_before(kernel: Any) -> Iterator[None]:
    """Undo what `begin` does, where it is called in pytest's own process, of which later ranks are forks."""
    configs = kernel.configs
    yield
    kernel.configs = configs
    torch.set_deterministic_debug_mode("default")


def synchronize() -> None:
    """Wait for this rank's device, then for the other ranks."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def tuned_in_context(call: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """Return `call` as a function that all ranks tune together, and a list of what its runs return."""
    from dist_autotune import contextual_autotune

    returned: list[Any] = []

    @contextual_autotune(is_dist=True, n_warmup=0, n_repeat=1, cache=False, log_dir=None)
    def step() -> None:
        returned.append(call())

    return step, returned


def message_of(call) -> str:
    """Return what `call` raises, as "Type: message"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def end_of(op: Operation, call: Callable[[], Any]) -> str:
    """Return what a call raises; fail unless the next one and `close` raise the same."""

    def checked() -> None:
        call()
        op.check()

    first = message_of(checked)
    assert [message_of(checked), message_of(op.close)] == [first, first]
    return first


def die() -> None:
    """End this rank as nothing but the system ends one."""
    os.kill(os.getpid(), signal.SIGKILL)


def cases_of(functions: Iterable[Callable[..., Any]], *args: Any, **options: Any) -> Cases:
    """Return the functions with these arguments as cases, by their names."""
    return {each.__name__: functools.partial(each, *args, **options) for each in functions}


def is_right(value: Any) -> bool:
    """Return whether it is True, or errors, some and all below 1: those that the arithmetic explains."""
    if isinstance(value, bool):
        return value
    return max(value, default=math.inf) < 1 and not math.isnan(sum(value))


def run_cases(cases: Cases) -> list[str]:
    """Run the cases in turn, all in this one process; return what was wrong, the same on all ranks.

    After one that raises, on any rank, the ranks may be apart and the rest is not run.
    """
    failed: list[str] = []
    for name, case in cases.items():
        text, raised = "", False
        try:
            value = case()
            text = "" if is_right(value) else f"returned {value}"
        except Exception:
            text, raised = traceback.format_exc(), True
        ends: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ends, (text, raised))
        failed += [f"{name}, rank {rank}: {text}" for rank, (text, _) in enumerate(ends) if text]
        if any(raised for _, raised in ends):
            return [*failed, f"not run: all behind {name}"]
    return failed


def delay_tasks(
    op: Operation, name: str, delay_s: float, of: Callable[..., bool] = lambda to, value: True
) -> None:
    """Let the CPU's side stream sleep before each "copy", or "write_signal", that is `of` (to, value)."""
    enqueue = getattr(op._memory, name)

    def enqueue_late(to, value, stream):
        if of(to, value):
            stream.enqueue(lambda: time.sleep(delay_s))
        enqueue(to, value, stream)

    setattr(op._memory, name, enqueue_late)


def hold_launch(op: Operation, until: Callable[[], Any]) -> None:
    """Let each launch wait on the host for `until`; what a call does before its launch is not held up.

    In the interpreter a kernel's patience is a number of polls: hold it until the peers that are to come have
    come, or one that the machine has no time for is given up too.
    """
    launch = op._launch

    def launch_then(*args, **kwargs):
        wait_for(until, 100.0)
        launch(*args, **kwargs)

    op._launch = launch_then
