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

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..exchange.call import numbered
from ..exchange.fill_nan import filler_of_all
from ..exchange.flags import ARRIVED
from ..launches.settled import TunedKernel
from ..tensors import OwnBuffer, check_distinct, check_overlap, check_sizes, check_tensor, pitch_of, room_in
from .ag_moe_kernel import all_gather_moe
from .launch import HEIGHTS, check_experts
from .operation import ExpertOperands, ExpertOperation, ExpertPlan, TileOrders
from .plan import Routing, Sorting

_KERNEL = TunedKernel(all_gather_moe, operation="AllGatherMoE")


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

    _tile_orders = TileOrders(2, by_first=False, shared=0)
    _rows_name, _weighted, _way = "x_shard", "route", "ag_moe way"
    _failure_kinds = ExpertOperation._failure_kinds._replace(
        late="rank {peer}, or one that it waits for, did not push its tokens in time"
    )

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

    @numbered
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
        operands = ExpertOperands(x_shard, weight, topk_ids, out=out)
        products: torch.Tensor = self._call("call", tokens, operands)[0]
        return products

    @numbered
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
        operands = ExpertOperands(x_shard, weight, topk_ids, topk_weights)
        result: tuple[torch.Tensor, Routing] = self._call("route", tokens, operands)
        return result

    @numbered
    def by_expert(self, x_shard: torch.Tensor, weight: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the products of tokens that `route` has sorted, in that order."""
        operands = ExpertOperands(x_shard, weight, routing=routing)
        products: torch.Tensor = self._call("by_expert", None, operands)[0]
        return products

    @property
    def shard(self) -> torch.Tensor:
        """The symmetric input buffer [tokens_per_rank, K]: `op(op.shard[:T_r], ...)` copies no tokens.

        Write it on the stream of the calls; it is free again as soon as a call has returned, which may have
        overwritten the rows after the first T_r.
        """
        self._check_usable()
        return self._shard

    # ---- one call

    def _layout_of(self, tensor: Any) -> Hashable:
        return self._own.layout_of(tensor)

    def _differentiable(self, operands: ExpertOperands) -> dict[str, torch.Tensor | None]:
        return {"x_shard": operands.rows, "weight": operands.weight, "out": operands.out}

    def _check_operands(self, operands: ExpertOperands) -> None:
        x_shard = operands.rows
        check_tensor("x_shard", x_shard, self._dtype, self.device)
        check_experts(operands.weight, self._k, self._dtype, self.device)
        if x_shard.shape[1] != self._k:
            raise ValueError(
                f"x_shard has shape {list(x_shard.shape)}; its rows must have K={self._k} elements"
            )
        check_overlap("x_shard", x_shard, self._shard, "T_r")

    def _check_result(self, operands: ExpertOperands) -> None:
        x_shard, weight, topk_ids, _, out, _, _ = operands
        if len(topk_ids) != len(x_shard):
            given = f"x_shard {list(x_shard.shape)} and topk_ids {list(topk_ids.shape)}"
            raise ValueError(f"{given} must have a row for each of the same tokens")
        if out is not None:
            check_tensor("out", out, self._dtype, self.device)
            if out.shape[1] != weight.shape[1]:
                raise ValueError(f"out has shape {list(out.shape)}; the result has {weight.shape[1]} columns")
            check_distinct(out)
            self._own.check_beside("out", out, "op.shard", "peers read")

    def _check_rows(self, operands: ExpertOperands, topk: int) -> None:
        x_shard, out, routing = operands.rows, operands.out, operands.routing
        if routing is not None and len(x_shard) != routing.tokens[self.rank]:
            shapes = f"x_shard {list(x_shard.shape)} and a routing of tokens {list(routing.tokens)}"
            raise ValueError(f"{shapes}: rank {self.rank} must pass as many")
        rows = sum(self._told) * topk
        if out is not None and out.shape[0] != rows:
            raise ValueError(f"out has shape {list(out.shape)}; the result has {rows} rows")

    def _result_shape(self, plan: ExpertPlan, operands: ExpertOperands) -> tuple[int, int]:
        return sum(self._told) * plan.topk, operands.weight.shape[1]

    def _exchange(
        self, plan: ExpertPlan, operands: ExpertOperands, is_gathered: bool, is_capturing: bool
    ) -> tuple[torch.Tensor, Routing | None]:
        x_shard, out = operands.rows, operands.out
        if len(x_shard) and x_shard.data_ptr() != self._own.begin:
            self._shard[: len(x_shard)].copy_(x_shard.detach())
        self._tell(plan, operands, is_gathered=is_gathered, at_once=not is_capturing)
        join = self._gather_rows(max(self._told)) if is_gathered else self._push(len(x_shard))
        sorting = self._sort(plan, operands, is_gathered=is_gathered)
        sources = sorting.plan.sources
        if operands.routing is not None:  # it may be of chunks that lie further apart
            sources = operands.routing.sources(max(self._told) if is_gathered else self._capacity)
        join()
        self._launch(operands.weight, out, sorting, sources)
        if not is_gathered:  # no tile writes rows of choices that are missing
            filler_of_all(out, self._flags.local, self.rank)(out)
            self._pushes.stream.join()
        return out, sorting.routing

    def _gather_rows(self, rows: int) -> Callable[[], None]:
        """Enqueue the collective of so many rows of each rank; return what orders later work after it."""
        return self._collective.start_all_gather(self._gathered(rows), self._shard[:rows])

    def _take_part(self, rows: int) -> None:
        self._gather_rows(rows)()

    def _gathered(self, rows: int) -> torch.Tensor:
        """Return where a collective gathers so many rows of each rank; this rank's lie there already."""
        return room_in(self._gather.local, self.rank, self.world_size, rows)

    def _push(self, tokens: int) -> Callable[[], None]:
        """Enqueue the pushes of rows; kernels wait for them by flags: there is nothing to join."""
        shard = self._shard[:tokens]
        for peer, slot in self._slots:
            copies = [(slot[:tokens], shard)] if tokens else []
            self._pushes.run(peer, self._pushes.sending(peer, copies, ARRIVED.value, 1), at_once=False)
        self._pushes.owes_parts = False
        return lambda: None

    def _launch(
        self, weight: torch.Tensor, out: torch.Tensor, sorting: Sorting, sources: torch.Tensor
    ) -> None:
        """Enqueue the kernel of a call; sources: in place of the plan's."""
        tokens, flags, rank = self._gather.local, self._flags.local, self.rank
        if sorting.is_gathered:
            tokens, flags, rank = self._gathered(max(self._told)), self._gatherer.arrived, 0
        plan = sorting.plan
        planned = (plan.rows, sources, sorting.ends, sorting.tables)
        tensors = (tokens, weight, out, *planned, flags, self._failures.words)
        strides = (weight.stride(0), pitch_of(weight), out.stride(0))
        of_layout = (_KERNEL, out.shape[0], weight, strides, tensors, sorting)
        launch = self._launch_of(*of_layout, HEIGHTS=HEIGHTS)
        launch((), tensors, (sorting.topk, plan.capacity, *strides, rank, self._patience_ticks))
