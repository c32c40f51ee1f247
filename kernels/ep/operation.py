"""`ExpertParallel`: tokens travel to the ranks of their experts, and results back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton

from ..configs import INTERPRETED
from ..exchange.call import NumberedCalls
from ..moe.launch import size_class
from ..moe.operation import check_choices
from ..signals import GIVEN_UP, Failure
from ..symm import SymmetricTensor
from ..tensors import Apart, check_no_gradient, check_out, check_sizes, check_tensor
from .combine_kernels import collect_dots, grade_rows, return_rows, sum_rows
from .dispatch_kernels import count_choices, gather_rows, place_choices, send_tokens
from .slots import DONE, NOT_DISPATCHED, NOT_RETURNED, OVER_CAPACITY

MOST_POSITIONS = 2**30  # choices of all ranks, in two slots of int32 positions
MOST_RANKS = 32  # of which a kernel holds a bit each
SEGMENTS = 4 if INTERPRETED else 16  # of all positions, counted and placed side by side
BLOCK_POSITIONS = 64 if INTERPRETED else 1024
BLOCK_COLUMNS = 64 if INTERPRETED else 4096
INTERPRETED_SMS = 1
LEFT = GIVEN_UP.value  # added to the flags of a rank that comes to no further exchange
DISPATCH, COMBINE, BACKWARD = "dispatch", "combine", "combine_backward"  # kinds of calls


@dataclass(frozen=True, eq=False)
class Dispatched:
    """What a dispatch has brought: the rows of this rank's experts, and where they came from.

    rows: [C, H], by expert, within an expert by source rank and token; behind `offsets[-1]` undefined.
    offsets: int32 [experts / W + 1], on the device: where the rows of each expert begin.
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    sources: torch.Tensor  # int32 [C]: the position of each row, see `slots`
    places: torch.Tensor  # int32 [tokens_per_rank * topk]: rows of own tokens at own experts
    topk_ids: torch.Tensor  # [T, topk], contiguous

    def with_rows(self, rows: torch.Tensor) -> Dispatched:
        return Dispatched(rows, self.offsets, self.sources, self.places, self.topk_ids)


