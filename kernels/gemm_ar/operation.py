"""`sum over ranks a @ weight.T` on all ranks, and what follows it in a transformer: residual and RMSNorm.

A call is a product, by torch or `persistent_matmul`, and an exchange of rows, in memory of `memory`:

    low-latency  multiply, send what comes out | add what comes, end it; or, of an operand that does not suit,
                 product to parts | send rows, add what comes, end them
    one-shot     product to parts | add rows of all parts, end them
    two-shot     product to parts | add the own rows of all parts, to sums | read all sums, end them
    collective   product to parts, or to the result | all-reduce | end them
    overlapped   GemmReduceScatter to sums | read all sums, end them

The kernels of low-latency calls are in `sending` and `low_latency`; every other kernel after a bar is
`pull.add_rows`. Why they end, and read no row too early or too late, is said there; why all ranks take the
same way, in `ways`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dist_autotune import is_tuning, tunable
from dist_autotune.for_operations import CachedChoice

from ..agreement.failures import FailureKinds, Refusal
from ..exchange import mail
from ..exchange.call import NumberedCalls, numbered
from ..exchange.flags import NO_MAIL, NOT_READ, OTHER_ROWS
from ..gemm.configs import class_of_rows
from ..gemm.operation import persistent_matmul
from ..gemm_rs import GemmReduceScatter
from ..tensors import Apart, check_eps, check_no_gradient, check_sizes, layout_of, remember
from . import sending
from .memory import GATHER, RowsMemory
from .pull import MOST_ROWS, REFUSED
from .rows import Ends
from .ways import COLLECTIVE, LOW_LATENCY, ONE_SHOT, OVERLAPPED, OVERLAPPED_FROM, TWO_SHOT, WAYS, Ways

EPS = 1e-6
PRODUCTS = ("torch", "own")
OWN_FROM = 257  # rows, as a choice: below, reading the weight bounds a product, and cuBLAS reads as fast
SEND = "send"  # the first launch of a low-latency call
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class RowsLayout(NamedTuple):
    """What is the same in all calls whose tensors lie alike."""

    rows: int
    kind: tuple[int, bool, bool]  # class of rows, may it be overlapped, has it a norm: all calls take one way
    ways: tuple[str, ...]  # that it may take
    choose: CachedChoice[str]  # one of them
    product: CachedChoice[str] | None  # one of PRODUCTS; None: torch's
    part: torch.Tensor  # what this rank adds, of the operation's memory
    launches: dict[str, Any]
    is_sent: bool  # by the kernel that multiplies, in low-latency calls
    apart: Apart | None  # a result that was given, from what it is the sum of


class SumOperands(NamedTuple):
    """The tensors of a call. Made in each call: no dataclass."""

    a: torch.Tensor
    weight: torch.Tensor | None
    ends: Ends
    eps: float


class GemmAllReduce(NumberedCalls):
    """`op(a [M, K], weight [N, K])` returns `sum over ranks a @ weight.T`, [M, N], the same on all ranks.

    Given `residual` [M, N] and `norm_weight` [N] it returns the pair (RMSNorm(s) * norm_weight, s) for
    s = sum + residual, in one kernel after the product. The residual and the norm's weight are equal on all
    ranks, and so are the results then, bit for bit.

    M may change from call to call, up to `m`, and is equal on all ranks; N is `n`; K is each rank's part of
    the inner dimension and may differ. The weight's rows are contiguous, or its columns, as those of `w.T`. A
    rank's product is rounded to `dtype`; the products are added in float32, in the order of the ranks, and
    the residual after them; the sum is rounded, once, and the norm is that of the rounded sum, in float32.
    With a collective the process group adds the products, in its own order and precision. An overlapped call
    does not round the product of the rank that adds, and rounds the sum before the residual, too.

    Calls need no host synchronisation between them, and may be captured in CUDA graphs and replayed any
    number of times among eager calls, in the same order on all ranks; before the capture, call once with the
    same shapes. `timeout_s` is how long a kernel waits for a peer. Opening and closing are collective. Tune
    it inside `contextual_autotune`: outside, a shape that has not been tuned takes the first candidate.

    `way` is "low-latency" (up to 64 rows and an even n; other calls are one-shot then), "one-shot",
    "two-shot", "collective" or "overlapped" (with a product, and rows that the ranks share evenly; other
    calls are two-shot then) for all calls, or None, which tunes it for each class of M (see `gemm.configs`);
    all ranks pass the same. Where this rank would take another than the last call of the class did, its host
    waits for the peers to come to the call. A captured call takes the way of the last eager one of its class.

    Each rank holds m * (1 + 1 / W) * n elements of symmetric memory beside its operands, and for low-latency
    calls 4 W * min(m, 64) * n elements more; where calls may be overlapped, from m = 1024 on, what
    `GemmReduceScatter` holds.
    """

    _collective: Ways
    _travels = "kernels read and write the rows of peers"
    _failure_kinds = FailureKinds(
        {
            OTHER_ROWS.value: "rank {peer} has {seen} rows, not as many as this rank",
            NOT_READ.value: "rank {peer}, or one that it waits for, did not read the rows of rank {rank} in "
            "time",
            NO_MAIL.value: "rank {peer}, or one that it waits for, did not send its rows in time",
        },
        late="rank {peer}, or one that it waits for, did not offer its rows in time",
        of_callers=(OTHER_ROWS.value,),
        refusal=Refusal(OTHER_ROWS.value, REFUSED.value, REFUSED.value),
    )

    def __init__(
        self,
        m: int,
        n: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        *,
        timeout_s: float = 300.0,
        way: str | None = None,
    ) -> None:
        check_sizes(m=m, n=n)
        if m > MOST_ROWS.value:
            raise ValueError(f"m={m} rows; it must be {MOST_ROWS.value} or less")
        if way not in (None, *WAYS):
            raise ValueError(f"way is {way!r}; it is one of {', '.join(WAYS)}, or None, which tunes it")
        self._m, self._n, self._dtype = m, n, dtype
        self._fixed, self._wants_low_latency = way, way in (None, LOW_LATENCY)
        self._overlaps = way == OVERLAPPED or (way is None and m >= OVERLAPPED_FROM)
        self._open_scatter = functools.partial(
            GemmReduceScatter, m, n, dtype, group, backend, timeout_s=timeout_s, collective=False
        )
        super().__init__(dtype, group, backend, timeout_s)

    def _allocate(self) -> None:
        memory, world = self._memory, self.world_size
        memory.require_equal("way", str(self._fixed))  # what is allocated depends on it
        has_low_latency = self._wants_low_latency and mail.can_take(1, self._n, self._dtype)
        sizes = self._m, self._n, self._dtype, self._failures.words
        self._rows = RowsMemory(memory, *sizes, has_low_latency=has_low_latency)
        self._parts, self._sums = self._rows.parts.local, self._rows.sums.local
        most_low_latency = mail.MOST_ROWS if has_low_latency else 0
        self._collective = Ways(memory, fixed=self._fixed, most_low_latency=most_low_latency)
        self._scatter = self._open_scatter() if self._overlaps and world > 1 else None
        self._layouts: dict[Hashable, RowsLayout] = {}  # by those of tensors that have been checked

    def _other_rows(self) -> str:
        return self._collective.differing()

    def _check_usable(self, calls: float | None = None) -> None:
        if not self._is_closed and self._scatter is not None:
            self._scatter.raise_known_failure()  # which says more than that the call was not carried out
        super()._check_usable(calls)

    def _end(self) -> None:
        if self._scatter is not None:
            self._scatter.abandon()  # unless it is closed
        super()._end()

    def meet_first(self) -> None:
        super().meet_first()
        if self._scatter is not None:
            self._scatter.meet_first()

    def close(self) -> None:
        """Meet the peers, give the memory back and raise what went wrong; a second call does nothing."""
        if not self._is_closed and self._scatter is not None:
            try:
                self._scatter.close()
            except BaseException:
                self.abandon()
                raise
        super().close()

    # ---- what the caller may use

    @property
    def part(self) -> torch.Tensor:
        """The buffer [m, N] of what this rank adds: to `all_reduce` its first rows pass without a copy."""
        self._check_usable()
        return self._parts

    @numbered
    def __call__(
        self,
        a: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = EPS,
    ) -> Result:
        """Return the sum, or with residual and norm_weight the pair; `out` is where the first is written.

        residual: [M, N], its rows contiguous. norm_weight: [N]. Both are of `dtype`, or both are None.

        A wrong argument raises on all ranks, and the next call may be made; other failures break the
        operation: see `exchange.call`. They are raised at the end of the call on the CPU, and on a GPU by a
        later call, `check` or `close`; results are NaN.
        """
        return self._call(a, weight, out, residual, norm_weight, eps, True)

    @numbered
    def all_reduce(self, part: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum over ranks of `part` [M, N], its rows contiguous; `out` as above, or `part` itself.

        Rows of `op.part` are not copied, and may be overwritten where nothing is being tuned.
        """
        result = self._call(part, None, out, None, None, EPS, False)
        assert isinstance(result, torch.Tensor)
        return result

    @numbered
    def all_reduce_rms_norm(
        self,
        part: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float = EPS,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pair for s = sum over ranks of `part` [M, N] + residual; `out` as in `all_reduce`."""
        result = self._call(part, None, out, residual, norm_weight, eps, False)
        assert isinstance(result, tuple)
        return result

    # ---- one call, see `exchange.call`

    def _new_layout(self, rows: int, k: int, *, multiplies: bool, has_norm: bool) -> RowsLayout:
        dtype = str(self._dtype)
        can_overlap = self._scatter is not None and multiplies and rows % self.world_size == 0
        size_class = class_of_rows(rows)
        ways = self._collective.options(size_class, can_overlap=can_overlap)
        may_overlap = OVERLAPPED in ways
        kind = size_class, may_overlap, has_norm
        key = (size_class, may_overlap, self.world_size, self._n, dtype, has_norm)  # equal on all ranks
        choose, product = CachedChoice(functools.partial(self._collective.choose, ways, key)), None
        if multiplies and rows >= OWN_FROM and self._dtype != torch.float32:
            key_of_product = (size_class, self._n, k, dtype)
            ask = functools.partial(tunable, "gemm_ar product", PRODUCTS, key=key_of_product)
            product = CachedChoice(ask)
        return RowsLayout(rows, kind, ways, choose, product, self._parts[:rows], {}, False, None)

    def _choose(self, layout: RowsLayout) -> str:
        return layout.choose()

    def _plan(self, given: tuple[Any, ...], is_capturing: bool) -> RowsLayout:
        a, weight, out, residual, norm_weight, eps, multiplies = given
        if torch.is_grad_enabled():
            asked = {"a" if multiplies else "part": a, "weight": weight, "out": out}
            check_no_gradient("GemmAllReduce", **asked, residual=residual, norm_weight=norm_weight)
        check_eps(eps)
        own, of_ending = self._rows.own, None
        of_part = own.layout_of(a)
        if not (out is residual is norm_weight is None):
            of_ending = own.layout_of(out), own.layout_of(residual), layout_of(norm_weight)
        lie = multiplies, of_part, layout_of(weight), of_ending
        layout = self._layouts.get(lie)
        if layout is None:
            self._rows.check(given)
            made = self._new_layout(*a.shape, multiplies=multiplies, has_norm=residual is not None)
            if weight is not None and self._rows.sending is not None and sending.can_send(a, weight):
                made = made._replace(is_sent=True)
            if out is not None:
                rest = {"weight": weight, "residual": residual, "norm_weight": norm_weight}
                made = made._replace(apart=Apart(out, **{"a" if multiplies else "part": a}, **rest))
            layout = remember(self._layouts, lie, made)
        if out is not None and layout.apart is not None:
            is_in_place = not multiplies and out.is_set_to(a)
            layout.apart.check(out, None if is_in_place else a, weight, residual, norm_weight)
        return layout

    def _agree(self, layout: RowsLayout, is_capturing: bool) -> str:
        return self._collective.settle(
            layout.kind, self._choose(layout), layout.rows, is_capturing=is_capturing
        )

    def _allocate_results(self, layout: RowsLayout, given: tuple[Any, ...]) -> SumOperands:
        a, weight, out, residual, norm_weight, eps, _ = given
        part = layout.part
        result = part.new_empty(part.shape) if out is None else out
        sums = None if residual is None else part.new_empty(part.shape)
        return SumOperands(a, weight, (residual, norm_weight, result, sums), float(eps))

    def _exchange(self, layout: RowsLayout, operands: SumOperands, way: str, is_capturing: bool) -> Result:
        a, weight, ends, eps = operands
        _, _, out, sums = ends
        if way == OVERLAPPED and way in layout.ways:
            assert self._scatter is not None
            assert weight is not None
            self._scatter(a, weight, self._sums[: layout.rows // self.world_size])
            self._launch(OVERLAPPED, layout, ends, eps)
        else:
            part = out if way == COLLECTIVE and sums is None and out.is_contiguous() else layout.part
            kept = self._multiply(way, layout, a, weight, part)
            self._add_up(way, layout, part, ends, eps)
            if kept is not None:
                a.copy_(kept)
        return out if sums is None else (out, sums)

    def _multiply(
        self, way: str, layout: RowsLayout, a: torch.Tensor, weight: torch.Tensor | None, part: torch.Tensor
    ) -> torch.Tensor | None:
        """Enqueue the product, to `part` or to the peers; return what `a` is to be again, if anything."""
        if weight is None:
            if part.data_ptr() != a.data_ptr():
                part.copy_(a)
            elif part is layout.part and way == COLLECTIVE and is_tuning():  # another run may follow
                return a.clone()
        elif way == LOW_LATENCY and layout.is_sent:
            send = layout.launches.get(SEND)
            if send is None:
                send = layout.launches[SEND] = self._rows.prepare_send(a, weight)
            send((), (a, weight), ())
        elif layout.product is not None and layout.product() == "own":
            persistent_matmul(a, weight.T, out=part)
        else:
            torch.mm(a, weight.T, out=part)
        return None

    def _add_up(self, way: str, layout: RowsLayout, part: torch.Tensor, ends: Ends, eps: float) -> None:
        """Enqueue what adds up the ranks' parts, and ends the sums."""
        residual, norm_weight, out, sums = ends
        if way in (LOW_LATENCY, ONE_SHOT):
            self._launch(way, layout, ends, eps)
        elif way in (TWO_SHOT, OVERLAPPED):  # as the last eager call was, which had a product
            self._launch(TWO_SHOT, layout, (residual, None, self._sums, None), eps)
            self._launch(GATHER, layout, (None, norm_weight, out, sums), eps)
        else:
            self._collective.all_reduce(part)
            if sums is not None:
                self._launch(COLLECTIVE, layout, ends, eps)
            elif part is not out:
                out.copy_(part)

    def _launch(self, what: str, layout: RowsLayout, ends: Ends, eps: float) -> None:
        launch = layout.launches.get(what)
        if launch is None:
            is_sent, programs = layout.is_sent, self._facts.programs
            launch = self._rows.prepare(what, layout.part, ends, programs, sent=is_sent)
            layout.launches[what] = launch
        launch(ends, self._patience_ticks, eps)

    # ---- calls that fail

    def _stand_in(self, went_ahead: tuple[int, int] | None, *given: Any) -> None:
        way, rows = self._collective.of_peers(went_ahead)
        if way == COLLECTIVE:
            self._take_part(rows)
            return
        if way == OVERLAPPED:
            assert self._scatter is not None
            self._scatter._calls += 1
            self._scatter._stand_in(None)
        self._rows.stand_in(way, rows, self._facts.programs, self._patience_ticks, EPS)

    def _collectives(self, layout: RowsLayout) -> list[Callable[[], None]]:
        return [lambda: self._take_part(layout.rows)]

    def _take_part(self, rows: int) -> None:
        self._collective.all_reduce(self._parts.new_full((rows, self._n), math.nan))

    def _leave_peers(self) -> None:
        if self._scatter is not None:
            self._scatter._leave_peers()
        self._rows.leave()
