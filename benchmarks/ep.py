"""Experts on different ranks: dispatch, combine, and a layer between them, against torch's collectives.

    ./launch.sh -m benchmarks.ep [--tokens T] [--hidden H] [--intermediate F] [--experts E] [--topk J]
                                 [--shapes public|decode] [--zipf S] [--one-launch] [--json FILE]

T tokens on each rank. The layer is router's choices -> dispatch -> grouped_mm, SwiGLU, grouped_mm -> combine.
Kernels of ours are tuned first, inside `contextual_autotune(is_dist=True)`.

    ours                     the layer of `ExpertParallel`; and as a CUDA graph
    all-to-all               sort, counts and rows by `all_to_all_single`, sort, the same products, and back:
                             its host waits for the counts
    all-gather               all tokens to all ranks, own choices picked, the same products, partial sums,
                             reduce-scatter; and as a CUDA graph
    ours, products           the layer by `dispatch_matmul` and `matmul_combine`; and as a CUDA graph
    torch, torchtitan        the layer by their exchanges, where they are: `operations/expert_exchanges.py`
    ... dispatch, combine    these parts alone
    ... step                 forward and backward pass of the layer

Protocol and traps: `common/arms.py`. Without GPUs a tiny shape runs on CPU ranks in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common.arms import Arm, Plan
from benchmarks.common.cases import Benchmark, Ratio
from benchmarks.common.ranks import ON_GPU, Ranks
from benchmarks.common.tuned import Tuned, in_both_ways
from benchmarks.operations.expert_exchanges import TORCH, TORCHTITAN, layer_by_nvshmem, layer_by_torchtitan
from benchmarks.operations.harness import DTYPES, LIMIT_S, OURS, PATIENCE_S, measured_case, parse
from benchmarks.operations.peers import all_gather, reduce_scatter
from benchmarks.operations.products import relative_error
from dist_autotune.kernels import ep
from dist_autotune.kernels.ep import Dispatched, ExpertParallel

ALL_TO_ALL, ALL_GATHER = "all-to-all", "all-gather"
PARTS, STEP = ("dispatch", "dispatch and combine"), "step"
PRODUCTS = f"{OURS}, products"
ROUNDINGS, OF_FLOAT32 = 2, 1e-4  # of rows and sums; the error of float32 products, relative


class Shape(NamedTuple):
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int

    def __str__(self) -> str:
        return " x ".join(map(str, self[:3])) + f", {self.experts} experts, top {self.topk}"


PUBLIC = (
    Shape(4096, 7168, 2048, 256, 8),
    Shape(8192, 2048, 768, 128, 8),
    Shape(4096, 4096, 2048, 256, 6),
    Shape(8192, 4096, 14336, 8, 2),
)
DECODE = tuple(Shape(tokens, 7168, 2048, 256, 8) for tokens in (1, 8, 64, 128))
DEFAULT = PUBLIC[1] if ON_GPU else Shape(8, 32, 16, 4, 2)
SIZES = {
    "tokens": "tokens of each rank",
    "hidden": "elements of a token",
    "intermediate": "of an expert",
    "experts": "of all ranks",
    "topk": "experts of a token",
}


class Swapped(torch.autograd.Function):
    """Rows by `all_to_all_single`; their gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        ctx.counts = sent, received
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows, received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Swapped.apply(grad.contiguous(), *ctx.counts), None, None


