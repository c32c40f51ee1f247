"""That operations which scatter end beside a kernel of another stream that holds SMs until its peers come.

Such a kernel, an all-reduce of the other dimension of a mesh, keeps programs of a launch out on one rank, and
is kept out itself by a launch that holds all SMs of another. On the CPU the interpreter is the strictest
device there is: one program runs at a time, and the next one starts when it has ended; here the last one does
not before the collective has. Ranks 0 and 2 are peers in the collective, as are 1 and 3; 0 and 1 in the
operation, as are 2 and 3:

    rank 0    collective holds an SM  ->  last program of the launch starts  ->  launch ends
    rank 2    launch ends  ->  collective starts
    rank 3    as rank 0                           rank 1    as rank 2
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dense_runs import SCATTERING_SUMS
from expert_runs import SCATTERING, STORING_CHOSEN
from operation_runs import message_of, on_ranks
from operations import HALF, Runs
from triton.runtime import interpreter

from dist_autotune.kernels.exchange.flags import DONE

PROGRAMS = 3
PATIENCE_S = 20.0


OF_SUMS = {"gemm_rs": SCATTERING_SUMS, "moe_rs": SCATTERING, "moe_rs, by stores": STORING_CHOSEN}
EACH = pytest.mark.parametrize("runs", OF_SUMS.values(), ids=OF_SUMS)


def opened(rank: int, runs: Runs, group: dist.ProcessGroup | None = None) -> Any:
    """Return an operation whose kernel has several programs."""
    runs.begin(rank)
    op = runs.open(32, 48, HALF, group, timeout_s=PATIENCE_S)
    op._facts = op._facts._replace(sms=PROGRAMS)
    return op


@contextlib.contextmanager
def last_program_held_until(kernel: Any, until: Callable[[], object], started: list[int]) -> Iterator[None]:
    """Let the last program of each launch of `kernel` start when `until` has returned; note who starts."""
    execute, set_idx = interpreter.GridExecutor.__call__, interpreter.interpreter_builder.set_grid_idx
    running: list[str] = []

    def run(executor: Any, *args: Any, **kwargs: Any) -> None:
        running.append(executor.fn.__name__)
        try:
            execute(executor, *args, **kwargs)
        finally:
            running.pop()

    def set_grid_idx(x: int, y: int, z: int) -> None:
        if running and running[-1] == kernel.fn.__name__:
            started.append(x)
            if x == PROGRAMS - 1:
                until()
        set_idx(x, y, z)

    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", run),
        mock.patch.object(interpreter.interpreter_builder, "set_grid_idx", set_grid_idx),
    ):
        yield


@EACH
@on_ranks(4)
def test_nobody_waits_for_a_program_that_a_collective_of_the_other_dimension_keeps_out(rank, runs):
    across = [dist.new_group(pair) for pair in ([0, 1], [2, 3])][rank // 2]
    beside = [dist.new_group(pair) for pair in ([0, 2], [1, 3])][rank % 2]
    op, tokens = opened(rank, runs, across), [24, 17]
    held, started = torch.ones(1), []
    given = runs.operands(op, tokens, 32, group=across)
    out = runs.new_out(op, tokens, given)
    if rank in (0, 3):
        collective = dist.all_reduce(held, group=beside, async_op=True)
        with last_program_held_until(runs.kernel, collective.wait, started):
            runs.call(op, given, out, tokens)
    else:
        runs.call(op, given, out, tokens)
        dist.all_reduce(held, group=beside)
    error = runs.error_ratio(out, *given, group=across)
    op.close()
    assert float(held) == 2
    assert started == ([0, 1, 2] if rank in (0, 3) else [])
    return [error]


@EACH
@on_ranks(2)
def test_a_program_that_starts_when_the_peer_has_ended_its_call_disturbs_no_later_call(rank, runs):
    """Let the peer's call return before the last program of this rank's launch starts, three times."""
    op, tokens = opened(rank, runs), [24, 17]
    store = dist.distributed_c10d._get_default_store()
    errors, started = [], []
    for call in range(3):
        given = runs.operands(op, tokens, 32)
        out = runs.new_out(op, tokens, given)
        if rank == 0:
            until = functools.partial(store.wait, [f"ended {call}"])
            with last_program_held_until(runs.kernel, until, started):
                runs.call(op, given, out, tokens)
        else:
            runs.call(op, given, out, tokens)
            store.set(f"ended {call}", "")
        errors.append(runs.error_ratio(out, *given))
    op.close()
    assert started == ([0, 1, 2] * 3 if rank == 0 else [])
    return errors


# ---- captured calls: what a graph enqueues has no order but that of its edges


def note_waits(op):
    """Return a list of the words that streams wait for from now on, by their addresses."""
    waits, wait_signal = [], op._memory.wait_signal

    def noted(flag, value, stream):
        waits.append(flag.data_ptr())
        wait_signal(flag, value, stream)

    op._memory.wait_signal = noted
    return waits


@EACH
@pytest.mark.parametrize("world", [1, 4])
@on_ranks()
def test_no_stream_of_a_captured_call_waits_for_its_own_kernel(rank, runs, world):
    """Make calls, in steps by turns, and see for how many DONE a stream waits in each."""
    op = opened(rank, runs)
    done = {flag.data_ptr() for peer, flag in enumerate(op._flags.local[DONE.value]) if peer != rank}
    waits, errors = note_waits(op), []
    for call in range(4):
        tokens = [(24, 17, 0, 5)[(p + call) % 4] for p in range(world)]
        given = runs.operands(op, tokens, 32)
        out = runs.new_out(op, tokens, given)
        waits.clear()
        (runs.call_as_captured, runs.call)[call % 2](op, given, out, tokens)
        is_pushed = call % 2 == 1 and runs is not STORING_CHOSEN
        assert len(done.intersection(waits)) == (world - 1) * is_pushed
        errors.append(runs.error_ratio(out, *given))
    op.close()
    return errors


@on_ranks(2)
def test_a_peer_that_does_not_permit_a_captured_push_is_named_and_later_replays_do_not_wait(rank):
    runs, op = SCATTERING_SUMS, opened(rank, SCATTERING_SUMS)
    if rank == 1:
        op.abandon()
        return
    op._patience_ticks, waits = 2, note_waits(op)
    given = runs.operands(op, [24, 24], 32)
    out = runs.new_out(op, [24, 24], given)
    call = functools.partial(runs.call_as_captured, op, given, out, [24, 24])
    first = message_of(call)
    assert first.startswith("PeerTimeout: GemmReduceScatter, rank 0: rank 1, or one that it waits for")
    assert "did not come to the call in time" in first
    op._failures.words.zero_()  # a replay does not look at what went wrong before
    op._patience_ticks = 10**7
    assert message_of(call) == "nothing was raised"
    fork = op._flags.local[DONE.value, rank].data_ptr()
    assert set(waits) <= {fork}  # what waited was a kernel, and kernels have patience
    op.abandon()
