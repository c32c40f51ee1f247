"""Each token of all ranks times the matrices of its experts, with the gather hidden behind the product.

The memory of a rank, W ranks:

    gather   [W, tokens_per_rank, K], symmetric. Chunk p is rank p's tokens; the own chunk is `op.shard`
    ids      int64, symmetric: the experts of each rank's tokens, rank p's from p * tokens_per_rank * topk on
    weights  float32, symmetric, in the same places: those of `route`
    flags    int32 [7, W], symmetric: see `exchange.flags`

Each rank sends its ids to all, then its tokens; they are sorted by expert while tokens travel (`routing`).
Tiles of the grouped GEMM come in the order of their last chunk. Timeline, and why every wait ends:
docs/protocol.md, Experts.

Where all ranks agree on it a call is collectives and the kernel of a single rank instead, see
`agreement.collective`. First the choices are gathered, one message a rank. They are sorted while the rows are
gathered in place in `gather`: for each rank as many as the rank with most tokens has. Ranks that agree have
equal `tokens`, so their parts of the collectives fit together, and a graph may repeat them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..exchange.fill_nan import filler_of_all
from ..exchange.flags import ARRIVED
from ..launches.settled import SettledLaunches
from ..signals import Failure
from ..tensors import (
    Apart,
    OwnBuffer,
    check_distinct,
    check_no_gradient,
    check_overlap,
    check_sizes,
    check_tensor,
    layout_of,
    pitch_of,
    remember,
    room_in,
)
from .ag_moe_kernel import all_gather_moe
from .launch import HEIGHTS, ExpertShape
from .operation import ExpertOperands, ExpertOperation, ExpertPlan, check_experts
from .plan import Plan, Routing


def _nothing() -> None:
    return


_SETTLED: SettledLaunches[ExpertShape] = SettledLaunches(all_gather_moe, operation="AllGatherMoE")


class AllGatherMoE(ExpertOperation):
    """`op(x_shard [T_r, K], weight [E, N, K], topk_ids [T_r, topk])` returns `[T * topk, N]` on each rank.

    T is the tokens of all ranks, rank by rank; row t * topk + j is token t times `weight[id].T`, where id is
    its j-th choice. A rank's T_r is 0 to `tokens_per_rank` and may change from call to call. E and topk (up
    to `max_topk`) are equal on all ranks, N may differ. An id of -1 drops a choice: its row is zeros. Any
    other id that is no expert is an error, raised on all ranks, that names the rank that chose it.

    Calls need no synchronisation with the device between them. Their shape needs every rank's T_r: `tokens=`
    gives it, on all ranks or on none; without it the hosts meet in each call, for some microseconds when they
    come together. Calls with `tokens=` may be captured in CUDA graphs and replayed any number of times among
    eager calls, in the same order on all ranks; before the capture, call once with the same shapes.
    `timeout_s` is how long a kernel waits for a peer. Opening and closing are collective.

    `collective=True` makes calls gather by collectives of the group and multiply by the kernel of a single
    rank, False never; None tunes that for each size class, numbers of tokens up to the same power of two. All
    ranks pass the same. A rank that would make the first collectives of a class waits, on the host, for its
    peers to come to the call; they make them if all would. A captured call repeats the way of the last eager
    call of its class; a replay waits for its peers as any collective does.
    """

    _orders, _by_first, _way, _puts = 2, False, "ag_moe way", True

    def __init__(
        self,
        tokens_per_rank: int,
        k: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        *,
        timeout_s: float = 300.0,
        max_topk: int = 16,
        collective: bool | None = None,
    ) -> None:
        check_sizes(k=k)
        self._k, self._key = k, (k, str(dtype))
        super().__init__(tokens_per_rank, dtype, group, backend, timeout_s, max_topk, collective)

    def _allocate(self) -> None:
        super()._allocate()
        self._gather = self._memory.allocate((self.world_size, self._capacity, self._k), self._dtype)
        self._shard = self._gather.local[self.rank]
        self._own = OwnBuffer(self._shard)
        self._slots = [(peer, self._gather.peers[peer][self.rank]) for peer in self._pushes.before]
        self._pushes.warm_up((slot, self._shard) for _, slot in self._slots)
        filler_of_all(self._shard, self._flags.local, self.rank)(self._shard, only_load=True)

    # ---- what the caller may use

    def __call__(
        self,
        x_shard: torch.Tensor,
        weight: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        tokens: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the products; `out`, if given, is where they are written.

        A wrong argument raises on all ranks, and the next call may be made; other failures break the
        operation: see `exchange.call`. They are raised at the end of the call on the CPU, and on a GPU by a
        later call, `check` or `close`.
        """
        return self._call("call", x_shard, weight, topk_ids, None, out, tokens, None)[0]

    def route(
        self,
        x_shard: torch.Tensor,
        weight: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        tokens: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, Routing]:
        """Return the products [T * topk, N] in the order of their experts, and that order.

        Later calls with the same choices take it and sort nothing: `MoEReduceScatter.by_expert`, which finds
        the weights [T_r, topk] of all ranks in it, and `by_expert`. All ranks call `route`, or none.
        """
        return self._call("route", x_shard, weight, topk_ids, topk_weights, None, tokens, None)

    def by_expert(self, x_shard: torch.Tensor, weight: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the products of tokens that `route` has sorted, in that order."""
        return self._call("by_expert", x_shard, weight, None, None, None, None, routing)[0]

    @property
    def shard(self) -> torch.Tensor:
        """The symmetric input buffer [tokens_per_rank, K]: `op(op.shard[:T_r], ...)` copies no tokens.

        Write it on the stream of the calls; it is free again as soon as a call has returned, which may have
        overwritten the rows behind the first T_r.
        """
        self._check_usable()
        return self._shard

    # ---- one call, see `exchange.call`

    def _plan(self, given: tuple[Any, ...], is_capturing: bool) -> ExpertPlan:
        kind, x_shard, weight, topk_ids, topk_weights, out, tokens, routing = given
        self._begin_plan(kind, tokens, is_capturing=is_capturing)
        check_no_gradient("AllGatherMoE", x_shard=x_shard, weight=weight, out=out)
        if routing is not None:
            self._check_tokens(x_shard, weight)
            self._check_routing(routing, weight)
            if x_shard.shape[0] != routing.tokens[self.rank]:
                shapes = f"x_shard {list(x_shard.shape)} and a routing of tokens {list(routing.tokens)}"
                raise ValueError(f"{shapes}: rank {self.rank} must pass as many")
            return ExpertPlan(kind, weight.shape[0], routing.topk, has_weights=False)
        lie = self._own.layout_of(x_shard), layout_of(weight), layout_of(topk_ids), self._own.layout_of(out)
        apart = self._checked.get(lie)
        if apart is None:
            self._check_arguments(x_shard, weight, topk_ids, out)
            made = Apart(out, x_shard=x_shard, weight=weight, topk_ids=topk_ids)
            apart = remember(self._checked, lie, made)
        assert topk_ids is not None
        if topk_weights is not None or kind == "route":
            self._check_weights(topk_ids, topk_weights)
        apart.check(out, x_shard, weight, topk_ids)
        own, topk = topk_ids.shape
        check = functools.partial(self._check_rows, out, topk)
        self._learn_tokens(own, tokens, check, is_capturing=is_capturing)
        return ExpertPlan(kind, weight.shape[0], topk, topk_weights is not None)

    def _allocate_results(self, plan: ExpertPlan, given: tuple[Any, ...]) -> ExpertOperands:
        _, x_shard, weight, topk_ids, topk_weights, out, _, routing = given
        if out is None:
            rows = sum(self._told) * plan.topk if routing is None else len(routing.rows)
            out = x_shard.new_empty((rows, weight.shape[1]))
        return ExpertOperands(x_shard, weight, topk_ids, topk_weights, out, routing)

    def _put(self, plan: ExpertPlan, operands: ExpertOperands) -> ExpertOperands:
        x_shard = operands.rows
        if len(x_shard) and x_shard.data_ptr() != self._own.begin:
            self._shard[: len(x_shard)].copy_(x_shard.detach())
        return operands

    def _exchange(
        self, plan: ExpertPlan, operands: ExpertOperands, is_gathered: bool, is_capturing: bool
    ) -> tuple[torch.Tensor, Routing | None]:
        x_shard, weight, topk_ids, _, out, routing, _ = operands
        self._tell(plan, operands, is_gathered=is_gathered, at_once=not is_capturing)
        join = self._gather_rows() if is_gathered else self._push(x_shard.shape[0])
        sorting: tuple[Plan, torch.Tensor | None]
        if plan.kind == "call":
            assert topk_ids is not None
            sorting = self._sort(topk_ids, plan.experts, first=self.rank, is_gathered=is_gathered), None
        elif plan.kind == "route":
            assert topk_ids is not None
            routing = self._route(topk_ids, plan.experts, is_gathered=is_gathered)
            sorting = routing.plan, None
        else:
            assert routing is not None
            sorting = routing.plan, routing.sources(max(self._told) if is_gathered else self._capacity)
        join()
        self._launch(weight, out, plan, *sorting, is_gathered=is_gathered)
        if not is_gathered:  # no tile writes rows of choices that are missing
            filler_of_all(out, self._flags.local, self.rank)(out)
            self._pushes.stream.join()
        return out, routing

    def _check_tokens(self, x_shard: torch.Tensor, weight: torch.Tensor) -> None:
        check_tensor("x_shard", x_shard, self._dtype, self.device)
        check_experts(weight, self._k, self._dtype, self.device)
        if x_shard.shape[1] != self._k:
            raise ValueError(
                f"x_shard has shape {list(x_shard.shape)}; its rows must have K={self._k} elements"
            )
        check_overlap("x_shard", x_shard, self._shard, "T_r")

    def _check_arguments(
        self, x_shard: torch.Tensor, weight: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor | None
    ) -> None:
        self._check_tokens(x_shard, weight)
        self._check_ids(topk_ids)
        if len(topk_ids) != len(x_shard):
            given = f"x_shard {list(x_shard.shape)} and topk_ids {list(topk_ids.shape)}"
            raise ValueError(f"{given} must have a row for each of the same tokens")
        if out is not None:
            check_tensor("out", out, self._dtype, self.device)
            if out.shape[1] != weight.shape[1]:
                raise ValueError(f"out has shape {list(out.shape)}; the result has {weight.shape[1]} columns")
            check_distinct("out", out)
            self._own.check_beside("out", out, "op.shard", "peers read")

    def _check_rows(self, out: torch.Tensor | None, topk: int, told: tuple[int, ...]) -> None:
        rows = sum(told) * topk
        if out is not None and out.shape[0] != rows:
            raise ValueError(f"out has shape {list(out.shape)}; the result has {rows} rows")

    def _gather_rows(self) -> Callable[[], None]:
        """Enqueue the collective of rows beside what follows; return what orders later work behind it."""
        return self._collective.start_all_gather(self._gathered(), self._shard[: max(self._told)])

    def _take_part(self) -> None:
        self._gather_rows()()

    def _gathered(self) -> torch.Tensor:
        """Return where a collective gathers equally many rows of each rank; this rank's lie there already."""
        return room_in(self._gather.local, self.rank, self.world_size, max(self._told))

    def _push(self, tokens: int) -> Callable[[], None]:
        """Enqueue the pushes of rows; kernels wait for them by flags: there is nothing to join."""
        shard = self._shard[:tokens]
        for peer, slot in self._slots:
            copies = [(slot[:tokens], shard)] if tokens else []
            self._pushes.run(peer, self._pushes.sending(peer, copies, ARRIVED.value, 1), at_once=False)
        self._pushes.owes_parts = False
        return _nothing

    def _launch(
        self,
        weight: torch.Tensor,
        out: torch.Tensor,
        of_call: ExpertPlan,
        plan: Plan,
        sources: torch.Tensor | None,
        *,
        is_gathered: bool,
    ) -> None:
        """Enqueue the kernel of a call; is_gathered: as of a single rank. sources: in place of the plan's."""
        tokens, flags, rank = self._gather.local, self._flags.local, self.rank
        ends, tables, is_sorted = plan.ends, plan.tables, of_call.kind != "call"
        if is_gathered:
            tokens, flags, rank = self._gathered(), self._arrived, 0
            first = HEIGHTS if is_sorted else 0  # a shared sorting has stages: by expert is order 1
            ends, tables = plan.ends_of_all[first:], plan.tables[first:]
        planned = (plan.rows, plan.sources if sources is None else sources, ends, tables)
        tensors = (tokens, weight, out, *planned, flags, self._errors)
        strides = (weight.stride(0), pitch_of(weight), out.stride(0))
        of_layout = (_SETTLED, out.shape[0], weight, strides, tensors)
        launch = self._launch_of(*of_layout, is_sorted=is_sorted, is_gathered=is_gathered, HEIGHTS=HEIGHTS)
        launch((), tensors, (of_call.topk, plan.capacity, *strides, rank, self._patience_ticks))

    def _describe_wait(self, peer: int, failure: Failure) -> str:
        return f"rank {peer}, or one that it waits for, did not push its tokens in time"