class Problem:
    """The tensors of one shape on this rank, the arms of torch, and what the right results are."""

    def __init__(self, shape: Shape, dtype: torch.dtype, ranks: Ranks, zipf: float) -> None:
        self.shape, self.ranks, self.zipf, self.world = shape, ranks, zipf, ranks.world_size
        of_rows = {"dtype": dtype, "device": ranks.device}
        self.own, own = shape.experts // self.world, shape.experts // self.world
        self.first = ranks.rank * own
        self.x = torch.empty(shape.tokens, shape.hidden, **of_rows)
        self.ids = torch.empty(shape.tokens, shape.topk, dtype=torch.int64, device=ranks.device)
        self.weights = torch.empty(shape.tokens, shape.topk, device=ranks.device)
        self.up = [self._weight(own, shape.hidden, shape.intermediate, of_rows) for _ in range(2)]
        self.down = self._weight(own, shape.intermediate, shape.hidden, of_rows)
        self.all_x = torch.empty(self.world * shape.tokens, shape.hidden, **of_rows)
        self.all_ids, self.all_weights = (
            torch.empty(len(self.all_x), shape.topk, dtype=each.dtype, device=ranks.device)
            for each in (self.ids, self.weights)
        )

    @staticmethod
    def _weight(experts: int, inner: int, outer: int, of_rows: dict[str, Any]) -> Tensor:
        """Return random factors [experts, inner, outer], columns contiguous."""
        return torch.randn(experts, outer, inner, **of_rows).mul_(inner**-0.5).transpose(1, 2)

    def refresh(self) -> None:
        self.x.normal_()
        popularity = -self.zipf * torch.arange(1, self.shape.experts + 1, device=self.x.device).log()
        noise = -torch.empty(self.shape.tokens, self.shape.experts, device=self.x.device).exponential_().log()
        self.ids.copy_((noise + popularity).topk(self.shape.topk).indices)
        self.weights.uniform_()
        for every, each in ((self.all_x, self.x), (self.all_ids, self.ids), (self.all_weights, self.weights)):
            all_gather(every, each)

    def experts(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return what this rank's experts make of rows that lie by expert."""
        gate, up = (F.grouped_mm(rows, weight, offs=ends) for weight in self.up)
        return F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)

    def parameters(self) -> list[Tensor]:
        return [*self.up, self.down]

    def step(self, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the gradient of the tokens, behind those of all parameters."""
        x = self.x.detach().requires_grad_()
        for each in self.parameters():
            each.requires_grad_()
        of_x, *_ = torch.autograd.grad(layer(x), [x, *self.parameters()], self.weighed(x))
        for each in self.parameters():
            each.requires_grad_(False)
        return of_x

    @staticmethod
    def weighed(x: Tensor) -> Tensor:
        """Return the gradient of the sums: that of a mean of squares of tokens."""
        return x.detach()

    # ---- right results

    def rows(self) -> Tensor:
        """Return the rows of this rank's experts, by expert, source rank and token."""
        return self.all_x[self._sorted_choices() // self.shape.topk]

    def _sorted_choices(self) -> Tensor:
        flat = self.all_ids.flatten()
        mine = ((flat >= self.first) & (flat < self.first + self.own)).nonzero()[:, 0]
        return mine[flat[mine].argsort(stable=True)]

    def sums(self, results: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the right sums of this rank's tokens, by way of all ranks' partial sums in float32."""
        chosen = self._sorted_choices()
        flat = self.all_ids.flatten()[chosen] - self.first
        ends = torch.searchsorted(flat, torch.arange(1, self.own + 1, device=flat.device)).to(torch.int32)
        total = torch.zeros(self.all_x.shape, device=self.x.device)
        weighted = results(self.rows(), ends).float() * self.all_weights.flatten()[chosen][:, None]
        total.index_add_(0, chosen // self.shape.topk, weighted)
        dist.all_reduce(total)
        return total.chunk(self.world)[self.ranks.rank]

    def gradients(self) -> Tensor:
        """Return the right gradients of this rank's tokens."""
        chosen = self._sorted_choices()
        flat = self.all_ids.flatten()[chosen] - self.first
        ends = torch.searchsorted(flat, torch.arange(1, self.own + 1, device=flat.device)).to(torch.int32)
        rows = self.rows().requires_grad_()
        of_sums = self.weighed(self.all_x)[chosen // self.shape.topk]
        of_results = self.all_weights.flatten()[chosen][:, None] * of_sums.float()
        (of_rows,) = torch.autograd.grad(self.experts(rows, ends), rows, of_results.to(rows.dtype))
        total = torch.zeros(self.all_x.shape, device=self.x.device)
        total.index_add_(0, chosen // self.shape.topk, of_rows.float())
        dist.all_reduce(total)
        return total.chunk(self.world)[self.ranks.rank]

    # ---- all-to-all

    def dispatch_all_to_all(self, x: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return rows by expert, where each expert's end, and what brings results back and adds them."""
        topk, world, own = self.shape.topk, self.world, self.own
        order = self.ids.flatten().argsort(stable=True)
        counts = torch.zeros(self.shape.experts, dtype=torch.int64, device=self.x.device)
        counts.scatter_add_(0, self.ids.flatten(), torch.ones_like(order))
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sent_counts = counts.view(world, own).sum(1).tolist()
        of_source = received.view(world, own)
        received_counts = of_source.sum(1).tolist()
        rows = Swapped.apply(x[order // topk], received_counts, sent_counts)
        expert = torch.arange(own, device=self.x.device).repeat(world).repeat_interleave(of_source.flatten())
        by_expert = expert.argsort(stable=True)
        ends = of_source.sum(0).cumsum(0).to(torch.int32)

        def back(results: Tensor) -> Tensor:
            unsorted = torch.empty_like(results)
            unsorted[by_expert] = results
            returned = Swapped.apply(unsorted, sent_counts, received_counts)
            in_order = torch.empty_like(returned)
            in_order[order] = returned
            choices = in_order.view(*self.ids.shape, -1)
            return torch.einsum("tkh,tk->th", choices, self.weights.to(choices.dtype))

        return rows[by_expert], ends, back

    # ---- all-gather

    def layer_by_all_gather(self) -> Tensor:
        topk, shape = self.shape.topk, self.all_x.shape
        for every, each in ((self.all_x, self.x), (self.all_ids, self.ids), (self.all_weights, self.weights)):
            all_gather(every, each)
        local = self.all_ids.flatten() - self.first
        order = torch.where((local >= 0) & (local < self.own), local, self.own).argsort(stable=True)
        experts = torch.arange(1, self.own + 1, device=local.device)
        chosen = torch.where((local >= 0) & (local < self.own), local, self.own)[order]
        ends = torch.searchsorted(chosen, experts).to(torch.int32)
        results = self.experts(self.all_x[order // topk], ends)
        weights = torch.where(chosen < self.own, self.all_weights.flatten()[order], 0.0)
        results = torch.where(chosen[:, None] < self.own, results * weights[:, None].to(results.dtype), 0.0)
        partial = torch.empty_like(results)
        partial[order] = results
        sums = torch.empty(self.x.shape, dtype=self.x.dtype, device=self.x.device)
        reduce_scatter(sums, partial.view(shape[0], topk, shape[1]).sum(1))
        return sums


def run_shape(shape: Shape, options: argparse.Namespace, plan: Plan, ranks: Ranks) -> dict[str, Any]:
    """Return the record of one shape."""
    dtype = DTYPES[options.dtype]
    problem = Problem(shape, dtype, ranks, options.zipf)
    problem.refresh()
    op = ExpertParallel(
        *(shape.tokens, shape.hidden, shape.experts, shape.topk, dtype),
        backend=options.backend,
        one_launch=None if options.one_launch else False,
        timeout_s=PATIENCE_S,
    )
    x, ids, weights = problem.x, problem.ids, problem.weights

    def layer() -> Tensor:
        d = op.dispatch(x, ids)
        return op.combine(problem.experts(d.rows, d.offsets[1:]), d, weights)

    ours = Tuned(layer, check=op.check, name=f"ep {shape}", retune=options.retune)
    ours.eager()
    kept: list[Dispatched] = [op.dispatch(x, ids)]

    def dispatch() -> Tensor:
        kept[0] = d = op.dispatch(x, ids)
        return d.rows

    def combine() -> Tensor:  # of rows that the last dispatch has brought, which may be of earlier inputs
        return op.combine(kept[0].rows, kept[0], weights)

    def combine_of_now() -> Tensor:
        dispatch()
        return combine()

    def layer_with_gradients(x: Tensor) -> Tensor:
        d = ep.dispatch(op, x, ids)
        return ep.combine(op, problem.experts(d.rows, d.offsets[1:]), d, weights)

    ours_step = Tuned(
        lambda: problem.step(layer_with_gradients),
        check=op.check,
        name=f"ep step {shape}",
        retune=options.retune,
    )
    gate_up = torch.cat(problem.up, dim=2).mT.contiguous()

    def layer_of_products() -> Tensor:
        d = op.dispatch_matmul(x, gate_up, ids)
        gate, up = d.rows.chunk(2, 1)
        return op.matmul_combine(F.silu(gate) * up, problem.down.mT, d, weights)

    products = Tuned(layer_of_products, check=op.check, name=f"ep products {shape}", retune=options.retune)

    def layer_by_all_to_all(x: Tensor = x) -> Tensor:
        rows, ends, back = problem.dispatch_all_to_all(x)
        return back(problem.experts(rows, ends))

    def round_trip_by_all_to_all() -> Tensor:
        rows, _, back = problem.dispatch_all_to_all(x)
        return back(rows)

    def of_others(name: str, prepare: Callable[..., Callable[[], Tensor]]) -> Arm:
        made = functools.partial(prepare, x, ids, weights, shape.experts, problem.experts)
        return Arm(name=name, prepare=made, **fixed(of_layer, (gigaflop, "TFLOP/s")))

    def of_rows(result: Tensor) -> float:
        wanted = problem.rows()
        return relative_error(result[: len(wanted)], wanted)

    def of_layer(result: Tensor) -> float:
        return relative_error(result, problem.sums(problem.experts))

    def of_step(result: Tensor) -> float:
        return relative_error(result, problem.gradients())

    def of_round_trip(result: Tensor) -> float:
        return relative_error(result, problem.sums(lambda rows, ends: rows))

    moved = 1e-6 * shape.tokens * shape.topk * shape.hidden * dtype.itemsize * (1 - 1 / ranks.world_size)
    gigaflop = 6e-9 * shape.tokens * shape.topk * shape.hidden * shape.intermediate

    def arms_of(
        error: Callable[[Tensor], float], work: tuple[float, str], calls: dict[str, Callable[[], Tensor]]
    ) -> list[Arm]:
        """Return the arms of calls; those whose host does not wait, as graphs, too."""
        ways = []
        for name, call in calls.items():
            ways += (
                [(name, lambda call=call: call)]
                if ALL_TO_ALL in name
                else in_both_ways(name, ours.then(call))
            )
        return [Arm(name=name, prepare=prepare, **fixed(error, work)) for name, prepare in ways]

    def fixed(error: Callable[[Tensor], float], work: tuple[float, str]) -> dict[str, Any]:
        limit = max(ROUNDINGS * torch.finfo(dtype).eps, OF_FLOAT32)
        return {"error": error, "limit": limit, "work": work[0], "rate": work[1]}

    layers = {OURS: ours.call, ALL_TO_ALL: layer_by_all_to_all, ALL_GATHER: problem.layer_by_all_gather}
    dispatches = {OURS: dispatch, ALL_TO_ALL: lambda: problem.dispatch_all_to_all(x)[0]}
    round_trips = {OURS: combine_of_now, ALL_TO_ALL: round_trip_by_all_to_all}
    arms = [
        *arms_of(of_layer, (gigaflop, "TFLOP/s"), layers),
        *(
            Arm(name=name, prepare=prepare, **fixed(of_layer, (gigaflop, "TFLOP/s")))
            for name, prepare in in_both_ways(PRODUCTS, products.then(products.call))
        ),
        of_others(TORCH, layer_by_nvshmem),
        of_others(TORCHTITAN, layer_by_torchtitan),
        *(
            Arm(name=f"{name}, {STEP}", prepare=prepare, **fixed(of_step, (3 * gigaflop, "TFLOP/s")))
            for name, prepare in {
                OURS: ours_step.eager,
                ALL_TO_ALL: lambda: lambda: problem.step(layer_by_all_to_all),
            }.items()
        ),
        *arms_of(
            of_rows, (moved, "GB/s"), {f"{name}, {PARTS[0]}": call for name, call in dispatches.items()}
        ),
        *arms_of(
            of_round_trip,
            (2 * moved, "GB/s"),
            {f"{name}, {PARTS[1]}": call for name, call in round_trips.items()},
        ),
    ]
    tuned = {"tuned": ours, "tuned_products": products, "tuned_step": ours_step}
    return measured_case(shape, plan, ranks, arms, refresh=problem.refresh, tuned=tuned, operations=[op])


def main() -> None:
    def add_more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--one-launch", action="store_true", help="tune whether few take one launch")
        parser.add_argument("--zipf", type=float, default=0.0, help="exponent of the experts' popularity")

    lists = {"public": PUBLIC, "decode": DECODE}
    shared = ("experts",)
    options = parse(__doc__, SIZES, lists=lists, default=DEFAULT, shared=shared, add_more=add_more)
    Benchmark(
        op="ep",
        title="Experts on different ranks",
        case_title="tokens of a rank x hidden x intermediate",
        ratios=[
            Ratio(of=ALL_TO_ALL, to=OURS),
            Ratio(of=ALL_GATHER, to=OURS),
            Ratio(of=f"{ALL_GATHER}, graph", to=f"{OURS}, graph"),
            *(Ratio(of=name, to=OURS) for name in (PRODUCTS, TORCH, TORCHTITAN)),
            *(Ratio(of=f"{ALL_TO_ALL}, {part}", to=f"{OURS}, {part}") for part in (*PARTS, STEP)),
        ],
        limit_s=LIMIT_S,
        needed=(OURS,),
    ).start(options, options.shapes, run_shape)


if __name__ == "__main__":
    main()
