"""That choices are sorted as the tables say, whatever they are."""

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from expert_runs import SCATTERING
from hypothesis import given, settings
from hypothesis import strategies as st
from operation_runs import on_ranks
from operations import HALF

from dist_autotune.kernels.exchange.flags import FLAGS, GIVEN, ROWS_SENT
from dist_autotune.kernels.exchange.peers import wait_for_flag
from dist_autotune.kernels.moe import plan as planning
from dist_autotune.kernels.moe import routing
from dist_autotune.kernels.moe.announcer import TOPK_SPAN
from dist_autotune.kernels.moe.launch import HEIGHTS
from dist_autotune.kernels.moe.plan import LOWEST, Plan, Sorting
from dist_autotune.kernels.moe.routing import digest_of
from dist_autotune.kernels.signals import GIVEN_UP, Failure, read_failure

CAPACITY = 24  # tokens of a rank


@dataclass(frozen=True)
class Routed:
    """What one rank's kernels made of the choices of all."""

    plan: Plan
    rank_of: list[int]  # by choice of all ranks
    expert_of: list[int]  # likewise; a dropped one is of the expert behind the last
    pairs: int
    failures: list[Failure | None]


def route(ids, experts, *, rank=0, first=0, by_first=False, is_shared=False, stages=None) -> Routed:
    """Sort `ids`, a matrix for each rank, as `rank` would whose peers have all told their choices."""
    world, topk = len(ids), ids[0].shape[1]
    tokens = tuple(len(part) for part in ids)
    stride, told = CAPACITY * topk, is_shared + digest_of(tokens)
    everyone = torch.full((world * stride,), 10**6, dtype=torch.int64)  # what nobody chose is no expert
    flags, errors = torch.zeros(FLAGS, world, dtype=torch.int32), torch.zeros(world, dtype=torch.int64)
    for peer, part in enumerate(ids):
        everyone[peer * stride : peer * stride + part.numel()] = part.reshape(-1)
        if peer != rank:
            flags[ROWS_SENT.value, peer] = tokens[peer] * TOPK_SPAN.value + topk
            flags[GIVEN.value, peer] = told
    plan = Plan(
        world_size=world,
        experts=experts,
        most=world * stride,
        orders=3 if is_shared else 1 if by_first else 2,
        by_first=by_first,
        device=torch.device("cpu"),
        stages=stages,
    )
    for tensor in vars(plan).values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(-(10**9))
    pairs = sum(tokens) * topk
    plan.sort(
        everyone, flags, errors, pairs=pairs, topk=topk, stride=stride, tokens=tokens[rank], told=told,
        rank=rank, first=first, patience_ticks=1, weights=weights_of(everyone) if is_shared else None,
    )  # fmt: skip
    all_ids = torch.cat(ids).reshape(-1).tolist()
    return Routed(
        plan=plan,
        rank_of=[peer for peer, part in enumerate(ids) for _ in range(part.numel())],
        expert_of=[expert if 0 <= expert < experts else experts for expert in all_ids],
        pairs=pairs,
        failures=[read_failure(int(flag)) for flag in errors],
    )


def weights_of(choices: torch.Tensor) -> torch.Tensor:
    """Return a weight for each place of a layout; NaN for what is no choice."""
    return torch.arange(float(len(choices))).where(choices.abs() < 10**6, float("nan"))


def entries(plan: Plan, table: int) -> list[tuple[int, ...]]:
    count = int(plan.ends[table, -1])
    return [tuple(entry) for entry in plan.tables[table, :count].tolist()]


