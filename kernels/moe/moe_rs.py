"""Each token's products with its experts, weighted and added, then summed over ranks on the token's own rank.

The memory of a rank, W ranks; `m` is tokens_per_rank:

    ids, weights  int64 and float32, symmetric: each rank's choices, rank p's from p * m * topk on
    products      [T * topk, N] of the caller's device, for the length of a call
    partial       [W - 1, m, N], slot s - 1: the sums for rank r + s, on their way out
    staged        [W - 1, m, N], symmetric, slot s - 1: the sums of rank r + s for this rank
    flags         int32 [7, W], symmetric: see `exchange.flags`

A stage is the tokens of one rank, the own ones last. The grouped GEMM's programs claim products of stage 0,
1, ... and combine a stage's tokens behind a round of the next one's tiles; then its sums are pushed. Steps
are enqueued in the order of `GemmReduceScatter`: see [Note: shared hardware queues]. A captured call
launches the kernel once for each stage, with that stage's part of the list. Timeline, and why every wait
ends: docs/protocol.md, Experts.

Where all ranks agree on it a call is collectives instead, as in `AllGatherMoE`: choices are gathered, the
kernel of a single rank combines the tokens of all, and a reduce-scatter adds the ranks' parts, padded to the
rows of the rank with most tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..exchange.push import SumPusher
from ..launches.settled import SettledLaunches
from ..signals import Failure
from ..tensors import (
    Apart,
    begin_at_16_bytes,
    check_no_gradient,
    check_out,
    check_sizes,
    check_tensor,
    layout_of,
    pitch_of,
    remember,
)
from .flags import NOT_COMPUTED
from .launch import HEIGHTS, ExpertShape
from .moe_rs_kernel import moe_reduce_scatter
from .operation import ExpertOperands, ExpertOperation, ExpertPlan, check_experts
from .plan import Plan, Routing

_SETTLED: SettledLaunches[ExpertShape] = SettledLaunches(moe_reduce_scatter, operation="MoEReduceScatter")


@dataclass(frozen=True, eq=False)
class _Choices:
    """The choices of one call, and the parts of their sorting that the kernel reads."""

    plan: Plan
    weights: torch.Tensor
    offsets: torch.Tensor
    ends: torch.Tensor
    tables: torch.Tensor
    counters: torch.Tensor
    tokens: tuple[int, ...]
    topk: int
    is_sorted: bool = False
    is_gathered: bool = False  # the kernel takes them for one rank's


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
    Kernels of other streams that wait for peers, such as collectives of another dimension of a mesh, may run
    beside a call, if they leave it an SM.

    Each rank holds 2 * (W - 1) * tokens_per_rank * n elements, half of them of symmetric memory, and in a
    call T * topk * n more.
    """

    _orders, _by_first, _way = 1, True, "moe_rs way"

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
    ) -> None:
        check_sizes(n=n)
        self._n, self._key = n, (n, str(dtype))
        super().__init__(tokens_per_rank, dtype, group, backend, timeout_s, max_topk, collective)

    def _allocate(self) -> None:
        super()._allocate()
        slots = max(1, self.world_size - 1)
        self._staged = self._memory.allocate((slots, self._capacity, self._n), self._dtype)
        self._partial = self._memory.hold(torch.zeros_like(self._staged.local))
        counters = torch.zeros(3 * self.world_size, dtype=torch.int32, device=self.device)
        self._counters = self._memory.hold(counters)
        # The announcer takes the permits.
        self._pusher = SumPusher(self._pushes, self._partial, self._staged, with_permits=False)

    # ---- what the caller may use

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
        return self._call("call", y, weight, topk_ids, topk_weights, out, tokens, None, None)

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
        return self._call("by_expert", y, weight, None, None, out, None, routing, weights)

    # ---- one call, see `exchange.call`

    def _plan(self, given: tuple[Any, ...], is_capturing: bool) -> ExpertPlan:
        kind, y, weight, topk_ids, topk_weights, out, tokens, routing, weights = given
        self._begin_plan(kind, tokens, is_capturing=is_capturing)
        asked = {"topk_weights": topk_weights, "weights": weights}
        check_no_gradient("MoEReduceScatter", y=y, weight=weight, out=out, **asked)
        if routing is not None:
            self._check_routed(y, weight, out, routing, weights)
            return ExpertPlan(kind, weight.shape[0], routing.topk, has_weights=False)
        given = (y, weight, topk_ids, topk_weights, out)
        lie = tuple(map(layout_of, given))
        apart = self._checked.get(lie)
        if apart is None:
            self._check_arguments(*given)
            read = {"y": y, "weight": weight, "topk_ids": topk_ids, "topk_weights": topk_weights}
            apart = remember(self._checked, lie, Apart(out, **read))
        apart.check(out, y, weight, topk_ids, topk_weights)
        assert topk_ids is not None
        own, topk = topk_ids.shape
        check = functools.partial(self._check_rows, y, topk)
        self._learn_tokens(own, tokens, check, is_capturing=is_capturing)
        return ExpertPlan(kind, weight.shape[0], topk, has_weights=True)

    def _allocate_results(self, plan: ExpertPlan, given: tuple[Any, ...]) -> ExpertOperands:
        _, y, weight, topk_ids, topk_weights, out, _, routing, weights = given
        if out is None:
            out = y.new_empty((self._told[self.rank], self._n))
        return ExpertOperands(y, weight, topk_ids, topk_weights, out, routing, weights)

    def _exchange(
        self, plan: ExpertPlan, operands: ExpertOperands, is_gathered: bool, is_capturing: bool
    ) -> torch.Tensor:
        y, weight, topk_ids, _, out, routing, factors = operands
        if routing is not None:
            self._counters.zero_()
        self._tell(plan, operands, is_gathered=is_gathered, at_once=not is_capturing)
        if routing is not None:
            factors = routing.weights if factors is None else factors.detach()
            choices = self._routed(routing, factors, is_gathered)
        else:
            assert topk_ids is not None
            sorting = self._sort(topk_ids, plan.experts, first=self.rank + 1, is_gathered=is_gathered)
            choices = self._sorted(sorting, plan.topk, is_gathered)
        self._scatter(y, weight, out, choices, is_capturing=is_capturing)
        return out

    def _check_routed(
        self,
        y: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None,
        routing: Routing,
        weights: torch.Tensor | None,
    ) -> None:
        factors = routing.weights if weights is None else weights
        self._check_operands(y, weight)
        self._check_routing(routing, weight)
        self._check_rows(y, routing.topk, routing.tokens)
        check_out(out, [routing.tokens[self.rank], self._n], self._dtype, self.device)
        if out is not None:
            read = {"y": y, "weight": weight, "weights": weights, "routing": routing.words}
            Apart(out, **read).check(out, *read.values())
        if factors.shape != (y.shape[0],) or factors.dtype != torch.float32 or not factors.is_contiguous():
            given = f"weights are {list(factors.shape)} in {factors.dtype}"
            raise ValueError(f"{given}; contiguous [{y.shape[0]}] in torch.float32 is needed")

    def _check_arguments(
        self,
        y: torch.Tensor,
        weight: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None,
    ) -> None:
        self._check_operands(y, weight)
        self._check_ids(topk_ids)
        self._check_weights(topk_ids, topk_weights)
        check_out(out, [topk_ids.shape[0], self._n], self._dtype, self.device)

    def _check_operands(self, y: torch.Tensor, weight: torch.Tensor) -> None:
        check_tensor("y", y, self._dtype, self.device)
        check_experts(weight, y.shape[1], self._dtype, self.device)
        if weight.shape[1] != self._n:
            raise ValueError(f"weight has shape {list(weight.shape)}; [E, n={self._n}, K] is needed")

    def _check_rows(self, y: torch.Tensor, topk: int, tokens: tuple[int, ...]) -> None:
        rows = sum(tokens) * topk
        if y.shape[0] != rows:
            wanted = f"tokens {list(tokens)} of the ranks with topk={topk} are {rows} rows"
            raise ValueError(f"y has {y.shape[0]} rows; {wanted}")

    def _sorted(self, plan: Plan, topk: int, is_gathered: bool) -> _Choices:
        """Return the choices as this call has sorted them."""
        listed = (plan.offsets_of_all, plan.ends_of_all) if is_gathered else (plan.offsets, plan.ends)
        read = (plan, self._weights.local, *listed, plan.tables, plan.counters, self._told, topk)
        return _Choices(*read, is_gathered=is_gathered)

    def _routed(self, routing: Routing, weights: torch.Tensor, is_gathered: bool) -> _Choices:
        """Return the choices in order 2, by stage; gathered: in order 1, by expert."""
        plan, order = routing.plan, 1 if is_gathered else 2
        offsets, ends = (plan.offsets_of_all, plan.ends_of_all) if is_gathered else (plan.offsets, plan.ends)
        listed = (offsets, ends[order * HEIGHTS :], plan.tables[order * HEIGHTS :], self._counters)
        of_call = (routing.tokens, routing.topk)
        return _Choices(plan, weights, *listed, *of_call, is_sorted=True, is_gathered=is_gathered)

    def _scatter(
        self,
        y: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        choices: _Choices,
        *,
        is_capturing: bool,
    ) -> None:
        """Enqueue kernel and pushes of one call, behind its permits, and its end; or its collective."""
        products = y.new_empty((y.shape[0], self._n))
        if choices.is_gathered:
            self._reduce(functools.partial(self._launch, y, weight), out, products, choices)
            return
        launch = functools.partial(self._launch, y, weight, out, products, choices)
        ways = {"in_steps": self._in_steps(is_capturing=is_capturing), "at_once": not is_capturing}
        self._pusher.run(launch, choices.tokens, in_pieces=False, **ways)
        self._pushes.finish()

    def _reduce(
        self, launch: Callable[..., None], out: torch.Tensor, products: torch.Tensor, choices: _Choices
    ) -> None:
        """Enqueue the kernel of all ranks' tokens, and the collective, padded to equally many rows a rank."""
        rows = max(choices.tokens)
        padded = self._pusher.room(self.world_size * rows)
        are_equal = min(choices.tokens) == rows
        sums = padded if are_equal else out.new_empty((sum(choices.tokens), self._n))
        launch(sums, products, choices)
        if not are_equal:
            parts = zip(padded.split(rows), sums.split(choices.tokens), strict=True)
            for padded_part, part in parts:
                padded_part[: len(part)].copy_(part)
        is_whole = len(out) == rows and out.is_contiguous()
        result = out.detach() if is_whole else out.new_empty((rows, self._n))
        self._collective.reduce_scatter(result, padded)
        if not is_whole:
            out.detach().copy_(result[: len(out)])

    def _take_part(self) -> None:
        rows = max(self._told)
        padded = self._pusher.room(self.world_size * rows).fill_(math.nan)
        self._collective.reduce_scatter(padded.new_empty((rows, self._n)), padded)

    def _launch(
        self,
        y: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        products: torch.Tensor,
        choices: _Choices,
        step: int | None = None,
    ) -> None:
        """Enqueue the kernel of a call, or of one stage; `step` is 0, 1, ... in the order of launches."""
        world, rank, flags = self.world_size, self.rank, self._flags.local
        if choices.is_gathered:
            world, rank, flags = 1, 0, self._arrived
        first_part, parts = (0, world) if step is None else (step, 1)
        sums = (products, self._partial, self._staged.local, choices.weights)
        plan = choices.plan
        planned = (plan.rows, plan.sources, choices.offsets, choices.ends, choices.tables, choices.counters)
        tensors = (y, weight, out, *sums, *planned, flags, self._errors)
        strides = (y.stride(0), weight.stride(0), pitch_of(weight), out.stride(0))
        addressable = begin_at_16_bytes(y.element_size(), (y.data_ptr(),), strides[:1])
        launch = self._launch_of(
            *(_SETTLED, y.shape[0], weight, strides, tensors),
            is_sorted=choices.is_sorted,
            is_gathered=choices.is_gathered,
            A_TMA_LEGAL=choices.is_sorted and self._has_tma and addressable,
        )
        own = (choices.topk, self._capacity, plan.capacity, *strides)
        launch((), tensors, (*own, first_part, parts, rank, self._patience_ticks))

    def _describe_wait(self, peer: int, failure: Failure) -> str:
        if failure.kind == NOT_COMPUTED.value:
            return f"the products of this rank were not stored in time ({failure.seen} tiles of a part were)"
        return f"rank {peer}, or one that it waits for, did not push its sums for chunk {self.rank} in time"
