"""Sessions of one group take turns, in one order on all ranks; overlapping groups never wait in a circle."""

import functools
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from kernels_for_tests import Bench, double, launch, numbers
from rank_programs import (
    TIMEOUT_S,
    blocks_of,
    ending,
    interrupt_when_waiting,
    raise_,
    run_until_settled,
    tune,
    tuned_step,
)

from dist_autotune.ranks.courier import Connections
from dist_autotune.ranks.group import GROUPS
from dist_autotune.triton_api import turn
from ranks import assert_all_ok, meet, run_ranks


def two_functions(groups=(None, None), names=("first", "second"), **options):
    """Return two tuned functions of a kernel each."""
    benches = Bench(), Bench()
    kernels = benches[0].kernel({16: 3.0, 32: 1.0}), benches[1].kernel({16: 1.0, 32: 3.0}, double)

    def made(place):
        thunk = lambda: launch(kernels[place], numbers())  # noqa: E731
        return tune(benches[place], thunk, name=names[place], group=groups[place], **options)

    return made(0), made(1)


def called_on_threads(functions, pause_s=0.05):
    """Call each on a thread of its own, one begun after the other; return their results."""
    with ThreadPoolExecutor(len(functions)) as pool:
        calls = []
        for function in functions:
            calls.append(pool.submit(function))
            time.sleep(pause_s)  # the order in which they begin is what differs between ranks
        return [call.result(2 * TIMEOUT_S) for call in calls]


@pytest.mark.parametrize(("world", "mode"), [(2, "replay"), (3, "replay"), (3, "online")])
def test_two_functions_that_threads_begin_in_other_order_on_other_ranks_are_tuned_one_after_the_other(
    world, mode
):
    def program(rank):
        functions = two_functions(mode=mode)
        calls = [functools.partial(run_until_settled, function) for function in functions]
        called_on_threads(calls if rank % 2 else calls[::-1])
        settled = [function.settled for function in functions]
        return settled, [blocks_of(function) for function in functions]

    expected = [True, True], [{"add64": 32}, {"double64": 16}]
    assert assert_all_ok(run_ranks(program, world)) == [expected] * world


@pytest.mark.parametrize("mode", ["replay", "online"])
def test_one_function_may_be_called_on_two_threads_of_each_rank_at_once(mode):
    def program(rank):
        sys.setswitchinterval(1e-5)  # s: threads meet everywhere
        step, _ = tuned_step({16: 3.0, 32: 1.0}, mode=mode)
        for size in (64, 128):  # the second one is new to settled calls
            for _ in range(5):
                called_on_threads([lambda size=size: step(size)] * 2, pause_s=0.0)
        return step.settled, step.untuned, blocks_of(step)["add128"]

    assert assert_all_ok(run_ranks(program, 2)) == [(True, (), 32)] * 2


def test_functions_on_groups_that_overlap_in_a_circle_are_all_tuned():
    def program(rank):
        pairs = [(0, 1), (1, 2), (0, 2)]
        groups = [dist.new_group(list(pair)) for pair in pairs]
        mine = {str(pair): group for pair, group in zip(pairs, groups, strict=True) if rank in pair}
        functions = two_functions([*mine.values()], [*mine])
        meet()
        called_on_threads(functions, pause_s=0.0)
        return [(function.settled, function.report.world_size) for function in functions]

    assert assert_all_ok(run_ranks(program, 3)) == [[(True, 2), (True, 2)]] * 3


def test_a_function_that_a_session_waits_for_goes_on_without_one_on_all_ranks(monkeypatch):
    monkeypatch.setattr(turn, "WAIT_S", 0.2)

    def program(rank):
        bench, other = Bench(), Bench()
        one, two = bench.kernel({16: 3.0, 32: 1.0}), other.kernel({16: 3.0, 32: 1.0}, double)
        inner = tune(other, lambda: launch(two, numbers()), name="inner")

        def thunk():
            thread = threading.Thread(target=inner)
            thread.start()
            thread.join(TIMEOUT_S)
            return launch(one, numbers())

        outer = tune(bench, thunk, name="outer")
        y = outer()
        return torch.equal(y, numbers() + 1), outer.settled, inner.report

    assert assert_all_ok(run_ranks(program, 2)) == [(True, True, None)] * 2


@pytest.mark.parametrize("has_asked", [True, False])
def test_ctrl_c_while_a_rank_asks_ends_the_call_of_its_peers(has_asked, monkeypatch):
    def program(rank):
        step, _ = two_functions()
        group = GROUPS.of(None)
        with monkeypatch.context() as patch:
            if rank == 0 and has_asked:
                interrupt_when_waiting(group._new_exchanges(f"{group._prefix}/turns/first/1"))
            elif rank == 0:
                patch.setattr(Connections, "take", lambda self: patch.undo() or raise_(KeyboardInterrupt()))
            else:
                meet()  # its peer has asked alone
            end = ending(step)
        if rank == 0:
            meet()
        meet()
        return end.partition(":")[0], torch.equal(step(), numbers() + 1), step.settled

    zero, one = assert_all_ok(run_ranks(program, 2))
    assert zero == ("KeyboardInterrupt", True, True)
    assert one == ("PeerFailed", True, True)
