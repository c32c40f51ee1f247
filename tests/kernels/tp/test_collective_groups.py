"""Communicators with limits: chosen alike on all ranks, made when first taken, closed; where ranks differ.

On the CPU copies of a gloo group stand for NCCL's communicators: choosing, making and closing are the same.
"""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documents import blocks, page
from kernels_for_tests import Bench
from operation_runs import on_ranks, values
from rank_programs import ending, tune

from dist_autotune.kernels.tp import CollectiveGroups, collective_groups
from ranks import assert_all_ok, run_ranks

LIMITS = (None, 4, 8)


def copy_of(group: dist.ProcessGroup, limit: int) -> dist.ProcessGroup:
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


def number_of_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def ms_of(rank: int) -> dict[int | None, float]:
    """Return how long a step takes with each limit: 4 is the fastest on rank 0, 8 by the slowest rank."""
    return [{None: 4.0, 4: 1.0, 8: 2.0}, {None: 4.0, 4: 3.0, 8: 2.0}][rank % 2]


class Step:
    """A function that sums over the ranks in the group of the limit, and takes as long as `ms` says."""

    def __init__(self, limits: CollectiveGroups, ms: dict[int | None, float], **options: Any) -> None:
        self.limits, self.ms, self.taken, self.bench = limits, ms, [], Bench()
        self.tuned = tune(self.bench, self.run, **options)

    def run(self) -> float:
        total = torch.ones(3)
        dist.all_reduce(total, group=self.limits.group((3,)))
        self.taken.append(self.limits.limit((3,)))
        self.bench.spend(self.ms[self.taken[-1]])
        return float(total[0])


def test_a_step_takes_one_limit_on_all_ranks_and_settles_on_that_of_the_slowest():
    def program(rank):
        before = number_of_groups()
        with CollectiveGroups(max_ctas=LIMITS, make=copy_of) as limits:
            step = Step(limits, ms_of(rank))
            sums = {step.tuned() for _ in range(2)}
            made = number_of_groups() - before
            limits.release_unused()
            kept = number_of_groups() - before
            sums.add(step.tuned())
            outside = limits.limit((3,)), limits.limit((5,))
        return step.taken, sums, made, kept, outside, number_of_groups() - before

    first, second = assert_all_ok(run_ranks(program, 2))
    assert first == second
    taken, sums, made, kept, outside, left = first
    assert set(taken) == {None, 4, 8}
    assert taken[-1] == 8
    assert sums == {2.0}
    assert (made, kept, left) == (2, 1, 0)
    assert outside == (8, None)


@on_ranks(2)
def test_without_nccl_every_call_gets_the_group_and_nothing_is_tuned(rank):
    limits = CollectiveGroups(max_ctas=(4, 8))
    step = Step(limits, {None: 1.0})
    assert step.tuned() == 2.0
    assert (step.taken, step.tuned.report.contexts) == ([None], ())
    assert limits.group() is dist.group.WORLD


@on_ranks(2)
def test_a_failed_step_is_made_again_with_the_same_communicators(rank):
    with CollectiveGroups(max_ctas=LIMITS, make=copy_of) as limits:
        step, run = Step(limits, ms_of(rank)), Step.run

        def failing_once() -> float:
            total = run(step)
            if rank == 1 and step.taken.count(4) == 1 and step.taken[-1] == 4:
                raise KeyError("of the step")
            return total

        step.tuned = tune(step.bench, failing_once)
        told = ("PeerFailed: rank 1 failed", "KeyError: 'of the step'")[rank]
        assert ending(step.tuned).startswith(told)
        assert (step.tuned(), step.taken[-1]) == (2.0, 8)


@on_ranks(2, timeout_s=30.0)
def test_a_peer_that_never_comes_to_make_a_communicator_is_not_waited_for_longer_than_said(rank):
    limits = CollectiveGroups(max_ctas=(4,), make=copy_of, timeout_s=1.0)
    before = number_of_groups()
    told = "RuntimeError: max CTAs of collectives: the limit 4: rank 0 of 2 got no answer"
    assert rank == 1 or ending(limits.group).startswith(told)
    assert number_of_groups() == before


@on_ranks(2)
def test_a_communicator_that_fails_on_one_rank_is_made_on_none(rank):
    def make(group: dist.ProcessGroup, limit: int) -> dist.ProcessGroup:
        if rank == 1 and limit == 4:
            raise RuntimeError("no memory left")
        return dist.new_group([rank], use_local_synchronization=True)

    text = "failed on 1 of 2 ranks: rank 1: RuntimeError: no memory left"
    ended = ending(CollectiveGroups(max_ctas=(4,), make=make).group)
    assert ended.endswith(f"max CTAs of collectives: making the limit 4 {text}")
    assert number_of_groups() == 1


@pytest.mark.parametrize(
    "differing", [{"max_ctas": (None, 4)}, {"max_ctas": (4, None, 8)}, {"name": "others"}], ids=str
)
@on_ranks(3)
def test_ranks_that_open_with_other_limits_all_learn_it(rank, differing):
    options = {"max_ctas": LIMITS, "make": copy_of, **(differing if rank == 1 else {})}
    text = ending(lambda: CollectiveGroups(**options))
    assert "ValueError" in text
    assert "rank 0: the arguments of CollectiveGroups, max CTAs of collectives, None, 4, 8" in text
    assert "rank 1: the arguments" in text


