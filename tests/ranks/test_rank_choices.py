"""A `tunable` among ranks: all of them take the same option in every run, whatever each of them knows."""

import shutil
from typing import Any

import pytest
import torch.distributed as dist
from kernels_for_tests import Bench
from operation_runs import on_ranks
from rank_programs import own_cache, tune

from dist_autotune import tunable
from dist_autotune.storage.winners import LAUNCHED
from ranks import assert_all_ok, run_ranks

OPTIONS = [None, 4, 8]


class Choosing:
    """A function that asks for an option among a group, and what it got in each run."""

    def __init__(self, ms: dict[Any, float], among: Any = None, **options: Any) -> None:
        self.ms, self.among, self.taken = ms, among or dist.group.WORLD, []
        self.bench = Bench()
        self.tuned = tune(self.bench, self.run, **{"name": "choosing", **options})

    def ask(self) -> Any:
        return tunable("limit", OPTIONS, key=(64,), among=self.among)

    def run(self) -> Any:
        self.taken.append(self.ask())
        self.bench.spend(self.ms[self.taken[-1]])
        return self.taken[-1]


def times_of(rank: int) -> dict[Any, float]:
    """Return times whose fastest option is 4 on rank 0, 8 on rank 1 and by the slowest rank."""
    return [{None: 4.0, 4: 1.0, 8: 2.0}, {None: 4.0, 4: 3.0, 8: 2.0}][rank % 2]


def test_ranks_take_the_same_option_in_every_run_and_settle_on_that_of_the_slowest_rank():
    def program(rank):
        choosing = Choosing(times_of(rank))
        return choosing.tuned(), choosing.ask(), choosing.taken

    first, second = assert_all_ok(run_ranks(program, 2))
    assert first == second
    assert first[:2] == (8, 8)
    assert set(first[2]) == {None, 4, 8}


@pytest.mark.parametrize(
    ("holder", "mode", "taken"),
    [
        # A result of another function is not offered at the opening: it is given to all in the first run.
        *((holder, "another function", [None, 8]) for holder in (0, 1)),
        *((0, mode, [8]) for mode in ("tune", "cached", "strict")),
    ],
)
def test_a_result_that_one_rank_alone_knows_is_taken_once_all_have_it(holder, mode, taken, monkeypatch):
    def program(rank, ms):
        choosing = Choosing(ms, cache=own_cache(rank))
        return choosing.tuned(), choosing.taken

    assert_all_ok(run_ranks(lambda rank: program(rank, times_of(rank)), 2))
    shutil.rmtree(own_cache(1 - holder))
    if mode == "another function":
        shutil.rmtree(own_cache(holder) / LAUNCHED)
    else:
        monkeypatch.setenv("DIST_AUTOTUNE_MODE", mode)
    again = run_ranks(lambda rank: program(rank, {None: 1.0, 4: 2.0, 8: 3.0}), 2)
    assert assert_all_ok(again) == [(8, taken)] * 2


@on_ranks(2)
def test_without_a_cache_another_function_of_the_process_takes_what_the_ranks_agreed_on(rank, monkeypatch):
    Choosing(times_of(rank), cache=False).tuned()
    monkeypatch.setenv("DIST_AUTOTUNE_MODE", "strict")
    choosing = Choosing(times_of(rank), cache=False)
    assert (choosing.tuned(), choosing.taken) == (8, [8])


@pytest.mark.filterwarnings("ignore:.* is tuned without is_dist=True")
@on_ranks(2)
def test_a_function_that_does_not_agree_with_them_takes_the_first_option_until_one_has_agreed(rank):
    alone = Choosing(times_of(rank), is_dist=False, name="alone")
    before = alone.tuned(), alone.ask(), alone.tuned.report.contexts
    together = Choosing(times_of(rank))
    together.tuned()
    assert (before, alone.tuned(), alone.ask()) == ((None, None, ()), 8, 8)


@pytest.mark.filterwarnings("ignore:.* is tuned without is_dist=True")
@on_ranks(3)
def test_a_function_of_fewer_ranks_does_not_choose_for_the_others(rank):
    pair = dist.new_group([0, 1])
    mine = {} if rank == 2 else {"group": pair}
    choosing = Choosing(times_of(rank), is_dist=rank < 2, **mine)
    choosing.among = dist.group.WORLD
    assert (choosing.tuned(), choosing.ask()) == (None, None)


def test_results_of_groups_that_overlap_are_told_apart_outside():
    best_of = {(0, 1): 4, (0, 2): 8}

    def program(rank):
        groups = {ranks: dist.new_group(list(ranks)) for ranks in best_of}
        mine = {ranks: group for ranks, group in groups.items() if rank in ranks}
        for ranks, group in mine.items():
            ms = {option: 1.0 if option == best_of[ranks] else 2.0 for option in OPTIONS}
            Choosing(ms, group, group=group).tuned()
        return {ranks: tunable("limit", OPTIONS, key=(64,), among=group) for ranks, group in mine.items()}

    assert assert_all_ok(run_ranks(program, 3)) == [best_of, {(0, 1): 4}, {(0, 2): 8}]
