"""Which ranks tune together: groups, subsets, none at all, one after another."""

import os
import signal
import threading
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from kernels_for_tests import double, records
from operation_runs import on_ranks
from rank_programs import blocks_of, ending, tuned_step
from torch.distributed.device_mesh import init_device_mesh

from dist_autotune import contextual_autotune
from dist_autotune.errors import InvalidOption
from dist_autotune.ranks import group
from ranks import assert_all_ok, run_ranks


@pytest.mark.parametrize("init", ["file", "tcp"])
def test_a_group_of_some_ranks_tunes_without_the_others_who_are_told_what_to_do(init):
    def program(rank):
        step, bench = tuned_step({16: 2.0 + (rank == 3), 32: 2.5, 64: 9.0}, group=dist.new_group([1, 3]))
        end = ending(step)
        return end if rank in (0, 2) else (step.report.world_size, bench.blocks()), step.settled

    zero, one, two, three = assert_all_ok(run_ranks(program, 4, init=init))
    assert one == three == ((2, [16, 32, 64, 32]), True)
    for rank, (text, settled) in ((0, zero), (2, two)):
        assert text.startswith(f"TuningError: Rank {rank} called a tuned function whose group= it is not a")
        assert "Call it on members only" in text
        assert not settled


@pytest.mark.parametrize("what", ["world of one", "group of one", "is_dist=False", "no group"])
def test_alone_nothing_is_exchanged(what):
    def program(rank):
        options = {}
        if what == "group of one":
            groups = [dist.new_group([0]), dist.new_group([1])]
            options["group"] = groups[rank]
        step, bench = tuned_step({16: 1.0 + rank, 32: 1.5}, is_dist=what != "is_dist=False", **options)
        if what == "is_dist=False":
            warnings.filterwarnings("ignore", message=".*is tuned without is_dist=True")
        if rank == 0:  # the other rank need not call
            step()
            assert not [event for event in records(rank=rank) if event.event == "exchanged"]
            assert "dist_autotune scout" not in [thread.name for thread in threading.enumerate()]
            return step.report.world_size, bench.blocks()
        return None

    init = "none" if what == "no group" else "file"
    results = assert_all_ok(run_ranks(program, 1 if what == "world of one" else 2, init=init))
    assert results[0] == (1, [16, 32, 16])


@on_ranks(3)
def test_sessions_back_to_back_hear_no_stale_message(rank):
    winners = []
    for n in range(12):
        fast = 16 if n % 2 else 32
        step, _ = tuned_step({16: 1.0 if fast == 16 else 2.0 + rank, 32: 1.0 if fast == 32 else 2.0 + rank})
        step()
        winners += blocks_of(step).values()
    assert winners == [32, 16] * 6


@on_ranks(2)
def test_runs_of_functions_called_in_different_order_count_for_no_rank(rank):
    first, _ = tuned_step({16: 1.0, 32: 2.0}, name="first", mode="online")
    second, _ = tuned_step({16: 1.0, 32: 2.0}, double, name="second", mode="online")
    unlike = [first, second] if rank else [second, first]
    for step in (first, second, *unlike, first, second, first, second):
        assert ending(step).startswith("returned tensor")
    assert (blocks_of(first), blocks_of(second)) == ({"add64": 16}, {"double64": 16})


def test_the_process_group_may_end_and_begin_again():
    def program(rank, directory):
        winners = []
        step, _ = tuned_step({16: lambda launch: 1.0 + rank * len(winners), 32: 1.5})
        step()
        winners += blocks_of(step).values()
        for n in range(2):
            dist.destroy_process_group()
            dist.init_process_group(
                "gloo", store=dist.FileStore(str(directory / f"again-{n}"), 2), rank=rank, world_size=2
            )
            step()
            winners += blocks_of(step).values()
        step()  # settled
        dist.destroy_process_group()
        step()
        return winners, step.report.world_size

    zero, one = assert_all_ok(run_ranks(program, 2, Path.cwd()))
    assert zero == one == ([16, 32, 32], 1)


# ---- a DeviceMesh for a group


def test_a_mesh_of_one_dimension_is_its_group():
    def program(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with pytest.raises(InvalidOption, match=r"of 2 dimensions \('dp', 'tp'\): give one, as mesh\['tp'\]"):
            contextual_autotune(is_dist=True, group=mesh)
        ms = {16: 1.0 if rank % 2 else 2.0, 32: 1.5 if rank < 2 else 2.5}
        step, bench = tuned_step(ms, group=mesh["tp"])
        for _ in range(2):
            step()
        return step.report.world_size, blocks_of(step), len(bench.blocks()), step.settled

    zero, one, two, three = assert_all_ok(run_ranks(program, 4))
    assert zero == one == (2, {"add64": 32}, 4, True)
    assert two == three == (2, {"add64": 16}, 4, True)


def test_a_child_that_is_forked_while_a_thread_makes_a_group_waits_for_no_lock(monkeypatch):
    def program(rank):
        made, genuine = threading.Barrier(2), group.ProcessGroup

        def slow(*given):
            made.wait(30)
            made.wait(30)
            return genuine(*given)

        monkeypatch.setattr(group, "ProcessGroup", slow)
        maker = threading.Thread(target=group.GROUPS.of, args=(None,))
        maker.start()
        made.wait(30)
        monkeypatch.undo()
        if (pid := os.fork()) == 0:
            signal.alarm(10)
            group.GROUPS.of(None)
            os._exit(0)
        ended = os.waitpid(pid, 0)[1]
        made.wait(30)
        maker.join()
        return ended

    assert assert_all_ok(run_ranks(program, 2)) == [0, 0]
