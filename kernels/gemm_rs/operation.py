"""Each rank's rows of `sum over ranks a @ weight.T`, with the scatter hidden behind the product.

Rows are in W chunks of M / W; chunk p is for rank p. A rank's GEMM computes the chunks of its peers first and
hands each over when its last tile is stored; the own chunk comes last, and its epilogue adds the peers' sums
in float32. The memory of a rank, W ranks:

    partial  [W - 1, m / W, N], slot s - 1: the sums for rank r + s, on their way out
    staged   [W - 1, m / W, N], symmetric, slot s - 1: the sums of rank r + s for this rank
    flags    int32 [7, W], symmetric: see `exchange.flags`

Eager calls with few rows are one launch, other calls one for each chunk, or as tuned. On request the kernel
itself stores sums to the peers' `staged`: one launch is all of a call, and a rank's own choice. Timelines of
all, and why every wait ends: docs/protocol.md, A scatter. Where all ranks agree on it a call is cuBLAS and a
collective instead, see `agreement.collective`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
import triton

from dist_autotune import tunable
from dist_autotune.for_operations import CachedChoice

from ..agreement.ballots import COLLECTIVE
from ..agreement.failures import FailureKinds, Refusal
from ..exchange.call import NumberedCalls, numbered
from ..exchange.fill_nan import filler_of_all
from ..exchange.flags import FLAGS, NO_PERMIT, NOT_SENT, OTHER_ROWS
from ..exchange.push import Pushes, SumPusher
from ..gemm.configs import class_of_rows
from ..gemm.launch import ChunkCall
from ..tensors import (
    FP8,
    Apart,
    check_factors,
    check_fp8,
    check_no_gradient,
    check_out,
    check_scales,
    check_sizes,
    check_tensor,
    check_ways,
    layout_of,
    remember,
)
from . import specialized
from .call import Body, ScatterLayout, ScatterMemory, ScatterOperands
from .plain import PlainBody

# Of an eager call that may be made in steps; each rank chooses for itself. With two ranks a launch for each
# chunk is faster (docs/benchmarks/gemm_rs_steps_2xH200_2026-11-27.md). With more, chunks have fewer tiles and
# the last wave of each counts for more: on four, 336 tiles take three waves of 132, and four launches twelve
# where 10.2 would do.
IN_STEPS, ONE_LAUNCH = LAUNCHES = ("each chunk", "one")
# Beside them, on request: not run between GPUs.
STORES = ("specialized that stores", "plain that stores")


class GemmReduceScatter(NumberedCalls):
    """`op(a [M, K], weight [N, K])` returns this rank's rows of `sum over ranks a @ weight.T`, [M / W, N].

    M may change from call to call, up to `m`, is equal on all ranks and a multiple of their number W; N is
    `n`; K is each rank's part of the inner dimension and may differ. The weight's rows are contiguous, or its
    columns, as those of `w.T`. A rank's part of the sum is rounded to
    `dtype` before it travels, and the parts are added in float32. Calls need no host synchronisation between
    them, and may be captured in CUDA graphs and replayed any number of times among eager calls, in the same
    order on all ranks; before the capture, call once with the same shapes. `timeout_s` is how long a
    kernel waits for a peer, and W times as long until its sums are with all. Opening and closing are
    collective. Kernels of other streams that wait for peers, such as collectives of another dimension of a
    mesh, may run beside a call, if they leave it an SM.
    Tune it inside `contextual_autotune`: outside, a shape that has not been tuned takes the first candidate.

    A warp-specialised kernel multiplies where it can: on Hopper and Blackwell, with rows that TMA can address
    and at least as many of them for each rank as its lowest tile has. With many rows it is launched once for
    each chunk; on more than two ranks that is tuned. Ranks may differ in that.

    `collective=True` makes calls multiply by cuBLAS and add the parts by a reduce-scatter of the group, in
    its own order, False never; None tunes that for each class of M (see `gemm.configs`) up to 4096. All ranks
    pass the same. A rank that would make the first one of a class waits, on the host, for its peers to come
    to the call; they make it if all would. A captured call repeats the way of the last eager call of its
    class; a replay waits for its peers as any collective does.

    `by_stores=True` makes the kernel store its sums into the peers' memory, in calls that are no collective:
    no copy engine, and one launch, also in captures. None tunes that. Ranks may differ in it.

    With dtype float8_e4m3fn rows of a and of the weight have float32 scales, the arguments `scale_a` and
    `scale_weight` of a call. Parts travel, and results are, in bf16. K is then a multiple of 16, and the
    weight's rows are contiguous.

    Each rank holds 2 * (W - 1) * m / W * n elements beside its operands, half of them of symmetric memory.
    """

    _further_dtypes = (FP8,)
    _failure_kinds = FailureKinds(
        {
            OTHER_ROWS.value: "rank {peer} has {seen} rows for each rank, not as many as this rank",
            NO_PERMIT.value: "rank {peer}, or one that it waits for, did not come to the call in time",
            NOT_SENT.value: "the sums of rank {peer} were not copied to all peers, {peers}, in time",
        },
        late="rank {peer}, or one that it waits for, did not push its sums for chunk {rank} in time",
        of_callers=(OTHER_ROWS.value,),
        refusal=Refusal(OTHER_ROWS.value, -1, -1),
    )
    _way = "gemm_rs way"

    def __init__(
        self,
        m: int,
        n: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        *,
        timeout_s: float = 300.0,
        collective: bool | None = None,
        by_stores: bool | None = False,
    ) -> None:
        check_sizes(m=m, n=n)
        check_ways(by_stores=by_stores)
        if dtype == FP8:
            if collective:
                raise ValueError(f"collective=True: no call in {FP8} is made by a collective; pass None")
            collective = False
        self._m, self._n, self._dtype, self._by_stores = m, n, dtype, by_stores
        self._out_dtype = torch.bfloat16 if dtype == FP8 else dtype
        self._key = n, str(dtype)  # of the choice: equal on all ranks, unlike K
        self._makes_collectives = collective
        super().__init__(dtype, group, backend, timeout_s)

    def _allocate(self) -> None:
        world, memory = self.world_size, self._memory
        if self._dtype == FP8 and self.device.type == "cuda":
            check_fp8(self.device)
        shape = (max(1, world - 1), triton.cdiv(self._m, world), self._n)
        staged = memory.allocate(shape, self._out_dtype)
        self._flags = memory.allocate((FLAGS, world), torch.int32)
        partial = memory.hold(torch.zeros_like(staged.local))
        counts = memory.hold(torch.zeros(world + 4, dtype=torch.int32, device=self.device))
        table = memory.hold(staged.addresses(self._flags))
        here = (staged.local, self._flags.local, counts, self._failures.words)
        self._held = ScatterMemory(table, partial, *here)
        self._pushes = Pushes(memory, memory.side_stream(), self._flags)
        self._pusher = SumPusher(self._pushes, partial, staged, with_permits=True)
        filler_of_all(partial[0], self._flags.local, self.rank)(partial[0], only_load=True)
        self._collective = self._open_collective(self._makes_collectives)
        self._layouts: dict[Hashable, ScatterLayout] = {}  # by those of tensors that have been checked
        self._chunk_calls: dict[int | None, ChunkCall] = {}  # by step
        self._may_store = self._by_stores is not False and self.world_size > 1

    def _other_rows(self) -> str:
        return self._collective.differing()

    # ---- what the caller may use

    @numbered
    def __call__(
        self,
        a: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        addend: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return this rank's rows; `out`, if given, is where they are written, beside all operands.

        addend [M, N], contiguous: this rank adds it to `a @ weight.T` before the sum over the ranks. Not in
        fp8.

        In fp8 this rank's product is multiplied by the scales of its rows, `scale_a` [M] or [M, 1], and of
        its columns, `scale_weight` [N] or [N, 1], before it is rounded; all are float32 and contiguous, and
        this rank's own; None is 1.

        A wrong argument raises on all ranks, and the next call may be made; other failures break the
        operation: see `exchange.call`. They are raised at the end of the call on the CPU, and on a GPU by a
        later call, `check` or `close`.
        """
        return self._call(a, weight, out, addend, scale_a, scale_weight)

    # ---- one call, see `exchange.call`

    def _plan(self, given: tuple[Any, ...], is_capturing: bool) -> ScatterLayout:
        a, weight, out, addend, scale_a, scale_weight = given
        if torch.is_grad_enabled():
            scales = {"scale_a": scale_a, "scale_weight": scale_weight}
            check_no_gradient("GemmReduceScatter", a=a, weight=weight, out=out, addend=addend, **scales)
        of_out = None if out is None else layout_of(out)
        of_addend = None if addend is None else layout_of(addend)
        of_scales = None if scale_a is scale_weight is None else (layout_of(scale_a), layout_of(scale_weight))
        lie = layout_of(a), layout_of(weight), of_out, of_addend, of_scales
        layout = self._layouts.get(lie)
        if layout is None:
            self._check_arguments(given)
            layout = remember(self._layouts, lie, self._new_layout(given))
        if out is not None:
            others = () if addend is of_scales is None else (addend, scale_a, scale_weight)
            layout.apart.check(out, a, weight, *others)
        return layout

    def _check_arguments(self, given: tuple[Any, ...]) -> None:
        a, weight, out, addend, scale_a, scale_weight = given
        check_factors(a, weight, self._m, self._n, self._dtype, self.device)
        rows, world = a.shape[0], self.world_size
        if rows % world:
            padded = rows + -rows % world
            raise ValueError(
                f"a has {rows} rows, which {world} ranks cannot share evenly; pad it to {padded}"
            )
        check_out(out, [rows // world, self._n], self._out_dtype, self.device)
        if addend is not None:
            if self._dtype == FP8:
                raise ValueError(f"addend is given, and operands are {FP8}; add it to the result of one rank")
            check_tensor("addend", addend, self._dtype, self.device)
            if addend.shape != (rows, self._n) or not addend.is_contiguous():
                lies = f"addend has shape {list(addend.shape)} and strides {addend.stride()}"
                raise ValueError(f"{lies}; it must be contiguous and [{rows}, {self._n}]")
        check_scales(self._dtype, self.device, (scale_a, rows), (scale_weight, self._n))

    def _new_layout(self, given: tuple[Any, ...]) -> ScatterLayout:
        a, weight, out, addend, scale_a, scale_weight = given
        all_rows, shape = len(a), (len(a) // self.world_size, self._n)
        if out is None:
            out = a.new_empty(shape, dtype=self._out_dtype)
        operands = ScatterOperands(a, weight, out, addend, scale_a, scale_weight)
        body = self._make_body(operands)
        storing = self._make_storing(operands) if self._may_store else {}
        others = {"addend": addend, "scale_a": scale_a, "scale_weight": scale_weight}
        rows, apart = (shape[0],) * self.world_size, Apart(out, a=a, weight=weight, **others)
        fill_nan = filler_of_all(out, self._flags.local, self.rank)
        key = (class_of_rows(all_rows), self.world_size, self._n, a.shape[1], str(self._dtype))
        launches = CachedChoice(functools.partial(self._choose_launches, body, tuple(storing), key))
        return ScatterLayout(all_rows, key[0], rows, shape, body, storing, launches, apart, fill_nan)

    def _choose_launches(self, body: Body, storing: tuple[str, ...], key: tuple[Any, ...]) -> str:
        ways: tuple[str, ...] = LAUNCHES if self.world_size > 2 else LAUNCHES[:1]
        if not body.in_steps:
            ways = (ONE_LAUNCH,)
        if storing:
            ways = storing if self._by_stores else (*ways, *storing)
        return ways[0] if len(ways) == 1 else tunable("gemm_rs launches", ways, key=key)

    def _make_body(self, operands: ScatterOperands) -> Body:
        if specialized.can_run(operands, self._held):
            return specialized.SpecializedBody(operands, self._held)
        return PlainBody(operands, self._held, self._facts)

    def _make_storing(self, operands: ScatterOperands) -> dict[str, Body]:
        found: dict[str, Body] = {}
        if specialized.can_run(operands, self._held):
            found[STORES[0]] = specialized.SpecializedBody(operands, self._held, stores=True)
        return found | {STORES[1]: PlainBody(operands, self._held, self._facts, stores=True)}

    def _agree(self, layout: ScatterLayout, is_capturing: bool) -> int:
        size_class = layout.size_class
        vote = self._collective.vote(size_class, self._key)
        return self._collective.agree(size_class, layout.all_rows, vote=vote, is_capturing=is_capturing)

    def _allocate_results(self, layout: ScatterLayout, given: tuple[Any, ...]) -> ScatterOperands:
        a, weight, out, addend, scale_a, scale_weight = given
        if out is None:
            out = a.new_empty(layout.shape, dtype=self._out_dtype)
        return ScatterOperands(a, weight, out, addend, scale_a, scale_weight)

    def _exchange(
        self, layout: ScatterLayout, operands: ScatterOperands, way: int, is_capturing: bool
    ) -> torch.Tensor:
        if way == COLLECTIVE:
            self._run_collective(operands)
            return operands.out
        launches = layout.launches()
        body = layout.storing.get(launches, layout.body)
        writes_nan = isinstance(body, PlainBody)  # itself, where a peer is lost
        if launches in STORES:
            self._launch(body, operands)
        else:
            in_steps = self._in_steps(is_capturing=is_capturing) or launches == IN_STEPS
            launch = functools.partial(self._launch, body, operands)
            self._pusher.run(launch, layout.rows, in_pieces=True, in_steps=in_steps, at_once=not is_capturing)
            if writes_nan:
                self._pushes.put_back()
        if not writes_nan:
            layout.fill_nan(operands.out)
        return operands.out

    def _run_collective(self, operands: ScatterOperands) -> None:
        a, weight, out = operands.a.detach(), operands.weight.detach(), operands.out.detach()
        sums, result = self._pusher.room(len(a)), out if out.is_contiguous() else out.new_empty(out.shape)
        if operands.addend is None:
            torch.mm(a, weight.T, out=sums)
        else:
            torch.addmm(operands.addend.detach(), a, weight.T, out=sums)
        self._collective.reduce_scatter(result, sums)
        if result is not out:
            out.copy_(result)

    def _launch(self, body: Body, operands: ScatterOperands, step: int | None = None) -> None:
        """Enqueue the product of one call on the current stream; of one chunk alone, that of rank + 1 + step.

        The own chunk is the last one, and the only one that waits for the peers' pushes.
        """
        call = self._chunk_calls.get(step)
        if call is None:
            first, chunks = (0, self.world_size) if step is None else (step, 1)
            programs = self._facts.programs
            call = ChunkCall(self.world_size, chunks, programs, (first, chunks, self.rank))
            self._chunk_calls[step] = call
        body.launch(operands, call, self._patience_ticks)

    # ---- calls that fail

    def _stand_in(self, went_ahead: tuple[int, int] | None, *given: Any) -> None:
        if went_ahead is not None and went_ahead[0] == COLLECTIVE:
            self._take_part(went_ahead[1])
        else:
            self._stand_in_by_pushes(self._flags.local, counted=True, announced=False)

    def _collectives(self, layout: ScatterLayout) -> list[Callable[[], None]]:
        return [lambda: self._take_part(layout.all_rows)]

    def _take_part(self, all_rows: int) -> None:
        sums = self._pusher.room(all_rows).fill_(math.nan)
        self._collective.reduce_scatter(sums.new_empty((all_rows // self.world_size, self._n)), sums)
