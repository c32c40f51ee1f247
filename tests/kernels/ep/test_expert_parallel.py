"""Tokens come to the ranks of their experts and their results come back, forward and backward."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from expert_parallel_runs import (
    HIDDEN,
    TOKENS,
    gathered,
    leave_one_candidate,
    matrices,
    opened,
    own_part,
    routing,
)
from operation_runs import Cases, device, on_ranks, synchronize, tuned_in_context

from dist_autotune.kernels.ep import ExpertParallel
from dist_autotune.kernels.ep import launches as ep_launches
from dist_autotune.kernels.signals import as_patience


def is_dispatched(op: ExpertParallel, x: torch.Tensor, ids: torch.Tensor, d) -> bool:
    """Return whether rows and offsets are as if each expert had searched all tokens in their order."""
    own = op.experts // op.world_size
    tokens, chosen = torch.cat(gathered(x)), torch.cat(gathered(ids))
    rows, ends = [], [0]
    for expert in range(op.rank * own, (op.rank + 1) * own):
        found = (chosen == expert).nonzero()[:, 0]
        rows.append(tokens[found])
        ends.append(ends[-1] + len(found))
    assert d.offsets.tolist() == ends
    return torch.equal(d.rows[: ends[-1]].cpu(), torch.cat(rows))


def products(x, ids, weights, first, second) -> torch.Tensor:
    """Return the weighted sums of each token's products with both matrices of its experts, in float32."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for choice in range(ids.shape[1]):
        real = (ids[:, choice] >= 0) & (ids[:, choice] < len(first))
        expert = torch.where(real, ids[:, choice], 0)
        hidden = torch.einsum("th,tnh->tn", x.float(), first.float()[expert])
        both = torch.einsum("tn,thn->th", hidden, second.float()[expert])
        total += torch.where(real, weights[:, choice], 0.0)[:, None] * both
    return total


def weighted_sums(x, ids, weights, experts: int) -> torch.Tensor:
    """Return what experts give that multiply by one more than their numbers, in float32."""
    one = torch.eye(x.shape[1]).expand(experts, -1, -1)
    return products(x, ids, weights, torch.arange(1, experts + 1)[:, None, None] * one, one)


def scaled(op: ExpertParallel, d) -> torch.Tensor:
    """Return the rows, each times one more than its expert's number."""
    own = op.experts // op.world_size
    expert = torch.bucketize(torch.arange(len(d.rows), device=d.offsets.device), d.offsets[1:], right=True)
    return (d.rows * (op.rank * own + expert + 1)[:, None]).to(d.rows.dtype)


def round_trip(op: ExpertParallel, tokens: int = TOKENS) -> None:
    """Assert that tokens come to their experts, and their results back."""
    x, ids, weights = torch.randn(tokens, HIDDEN), routing("any", tokens, 6, 2), torch.rand(tokens, 2)
    d = op.dispatch(x, ids)
    y = op.combine(scaled(op, d), d, weights)
    assert is_dispatched(op, x, ids, d)
    torch.testing.assert_close(y, weighted_sums(x, ids, weights, 6), rtol=1e-4, atol=1e-5)