@on_ranks(2)
def test_communicators_are_made_again_and_among_ranks_with_other_numbers_of_groups(rank):
    """Their names would come again after closing, and differ, if torch made them alone."""
    extra = [dist.new_group([1], use_local_synchronization=True)] if rank == 1 else []
    for _ in range(2):
        with CollectiveGroups(max_ctas=(4, 8), make=copy_of) as limits:
            total = torch.ones(1)
            dist.all_reduce(total, group=limits.group())
            limits._taken.clear()
            limits.release_unused()
            dist.all_reduce(total, group=limits.group())
            assert float(total) == 4.0
    assert number_of_groups() == 1 + len(extra)


@pytest.mark.parametrize(
    ("max_ctas", "text"),
    [
        ((), "at least one limit"),
        ("48", "at least one limit"),
        ((None, 0), "0 is no limit"),
        ((4.0,), "4.0 is no limit"),
        ((True,), "True is no limit"),
        ((4, 8, 4), "each limit once"),
    ],
    ids=str,
)
def test_limits_that_are_none_are_refused_before_anybody_waits(max_ctas, text):
    with pytest.raises(ValueError, match=text):
        CollectiveGroups(max_ctas=max_ctas)


@on_ranks(2)
def test_a_capture_makes_no_communicator(rank):
    limits = CollectiveGroups(max_ctas=(4,), make=copy_of)
    torch.cuda.is_initialized = torch.cuda.is_current_stream_capturing = lambda: True
    told = "RuntimeError: max CTAs of collectives: the communicator of 4 CTAs is not made yet"
    assert ending(lambda: limits.group((7,))).startswith(told)


# ---- what NCCL is asked for


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)
        self._timeout = datetime.timedelta(minutes=10)


@pytest.mark.parametrize("fails", [False, True], ids=["made", "not made"])
@pytest.mark.parametrize("device", [None, torch.device("cuda", 0)], ids=["lazy", "bound to a device"])
def test_a_communicator_has_the_limit_and_what_the_group_has(monkeypatch, device, fails):
    asked: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    parent = Options(is_high_priority_stream=True)
    parent._timeout = datetime.timedelta(seconds=77)
    backend = SimpleNamespace(options=parent)
    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(wrapped_pg=backend), size=lambda: 2)
    world, made = SimpleNamespace(bound_device_id=device), SimpleNamespace(bound_device_id=None)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(type(dist.group), "WORLD", world)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [1, 3])

    def ask(*given: Any, **more: Any) -> Any:
        asked.append((given, more, world.bound_device_id))
        if fails:
            raise RuntimeError("no communicator")
        return made

    monkeypatch.setattr(dist, "new_group", ask)
    if fails:
        with pytest.raises(RuntimeError, match="no communicator"):
            collective_groups.limited_communicator(group, 8)
    else:
        assert collective_groups.limited_communicator(group, 8) is made
        assert made.bound_device_id == device
    ((given, more, bound_meanwhile),) = asked
    options = given[3]
    assert (options.config.max_ctas, options.is_high_priority_stream) == (8, True)
    assert options._timeout == datetime.timedelta(seconds=77)
    assert (given[0], given[2]) == ([1, 3], "nccl")  # no other backend is given options of NCCL
    assert more["use_local_synchronization"]  # ranks outside the group do not call it
    assert (bound_meanwhile, world.bound_device_id) == (None, device)  # nothing is split


def test_an_nccl_without_limits_is_named(monkeypatch):
    old = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", old, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    with pytest.raises(RuntimeError, match=r"the NCCL of torch .* has no max_ctas"):
        collective_groups._has_nccl(None)


# ---- the page


@on_ranks(2)
def test_the_recipe_of_the_page_reduces_beside_a_product(rank):
    (recipe,) = blocks(page("docs/overlap.md"), "python")
    torch.manual_seed(rank)
    given = {name: torch.randn(4, 4) for name in ("a", "b", "bucket")}
    wanted = given["bucket"].clone()
    dist.all_reduce(wanted)
    exec(recipe, given)
    assert torch.equal(given["bucket"], wanted)
    assert torch.equal(given["product"], given["a"] @ given["b"])


# ---- on GPUs


def limited_on_gpus(rank, store):
    """Sum with each limit, eagerly and in a graph; return the results and how long each limit takes."""
    device = torch.device("cuda", rank)
    if store is not None:  # a default group that is bound to its device
        dist.destroy_process_group()
        file = dist.FileStore(store, 2)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=file, rank=rank, world_size=2, device_id=device)
    field, wrong, ms = torch.ones(1 << 25, device=device), [], {}
    for _ in range(2):  # closed and opened again
        with CollectiveGroups(max_ctas=(None, 1, 8)) as limits:
            for limit in limits.max_ctas:
                group = limits.communicator(limit)
                for _ in range(3):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    dist.all_reduce(field.fill_(1.0), group=group)
                    end.record()
                    wrong.append(float((field - 2.0).abs().max()))
                    end.synchronize()
                ms[limit] = begin.elapsed_time(end)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                dist.all_reduce(field, group=limits.communicator(8))
            field.fill_(1.0)
            graph.replay()
            wrong.append(float((field - 2.0).abs().max()))
            del graph
    return max(wrong), ms


@pytest.mark.gpu(devices=2, alone=True)  # it compares times
@pytest.mark.parametrize("is_bound", [False, True], ids=["lazy", "bound to a device"])
def test_communicators_of_nccl_sum_and_fewer_ctas_take_longer(is_bound, tmp_path):
    store = str(tmp_path / "store") if is_bound else None
    for wrong, ms in values(limited_on_gpus, 2, store, timeout_s=240):
        assert wrong == 0.0
        assert ms[1] > 1.5 * ms[8]
