"""What the tests with several ranks share: exchanges, a tuned function per rank, how calls ended."""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kernels_for_tests import Bench, Ms, add, double, is_outside, launch, numbers, out_of_resources

from dist_autotune import is_tuning
from dist_autotune.ranks.exchange import Exchanges, ExchangeWait
from dist_autotune.ranks.group import GROUPS

TIMEOUT_S = 20.0  # of exchanges that are to succeed, on a machine that is busy with other tests
SOON_S = 10.0  # the end of what needs no time-out: far from TIMEOUT_S, far above what a busy machine adds
SHORT_S = 1.0  # of exchanges that are to be given up: `meet` before them, or a slow rank is given up too
IN_TIME_S = 8 * SHORT_S  # their end: less than the tenfold that heartbeats could buy


def tune(bench: Bench, thunk: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate for several ranks: nothing on disk, one sample of each config unless `options` differ."""
    return bench.tune(thunk, **{"is_dist": True, "cache": False, "timeout_s": TIMEOUT_S, **options})


def tuned_step(ms: Mapping[int, Ms], function: Any = add, **options: Any) -> tuple[Any, Bench]:
    """Return a tuned function that launches one kernel, of so many numbers, and the bench that notes it."""
    bench = Bench()
    kernel = bench.kernel(ms, function)
    return tune(bench, lambda n=64: launch(kernel, numbers(n)), **options), bench


def grid(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the row of one of four ranks, {0, 1} or {2, 3}, and its column, {0, 2} or {1, 3}, as groups."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return rows[rank // 2], columns[rank % 2]


def ending(call: Callable[[], Any]) -> str:
    """Return how `call` ended, as "Type: message" or "returned value"."""
    try:
        return f"returned {call()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def blocks_of(tuned: Any) -> dict[str, int | None]:
    """Return the BLOCK of each context's winner, by kernel and key."""
    return {
        f"{context.kernel}{context.key[0]}": context.config.kwargs["BLOCK"] if context.config else None
        for context in tuned.report.contexts
    }


def statuses_of(tuned: Any) -> dict[str, str]:
    return {f"{context.kernel}{context.key[0]}": context.status for context in tuned.report.contexts}


def run_until_settled(tuned: Any, limit: int = 40) -> int:
    """Call a tuned function until nothing is left to try; return the number of calls."""
    for calls in range(1, limit):
        tuned()
        if tuned.settled:
            return calls
    raise AssertionError(f"not settled after {limit} calls")


def wait_for(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.001)


def set_patience(tuned: Any, timeout_s: float) -> None:
    """Let the exchanges of a function that has been called end after `timeout_s`, from the next one on.

    So that only those are short that are to be given up: ranks may start, or come to a run, seconds apart.
    """
    tuned._calls.state.function.timeout_s = timeout_s


def interrupt_when_waiting(waits: Exchanges) -> None:
    """Send this process a Ctrl-C once it waits for its peers in the next exchange; returns at once."""
    key = f"{waits.number}/{dist.get_rank()}"

    def interrupt() -> None:
        wait_for(lambda: waits._do(lambda store: store.check([key])))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def left():
    """Return the keys of ours that the store holds."""
    return [key for key in dist.distributed_c10d._get_default_store().list_keys() if "autotune" in key]


def settled_step(**options):
    """Return a settled function that launches the sizes in a list, one so far; its bench, and the list."""
    bench, sizes = Bench(), [64]
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    step = tune(bench, lambda: [launch(kernel, numbers(n)) for n in sizes], **options)
    run_until_settled(step)
    bench.forget()
    return step, bench, sizes


# ---- results on disk


def own_cache(rank: int) -> Path:
    """Return a cache directory of this rank's own, as on another host."""
    return Path(f"cache-{rank}").absolute()


def tune_on_disk(
    rank: int, ms: dict[int, float], *, failures: Collection[int] = (), x: Any = None, **options: Any
) -> tuple[int, int | None, str, list[int]]:
    """Tune one kernel with this rank's own cache; return runs, winner, status and launches."""
    bench, x = Bench(), numbers() if x is None else x
    kernel = bench.kernel(ms)
    kernel.fn.failures.update(dict.fromkeys(failures, out_of_resources))
    step = tune(bench, lambda: launch(kernel, x), **{"cache": own_cache(rank), **options})
    assert torch.equal(step(), x + 1)
    (status,) = statuses_of(step).values()
    (winner,) = blocks_of(step).values()
    return step.report.runs, winner, status, bench.blocks()


# ---- an exchange with nothing to tune


def join(reports: Mapping[int, bytes]) -> bytes:
    """Decide so that what arrived, and from whom, can be told afterwards."""
    return b" ".join(reports.values())


def exchange(report: object, timeout_s: float = TIMEOUT_S, group: object = None) -> list[int]:
    """Return the numbers that the ranks sent, by rank."""
    order = GROUPS.of(group).exchange(str(report).encode(), join, ExchangeWait("a test", timeout_s))
    return [int(number) for number in order.split()]


# ---- one rank fails


class Boom(Exception):
    """What a thunk of these tests raises."""


def raise_(error: BaseException) -> None:
    raise error


def failing_step(
    rank: int, *, fails: dict[int, Callable[[], Any]], at_run: int, **options: Any
) -> tuple[Any, list[None], torch.Tensor]:
    """Return a tuned function of two kernels that calls `fails[rank]` in the middle of its n-th run.

    With it a list that grows by one with each run, and the tensor whose successors it returns.
    """
    bench, x, runs = Bench(), numbers(), []
    first = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    second = bench.kernel({16: 1.0, 32: 2.0}, double)

    def thunk():
        runs.append(None)
        y = launch(first, x)
        if len(runs) == at_run and rank in fails:
            fails[rank]()
        launch(second, x)
        return y

    return tune(bench, thunk, **options), runs, x


def assert_next_call_works(step: Any, x: torch.Tensor) -> list[tuple[str, int | None]]:
    """Call once more, to the end; return the winners."""
    assert is_outside()
    assert not is_tuning()
    assert torch.equal(step(), x + 1)
    assert sorted(statuses_of(step).values()) == ["tuned", "tuned"]
    return sorted(blocks_of(step).items())