WORLDS = [2, 3, 4, pytest.param(2, marks=pytest.mark.gpu(devices=2), id="2 GPUs")]


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_tokens_come_to_their_experts_and_their_results_back(rank: int, world: int) -> Cases:
    torch.manual_seed(rank)
    dtype = torch.float32 if device() == "cpu" else torch.bfloat16
    near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 2e-2}

    def case(kind: str, topk: int, counts: list[int], leave: bool, one_launch: bool | None = None):
        def run() -> bool:
            if leave:  # another candidate and another way on each rank
                leave_one_candidate(rank)
            with opened(2 * world, topk, dtype, one_launch=rank % 2 == 0 if leave else one_launch) as op:
                for turn in range(3):  # with other inputs, back to back; the last as a captured call goes
                    op._is_capturing = (lambda: True) if turn == 2 and device() == "cpu" else op._is_capturing
                    tokens = counts[(rank + turn) % len(counts)]
                    x = torch.randn(tokens, HIDDEN).to(dtype)
                    ids, weights = routing(kind, tokens, op.experts, topk), torch.rand(tokens, topk)
                    if turn == 1 and rank == world - 1:
                        time.sleep(0.05)
                    given = (x.to(device()), ids.to(device()))
                    d = op.dispatch(*given)
                    y = op.combine(scaled(op, d), d, weights.to(device()))
                    assert is_dispatched(op, x, ids, d)
                    want = weighted_sums(x, ids, weights, op.experts)
                    torch.testing.assert_close(y.float().cpu(), want, **near)
                    if turn == 1:
                        continue
                    first, second = (
                        matrices(op.experts, *size, dtype) for size in ((20, HIDDEN), (HIDDEN, 20))
                    )
                    by_columns = own_part(op, second).mT.contiguous().mT
                    d = op.dispatch_matmul(given[0], own_part(op, first), given[1])
                    y = op.matmul_combine(d.rows, by_columns, d, weights.to(device()))
                    torch.testing.assert_close(
                        y.float().cpu(), products(x, ids, weights, first, second), **near
                    )
            return True

        return run

    cases = {
        "other candidates": case("any", 3, [TOKENS, 5, 11], True),
        "a rank without tokens": case("skewed", 2, [0, TOKENS], False),
        "dropped": case("dropped", 2, [TOKENS, 3], False, False),
    }
    if world == 2:
        cases["one expert"] = case("one", 1, [9, TOKENS], False)
        cases["duplicates"] = case("duplicates", 2, [TOKENS], False)
    return cases


