"""What the tests of `AllGatherMoE`, `MoEReduceScatter` and layers of both do on a rank."""

import abc
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from operation_runs import delay_tasks, device
from operations import HALF, Runs

from dist_autotune.kernels.ag_moe import AllGatherMoE
from dist_autotune.kernels.exchange.flags import ARRIVED
from dist_autotune.kernels.moe import ag_moe_kernel, moe_rs_kernel
from dist_autotune.kernels.moe_rs import MoEReduceScatter

GIVEN_OTHERS = "rank 0 was given other tokens= than the ranks have, or one of them called route(). Close it"


class ExpertRuns(Runs):
    """An operation whose weight is one of experts: [experts, N, K]."""

    @abc.abstractmethod
    def fresh_call(self, op: Any, tokens: Sequence[int], *, told=True, topk=2, ids=None) -> None:
        """Call with fresh inputs and three experts; `ids` are this rank's choices."""

    def call(self, op, operands, out, rows, *, told=True):
        assert op(*operands, out, tokens=list(rows) if told else None) is out
        return out


def delay_pushes(op: Any, delay_s: float) -> None:
    """Let this rank's side stream, a thread, sleep before it pushes rows to rank 0 and before it says so."""
    arrived = op._flags.peers[0][ARRIVED.value, op.rank].data_ptr()
    delay_tasks(op, "copy", delay_s, lambda to, _: to.dim() == 2 and to.dtype.is_floating_point)
    delay_tasks(op, "write_signal", delay_s, lambda to, _: to.data_ptr() == arrived)


# ---- inputs and right results


def random_choices(tokens: int, experts: int, topk: int, kind: str = "any") -> torch.Tensor:
    """Return fresh ids [tokens, topk]: of "any" or none, all of "one", a token's the "same", "none"."""
    if kind == "one":
        return torch.full((tokens, topk), experts - 1, device=device())
    if kind == "same":
        return torch.randint(0, experts, (tokens, 1), device=device()).expand(-1, topk)
    if kind == "none":
        return torch.full((tokens, topk), -1, device=device())
    return torch.randint(-1, experts, (tokens, topk), device=device())


def randoms(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, device=device()).to(dtype)


def of_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank of the group, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    value = value.cpu() if isinstance(value, torch.Tensor) else value
    dist.all_gather_object(values, value, group=group)
    return [each.to(device()) if isinstance(each, torch.Tensor) else each for each in values]


