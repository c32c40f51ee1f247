"""Each token of all ranks times the matrices of its experts, with the gather hidden behind the product.

The memory of a rank, W ranks:

    gather   [W, tokens_per_rank, K], symmetric. Chunk p is rank p's tokens; the own chunk is `op.shard`
    ids      int64, symmetric: the experts of each rank's tokens, rank p's from p * tokens_per_rank * topk on
    weights  float32, symmetric, in the same places: those of `route`
    flags    int32 [7, W], symmetric: see `exchange.flags`

A call on rank r:

    caller's stream                           side stream: copy engine and stream memory operations
    x_shard to chunk r, ids to their place
    fork                               -->    FREE[r] of every peer := 1
    count_choices, once all TOLD[p] >= 1      for p = r - 1, r - 2, ... (mod W):
    place_choices: tokens by expert,              wait until FREE[p] >= 1, FREE[p] := 0
        and within it r, r + 1, ...               ids, GIVEN[r], TOLD[r] to rank p
    grouped GEMM, one persistent kernel:      for p = r - 1, r - 2, ...:
        a tile once ARRIVED[p] >= 1 for all       chunk r to rank p
        p up to its last row's                    ARRIVED[r] of rank p := 1
        all ARRIVED before it ends
    join                               <--
    TOLD, ARRIVED := AFTER

All ids travel before any chunk, so sorting them hides behind the chunks. Tiles come in the order of their
last chunk (`routing`).

[Note: a gather for experts ends] The side stream of a call waits only for the peers' FREE, which follow their
forks; nothing on it needs an SM, and it is enqueued before the kernels that wait for it. The kernels wait
only for the side streams of peers. So if all of call k - 1 ends, then all forks of k happen, all ids and
chunks are pushed, and all kernels of k end.

`exchange.push` says how permits, overwriting and patience work; here TOLD is used like ARRIVED. The acquire
of a wait orders the ordinary loads of ids and of A behind it. It would not order TMA loads, so TMA loads the
weight alone.

[Note: what the host must know] The result has a row for each choice of all ranks, so its shape needs the
number of tokens of each rank. The caller passes it (`tokens=`), or the hosts exchange it (`Ballots`), which
waits for the slowest host and for no device. The device uses the numbers that the peers announced, never
beyond the rows that the host allocated, and compares both: if they differ, all ranks raise an error that
names the rank with the wrong ones.

A sorting may be shared (`Routing`): `route` announces weights beside ids, and sorts for both operations of a
layer. `by_expert`, here and in `MoEReduceScatter`, then announces no choices and sorts nothing: its side
stream takes the permits and pushes the rows. Such a call has no other kernel than the grouped GEMM, so that
one lets the side stream through where a peer was given up earlier.

Where all ranks agree on it a call is collectives and the kernel of a single rank instead, see
`exchange.collective`. First the choices are gathered, one message a rank. They are sorted while the rows are
gathered in place in `gather`: for each rank as many as the rank with most tokens has. Ranks that agree have
equal `tokens`, so their parts of the collectives fit together, and a graph may repeat them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from ..exchange.flags import ARRIVED
from ..exchange.spoil import spoiling_all
from ..launches.settled import SettledLaunches
from ..signals import Failure
from ..tensors import (
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
from .operation import ExpertOperation, check_apart, check_experts
from .plan import Plan, Routing

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

    _orders, _by_first, _way = 2, False, "ag_moe way"

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
        spoiling_all(self._shard, self._flags.local, self.rank)(self._shard, only_load=True)

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

        A wrong argument raises before any peer hears of the call, save the number of rows of `out` without
        `tokens=`. A failure of the call itself is raised at its end on the CPU, and on a GPU by a later call,
        `check` or `close`.
        """
        self._check_usable()
        check_no_gradient("AllGatherMoE", x_shard=x_shard, weight=weight, out=out)
        lie = self._own.layout_of(x_shard), layout_of(weight), layout_of(topk_ids), self._own.layout_of(out)
        if lie not in self._checked:
            self._check_arguments(x_shard, weight, topk_ids, out)
            remember(self._checked, lie, None)
        check_apart(out, x_shard=x_shard, weight=weight, topk_ids=topk_ids)
        known = self._known_tokens(topk_ids.shape[0], tokens)
        if known is not None:
            self._check_rows(out, sum(known) * topk_ids.shape[1])
        with self._carrying_out():
            rows = sum(self._tokens_of_all(x_shard.shape[0], known)) * topk_ids.shape[1]
            self._check_rows(out, rows)
            if out is None:
                out = x_shard.new_empty((rows, weight.shape[1]))
            with self._exchanging("call", x_shard, weight, topk_ids.shape[1], topk_ids) as is_gathered:
                plan = self._sort(topk_ids, weight.shape[0], first=self.rank, is_gathered=is_gathered)
            self._launch(weight, out, plan, topk_ids.shape[1], is_gathered=is_gathered)
            self._finish(out, is_gathered)
        return out

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
        self._check_usable()
        check_no_gradient("AllGatherMoE", x_shard=x_shard, weight=weight)
        self._check_arguments(x_shard, weight, topk_ids, None)
        self._check_weights(topk_ids, topk_weights)
        known = self._known_tokens(topk_ids.shape[0], tokens)
        with self._carrying_out():
            counts = self._tokens_of_all(x_shard.shape[0], known)
            out = x_shard.new_empty((sum(counts) * topk_ids.shape[1], weight.shape[1]))
            told = (topk_ids.shape[1], topk_ids, topk_weights)
            with self._exchanging("route", x_shard, weight, *told) as is_gathered:
                routing = self._route(topk_ids, weight.shape[0], is_gathered=is_gathered)
            plan = routing.plan
            self._launch(weight, out, plan, routing.topk, is_sorted=True, is_gathered=is_gathered)
            self._finish(out, is_gathered)
        return out, routing

    def by_expert(self, x_shard: torch.Tensor, weight: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the products of tokens that `route` has sorted, in that order."""
        self._check_usable()
        check_no_gradient("AllGatherMoE", x_shard=x_shard, weight=weight)
        self._check_tokens(x_shard, weight)
        self._check_routing(routing, weight)
        if x_shard.shape[0] != routing.tokens[self.rank]:
            given = f"x_shard {list(x_shard.shape)} and a routing of tokens {list(routing.tokens)}"
            raise ValueError(f"{given}: rank {self.rank} must pass as many")
        with self._carrying_out():
            out = x_shard.new_empty((len(routing.rows), weight.shape[1]))
            with self._exchanging("by_expert", x_shard, weight, routing.topk) as is_gathered:
                sources = routing.sources(max(routing.tokens) if is_gathered else self._capacity)
            planned = (routing.plan, routing.topk, sources)
            self._launch(weight, out, *planned, is_sorted=True, is_gathered=is_gathered)
            self._finish(out, is_gathered)
        return out

    @property
    def shard(self) -> torch.Tensor:
        """The symmetric input buffer [tokens_per_rank, K]: `op(op.shard[:T_r], ...)` copies no tokens.

        Write it on the stream of the calls; it is free again as soon as a call has returned, which may have
        overwritten the rows behind the first T_r.
        """
        self._check_usable()
        return self._shard

    # ---- one call

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

    def _check_rows(self, out: torch.Tensor | None, rows: int) -> None:
        if out is not None and out.shape[0] != rows:
            raise ValueError(f"out has shape {list(out.shape)}; the result has {rows} rows")

    @contextlib.contextmanager
    def _exchanging(
        self,
        kind: str,
        x_shard: torch.Tensor,
        weight: torch.Tensor,
        topk: int,
        topk_ids: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
    ) -> Iterator[bool]:
        """Enqueue, beside the block, the exchange of tokens and choices; yield whether by collectives."""
        if len(x_shard) and x_shard.data_ptr() != self._own.begin:
            self._shard[: len(x_shard)].copy_(x_shard.detach())
        if self._tell(kind, weight.shape[0], topk, topk_ids, topk_weights):
            join = self._collective.start_all_gather(self._gathered(), self._shard[: max(self._told)])
            yield True
            join()
        else:
            self._push(x_shard.shape[0])
            yield False

    def _gathered(self) -> torch.Tensor:
        """Return where a collective gathers equally many rows of each rank; this rank's lie there already."""
        return room_in(self._gather.local, self.rank, self.world_size, max(self._told))

    def _finish(self, out: torch.Tensor, is_gathered: bool) -> None:
        if not is_gathered:  # no tile writes rows of choices that are missing
            spoiling_all(out, self._flags.local, self.rank)(out)
            self._pushes.stream.join()

    def _push(self, tokens: int) -> None:
        shard = self._shard[:tokens]
        for peer, slot in self._slots:
            copies = [(slot[:tokens], shard)] if tokens else []
            self._pushes.run(peer, self._pushes.sending(peer, copies, ARRIVED.value, 1), at_once=False)

    def _launch(
        self,
        weight: torch.Tensor,
        out: torch.Tensor,
        plan: Plan,
        topk: int,
        sources: torch.Tensor | None = None,
        *,
        is_sorted: bool = False,
        is_gathered: bool = False,
    ) -> None:
        """Enqueue the kernel of a call; is_gathered: as of a single rank. sources: in place of the plan's."""
        tokens, flags, rank = self._gather.local, self._flags.local, self.rank
        ends, tables = plan.ends, plan.tables
        if is_gathered:
            tokens, flags, rank = self._gathered(), self._arrived, 0
            first = HEIGHTS if is_sorted else 0  # a shared sorting has stages: by expert is order 1
            ends, tables = plan.ends_of_all[first:], plan.tables[first:]
        planned = (plan.rows, plan.sources if sources is None else sources, ends, tables)
        tensors = (tokens, weight, out, *planned, flags, self._errors)
        strides = (weight.stride(0), pitch_of(weight), out.stride(0))
        of_layout = (_SETTLED, out.shape[0], weight, strides, tensors)
        launch = self._launch_of(*of_layout, is_sorted=is_sorted, is_gathered=is_gathered, HEIGHTS=HEIGHTS)
        launch((), tensors, (topk, plan.capacity, *strides, rank, self._patience_ticks))

    def _describe_wait(self, peer: int, failure: Failure) -> str:
        return f"rank {peer}, or one that it waits for, did not push its tokens in time"