@on_ranks(3, timeout_s=90)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_subgroup_takes_odd_sizes_strided_tokens_and_choices_of_other_types_in_any_mode(rank, dtype):
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank)
    first, second = matrices(6, 7, 33, dtype), matrices(6, 33, 7, dtype)
    with torch.inference_mode(), ExpertParallel(5, 33, 6, 3, dtype, group=group, timeout_s=20.0) as op:
        for tokens, of_ids, of_weights in ((5, torch.int32, torch.bfloat16), (0, torch.int64, torch.float64)):
            x = torch.randn(tokens, 40).to(dtype)[:, :33]
            ids = torch.randint(-2, 8, (3, tokens)).T.to(of_ids)
            weights = torch.rand(3, tokens).T.to(of_weights)
            d = op.dispatch_matmul(x, own_part(op, first), ids)
            y = op.matmul_combine(d.rows, own_part(op, second), d, weights)
            want = products(x, ids.long(), weights.float(), first, second)
            near = 1e-5 if dtype == torch.float32 else 5e-3
            torch.testing.assert_close(y.float(), want, rtol=near, atol=near)
        op.check()


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_rows_may_travel_in_fp8_with_a_scale_for_each_128_elements(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    dtype, hidden = torch.float32 if device() == "cpu" else torch.bfloat16, 384
    leave_one_candidate(rank)
    with ExpertParallel(TOKENS, hidden, 2 * world, 2, dtype, one_launch=None, timeout_s=20.0) as op:
        x = (torch.randn(TOKENS, hidden) * torch.logspace(-3, 3, 3).repeat_interleave(128)).to(dtype)
        x[1] = 0
        ids = routing("dropped", TOKENS, op.experts, 2)
        d = op.dispatch(x.to(device()), ids.to(device()), fp8=True)
        exact = op.dispatch(x.to(device()), ids.to(device()))
        assert is_dispatched(op, x, ids, exact)
        assert torch.equal(d.offsets, exact.offsets)
        grouped, rounded = (each.rows[: each.offsets[-1]].float().view(-1, 128) for each in (exact, d))
        scales = grouped.abs().amax(1, keepdim=True) / 448
        # Half a step of three bits; the smallest numbers the interpreter does not round to the nearest.
        error, half_a_step = (grouped - rounded).abs(), grouped.abs() / 16
        assert (error <= torch.maximum(1.001 * half_a_step, scales / 64)).all()
        assert not torch.equal(grouped, rounded)


@on_ranks(2)
def test_ranks_that_dispatch_in_other_formats_are_named(rank):
    with ExpertParallel(TOKENS, 64, 4, 2, torch.float32) as op:
        x, ids = torch.randn(4, 64), torch.zeros(4, 2, dtype=torch.int64)
        with pytest.raises(ValueError, match="hidden=64; fp8 takes a multiple of 128"):
            op.dispatch(x, ids, fp8=True)
        assert is_dispatched(op, x, ids, op.dispatch(x, ids))  # it was refused, and broke nothing
    op = ExpertParallel(TOKENS, 128, 4, 2, torch.float32)
    found = "rank 1 did dispatch in fp8, this rank did not so"
    with pytest.raises(ValueError, match=found if rank == 0 else "rank 0 did not dispatch in fp8, this rank"):
        op.dispatch(torch.randn(4, 128), ids, fp8=rank == 1)
    synchronize()
    op.abandon()


@on_ranks(2, timeout_s=60)
def test_more_rows_than_the_capacity_are_an_error_by_name_on_all_ranks(rank):
    op = opened(4, 2, capacity=10)
    x, ids = torch.randn(TOKENS, HIDDEN), torch.zeros(TOKENS, 2, dtype=torch.int64)  # all to rank 0
    found = "brought 64 rows to rank 0; capacity=10 are kept. Raise capacity="
    with contextlib.suppress(ValueError, RuntimeError):  # a peer may hear of it in this call, or in the next
        op.dispatch(x, ids)
    synchronize()
    for _ in range(2):
        with pytest.raises(ValueError if rank == 0 else RuntimeError, match=found):
            op.dispatch(x, ids)
    if rank == 0:
        with pytest.raises(ValueError, match=found):
            op.check()
    synchronize()
    op.abandon()


@on_ranks(2)
def test_wrong_arguments_are_refused(rank):
    with pytest.raises(ValueError, match="experts=5 must be a multiple of the number of ranks, 2"):
        opened(5)
    with pytest.raises(ValueError, match="topk=7 is more than experts=6"):
        opened(6, 7)
    with opened() as op:
        x, ids = torch.randn(4, HIDDEN), torch.zeros(4, 2, dtype=torch.int64)
        wrong = {
            r"17 tokens; this operation takes up to tokens_per_rank=16": (torch.randn(17, HIDDEN), ids),
            r"x has shape \[4, 8\]; \[T, hidden=32\]": (torch.randn(4, 8), ids),
            r"topk_ids has shape \[4, 3\]; \[4, topk=2\]": (x, torch.zeros(4, 3, dtype=torch.int64)),
            r"topk_ids is torch.float32": (x, ids.float()),
        }
        for message, given in wrong.items():
            with pytest.raises(ValueError, match=message):
                op.dispatch(*given)
        few, d = torch.randn(2, HIDDEN, HIDDEN), op.dispatch(x, ids)
        with pytest.raises(ValueError, match=r"weight has shape \[2, 32, 32\]; \[experts / W=3, N, 32\]"):
            op.dispatch_matmul(x, few, ids)
        with pytest.raises(ValueError, match=r"weight has shape \[3, 5, 32\]; \[experts / W=3, 32, 32\]"):
            op.matmul_combine(d.rows, torch.randn(3, 5, HIDDEN), d, torch.ones(4, 2))
        with pytest.raises(ValueError, match=r"rows have shape \[3, 32\]; \[C=64, F\]"):
            op.matmul_combine(d.rows[:3], torch.randn(3, HIDDEN, HIDDEN), d, torch.ones(4, 2))


@on_ranks(2)
def test_a_dispatch_of_other_sizes_is_refused_before_anything_of_it_is_read(rank):
    with opened(topk=1) as op, opened(topk=2, capacity=2 * TOKENS) as other:  # rows of both are of one shape
        x, square = torch.randn(4, HIDDEN), own_part(op, matrices(6, HIDDEN, HIDDEN))
        d = op.dispatch(x, torch.zeros(4, 1, dtype=torch.int64))
        of_other = other.dispatch(x, torch.zeros(4, 2, dtype=torch.int64))
        weights = torch.ones(4, 2)
        for wrong, error, told in (
            (None, TypeError, "d is a NoneType; what dispatch or dispatch_matmul returned is needed"),
            (of_other, ValueError, r"d is of an operation with other sizes: topk=2, .*; topk=1, .* are"),
        ):
            for call in (
                lambda d: op.combine(of_other.rows, d, weights),
                lambda d: op.matmul_combine(of_other.rows, square, d, weights),
                lambda d: op.combine_backward(x, of_other.rows, d, weights),
            ):
                with pytest.raises(error, match=told):
                    call(wrong)
        with pytest.raises(TypeError, match="d is a NoneType"):
            op.matmul(of_other.rows, square, None)
        op.combine(d.rows, d, torch.ones(4, 1))


@on_ranks(2, timeout_s=60)
@pytest.mark.parametrize(
    "kind", ["dispatch", "dispatch_matmul", "combine", "matmul_combine", "combine_backward"]
)
def test_a_wrong_argument_of_one_rank_fails_the_call_on_all_and_the_next_is_right(rank, kind):
    torch.manual_seed(rank)
    ids, weights = routing("any", TOKENS, 6, 2), torch.rand(TOKENS, 2)
    with opened() as op:
        round_trip(op)
        x = torch.randn(TOKENS, HIDDEN)
        d = op.dispatch(x, ids)
        square = own_part(op, matrices(6, HIDDEN, HIDDEN))
        given = {
            "dispatch": (x, ids),
            "dispatch_matmul": (x, square, ids),
            "combine": (d.rows, d, weights),
            "matmul_combine": (d.rows, square, d, weights),
            "combine_backward": (x, d.rows, d, weights),
        }
        shape, unknown = "has shape|have shape", "unexpected keyword argument"
        told = {ValueError: shape, TypeError: unknown, RuntimeError: f"{kind} has no backward"}
        for kind_of_error in [*told][: 2 if kind == "combine_backward" else 3]:
            (first, *others), more = given[kind], {}
            if rank == 0:
                told[kind_of_error] = rf"rank 1 refused its arguments of call {op._calls + 1}"
            elif kind_of_error is ValueError:
                first = first[:, :5]
            elif kind_of_error is TypeError:
                more["unknown"] = 1
            else:
                first = first.clone().requires_grad_()
            with pytest.raises(ValueError if rank == 0 else kind_of_error, match=told[kind_of_error]):
                getattr(op, kind)(first, *others, **more)
            round_trip(op)


@on_ranks(2, timeout_s=60)
def test_a_failure_behind_the_arguments_breaks_the_operation_on_all_ranks_by_its_cause(rank):
    op = opened()
    x, ids = torch.randn(TOKENS, HIDDEN), routing("any", TOKENS, 6, 2)
    op.dispatch(x, ids)
    if rank == 1:

        def fails(*given):
            raise torch.OutOfMemoryError("no memory is left")

        op._launches.new_dispatch = fails
    told = "no memory is left" if rank == 1 else "call 2 failed on rank 1: .*no memory is left"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=told):
            op.dispatch(x, ids)
    synchronize()
    op.abandon()


