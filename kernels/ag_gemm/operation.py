"""`all_gather(a) @ weight.T` on every rank, with the gather hidden behind the product.

Read it in this order:

    operation    one call, from its arguments to its launch
    choices      options of a call that each rank may choose for itself
    push         the protocol: each rank pushes its chunk to its peers; the order of steps, and why every wait
                 ends
    collective   an all-gather before cuBLAS in its place, where all ranks agree on it
    by_mail      a gather of few rows in one launch before cuBLAS, the same
    chunks       the device side of waiting
    plain, specialized     the consumers: kernels that wait and multiply

Do not call two operations on two streams at once: their kernels could fill the chip and wait for each
other's peers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dist_autotune.for_operations import CachedChoice

from ..agreement.ballots import COLLECTIVE
from ..agreement.failures import FailureKinds, Refusal
from ..epilogues import ONLY_SUMS, Epilogue, result_columns
from ..exchange.call import NumberedCalls, numbered
from ..exchange.fill_nan import filler_of_chunks
from ..exchange.flags import FLAGS, NO_MAIL, NOT_SENT, OTHER_ROWS
from ..exchange.push import ChunkPusher, piece_counts
from ..gemm.configs import class_of_rows
from ..gemm.launch import ChunkCall
from ..tensors import (
    FP8,
    Apart,
    check_fp8,
    check_no_gradient,
    check_sizes,
    layout_of,
    lies_by_columns,
    remember,
)
from . import specialized
from .by_mail import BY_MAIL, LOW_LATENCY, GatherByMail
from .call import Consumer, GatherLayout, GatherMemory, Product
from .choices import STORING, Choice, Fixed, options_for
from .gather_buffer import GatherBuffer, RowFormat
from .matmul import multiply_into
from .plain import PlainConsumer


class AllGatherGemm(NumberedCalls):
    """`op(a_shard [m, K], weight [N, K])` returns `all_gather(a) @ weight.T`, [W * m, N], on each of W ranks.

    With `bias` [N] and `activation` it returns activation(all_gather(a) @ weight.T + bias), see `__call__`.

    m may change from call to call, up to `m_per_rank`, and is equal on all ranks; N may differ. The weight's
    rows are contiguous, or its columns, as those of `w.T`. Calls need no host synchronisation between them.
    A kernel waits `timeout_s` for a peer's chunk, and W times as long until its own is with all peers.
    Opening and closing are collective.

    Calls may be captured in CUDA graphs, several of several operations in one, and replayed any number of
    times among eager calls; all ranks make the same calls and replays in the same order. Before the capture,
    call once with the same shapes, so that the kernel is tuned and loaded. Write new inputs into the tensors
    of the capture, or `op.shard`, before a replay; a replay after `close` uses memory that is gone.

    `consumer`, `pieces` and `programs` fix choices that are otherwise tuned for each shape; ranks may differ
    in them.

    `collective=True` makes calls gather by a collective of the group and multiply by cuBLAS, False never;
    None tunes that for each class of rows (see `gemm.configs`), up to 4096 of all ranks. All ranks pass the
    same. A rank that fixes a consumer makes no collective. A rank that would make the first one of a class
    waits, on the host, for its peers to come to the call; they make it if all would. A captured call repeats
    the way of the last eager call of its class; a replay waits for its peers as any collective does.

    `by_stores=True` makes programs of the plain kernel store this rank's rows to the peers, in calls that are
    no collective: one launch, no copy engine. None tunes it beside the consumers. Ranks may differ in it.

    `low_latency=True` makes calls of up to 64 rows of each rank gather in one launch (see `by_mail`) and
    multiply by cuBLAS, if a row's bytes are a multiple of 4; None tunes that beside the other ways. All ranks
    pass the same. Each rank then holds 4 * W * min(m_per_rank, 64) * K elements more.

    With dtype float8_e4m3fn rows of a and of the weight have float32 scales, the arguments `scale_a` and
    `scale_weight` of a call, and products are bf16. K is then a multiple of 16, and the weight's rows are
    contiguous.

    Each rank holds W * m_per_rank * K elements of symmetric memory.
    """

    _further_dtypes = (FP8,)
    _failure_kinds = FailureKinds(
        {
            OTHER_ROWS.value: "rank {peer} pushed {seen} rows, not as many as this rank passed",
            NO_MAIL.value: "rank {peer}, or one that it waits for, did not send its rows in time",
            NOT_SENT.value: "chunk {peer} was not copied to all peers, {peers}, in time",  # about this rank
        },
        late="rank {peer}, or one that it waits for, did not push chunk {peer} in time",
        of_callers=(OTHER_ROWS.value,),
        refusal=Refusal(OTHER_ROWS.value, -1, -1),
    )
    _way = "ag_gemm way"

    def __init__(
        self,
        m_per_rank: int,
        k: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        *,
        timeout_s: float = 300.0,
        consumer: str | None = None,
        pieces: int | None = None,
        programs: int | None = None,
        collective: bool | None = None,
        low_latency: bool | None = False,
        by_stores: bool | None = False,
    ) -> None:
        check_sizes(m_per_rank=m_per_rank, k=k)
        self._fixed = Fixed(consumer, pieces, programs, by_stores)
        self._fixed.check_ways(collective=collective, low_latency=low_latency)
        self._capacity, self._k, self._dtype = m_per_rank, k, dtype
        self._format = RowFormat(k, dtype)
        self._key = k, str(dtype)  # of the choice: equal on all ranks, unlike N
        self._makes_collectives, self._low_latency = collective, low_latency
        super().__init__(dtype, group, backend, timeout_s)

    def _allocate(self) -> None:
        world, memory = self.world_size, self._memory
        self._fixed.check()
        memory.require_equal("low_latency", str(self._low_latency))
        if self._format.is_scaled and self.device.type == "cuda":
            check_fp8(self.device)
        self._buffer = GatherBuffer(memory, self._format, self._capacity)
        self._gather = self._buffer.symmetric
        flags = memory.allocate((FLAGS, world), torch.int32)
        table = memory.hold(self._gather.addresses(flags))
        counts = memory.hold(torch.zeros(world + 2, dtype=torch.int32, device=self.device))
        here = (self._buffer.a, flags.local, self._failures.words)
        self._held = GatherMemory(table, counts, *here, self.rank, world)
        self._pusher = ChunkPusher(memory, self._gather, flags)
        self._pushes = self._pusher.pushes
        self._collective = self._open_collective(self._makes_collectives, further=self._low_latency)
        self._mail: GatherByMail | None = None
        if self._low_latency is not False and world > 1 and GatherByMail.can_open(self._format):
            self._mail = GatherByMail(memory, self._format, self._capacity, self._failures.words)
        # Rows of each rank in the last call; below 0: in one piece, see `GatherBuffer.room`; None: elsewhere.
        self._gathered: int | None = 0
        self._layouts: dict[Hashable, GatherLayout] = {}  # by those of tensors that have been checked
        self._chunk_calls: dict[int, ChunkCall] = {}  # by programs
        self._may_store = self._fixed.by_stores is not False

    def _other_rows(self) -> str:
        return self._collective.differing()

    # ---- what the caller may use

    @numbered
    def __call__(
        self,
        a_shard: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        scale_a: torch.Tensor | None = None,
        scale_weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> torch.Tensor:
        """Return the product; `out`, if given, is where it is written, beside all operands and `op.gathered`.

        `bias` [N], contiguous, in fp16, bf16 or fp32, is added to the float32 sums and `activation` ("relu",
        "gelu", "gelu_tanh" or "silu") applied before they are rounded, once. Both are this rank's own.
        A gated one ("swiglu" or "geglu_tanh") makes [W * m, N / 2], the activation of the gate times up;
        `interleave_gate_up` makes such a weight and bias.

        In fp8 the sums are multiplied before by the scales of their rows, of which each rank passes `scale_a`
        [m] or [m, 1] for its own, and of their columns, `scale_weight` [N] or [N, 1]; all are float32 and
        contiguous, None is 1.

        A wrong argument raises on all ranks, and the next call may be made; other failures break the
        operation: see `exchange.call`. They are raised at the end of the call on the CPU, and on a GPU by a
        later call, `check` or `close`.
        """
        if bias is scale_a is scale_weight is None and activation is None:
            return self._call(a_shard, weight, out, ONLY_SUMS, None)
        return self._call(a_shard, weight, out, Epilogue(bias, activation, scale_a, scale_weight), None)

    @numbered
    def with_gathered(
        self,
        a_shard: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        gathered: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call, and return the product and `all_gather(a)` of this call.

        `gathered` [W * m, K], contiguous, is where the rows are written, beside the operands; without it the
        next call may overwrite them.
        """
        product = self._call(a_shard, weight, out, ONLY_SUMS, gathered)
        return product, self._rows_of_all() if gathered is None else gathered

    @property
    def shard(self) -> torch.Tensor:
        """The symmetric input buffer [m_per_rank, K]: `op(op.shard[:m], weight)` copies nothing.

        Write it on the stream of the calls; it is free again as soon as a call has returned, which may have
        overwritten the rows after the first m.
        """
        self._check_usable()
        return self._buffer.shard

    @property
    def gathered(self) -> torch.Tensor:
        """`all_gather(a)` of the last call, [W * m, K], until the next call or replay.

        A copy where m < m_per_rank; read during a capture, it is a part of the graph.
        """
        self._check_usable()
        if self._gathered is None:
            raise RuntimeError("the last call wrote its rows to the tensor that it was given for them")
        if self._gathered == 0:
            raise RuntimeError("nothing has been gathered yet; call the operation first")
        return self._rows_of_all()

    def _rows_of_all(self) -> torch.Tensor:
        rows = self._gathered or 0
        return self._format.rows_in(self._buffer.chunks(rows) if rows > 0 else self._buffer.room(-rows)[0])

    # ---- one call, see `exchange.call`

    def _plan(self, given: tuple[Any, ...], is_capturing: bool) -> GatherLayout:
        a_shard, weight, out, epilogue, gathered = given
        bias, _, scale_a, scale_weight = epilogue
        if torch.is_grad_enabled():
            scales = {"scale_a": scale_a, "scale_weight": scale_weight}
            check_no_gradient("AllGatherGemm", a_shard=a_shard, weight=weight, out=out, bias=bias, **scales)
        of_out = None if out is None else self._buffer.layout_of(out)
        key = self._buffer.layout_of(a_shard), layout_of(weight), of_out, epilogue.layout()
        layout = self._layouts.get(key)
        if layout is None:
            self._buffer.check(a_shard, weight, out, epilogue)
            ending = epilogue._replace(scale_a=self._buffer.scales)
            made = self._new_layout(weight, out, len(a_shard), ending)
            if out is not None:
                others = {"bias": bias, "scale_a": scale_a, "scale_weight": scale_weight}
                made = replace(made, apart=Apart(out, a_shard=a_shard, weight=weight, **others))
            layout = remember(self._layouts, key, made)
        if out is not None and layout.apart is not None:
            rest = () if epilogue is ONLY_SUMS else (bias, scale_a, scale_weight)
            layout.apart.check(out, a_shard, weight, *rest)
        if gathered is not None:
            self._buffer.check_gathered(gathered, a_shard=a_shard, weight=weight, product=out)
        return layout

    def _new_layout(
        self, weight: torch.Tensor, out: torch.Tensor | None, rows: int, epilogue: Epilogue
    ) -> GatherLayout:
        shape = (self.world_size * rows, result_columns(epilogue.activation, weight.shape[0]))
        if out is None:
            out = weight.new_empty(shape, dtype=self._format.product_dtype)
        can_run = specialized.can_run(self._buffer.a, weight, out, rows)
        most_pieces = piece_counts(rows)[-1]  # of a class all have the same options
        kind = (class_of_rows(rows), can_run, most_pieces, weight.shape[0], self._k, lies_by_columns(weight))
        key = (*kind, str(self._dtype), self.world_size, *epilogue.key())
        options = options_for(rows, self._facts.sms, self.world_size, specialized=can_run, fixed=self._fixed)
        choose = CachedChoice(functools.partial(options.choose, key))
        fill_nan = filler_of_chunks(out, self._pusher.flags, self.rank, rows)
        made = GatherLayout(rows, class_of_rows(shape[0]), shape, choose, fill_nan)
        if self._mail is not None and self._mail.can_take(made.size_class):
            programs = self._facts.programs
            made = replace(made, mail=self._mail.prepare(programs, *self._buffer.room(rows)))
        return made

    def _agree(self, layout: GatherLayout, is_capturing: bool) -> int:
        key = layout.size_class
        return self._collective.agree(key, layout.rows, vote=self._vote(layout), is_capturing=is_capturing)

    def _vote(self, layout: GatherLayout) -> int:
        if self._fixed.consumer is not None:
            return 0
        if layout.mail is None:
            return self._collective.vote(layout.size_class, self._key)
        return (
            BY_MAIL if self._low_latency else self._collective.vote(layout.size_class, self._key, LOW_LATENCY)
        )

    def _allocate_results(self, layout: GatherLayout, given: tuple[Any, ...]) -> Product:
        a_shard, weight, out, epilogue, gathered = given
        if out is None:
            out = weight.new_empty(layout.shape, dtype=self._format.product_dtype)
        return Product(a_shard, weight, out, epilogue, layout, gathered)

    def _exchange(self, layout: GatherLayout, product: Product, way: int, is_capturing: bool) -> torch.Tensor:
        if way:
            self._gather_and_multiply(way, product)
            return product.out
        self._buffer.put(product.a_shard, product.epilogue.scale_a)
        if self._format.is_scaled:
            product = product._replace(epilogue=product.epilogue._replace(scale_a=self._buffer.scales))
        choice = self._choose(layout)
        consumer = layout.consumers.get(choice.consumer) or self._new_consumer(product, choice, is_capturing)
        self._gathered = layout.rows
        pushes = choice.consumer not in STORING  # else one launch is all of a call
        if pushes:
            self._pusher.start(layout.rows, choice.pieces, is_capturing=is_capturing)
        self._launch(product, consumer, choice.programs)
        if pushes:
            layout.fill_nan(product.out)
            self._pusher.finish(is_capturing=is_capturing)
        if product.gathered is not None:
            rows = product.gathered.detach().view(self.world_size, layout.rows, -1)
            rows.copy_(self._buffer.a[:, : layout.rows])
            self._gathered = None
        return product.out

    def _gather_and_multiply(self, way: int, product: Product) -> None:
        """Gather by a collective or by mail: for both see [Note: a collective needs no permit]."""
        a_shard, weight, out, epilogue, layout, into = product
        gathered, own = self._buffer.room(layout.rows)
        if way == COLLECTIVE and self._buffer.lies_apart(a_shard):
            own = a_shard.detach()
        else:
            self._buffer.put(a_shard, epilogue.scale_a)
        self._gathered = -layout.rows if into is None else None
        if way == COLLECTIVE:
            gathered = gathered if into is None else into.detach()
            self._collective.all_gather(gathered, own)
        else:
            assert layout.mail is not None
            layout.mail(self._patience_ticks)
            if into is not None:
                into.detach().copy_(gathered)
        epilogue = epilogue._replace(scale_a=self._format.scales_in(gathered))
        multiply_into(out.detach(), self._format.rows_in(gathered), weight.detach().T, epilogue)

    def _choose(self, layout: GatherLayout) -> Choice:
        return layout.choose()

    def _new_consumer(self, product: Product, choice: Choice, is_capturing: bool) -> Consumer:
        """Make it and load its kernels before any stream waits for a peer, see `launches.loading.load`."""
        made: Consumer
        if choice.consumer == "specialized":
            made = specialized.SpecializedConsumer(product, self._held)
        else:
            storers = STORING.get(choice.consumer, 0)
            made = PlainConsumer(product, self._held, self._facts, storers=storers)
        if not is_capturing:
            made.load(product, self._call_of(choice.programs), self._patience_ticks)
            product.layout.fill_nan(product.out, only_load=True)
        product.layout.consumers[choice.consumer] = made
        return made

    def _call_of(self, programs: int) -> ChunkCall:
        call = self._chunk_calls.get(programs)
        if call is None:
            world = self.world_size
            call = self._chunk_calls[programs] = ChunkCall(world, world, programs, (self.rank,))
        return call

    def _launch(self, product: Product, consumer: Consumer, programs: int) -> None:
        consumer.launch(product, self._call_of(programs), self._patience_ticks)

    # ---- calls that fail

    def _stand_in(self, went_ahead: tuple[int, int] | None, *given: Any) -> None:
        way, rows = went_ahead or (0, 0)
        if way == COLLECTIVE:
            self._take_part(rows)
        elif way == BY_MAIL:
            assert self._mail is not None
            self._mail.send_nan(self._facts.programs, rows, self._patience_ticks)
        else:
            self._stand_in_by_pushes(self._pusher.flags, counted=True, announced=False)
        self._gathered = 0

    def _collectives(self, layout: GatherLayout) -> list[Callable[[], None]]:
        return [lambda: self._take_part(layout.rows)]

    def _take_part(self, rows: int) -> None:
        self._collective.all_gather(*self._buffer.room(rows))

    def _leave_peers(self) -> None:
        super()._leave_peers()
        if self._mail is not None:
            self._mail.leave()
