"""Each token's products with its experts, weighted and added, then summed over ranks on the token's own rank.

The memory of a rank, W ranks; `m` is tokens_per_rank:

    ids, weights  int64 and float32, symmetric: each rank's choices, rank p's from p * m * topk on
    products      [T * topk, N] of the caller's device, for the length of a call
    partial       [W - 1, m, N], slot s - 1: the sums for rank r + s, on their way out
    staged        [W - 1, m, N], symmetric, slot s - 1: the sums of rank r + s for this rank
    flags         int32 [7, W], symmetric: see `exchange.flags`

A stage is the tokens of one rank, the own ones last. The grouped GEMM's programs claim products of stage 0,
1, ... and combine a stage's tokens after a round of the next one's tiles; then its sums are pushed. Steps
are enqueued in the order of `GemmReduceScatter`: see [Note: shared hardware queues]. A captured call
launches the kernel once for each stage, with that stage's part of the list. On request the kernel itself
stores sums to the peers' `staged`, in one launch. Timeline, and why every wait ends: docs/protocol.md,
Experts.

Where all ranks agree on it a call is collectives instead, as in `AllGatherMoE`: choices are gathered, the
kernel of a single rank combines the tokens of all, and a reduce-scatter adds the ranks' parts, padded to the
rows of the rank with most tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from dist_autotune import tunable

from ..exchange.call import numbered
from ..exchange.push import SumPusher
from ..launches.settled import TunedKernel
from ..tensors import Apart, begin_at_16_bytes, check_out, check_sizes, check_tensor, check_ways, pitch_of
from .launch import check_experts, size_class
from .moe_rs_kernel import moe_reduce_scatter
from .operation import ExpertOperands, ExpertOperation, ExpertPlan, TileOrders
from .plan import Routing, Sorting

SUMS = ("pushed", "stored")  # by copy engines, or by the kernel

_KERNEL = TunedKernel(moe_reduce_scatter, operation="MoEReduceScatter")


class MoEReduceScatter(ExpertOperation):
    """`op(y [T * topk, K], weight [E, N, K], topk_ids [T_r, topk], topk_weights [T_r, topk])`: sums [T_r, N].

    The sum, over all ranks and the topk choices of each of this rank's tokens, of the choice's weight times
    its row of y times `weight[id].T`. T is the tokens of all ranks, rank by rank, and y has rows for all of
    them, as `AllGatherMoE` returns them; ids and weights are those of this rank's own. A rank's T_r is 0 to
    `tokens_per_rank` and may change from call to call. E and topk (up to `max_topk`) are equal on all ranks,
    N is `n`; K is each rank's part of the inner dimension and may differ. An id of -1 drops a choice,
    whatever its row and its weight; any other id that is no expert is an error, raised on all ranks, that
    names the rank.

    The same call gives the same bits each time, with the same config. Tune it inside `contextual_autotune`:
    outside, a shape that has not been tuned takes the first candidate. `tokens=`, CUDA graphs, timeouts and
    `collective` are as in `AllGatherMoE`; a collective adds parts in its own order.
    `by_stores=True` makes the kernel store its sums into the peers' memory, in calls that are no collective:
    one launch of it, also in captures. None tunes that. Ranks may differ in it.
    Kernels of other streams that wait for peers, such as collectives of another dimension of a mesh, may run
    beside a call, if they leave it an SM.

    Each rank holds 2 * (W - 1) * tokens_per_rank * n elements, half of them of symmetric memory, and in a
    call T * topk * n more.
    """

    _tile_orders = TileOrders(1, by_first=True, shared=2)
    _rows_name, _weighted, _way = "y", "call", "moe_rs way"
    _failure_kinds = ExpertOperation._failure_kinds._replace(
        late="rank {peer}, or one that it waits for, did not push its sums for chunk {rank} in time"
    )

    def __init__(
        self,
        tokens_per_rank: int,
        n: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        *,
        timeout_s: float = 300.0,
        max_topk: int = 16,
        collective: bool | None = None,
        by_stores: bool | None = False,
    ) -> None:
        check_sizes(n=n)
        check_ways(by_stores=by_stores)
        self._by_stores = by_stores
        self._n, self._key = n, (n, str(dtype))
        super().__init__(tokens_per_rank, dtype, group, backend, timeout_s, max_topk, collective)

    def _allocate(self) -> None:
        super()._allocate()
        slots = max(1, self.world_size - 1)
        self._staged = self._memory.allocate((slots, self._capacity, self._n), self._dtype)
        self._partial = self._memory.hold(torch.zeros_like(self._staged.local))
        counters = torch.zeros(3 * self.world_size, dtype=torch.int32, device=self.device)
        self._counters = self._memory.hold(counters)
        self._table = self._memory.hold(self._staged.addresses(self._flags))
        self._may_store = self._by_stores is not False and self.world_size > 1
        # The announcer takes the permits.
        self._pusher = SumPusher(self._pushes, self._partial, self._staged, with_permits=False)

    # ---- what the caller may use

    @numbered
    def __call__(
        self,
        y: torch.Tensor,
        weight: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        tokens: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return this rank's sums; `out`, if given, is where they are written.

        A wrong argument raises on all ranks, and the next call may be made; other failures break the
        operation: see `exchange.call`. They are raised at the end of the call on the CPU, and on a GPU by a
        later call, `check` or `close`.
        """
        sums: torch.Tensor = self._call(
            "call", tokens, ExpertOperands(y, weight, topk_ids, topk_weights, out)
        )
        return sums

    @numbered
    def by_expert(
        self,
        y: torch.Tensor,
        weight: torch.Tensor,
        routing: Routing,
        weights: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return this rank's sums of rows of y [T * topk, K] that are sorted as the routing says.

        weights: float32 [T * topk], of all ranks' choices, as sorted; None: those that were routed.
        """
        operands = ExpertOperands(y, weight, out=out, routing=routing, factors=weights)
        sums: torch.Tensor = self._call("by_expert", None, operands)
        return sums

    # ---- one call

    def _differentiable(self, operands: ExpertOperands) -> dict[str, torch.Tensor | None]:
        y, weight, _, topk_weights, out, _, weights = operands
        return {"y": y, "weight": weight, "out": out, "topk_weights": topk_weights, "weights": weights}

    def _check_operands(self, operands: ExpertOperands) -> None:
        y, weight = operands.rows, operands.weight
        check_tensor("y", y, self._dtype, self.device)
        check_experts(weight, y.shape[1], self._dtype, self.device)
        if weight.shape[1] != self._n:
            raise ValueError(f"weight has shape {list(weight.shape)}; [E, n={self._n}, K] is needed")

    def _check_result(self, operands: ExpertOperands) -> None:
        check_out(operands.out, [len(operands.topk_ids), self._n], self._dtype, self.device)

    def _check_rows(self, operands: ExpertOperands, topk: int) -> None:
        y, weight, _, _, out, routing, weights = operands
        rows = sum(self._told) * topk
        if y.shape[0] != rows:
            wanted = f"tokens {list(self._told)} of the ranks with topk={topk} are {rows} rows"
            raise ValueError(f"y has {y.shape[0]} rows; {wanted}")
        if routing is None:
            return
        check_out(out, [self._told[self.rank], self._n], self._dtype, self.device)
        read = {"y": y, "weight": weight, "weights": weights, "routing": routing.words}
        Apart(out, **read).check(out, *read.values())
        if weights is not None and (
            weights.shape != (rows,) or weights.dtype != torch.float32 or not weights.is_contiguous()
        ):
            given = f"weights are {list(weights.shape)} in {weights.dtype}"
            raise ValueError(f"{given}; contiguous [{rows}] in torch.float32 is needed")

    def _result_shape(self, plan: ExpertPlan, operands: ExpertOperands) -> tuple[int, int]:
        return self._told[self.rank], self._n

    def _exchange(
        self, plan: ExpertPlan, operands: ExpertOperands, is_gathered: bool, is_capturing: bool
    ) -> torch.Tensor:
        y, routing, factors = operands.rows, operands.routing, operands.factors
        if routing is not None:
            self._counters.zero_()
        stores = not is_gathered and self._is_storing(plan)
        if routing is None or not stores:
            self._tell(plan, operands, is_gathered=is_gathered, at_once=not is_capturing)
        sorting = self._sort(plan, operands, is_gathered=is_gathered)
        if factors is None:
            factors = self._announcer.weights.local if routing is None else routing.weights
        products = y.new_empty((y.shape[0], self._n))
        read = (y, operands.weight, products, factors.detach(), sorting)
        launch = functools.partial(self._launch, *read, stores)
        if is_gathered:
            self._reduce(launch, operands.out)
        elif stores:
            launch(operands.out)
            self._pushes.finish_stores(has_pushed=routing is None)
        else:
            ways = {"in_steps": self._in_steps(is_capturing=is_capturing), "at_once": not is_capturing}
            self._pusher.run(functools.partial(launch, operands.out), self._told, in_pieces=False, **ways)
            self._pushes.finish()
        return operands.out

    def _is_storing(self, plan: ExpertPlan) -> bool:
        """Return whether this rank's kernel stores the sums of a call to the peers."""
        if self._by_stores is not None or not self._may_store:
            return self._may_store
        of_size = size_class(sum(self._told) * plan.topk)
        return tunable("moe_rs sums", SUMS, key=(of_size, self.world_size, *plan, *self._key)) == SUMS[1]

    def _reduce(self, launch: Callable[..., None], out: torch.Tensor) -> None:
        """Enqueue the kernel of all ranks' tokens, and the collective, padded to equally many rows a rank."""
        tokens, rows = self._told, max(self._told)
        padded = self._pusher.room(self.world_size * rows)
        are_equal = min(tokens) == rows
        sums = padded if are_equal else out.new_empty((sum(tokens), self._n))
        launch(sums)
        if not are_equal:
            parts = zip(padded.split(rows), sums.split(tokens), strict=True)
            for padded_part, part in parts:
                padded_part[: len(part)].copy_(part)
        is_whole = len(out) == rows and out.is_contiguous()
        result = out.detach() if is_whole else out.new_empty((rows, self._n))
        self._collective.reduce_scatter(result, padded)
        if not is_whole:
            out.detach().copy_(result[: len(out)])

    def _take_part(self, rows: int) -> None:
        padded = self._pusher.room(self.world_size * rows).fill_(math.nan)
        self._collective.reduce_scatter(padded.new_empty((rows, self._n)), padded)

    def _launch(
        self,
        y: torch.Tensor,
        weight: torch.Tensor,
        products: torch.Tensor,
        factors: torch.Tensor,
        sorting: Sorting,
        stores: bool,
        out: torch.Tensor,
        step: int | None = None,
    ) -> None:
        """Enqueue the kernel of a call, or of one stage; `step` is 0, 1, ... in the order of launches."""
        world, rank, flags, plan = self.world_size, self.rank, self._flags.local, sorting.plan
        if sorting.is_gathered:
            world, rank, flags = 1, 0, self._gatherer.arrived
        first_part, parts = (0, world) if step is None else (step, 1)
        sums = (products, self._partial, self._staged.local, factors)
        counters = self._counters if sorting.is_shared else plan.counters
        planned = (plan.rows, plan.sources, sorting.offsets, sorting.ends, sorting.tables, counters)
        tensors = (y, weight, out, *sums, *planned, flags, self._failures.words)
        strides = (y.stride(0), weight.stride(0), pitch_of(weight), out.stride(0))
        addressable = begin_at_16_bytes(y.element_size(), (y.data_ptr(),), strides[:1])
        launch = self._launch_of(
            *(_KERNEL, y.shape[0], weight, strides, tensors, sorting, (self._table,)),
            A_TMA_LEGAL=sorting.is_shared and self._facts.has_tma and addressable,
            STORES=stores,
        )
        own = (sorting.topk, self._capacity, plan.capacity, *strides)
        launch((), tensors, (*own, first_part, parts, rank, self._patience_ticks))