class HeldUp:
    """A kernel whose next launch comes behind `until()`."""

    def __init__(self, kernel, until):
        self.kernel, self.until = kernel, until

    def __getitem__(self, grid):
        until, self.until = self.until, bool
        until()
        return self.kernel[grid]


@on_ranks(2, timeout_s=60)
def test_a_call_that_a_peer_has_made_stays_right_when_that_peer_leaves_amid_it(rank, monkeypatch):
    op = opened(one_launch=rank == 1)
    x, ids = torch.randn(TOKENS, HIDDEN), routing("any", TOKENS, 6, 2)
    if rank == 0:  # between its counting and its placing
        monkeypatch.setattr(ep_launches._PLACE, "_kernel", HeldUp(ep_launches.place_choices, synchronize))
    d = op.dispatch(x, ids)
    if rank == 1:
        op._leave_peers()
        synchronize()
    assert is_dispatched(op, x, ids, d)
    op.abandon()


@on_ranks(2, timeout_s=60)
def test_a_peer_that_comes_when_it_is_given_up_stays_given_up_in_that_call(rank, monkeypatch):
    op = opened(one_launch=rank == 1)
    if rank == 0:
        op._patience_ticks = as_patience(0.3)
    x, ids = torch.randn(TOKENS, HIDDEN), torch.zeros(TOKENS, 2, dtype=torch.int64)  # all to rank 0
    if rank == 0:
        monkeypatch.setattr(ep_launches._PLACE, "_kernel", HeldUp(ep_launches.place_choices, meet_twice))
        with pytest.raises(TimeoutError, match="rank 1 did not dispatch its tokens in time"):
            op.dispatch(x, ids)
    else:
        synchronize()
        op.dispatch(x, ids)
        synchronize()
    synchronize()
    op.abandon()


