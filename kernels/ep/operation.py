"""`ExpertParallel`: tokens travel to the ranks of their experts, and results back."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dist_autotune import tunable

from ..agreement.failures import FailureKinds
from ..exchange.call import NumberedCalls, numbered
from ..moe.launch import check_experts, size_class
from ..moe.tokens import check_choices, check_weights
from ..signals import Failure
from ..tensors import Apart, check_fp8, check_no_gradient, check_out, check_sizes, check_tensor, check_ways
from .launches import Dispatched, Launches, Sizes, check_is_dispatched
from .slots import NOT_DISPATCHED, NOT_RETURNED, OTHER_FORMAT, OVER_CAPACITY, SCALED

DISPATCH, COMBINE = "dispatch", "combine"  # kinds of calls, and the exchanges that they are
DISPATCH_MATMUL, MATMUL_COMBINE, BACKWARD = "dispatch_matmul", "matmul_combine", "combine_backward"
# The arguments of kinds that have no backward.
ARGUMENTS = {
    DISPATCH: ("x", "topk_ids", "fp8"),
    COMBINE: ("rows", "d", "topk_weights", "out"),
    DISPATCH_MATMUL: ("x", "weight", "topk_ids"),
    MATMUL_COMBINE: ("rows", "weight", "d", "topk_weights", "out"),
}

MOST_POSITIONS = 2**30  # choices of all ranks, in two slots of int32 positions
MOST_RANKS = 32  # of which a kernel holds a bit each
MOST_TOKENS_AT_ONCE = 128  # placing more in one launch takes longer than the launches that it saves

_NUMBERS = itertools.count()
OPEN: weakref.WeakValueDictionary[str, ExpertParallel] = weakref.WeakValueDictionary()  # by name


class ExpertParallel(NumberedCalls):
    """Dispatch of tokens to experts on other ranks, and combine of their results; a context manager.

        d = op.dispatch(x [T, H], topk_ids [T, topk])         # d.rows [C, H], d.offsets [experts / W + 1]
        y = op.combine(rows [C, H], d, topk_weights [T, topk])  # [T, H]

        d = op.dispatch_matmul(x, weight [experts / W, N, H], topk_ids)    # d.rows [C, N]: products
        y = op.matmul_combine(rows [C, F], weight [experts / W, H, F], d, topk_weights)

    Expert e lives on rank e // (experts / W). T is 0 to `tokens_per_rank`, may differ from rank to rank and
    change from call to call; the host waits for no count. C is W * tokens_per_rank * min(topk, experts / W),
    or `capacity`, if that is less: more rows are an error, raised by the next call, `check` or `close`. A
    choice that is no expert, such as -1, is dropped. A token's results are added in float32 in the order of
    its choices; those of dropped choices count nothing.

    All ranks make the same calls in the same order, see [Note: an exchange ends]. Each holds
    2 * (W + topk) * tokens_per_rank * H elements of symmetric memory. Kernels are tuned inside
    `contextual_autotune`. one_launch: whether calls of up to 128 tokens are one launch each way; None tunes
    it. Ranks may differ in it.
    """

    _agrees = False
    _travels = "kernels write rows to the peers"
    _failure_kinds = FailureKinds({}, of_callers=(OVER_CAPACITY.value, OTHER_FORMAT.value), advice="")

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
        one_launch: bool | None = False,
        timeout_s: float = 300.0,
    ) -> None:
        check_sizes(tokens_per_rank=tokens_per_rank, hidden=hidden, experts=experts, topk=topk)
        if capacity is not None:
            check_sizes(capacity=capacity)
        if topk > experts:
            raise ValueError(f"topk={topk} is more than experts={experts}: a token chooses an expert once")
        check_ways(one_launch=one_launch)
        self._one_launch = one_launch
        self.name = f"ExpertParallel {next(_NUMBERS)}"  # among those of this process
        self.tokens_per_rank, self.topk, self._asked_capacity = tokens_per_rank, topk, capacity
        self.hidden, self.experts, self.dtype = hidden, experts, dtype
        super().__init__(dtype, group, backend, timeout_s)
        OPEN[self.name] = self

    def _allocate(self) -> None:
        memory, world = self._memory, self.world_size
        if self.experts % world:
            raise ValueError(f"experts={self.experts} must be a multiple of the number of ranks, {world}")
        positions = world * self.tokens_per_rank * self.topk
        if 2 * positions >= MOST_POSITIONS or world > MOST_RANKS:
            raise ValueError(
                f"{world} ranks x tokens_per_rank={self.tokens_per_rank} x topk={self.topk} are more than "
                f"{MOST_POSITIONS // 2} choices, or than {MOST_RANKS} ranks"
            )
        for name, value in (("hidden", self.hidden), ("experts", self.experts), ("topk", self.topk)):
            memory.require_equal(name, value)
        own_experts = self.experts // world
        most = world * self.tokens_per_rank * min(self.topk, own_experts)
        self.capacity = min(self._asked_capacity or most, most)
        sizes = Sizes(self.tokens_per_rank, self.hidden, own_experts, self.topk, self.capacity)
        self._has_told_peers = False
        self._launches = Launches(memory, self._failures.words, sizes, self.dtype)

    # ---- what the caller may use

    @numbered
    def dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, *, fp8: bool = False) -> Dispatched:
        """Send each token to the ranks of its experts; return the rows of this rank's experts.

        x: [T, H]; topk_ids: int32 or int64 [T, topk]. A wrong argument fails the call on all ranks. fp8, on
        all ranks or none: tokens travel in float8_e4m3fn, with a scale for each 128 elements; rows are of x's
        type.
        """
        found: Dispatched = self._call(DISPATCH, x, topk_ids, fp8)
        return found

    @numbered
    def combine(
        self, rows: torch.Tensor, d: Dispatched, topk_weights: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sums [T, H] of this rank's tokens: of each choice, its weight times its expert's row.

        rows: [C, H], as `d.rows` lies; topk_weights: [T, topk]. A wrong argument fails the call on all ranks.
        """
        sums: torch.Tensor = self._call(COMBINE, rows, d, topk_weights, out)
        return sums

    @numbered
    def combine_backward(
        self, grad: torch.Tensor, rows: torch.Tensor, d: Dispatched, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of `combine` for its rows and weights, from those of its sums."""
        found: tuple[torch.Tensor, torch.Tensor] = self._call(BACKWARD, grad, rows, d, topk_weights)
        return found

    @numbered
    def dispatch_matmul(self, x: torch.Tensor, weight: torch.Tensor, topk_ids: torch.Tensor) -> Dispatched:
        """Dispatch tokens, and return each times its expert's matrix: `d.rows` [C, N].

        weight: [experts / W, N, hidden], by rows or by columns. Tokens are read where they have arrived, so
        no matrix of them is made.
        """
        found: Dispatched = self._call(DISPATCH_MATMUL, x, weight, topk_ids)
        return found

    @numbered
    def matmul_combine(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        d: Dispatched,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the sums [T, hidden] of each row times its expert's matrix, combined.

        rows: [C, F]; weight: [experts / W, hidden, F], by rows or by columns. Products leave for the ranks of
        their tokens, tile by tile, while others are computed.
        """
        sums: torch.Tensor = self._call(MATMUL_COMBINE, rows, weight, d, topk_weights, out)
        return sums

    def matmul(self, rows: torch.Tensor, weight: torch.Tensor, d: Dispatched) -> torch.Tensor:
        """Return each row [C, F] times its expert's matrix, [C, N]; it meets no peer, and takes no number.

        weight: [experts / W, N, F], by rows or by columns.
        """
        check_no_gradient("ExpertParallel.matmul", rows=rows, weight=weight)
        self._check_usable()
        check_is_dispatched(d)
        self._check_product(rows, weight, d, None)
        return self._launches.product(rows, weight, d)

    # ---- one call, see `exchange.call`

    def _plan(self, given: tuple[Any, ...], is_capturing: bool) -> None:
        kind, *given_to = given
        if kind in ARGUMENTS:
            named = zip(ARGUMENTS[kind], given_to, strict=True)
            check_no_gradient(f"{type(self).__name__}.{kind}", **dict(named))
        if kind == DISPATCH:
            *tokens, fp8 = given_to
            self._check_tokens("x", *tokens)
            if fp8:
                self._check_fp8()
        elif kind == DISPATCH_MATMUL:
            x, weight, topk_ids = given_to
            self._check_tokens("x", x, topk_ids)
            self._check_experts(weight, self.hidden)
        elif kind == BACKWARD:
            grad, rows, d, topk_weights = given_to
            self._launches.sizes.check_dispatched(d)
            self._check_tokens("grad", grad, d.topk_ids)
            self._check_rows(rows)
            check_weights(topk_weights, d.topk_ids)
        else:
            rows, *weight, d, topk_weights, out = given_to
            self._launches.sizes.check_dispatched(d)
            if kind == COMBINE:
                self._check_rows(rows)
            else:
                self._check_product(rows, weight[0], d, self.hidden)
            check_weights(topk_weights, d.topk_ids)
            check_out(out, [len(d.topk_ids), self.hidden], self.dtype, self.device)
            if out is not None:
                read = {"topk_weights": topk_weights, "topk_ids": d.topk_ids}
                read |= dict(zip(("rows", "weight"), (rows, *weight), strict=False))
                Apart(out, **read).check(out, *read.values())

    def _agree(self, plan: None, is_capturing: bool) -> None:
        """There is one way."""

    def _allocate_results(self, plan: None, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return given

    def _exchange(self, plan: None, operands: tuple[Any, ...], way: None, is_capturing: bool) -> Any:
        kind, *given = operands
        calls: dict[str, Callable[..., Any]] = {
            DISPATCH: self._dispatch,
            DISPATCH_MATMUL: self._dispatch_matmul,
            COMBINE: self._combine,
            MATMUL_COMBINE: self._matmul_combine,
            BACKWARD: self._combine_backward,
        }
        return calls[kind](*given)

    def _dispatch(self, x: torch.Tensor, topk_ids: torch.Tensor, fp8: bool) -> Dispatched:
        d, is_whole = self._send(DISPATCH, x, topk_ids, self.hidden, fp8=fp8)
        if not is_whole:
            self._launches.gather(x, d, fp8=fp8)
        return d

    def _dispatch_matmul(self, x: torch.Tensor, weight: torch.Tensor, topk_ids: torch.Tensor) -> Dispatched:
        d, _ = self._send(DISPATCH_MATMUL, x, topk_ids, weight.shape[1])
        self._launches.multiply(None, weight, d, d.rows)
        return d

    def _send(
        self, kind: str, x: torch.Tensor, topk_ids: torch.Tensor, columns: int, *, fp8: bool = False
    ) -> tuple[Dispatched, bool]:
        """Enqueue a dispatch up to where its rows lie; return it, and whether that was in one launch.

        In one launch those of a dispatch have been copied, too.
        """
        d = self._launches.new_dispatch(topk_ids.detach().contiguous(), columns)
        at_once = self._is_at_once(kind, len(x))
        to_all, patience_ticks = kind == DISPATCH_MATMUL, self._patience_ticks
        self._launches.send(x, d, None, patience_ticks, to_all=to_all, fp8=fp8, at_once=at_once)
        if not at_once:
            self._launches.sort(d, patience_ticks, fp8=fp8)
        return d, at_once

    def _is_at_once(self, kind: str, tokens: int) -> bool:
        """Return whether this rank makes its part of an exchange of so many tokens in one launch."""
        if tokens > MOST_TOKENS_AT_ONCE:
            return False
        if self._one_launch is not None:
            return self._one_launch
        # To place the rows of peers with many tokens in one launch is slow: no default where there may be.
        ways = (True, False) if self.tokens_per_rank <= MOST_TOKENS_AT_ONCE else (False, True)
        key = (size_class(tokens), self.hidden, self.topk, self.experts, self.world_size)
        return tunable(f"ep {kind} in one launch", ways, key=key)

    def _combine(
        self, rows: torch.Tensor, d: Dispatched, topk_weights: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        weights, sums = topk_weights.detach().contiguous(), self._new_sums(d, out)
        given = (rows, d, weights, sums, self._patience_ticks)
        at_once = self._is_at_once(COMBINE, len(sums))
        self._launches.combine(*given, returns=True, sums=at_once)
        if not at_once:
            self._launches.combine(*given, returns=False, sums=True)
        return sums if out is None else out

    def _matmul_combine(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        d: Dispatched,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        weights, sums = topk_weights.detach().contiguous(), self._new_sums(d, out)
        self._launches.multiply(rows, weight, d, None)
        self._launches.combine(None, d, weights, sums, self._patience_ticks, returns=False, sums=True)
        return sums if out is None else out

    def _new_sums(self, d: Dispatched, out: torch.Tensor | None) -> torch.Tensor:
        if out is not None:
            return out.detach()
        return self._launches.new_rows(0).new_empty((len(d.topk_ids), self.hidden))

    def _combine_backward(
        self, grad: torch.Tensor, rows: torch.Tensor, d: Dispatched, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = topk_weights.detach().to(torch.float32).contiguous()
        of_rows, of_weights = self._launches.new_rows(self.hidden), torch.empty_like(weights)
        self._launches.send(grad, d, weights, self._patience_ticks)
        self._launches.grade(grad, rows, d, of_rows, self._patience_ticks)
        self._launches.collect(d.topk_ids, of_weights, self._patience_ticks)
        return of_rows, of_weights.to(topk_weights.dtype)

    def _stand_in(self, went_ahead: tuple[int, int] | None, *given: Any) -> None:
        """Make the exchange of the call without a token and without a row."""
        kind, *_, last = given
        x = self._launches.new_rows(self.hidden)[:0]
        ids = torch.empty((0, self.topk), dtype=torch.int32, device=self.device)
        weights = torch.empty((0, self.topk), device=self.device)
        d = self._launches.new_dispatch(ids, self.hidden)
        d.offsets.zero_()
        if kind in (DISPATCH, DISPATCH_MATMUL):
            fp8 = False
            with contextlib.suppress(TypeError, ValueError):  # there are no kernels: all ranks refuse it
                self._check_fp8()
                fp8 = last is True
            self._dispatch(x, ids, fp8=fp8)
        elif kind == BACKWARD:
            self._combine_backward(x, d.rows, d, weights)
        else:
            self._combine(d.rows, d, weights, None)

    def _leave_peers(self) -> None:
        self._launches.leave()

    # ---- checks

    def _check_tokens(self, name: str, x: torch.Tensor, topk_ids: torch.Tensor) -> None:
        check_tensor(name, x, self.dtype, self.device)
        check_choices("topk_ids", topk_ids, self.device, integers=True)
        if x.shape[1] != self.hidden:
            raise ValueError(f"{name} has shape {list(x.shape)}; [T, hidden={self.hidden}] is needed")
        if len(x) > self.tokens_per_rank:
            raise ValueError(
                f"{len(x)} tokens; this operation takes up to tokens_per_rank={self.tokens_per_rank}"
            )
        if topk_ids.shape != (len(x), self.topk):
            needed = f"[{len(x)}, topk={self.topk}]"
            raise ValueError(f"topk_ids has shape {list(topk_ids.shape)}; {needed} is needed")

    def _check_fp8(self) -> None:
        if self.hidden % SCALED.value:
            raise ValueError(f"hidden={self.hidden}; fp8 takes a multiple of {SCALED.value}, for its scales")
        if self._facts.is_gpu:
            check_fp8(self.device)

    def _check_rows(self, rows: torch.Tensor) -> None:
        check_tensor("rows", rows, self.dtype, self.device)
        if rows.shape != (self.capacity, self.hidden):
            needed = f"[C={self.capacity}, hidden={self.hidden}]"
            raise ValueError(f"rows have shape {list(rows.shape)}; {needed} is needed")

    def _check_experts(self, weight: torch.Tensor, inner: int, columns: int | None = None) -> None:
        check_experts(weight, inner, self.dtype, self.device)
        own = self.experts // self.world_size
        if len(weight) != own or columns not in (None, weight.shape[1]):
            needed = f"[experts / W={own}, {'N' if columns is None else columns}, {inner}]"
            raise ValueError(f"weight has shape {list(weight.shape)}; {needed} is needed")

    def _check_product(
        self, rows: torch.Tensor, weight: torch.Tensor, d: Dispatched, columns: int | None
    ) -> None:
        check_tensor("rows", rows, self.dtype, self.device)
        if len(rows) != self.capacity or len(d.sources) != self.capacity:
            raise ValueError(f"rows have shape {list(rows.shape)}; [C={self.capacity}, F] is needed")
        self._check_experts(weight, rows.shape[1], columns)

    # ---- failures

    def _error(self) -> Exception | None:
        """Return the exception for the error records; tell peers once where rows did not find room here.

        They have sums of rows that were not kept, and must not wait for this rank's next call.
        """
        error = super()._error()
        if self.rank in self._failures.by_rank() and not self._has_told_peers:
            self._has_told_peers = True
            self._bulletin.tell_broken(self._calls, str(error))
            self._leave_peers()
        return error

    def _describe(self, peer: int, failure: Failure) -> str:
        if failure.kind == OVER_CAPACITY.value:
            kept = f"capacity={self.capacity} are kept. Raise capacity=, or pass none"
            return f"a dispatch brought {failure.seen} rows to rank {peer}; {kept}"
        if failure.kind == OTHER_FORMAT.value:
            here, there = ("", "not ") if failure.seen == 0 else ("not ", "")
            return f"rank {peer} did {there}dispatch in fp8, this rank did {here}so: pass fp8 on all or none"
        what = {NOT_DISPATCHED.value: "dispatch its tokens", NOT_RETURNED.value: "return its rows"}
        return f"rank {peer} did not {what[failure.kind]} in time"