class ExpertParallel(NumberedCalls):
    """Dispatch of tokens to experts on other ranks, and combine of their results; a context manager.

        d = op.dispatch(x [T, H], topk_ids [T, topk])         # d.rows [C, H], d.offsets [experts / W + 1]
        y = op.combine(rows [C, H], d, topk_weights [T, topk])  # [T, H]

    Expert e lives on rank e // (experts / W). T is 0 to `tokens_per_rank`, may differ from rank to rank and
    change from call to call; the host waits for no count. C is W * tokens_per_rank * min(topk, experts / W),
    or `capacity`, if that is less: more rows are an error, raised by the next call, `check` or `close`. A
    choice that is no expert, such as -1, is dropped. A token's results are added in float32 in the order of
    its choices; those of dropped choices count nothing.

    All ranks make the same calls in the same order, see [Note: an exchange ends]. Each holds
    2 * (W + topk) * tokens_per_rank * H elements of symmetric memory. Kernels are tuned inside
    `contextual_autotune`.
    """

    _wrong_calls = (OVER_CAPACITY.value,)
    _mend_calls = "Raise capacity=, or pass none. "

    def __init__(
        self,
        tokens_per_rank: int,
        hidden: int,
        experts: int,
        topk: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        capacity: int | None = None,
        *,
        timeout_s: float = 300.0,
    ) -> None:
        check_sizes(tokens_per_rank=tokens_per_rank, hidden=hidden, experts=experts, topk=topk)
        if capacity is not None:
            check_sizes(capacity=capacity)
        if topk > experts:
            raise ValueError(f"topk={topk} is more than experts={experts}: a token chooses an expert once")
        self._most_tokens, self._topk, self._asked_capacity = tokens_per_rank, topk, capacity
        self.hidden, self.experts, self.dtype = hidden, experts, dtype
        super().__init__(dtype, group, backend, timeout_s)

    def _allocate(self) -> None:
        memory, world = self._memory, self.world_size
        if self.experts % world:
            raise ValueError(f"experts={self.experts} must be a multiple of the number of ranks, {world}")
        positions = world * self._most_tokens * self._topk
        if 2 * positions >= MOST_POSITIONS or world > MOST_RANKS:
            raise ValueError(
                f"{world} ranks x tokens_per_rank={self._most_tokens} x topk={self._topk} are more than "
                f"{MOST_POSITIONS // 2} choices, or than {MOST_RANKS} ranks"
            )
        given = self._asked_capacity or 0
        for name, value in (("hidden", self.hidden), ("experts", self.experts), ("topk", self._topk)):
            memory.require_equal(name, value)
        self._own_experts = self.experts // world
        most = world * self._most_tokens * min(self._topk, self._own_experts)
        self.capacity = min(given or most, most)
        tokens = (2, world, self._most_tokens)  # see [Note: two slots take turns]
        self._tokens = memory.allocate((*tokens, self.hidden), self.dtype)
        self._ids = memory.allocate((*tokens, self._topk), torch.int32)
        self._weights = memory.allocate((*tokens, self._topk), torch.float32)
        self._counts = memory.allocate((2, world), torch.int32)
        self._choices = memory.allocate((2, self._most_tokens, self._topk, self.hidden), self.dtype)
        self._dots = memory.allocate((2, self._most_tokens, self._topk), torch.float32)
        self._flags = memory.allocate((2, world), torch.int32)
        self._state = memory.hold(torch.zeros((2, 2), dtype=torch.int32, device=self.device))
        self._found = memory.hold(
            torch.zeros((self._own_experts, SEGMENTS), dtype=torch.int32, device=self.device)
        )
        self._sent_to = self._table(self._tokens, self._ids, self._weights, self._counts, self._flags)
        self._returned_to = self._table(self._choices, self._flags)
        self._graded_to = self._table(self._dots, self._flags)
        self._length = -(-positions // (SEGMENTS * BLOCK_POSITIONS)) * BLOCK_POSITIONS
        self._of_row = {
            "H": self.hidden,
            "K": self._topk,
            "WORLD": world,
            "BLOCK": min(triton.next_power_of_2(self.hidden), BLOCK_COLUMNS),
        }
        self._of_positions = {
            "K": self._topk,
            "WORLD": world,
            "RANKS": triton.next_power_of_2(world),
            "BLOCK": BLOCK_POSITIONS,
        }

    def _table(self, *tensors: SymmetricTensor) -> torch.Tensor:
        """Return the int64 [tensors, W] table of where each rank's parts lie; it keeps them mapped."""
        tables = [each.addresses() for each in tensors]
        table = self._memory.hold(torch.stack(tables))
        table.points_to = tuple(peer for each in tensors for peer in each.peers)  # type: ignore[attr-defined]
        return table

    # ---- what the caller may use

    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor) -> Dispatched:
        """Send each token to the ranks of its experts; return the rows of this rank's experts.

        x: [T, H]; topk_ids: int32 or int64 [T, topk]. A wrong argument fails the call on all ranks.
        """
        check_no_gradient("ExpertParallel.dispatch", x=x)
        found: Dispatched = self._call(DISPATCH, x, topk_ids)
        return found

    def combine(
        self, rows: torch.Tensor, d: Dispatched, topk_weights: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sums [T, H] of this rank's tokens: of each choice, its weight times its expert's row.

        rows: [C, H], as `d.rows` lies; topk_weights: [T, topk]. A wrong argument fails the call on all ranks.
        """
        check_no_gradient("ExpertParallel.combine", rows=rows, topk_weights=topk_weights, out=out)
        sums: torch.Tensor = self._call(COMBINE, rows, d, topk_weights, out)
        return sums

    def combine_backward(
        self, grad: torch.Tensor, rows: torch.Tensor, d: Dispatched, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of `combine` for its rows and weights, from those of its sums."""
        found: tuple[torch.Tensor, torch.Tensor] = self._call(BACKWARD, grad, rows, d, topk_weights)
        return found

    # ---- one call, see `exchange.call`

    def _plan(self, given: tuple[Any, ...], is_capturing: bool) -> None:
        kind, *given_to = given
        if kind == DISPATCH:
            self._check_tokens("x", *given_to)
        elif kind == COMBINE:
            rows, d, topk_weights, out = given_to
            self._check_rows(rows, d)
            self._check_weights(topk_weights, d)
            check_out(out, [len(d.topk_ids), self.hidden], self.dtype, self.device)
            if out is not None:
                read = {"rows": rows, "topk_weights": topk_weights, "topk_ids": d.topk_ids}
                Apart(out, **read).check(out, *read.values())
        else:
            grad, rows, d, topk_weights = given_to
            self._check_tokens("grad", grad, d.topk_ids)
            self._check_rows(rows, d)
            self._check_weights(topk_weights, d)

    def _agree(self, plan: None, is_capturing: bool) -> None:
        """There is one way."""

    def _allocate_results(self, plan: None, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return given

    def _exchange(self, plan: None, operands: tuple[Any, ...], way: None, is_capturing: bool) -> Any:
        kind, *given = operands
        if kind == DISPATCH:
            return self._dispatch(*given)
        return self._combine(*given) if kind == COMBINE else self._combine_backward(*given)

    def _dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor) -> Dispatched:
        ids = topk_ids.detach().contiguous()
        d = self._new_dispatch(x, ids)
        self._send(x, ids, None)
        self._sort(d)
        self._gather(x, d)
        return d

    def _combine(
        self, rows: torch.Tensor, d: Dispatched, topk_weights: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        weights = topk_weights.detach().to(torch.float32).contiguous()
        sums = rows.new_empty((len(d.topk_ids), self.hidden))
        self._return(rows, d)
        self._sum(rows, d, weights, sums)
        if out is None:
            return sums
        out.detach().copy_(sums)
        return out

    def _combine_backward(
        self, grad: torch.Tensor, rows: torch.Tensor, d: Dispatched, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = topk_weights.detach().to(torch.float32).contiguous()
        of_rows, of_weights = torch.empty_like(d.rows), torch.empty_like(weights)
        self._send(grad, d.topk_ids, weights)
        self._grade(grad, rows, d, of_rows)
        self._collect(d.topk_ids, of_weights)
        return of_rows, of_weights.to(topk_weights.dtype)

    def _stand_in(self, went_ahead: tuple[int, int] | None, *given: Any) -> None:
        """Make the call without a token and without a row."""
        kind, *_ = given
        x, ids = self._tokens.local.new_empty((0, self.hidden)), self._ids.local.new_empty((0, self._topk))
        weights = self._weights.local.new_empty((0, self._topk))
        d = self._new_dispatch(x, ids)
        d.offsets.zero_()
        nothing = {DISPATCH: (x, ids), COMBINE: (d.rows, d, weights, None), BACKWARD: (x, d.rows, d, weights)}
        self._exchange(None, (kind, *nothing[kind]), None, False)

    def _ask_peers(self) -> None:
        """Hosts agree on nothing."""

    def _leave_hosts(self) -> None:
        if self._meeting is not None:
            self._meeting.leave()

    def _leave_peers(self) -> None:
        """Come to no exchange that has not been completed, see [Note: an exchange is lost once]."""
        completed = self._state[:, DONE.value]
        for peer, flags in enumerate(self._flags.peers):
            if peer != self.rank:
                raised = flags[:, self.rank]
                raised += LEFT * (raised - completed <= 1)  # else this rank is given up there

    def _make_owed_collectives(self, given: tuple[Any, ...], agreed: Any) -> None:
        """There is none."""

    def _collectives(self, plan: None) -> list[Callable[[], None]]:
        return []

    # ---- checks

    def _check_tokens(self, name: str, x: torch.Tensor, topk_ids: torch.Tensor) -> None:
        check_tensor(name, x, self.dtype, self.device)
        check_choices("topk_ids", topk_ids, self.device, integers=True)
        if x.shape[1] != self.hidden:
            raise ValueError(f"{name} has shape {list(x.shape)}; [T, hidden={self.hidden}] is needed")
        if len(x) > self._most_tokens:
            raise ValueError(
                f"{len(x)} tokens; this operation takes up to tokens_per_rank={self._most_tokens}"
            )
        if topk_ids.shape != (len(x), self._topk):
            needed = f"[{len(x)}, topk={self._topk}]"
            raise ValueError(f"topk_ids has shape {list(topk_ids.shape)}; {needed} is needed")

    def _check_rows(self, rows: torch.Tensor, d: Dispatched) -> None:
        check_tensor("rows", rows, self.dtype, self.device)
        if rows.shape != d.rows.shape or len(rows) != self.capacity:
            raise ValueError(
                f"rows have shape {list(rows.shape)}; [C={self.capacity}, hidden={self.hidden}] is needed"
            )

    def _check_weights(self, topk_weights: torch.Tensor, d: Dispatched) -> None:
        check_choices("topk_weights", topk_weights, self.device, integers=False)
        if topk_weights.shape != d.topk_ids.shape:
            shapes = f"topk_weights {list(topk_weights.shape)}, topk_ids {list(d.topk_ids.shape)}"
            raise ValueError(f"{shapes}: they must be of one shape")

    # ---- the launches

    def _new_dispatch(self, x: torch.Tensor, ids: torch.Tensor) -> Dispatched:
        offsets, sources, places = (
            torch.empty(length, dtype=torch.int32, device=self.device)
            for length in (self._own_experts + 1, self.capacity, self._most_tokens * self._topk)
        )
        return Dispatched(x.new_empty((self.capacity, self.hidden)), offsets, sources, places, ids)

    def _grid(self, items: int) -> Any:
        sms = self._sms or INTERPRETED_SMS
        return lambda meta: (max(1, min(items, meta["PER_SM"] * sms)),)

    def _send(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None) -> None:
        held = (self._tokens, self._ids, self._weights, self._counts, self._flags)
        given = (x.detach(), ids, self._weights.local if weights is None else weights)
        sizes = (size_class(len(x)), len(x), self._most_tokens, self._own_experts, self.rank, x.stride(0))
        send_tokens[self._grid(len(x))](
            *given,
            *(each.local for each in held),
            *(self._sent_to, self._state, *sizes),
            **self._of_row,
            WEIGHTED=weights is not None,
            CHOICES=triton.next_power_of_2(self._topk),
        )

    def _sort(self, d: Dispatched) -> None:
        held = (
            self._ids.local,
            self._counts.local,
            self._flags.local,
            self._errors,
            self._state,
            self._found,
        )
        sizes = (self._most_tokens, self._own_experts, self.rank, self._length)
        grid = (self._own_experts, SEGMENTS)
        count_choices[grid](*held, *sizes, self._patience_ticks, **self._of_positions)
        place_choices[grid](
            *held,
            *(d.sources, d.places, d.offsets, *sizes, self.capacity, self._patience_ticks),
            **self._of_positions,
            SEGMENTS=SEGMENTS,
            EXPERTS=triton.next_power_of_2(self._own_experts),
        )

    def _gather(self, x: torch.Tensor, d: Dispatched) -> None:
        sizes = (size_class(len(x)), len(x), self._most_tokens, self._own_experts, self.rank, x.stride(0))
        tensors = (x.detach(), self._tokens.local, d.rows, d.sources, d.offsets, self._state)
        gather_rows[self._grid(self.capacity)](*tensors, *sizes, **self._of_row)

    def _return(self, rows: torch.Tensor, d: Dispatched) -> None:
        tensors = (rows.detach(), self._choices.local, self._flags.local, self._returned_to)
        sizes = (size_class(len(d.topk_ids)), self._most_tokens, self._own_experts, self.rank, rows.stride(0))
        planned = (d.sources, d.offsets, self._state)
        return_rows[self._grid(self.capacity)](*tensors, *planned, *sizes, **self._of_row)

    def _sum(self, rows: torch.Tensor, d: Dispatched, weights: torch.Tensor, out: torch.Tensor) -> None:
        tokens = len(d.topk_ids)
        tensors = (rows.detach(), self._choices.local, d.topk_ids, weights, d.places, out)
        sizes = (size_class(tokens), tokens, self._most_tokens, self._own_experts, self.capacity, self.rank)
        sum_rows[self._grid(tokens)](
            *tensors,
            *(self._flags.local, self._errors, self._state, *sizes, self._patience_ticks, rows.stride(0)),
            **self._of_row,
        )

    def _grade(self, grad: torch.Tensor, rows: torch.Tensor, d: Dispatched, out: torch.Tensor) -> None:
        tensors = (
            grad.detach(),
            self._tokens.local,
            rows.detach(),
            self._weights.local,
            out,
            self._dots.local,
        )
        planned = (self._flags.local, self._graded_to, d.sources, d.offsets, self._errors, self._state)
        sizes = (size_class(len(grad)), len(grad), self._most_tokens, self._own_experts, self.rank)
        grade_rows[self._grid(self.capacity)](
            *(*tensors, *planned, *sizes, self._patience_ticks, grad.stride(0), rows.stride(0)),
            **self._of_row,
        )

    def _collect(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        sizes = (len(ids), self._most_tokens, self._own_experts, self.rank, self._patience_ticks)
        programs = max(1, min(-(-out.numel() // BLOCK_POSITIONS), self._sms or INTERPRETED_SMS))
        collect_dots[(programs,)](
            *(self._dots.local, ids, out, self._flags.local, self._errors, self._state, *sizes),
            K=self._topk,
            WORLD=self.world_size,
            BLOCK=BLOCK_POSITIONS,
        )

    # ---- failures

    def _describe(self, peer: int, failure: Failure) -> str:
        if failure.kind == OVER_CAPACITY.value:
            return f"a dispatch brought {failure.seen} rows to rank {peer}; capacity={self.capacity} are kept"
        what = {NOT_DISPATCHED.value: "dispatch its tokens", NOT_RETURNED.value: "return its rows"}
        return f"rank {peer} did not {what[failure.kind]} in time"