def products(rows: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return in float32, for each choice, its row times its expert's weight.T; zeros where there is none."""
    found = torch.zeros(len(rows), weight.shape[1], device=rows.device)
    for expert in range(weight.shape[0]):
        chosen = ids == expert
        found[chosen] = rows[chosen].float() @ weight[expert].float().T
    return found


def relative_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the error; inf for NaN, which `max` would pass over, and for zeros that are not exactly that."""
    if not wanted.any():
        return 0.0 if torch.equal(out.float(), wanted) else math.inf
    error = float((out.float() - wanted).norm() / wanted.norm())
    return math.inf if math.isnan(error) else error


def explained_error(dtype: torch.dtype, roundings: int, inner: int) -> float:
    """Return what the arithmetic explains: a rounding to the type costs at most its eps (the interpreter
    truncates bfloat16), products of halves are exact in float32, and adding `inner` of them there costs about
    the root of that many float32 eps."""
    return roundings * torch.finfo(dtype).eps + inner**0.5 * torch.finfo(torch.float32).eps


# ---- AllGatherMoE


class Gathering(ExpertRuns):
    """AllGatherMoE is opened with K and called with N."""

    name, kernel, candidates = "AllGatherMoE", ag_moe_kernel.all_gather_moe, ag_moe_kernel.CANDIDATES
    can_be_in_place = True

    def sizes(self, k, n):
        return k, n

    def open(self, tokens_per_rank, size, dtype=HALF, group=None, **named):
        return AllGatherMoE(tokens_per_rank, size, dtype, group, **named)

    def buffers(self, op):
        return (op._gather.local,)

    def operands(self, op, tokens, size, experts=3, topk=2, kind="any", group=None):
        count = tokens[op.rank]
        x = randoms(count, op._k, dtype=op._dtype)
        weight = randoms(experts, size, op._k, dtype=op._dtype)
        return x, weight, random_choices(count, experts, topk, kind)

    def new_out(self, op, tokens, operands):
        _, weight, ids = operands
        shape = (sum(tokens) * ids.shape[1], weight.shape[1])
        return torch.full(shape, float("nan"), dtype=op._dtype, device=device())

    def given(self, op, operands, *, told, in_place):
        x, weight, ids = operands
        if in_place:
            x = op.shard[: len(x)].copy_(x)
        return x, weight, ids.to(torch.int32) if told else ids

    def error_ratio(self, out, x, weight, ids, group=None):
        rows = torch.cat(of_all_ranks(x, group)).repeat_interleave(ids.shape[1], dim=0)
        wanted = products(rows, weight, torch.cat(of_all_ranks(ids, group)).reshape(-1))
        assert out.shape == wanted.shape
        return relative_error(out, wanted) / explained_error(out.dtype, 1, x.shape[1])

    def fresh_call(self, op, tokens, *, told=True, topk=2, ids=None):
        ids = random_choices(tokens[op.rank], 3, topk) if ids is None else ids.to(device())
        given = list(tokens) if told else None
        op(randoms(len(ids), op._k), randoms(3, 16, op._k), ids, tokens=given)


GATHERING = Gathering()


# ---- MoEReduceScatter, and layers of both


class Scattering(ExpertRuns):
    """MoEReduceScatter is opened with N and called with this rank's part of K."""

    name, kernel, candidates = "MoEReduceScatter", moe_rs_kernel.moe_reduce_scatter, moe_rs_kernel.CANDIDATES

    def __init__(self, **options):
        self.options = options

    def begin(self, rank, candidate=None):
        """Do that; and memory that torch hands out is NaN from now on, so products that are read before they
        are stored show. `torch.set_deterministic_debug_mode("default")` ends it."""
        torch.set_deterministic_debug_mode("warn")
        super().begin(rank, candidate)

    def sizes(self, k, n):
        return n, k

    def open(self, tokens_per_rank, size, dtype=HALF, group=None, **named):
        return MoEReduceScatter(tokens_per_rank, size, dtype, group, **self.options, **named)

    def buffers(self, op):
        return op._staged.local, op._partial, op._announcer.weights.local

    def operands(self, op, tokens, size, experts=3, topk=2, kind="any", group=None):
        """Return y, weight, ids and weights; a dropped choice has NaN for its row and its weight."""
        ids = random_choices(tokens[op.rank], experts, topk, kind)
        weights = torch.randn(ids.shape, device=device())
        weights[ids < 0] = float("nan")
        y = randoms(sum(tokens) * topk, size, dtype=op._dtype)
        y[torch.cat(of_all_ranks(ids, group)).reshape(-1) < 0] = float("nan")
        return y, randoms(experts, op._n, size, dtype=op._dtype), ids, weights

    def new_out(self, op, tokens, operands):
        return torch.full((tokens[op.rank], op._n), float("nan"), dtype=op._dtype, device=device())

    def error_ratio(self, out, y, weight, ids, weights, group=None):
        """Three roundings: of each product, of each rank's part of a sum, of the sum."""
        counts, topk = of_all_ranks(len(ids), group), ids.shape[1]
        all_ids = torch.cat(of_all_ranks(ids, group))
        scale = torch.where(all_ids < 0, 0.0, torch.cat(of_all_ranks(weights, group)))
        parts = products(y, weight, all_ids.reshape(-1)) * scale.reshape(-1, 1)
        total = parts.reshape(-1, topk, weight.shape[1]).sum(dim=1)
        if dist.is_initialized():
            dist.all_reduce(total, group=group)
        begin = sum(counts[: dist.get_rank(group)]) if dist.is_initialized() else 0
        inner = topk * sum(of_all_ranks(y.shape[1], group))
        wanted = total[begin : begin + len(ids)]
        assert out.shape == wanted.shape
        return relative_error(out, wanted) / explained_error(out.dtype, 3, inner)

    def fresh_call(self, op, tokens, *, told=True, topk=2, ids=None, rows=None):
        ids = random_choices(tokens[op.rank], 3, topk) if ids is None else ids.to(device())
        y = randoms(sum(tokens) * topk if rows is None else rows, 16)
        weights = torch.ones(ids.shape, device=device())
        op(y, randoms(3, op._n, 16), ids, weights, tokens=list(tokens) if told else None)


SCATTERING = Scattering()
STORING_CHOSEN = Scattering(by_stores=True)


def same_call_twice(rank):
    SCATTERING.begin(rank)
    with SCATTERING.open(40, 24, HALF) as op:
        given = SCATTERING.operands(op, [40, 31], 16, 3, 3)
        first = op(*given)
        SCATTERING.call_and_compare(op, [5, 40], 16, 3, 2)
        return torch.equal(first, op(*given))


def layer_operands(rank, tokens, kind, dtype):
    """Return tokens, choices, their weights, NaN where one is dropped, and two weights of four experts."""
    ids = random_choices(tokens[rank], 4, 2, kind)
    weights = torch.rand(ids.shape, device=device()).where(ids >= 0, float("nan"))
    first, second = randoms(4, 24, 16, dtype=dtype), randoms(4, 16, 24, dtype=dtype)
    return randoms(tokens[rank], 16, dtype=dtype), ids, weights, first, second


def layer_errors(hidden, routing, out, x, ids, weights, first, second):
    """Return the errors of what a layer gathered, by expert, and of what it scattered."""
    by_choice = torch.empty_like(hidden)
    by_choice[routing.rows.long()] = hidden
    return [
        GATHERING.error_ratio(by_choice, x, first, ids),
        SCATTERING.error_ratio(out, by_choice, second, ids, weights),
    ]


def routed_layers(rank, tokens, kind, dtype=HALF, scattering=SCATTERING, **options):
    """Gather, multiply, multiply and scatter with one sorting, then as backward would with what it kept."""
    GATHERING.begin(rank)
    scattering.begin(rank)
    errors, most = [], max(*tokens, 1)
    with (
        GATHERING.open(most, 16, dtype, **options) as up,
        scattering.open(most + 3, 16, dtype, **options) as down,
        GATHERING.open(most + 5, 16, dtype, **options) as another,  # whose chunks lie further apart
    ):
        for told in (None, tokens):
            scattering.poison(down)
            GATHERING.poison(up)
            x, ids, weights, first, second = layer_operands(rank, tokens, kind, dtype)
            hidden, routing = up.route(x, first, ids, weights, tokens=told)
            out = down.by_expert(hidden, second, routing)
            errors += layer_errors(hidden, routing, out, x, ids, weights, first, second)
            again = another.by_expert(x, first, routing)
            ones = torch.ones(len(hidden), device=device())
            out = down.by_expert(again, second, routing, ones)
            errors += layer_errors(again, routing, out, x, ids, torch.ones_like(weights), first, second)
    return errors


def sorted_rows(rank, shape, candidates):
    """Scatter rows that are sorted by expert, where TMA can address them and where it cannot.

    Return the errors, and for each call whether TMA was said to be able to. Rows of dropped choices are NaN.
    """
    tokens, k, n, experts, topk = shape
    errors, legal, launch_of = [], [], MoEReduceScatter._launch_of
    MoEReduceScatter._launch_of = lambda *args, **given: (
        legal.append(given["A_TMA_LEGAL"]) or launch_of(*args, **given)
    )
    GATHERING.begin(rank)
    with GATHERING.open(max(tokens), 8, HALF) as up, SCATTERING.open(max(tokens), n, HALF) as down:
        for candidate in candidates:
            SCATTERING.begin(rank, candidate)
            SCATTERING.poison(down)
            ids = random_choices(tokens[rank], experts, topk)
            weights = torch.rand(ids.shape, device=device())
            x, first = randoms(len(ids), 8), randoms(experts, 8, 8)
            _, routing = up.route(x, first, ids, weights, tokens=tokens)
            room = torch.full((len(routing.rows), k + 1), float("nan"), dtype=HALF, device=device())
            at_odd_addresses, kept = room[:, 1:], int(routing.ends[-1])
            at_odd_addresses[:kept] = randoms(kept, k)
            by_choice = torch.empty_like(at_odd_addresses)
            by_choice[routing.rows.long()] = at_odd_addresses
            second = randoms(experts, n, k)
            for y in (at_odd_addresses.contiguous(), at_odd_addresses):
                out = down.by_expert(y, second, routing)
                errors.append(SCATTERING.error_ratio(out, by_choice, second, ids, weights))
    return errors, legal


def captured_layer(rank, tokens, **options):
    """Replay a layer with one sorting, with inputs that change, among eager calls."""
    GATHERING.begin(rank)
    SCATTERING.begin(rank)
    errors, most = [], max(tokens)
    with GATHERING.open(most, 16, HALF, **options) as up, SCATTERING.open(most, 16, HALF, **options) as down:
        x, ids, weights, first, second = given = layer_operands(rank, tokens, "any", HALF)

        def layer():
            hidden, routing = up.route(x, first, ids, weights, tokens=tokens)
            return hidden, routing, down.by_expert(hidden, second, routing)

        layer()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = layer()
        for call in range(4):
            x.normal_()
            ids.random_(-1, 4)
            weights.uniform_()
            result = layer() if call == 1 else captured
            if call != 1:
                graph.replay()
            errors += layer_errors(*result, *given)
    return errors