def check(routed: Routed, ids, experts, *, first, by_first) -> None:
    """Assert that each choice has one place, and each table covers all places with blocks as it promises."""
    plan = routed.plan
    world = plan.ends.shape[1]  # or 1: all ranks' chunks are one stage
    rows = plan.rows[: routed.pairs].tolist()
    assert sorted(rows) == list(range(routed.pairs))
    stages = [(routed.rank_of[row] - first) % world for row in rows]
    keys = [(routed.expert_of[row], stage) for row, stage in zip(rows, stages, strict=True)]
    assert keys == sorted(keys)
    flat = [
        peer * CAPACITY * ids[0].shape[1] + i for peer, part in enumerate(ids) for i in range(part.numel())
    ]
    assert plan.sources[: routed.pairs].tolist() == [flat[row] for row in rows]
    for table in range(plan.tables.shape[0]):
        height = LOWEST << table % HEIGHTS
        blocks = entries(plan, table)
        covered = sorted(place for _, begin, end, _ in blocks for place in range(begin, end))
        assert covered == list(range(routed.pairs))
        most = sum(-(-sum(key[0] == expert for key in keys) // height) for expert in range(experts + 1))
        assert len(blocks) == most  # none is cut shorter than it must be
        own_last = table // HEIGHTS == 2
        for expert, begin, end, stage in blocks:
            assert 0 < end - begin <= height
            assert {key[0] for key in keys[begin:end]} == {expert}
            touched = [(key[1] - own_last) % world for key in keys[begin:end]]
            assert stage == (min(touched) if by_first or own_last else max(touched))
        if table // HEIGHTS != 1:  # in the order of stages
            order = [block[3] for block in blocks]
            assert order == sorted(order)
            ends = [sum(stage <= last for stage in order) for last in range(world)]
            assert plan.ends[table].tolist() == ends
        else:  # expert by expert
            assert [block[:2] for block in blocks] == sorted(block[:2] for block in blocks)


@triton.jit
def lost_by_the_second(FLAG: tl.constexpr, KIND: tl.constexpr, peer, peers, WORLD: tl.constexpr):
    value = wait_for_flag(FLAG, KIND, peer, peers, WORLD)
    return tl.where((tl.program_id(0) == 1) & (peer == WORLD - 1), GIVEN_UP + 1, value)


@triton.jit
def lost_by_all(FLAG: tl.constexpr, KIND: tl.constexpr, peer, peers, WORLD: tl.constexpr):
    value = wait_for_flag(FLAG, KIND, peer, peers, WORLD)
    return tl.where(peer == WORLD - 1, GIVEN_UP + 1, value)


def count_in_two_programs(monkeypatch):
    monkeypatch.setattr(planning, "PROGRAMS", 2)
    monkeypatch.setattr(planning, "BLOCK", 8)


@pytest.mark.parametrize("is_shared", [False, True], ids=["one operation's", "shared"])
def test_programs_that_find_other_choices_sort_nothing(monkeypatch, is_shared):
    """Let the second of two programs find rank 2 given up, when it comes back as the first one reads."""
    count_in_two_programs(monkeypatch)
    ids = [torch.arange(2 * CAPACITY).view(CAPACITY, 2) % 5] * 3
    monkeypatch.setattr(routing, "wait_for_flag", lost_by_all)
    plan = route(ids, 5, is_shared=is_shared).plan
    places = 4 * CAPACITY  # of ranks 0 and 1
    assert sorted(plan.rows[:places].tolist()) == [*range(places)]
    assert plan.ends[:, -1].min() > 0
    monkeypatch.setattr(routing, "wait_for_flag", lost_by_the_second)
    plan = route(ids, 5, is_shared=is_shared).plan
    assert plan.ends.unique().tolist() == [0]
    assert plan.counters.unique().tolist() == [0]


@pytest.mark.parametrize("is_shared", [False, True], ids=["one operation's", "shared"])
def test_choices_that_a_peer_overwrites_while_they_are_sorted_have_a_place_each(monkeypatch, is_shared):
    """A peer may that has given this rank up."""
    count = planning._COUNT.launch

    def count_then_overwrite(kind, programs, tensors, *given):
        count(kind, programs, tensors, *given)
        tensors[0].fill_(1)

    monkeypatch.setattr(planning._COUNT, "launch", count_then_overwrite)
    ids = [torch.arange(2 * CAPACITY).view(CAPACITY, 2) % 6 - 1] * 3
    check(route(ids, 5, is_shared=is_shared), ids, 5, first=0, by_first=False)


@on_ranks(2)
def test_sums_of_choices_that_were_not_sorted_are_nan_on_every_rank(rank, monkeypatch):
    SCATTERING.begin(rank)
    with SCATTERING.open(24, 16, HALF) as op:
        given = SCATTERING.operands(op, [24, 24], 16, 5, 2)
        assert not op(*given).isnan().any()
        if rank == 0:
            count_in_two_programs(monkeypatch)
            monkeypatch.setattr(routing, "wait_for_flag", lost_by_the_second)
        assert op(*given).isnan().all()


@st.composite
def problems(draw):
    world, topk, experts = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    favourites = draw(st.lists(st.integers(-1, experts - 1), min_size=1, max_size=4))
    ids = []
    for _ in range(world):
        tokens = draw(st.integers(0, CAPACITY))
        chosen = draw(st.lists(st.sampled_from(favourites), min_size=tokens * topk, max_size=tokens * topk))
        ids.append(torch.tensor(chosen, dtype=torch.int64).reshape(tokens, topk))
    return ids, experts, draw(st.integers(0, world - 1))


@given(problems(), st.booleans(), st.booleans())
@settings(max_examples=20, deadline=None)
def test_choices_are_sorted_and_the_tables_list_them(problem, by_first, are_all_here):
    ids, experts, rank = problem
    first = rank if are_all_here else (rank + by_first) % len(ids)
    stages = 1 if are_all_here else None
    routed = route(ids, experts, rank=rank, first=first, by_first=by_first, stages=stages)
    assert routed.failures == [None] * len(ids)
    check(routed, ids, experts, first=first, by_first=by_first)
    if are_all_here:
        gathered = Sorting(routed.plan, 1, 0, routing=None, is_gathered=True)
        assert gathered.offsets.tolist() == [0, routed.pairs]
        assert torch.equal(gathered.ends, routed.plan.ends[:, 0])


@given(problems())
@settings(max_examples=10, deadline=None)
def test_a_shared_sorting_keeps_the_order_of_choices_and_has_tables_for_both_operations(problem):
    ids, experts, rank = problem
    routed = route(ids, experts, rank=rank, first=rank, is_shared=True)
    assert routed.failures == [None] * len(ids)
    check(routed, ids, experts, first=rank, by_first=False)
    plan, stages = routed.plan, [(source - rank) % len(ids) for source in routed.rank_of]
    order = sorted(range(routed.pairs), key=lambda row: (routed.expert_of[row], stages[row], row))
    assert plan.rows[: routed.pairs].tolist() == order
    kept = [routed.expert_of[row] < experts for row in order]
    wanted = plan.sources[: routed.pairs].float() * torch.tensor(kept)
    assert torch.equal(plan.weights[: routed.pairs], wanted)