def meet_twice() -> None:
    synchronize()
    synchronize()


@on_ranks(1)
def test_rows_whose_sources_never_came_are_not_followed(rank):
    """A peer that has given this rank up may write choices while they are sorted."""
    with opened() as op:
        x, ids = torch.randn(TOKENS // 2, HIDDEN), routing("any", TOKENS // 2, 6, 2)
        d = op.dispatch(x, ids)
        outside = [-1, -(2**31), 2**31 - 1, TOKENS * 4]
        d.sources[::2] = torch.tensor([*outside, TOKENS * 2, TOKENS * 2 - 1, -2, 1]).repeat(2)
        launches, patience_ticks = op._launches, as_patience(1.0)
        launches.gather(x, d)
        launches.combine(d.rows, d, torch.ones(len(x), 2), x, patience_ticks, returns=True, sums=True)
        launches.grade(x, d.rows, d, torch.empty_like(d.rows), patience_ticks)
        weight = torch.randn(6, HIDDEN, HIDDEN)
        launches.multiply(None, weight, d, torch.empty_like(d.rows))
        launches.multiply(d.rows, weight, d, None)


@on_ranks(2, timeout_s=60)
@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize("kind", ["dispatch", "combine"])
def test_a_rank_that_does_not_come_is_named(rank, kind, one_launch):
    op = opened(one_launch=one_launch)
    x, ids, weights = torch.randn(4, HIDDEN), torch.tensor([[0, 5]] * 4), torch.ones(4, 2)
    if kind == "combine":
        d = op.dispatch(x, ids)
    op._patience_ticks = as_patience(0.3)
    if rank == 1 and kind == "dispatch":
        with pytest.raises(TimeoutError, match="rank 0 did not dispatch its tokens in time"):
            op.dispatch(x, ids)
    elif rank == 1:
        sums = torch.zeros(4, HIDDEN)
        with pytest.raises(TimeoutError, match="rank 0 did not return its rows in time"):
            op.combine(d.rows, d, weights, sums)
        assert sums.isnan().all()  # of which rank 0 has one row each
    synchronize()
    op.abandon()


@on_ranks(2, timeout_s=90)
def test_the_way_of_few_tokens_is_tuned_by_each_rank_unless_it_is_fixed(rank):
    for one_launch in (None, rank == 0):
        with opened(one_launch=one_launch) as op:
            step, _ = tuned_in_context(lambda op=op: round_trip(op, 9))
            step()
            found = {each.kernel for each in step.report.contexts if each.kernel.startswith("ep ")}
        ways = {"ep dispatch in one launch", "ep combine in one launch"}
        assert found == (ways if one_launch is None else set())
    with pytest.raises(ValueError, match="one_launch is 'yes'; it is True, False, or None, which tunes it"):
        opened(one_launch="yes")


@pytest.mark.parametrize(("major", "takes"), [(0, False), (8, False), (9, True), (10, True), (12, False)])
def test_torch_multiplies_only_on_gpus_on_which_its_host_waits_for_no_count(major, takes, monkeypatch):
    monkeypatch.setattr(ep_launches, "capability", lambda device: major)
    rows, weight = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((8, 64), (2, 32, 64))
    )
    assert ep_launches._torch_takes(rows, weight) == takes
