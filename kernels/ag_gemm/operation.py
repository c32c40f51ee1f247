"""`all_gather(a) @ weight.T` on every rank, with the gather hidden behind the product.

This page is about eager calls. Calls that are captured in a CUDA graph take a second lane, whose words and
slots are its own: `lane`.

What a rank holds, W ranks:

    gather   [W, m_per_rank, K], symmetric, the lane's slots behind it. Chunk p is rank p's shard; the own
             chunk is `op.shard`, read in place by the own GEMM and copied by the peers
    words    int32 [6, W], symmetric: READY, FETCHED, ROWS for even and odd epochs, whose column p rank p
             alone writes, and ARRIVED, which this rank's side stream writes

What call e does on rank r (e is the epoch: 1, 2, 3, ... and never reset):

    caller's stream                           side stream: copy engine and stream memory operations
    a_shard to chunk r, if it is not there
    fork                               -->    READY[r] of every peer := e
    GEMM, one persistent kernel:              for p = r + 1, r + 2, ... (mod W):
        chunk r at once,                          wait until READY[p] >= e
        chunk p once ARRIVED[p] >= e,             chunk p of rank p to chunk p here
        at last waits for FETCHED[p] >= e         ARRIVED[p] := e, FETCHED[r] of rank p := e
    join                               <--

**It ends.** No operation of the side stream needs an SM, and those of call e are enqueued before the GEMM
of call e: neither a full chip nor a shared hardware queue can hold them back behind it. They wait for the
fork, that is for the caller's earlier work, and for the peers' READY, which follows the peers' forks.
Nothing of call e on any side stream waits for any GEMM of call e. So if all GEMMs of call e - 1 end, then
all forks of e happen, all READY are written, all chunks are copied, all ARRIVED and FETCHED are written,
and all GEMMs of call e end.

**It reads no stale data.** ARRIVED[p] := e follows the copy on one stream, and the copy follows READY.

**Nothing is overwritten while it is read.** Chunk p here is written by the copy of call e + 1, behind the
fork of e + 1, behind the GEMM of e, its only reader. Chunk r is written by the caller behind the GEMM of
e, which does not end before every peer's FETCHED says that the copy is done. One gather buffer is enough.
ROWS has a word for even and one for odd epochs: p writes the word again in call e + 2, behind its GEMM of
e + 1, behind our FETCHED of e + 1, behind our fork of e + 1, behind the GEMM of e that read it.

**No wait is unbounded.** The GEMM polls with a budget. When it is spent it records the peer and the epoch
in memory that the host reads, and releases its side stream by setting READY[p] itself. That is reported
by the next call, by `check` and by `close`, and the operation is then good for nothing but closing.

Candidates may differ between ranks in one call: ranks tell each other about chunks, never about tiles.
Every rank must make the same calls in the same order, each on one stream at a time; calls of two
operations on two streams at once could fill the chip with kernels that wait for each other's peers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton

from ..operation import Operation, begin_at_16_bytes, launch
from ..signals import as_epoch
from ..symm import SymmetricMemoryError
from .errors import check_tensors, failure_error
from .lane import PushLane, slots_of
from .plain import all_gather_gemm
from .producer import ChunkProducer

INTERPRETED_PROGRAMS = 2  # the interpreter runs them one after the other


class AllGatherGemm(Operation):
    """`op(a_shard [m, K], weight [N, K])` returns `all_gather(a) @ weight.T`, [W * m, N], on each of W ranks.

    m may change from call to call, up to `m_per_rank`, and is equal on all ranks; N may differ. Calls need
    no host synchronisation between them. `timeout_s` is how long a rank waits for a peer, roughly. Opening
    and closing are collective.

    Calls may be captured in CUDA graphs, several of several operations in one, and replayed any number of
    times among eager calls; all ranks make the same calls and replays in the same order. Before the capture,
    call once with the same shapes, so that the kernel is tuned and loaded. Write new inputs into the tensors
    of the capture, or `op.shard`, before a replay; a replay after `close` uses memory that is gone.

    Of symmetric memory each rank holds W * m_per_rank * K elements and as many less one shard again for
    graphs, which `graphs=False` saves.
    """

    def __init__(
        self,
        m_per_rank: int,
        k: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        *,
        timeout_s: float = 300.0,
        graphs: bool = True,
    ) -> None:
        self._capacity, self._k, self._dtype, self._graphs = m_per_rank, k, dtype, graphs
        self._rows = 0
        self._lane_rows = 0  # of the last call that the host has put into the lane
        self._gathered: torch.Tensor | None = None
        super().__init__(dtype, group, backend, timeout_s)

    def _allocate(self) -> None:
        world = self.world_size
        slots = slots_of(world, graphs=self._graphs)
        self._gather = self._memory.allocate((slots, self._capacity, self._k), self._dtype)
        self._shard = self._gather.local[self.rank]
        self._words = self._memory.allocate((6, world), torch.int32)
        self._producer = ChunkProducer(self._memory, self._gather, self._words)
        self._lane: PushLane | None = None
        if self._graphs:
            self._lane = PushLane(self._memory, self._gather, self._memory.allocate((6, world), torch.int32))

    def _forget(self) -> None:
        del self._gather, self._shard, self._gathered, self._words
        del self._producer, self._lane

    def _failure(self) -> Exception | None:
        return failure_error(self._error_words, self.rank, self._calls)

    # ---- what the caller may use

    def __call__(
        self, a_shard: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the product; `out`, if given, is where it is written.

        A wrong argument raises before any peer hears of the call. A failure of the call itself is raised
        at its end on the CPU, and on a GPU by a later call, `check` or `close`.
        """
        return self._call(a_shard, weight, out, in_lane=self._is_capturing())

    def _call(
        self, a_shard: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, *, in_lane: bool
    ) -> torch.Tensor:
        self._check_usable()
        check_tensors(a_shard, weight, out, self._shard, self.world_size)
        self._check_device()
        if in_lane and self._lane is None:
            raise RuntimeError("this AllGatherGemm was opened with graphs=False and cannot be captured")
        rows = a_shard.shape[0]
        if out is None:
            out = a_shard.new_empty((self.world_size * rows, weight.shape[0]))
        if a_shard.data_ptr() != self._shard.data_ptr():
            self._shard[:rows].copy_(a_shard.detach())
        self._gathered = None
        (self._run_in_lane if in_lane else self._run)(weight, out, rows)
        if self.device.type == "cpu":
            self._check_usable()
        return out

    @property
    def shard(self) -> torch.Tensor:
        """The symmetric input buffer [m_per_rank, K]: `op(op.shard[:m], weight)` copies nothing.

        Write it on the stream of the calls; it is free again as soon as a call has returned.
        """
        self._check_usable()
        return self._shard

    @property
    def gathered(self) -> torch.Tensor:
        """`all_gather(a)` of the last call or replay, [W * m, K], until the next one.

        A copy where m < m_per_rank, and after a replay. Where there may have been replays, of which the host
        knows nothing, this waits for the device; read during a capture, it is a part of the graph.
        """
        self._check_usable()
        if self._lane is not None and self._lane_rows:
            rows = self._lane_rows if self._is_capturing() else self._lane.last_rows()
            if rows:
                return self._lane.gathered(rows)
        if self._calls == 0:
            raise RuntimeError("nothing has been gathered yet; call the operation first")
        if self._gathered is None:
            chunks = self._gather.local[: self.world_size, : self._rows]
            self._gathered = chunks.reshape(-1, self._shard.shape[1])
        return self._gathered

    # ---- one call

    def _run(self, weight: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        self._calls += 1
        self._rows = rows
        epoch = as_epoch(self._calls)
        try:
            if self._lane is not None and self._lane_rows:
                self._lane.note_eager_call()
            self._producer.start(rows, epoch)
            self._launch(weight, out, rows, self._words.local, epoch, pushed=0)
            self._producer.join()
        except BaseException as error:
            self._broken_by = f"call {self._calls} was not carried out: {error!r}"
            self._producer.finish_alone(self._calls)
            raise

    def _run_in_lane(self, weight: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        assert self._lane is not None
        before, self._lane_rows = self._lane_rows, rows
        try:
            self._lane.start(rows)
            self._launch(weight, out, rows, self._lane.words, 1, pushed=1)
            self._lane.finish()
        except BaseException as error:
            if not self._is_capturing():
                self._broken_by = f"a call was not carried out: {error!r}"
                raise
            self._lane_rows = before  # of what is captured nothing has happened
            if isinstance(error, SymmetricMemoryError):
                raise RuntimeError(f"AllGatherGemm cannot be captured here: {error}") from error
            raise

    def _launch(
        self,
        weight: torch.Tensor,
        out: torch.Tensor,
        rows: int,
        words: torch.Tensor,
        epoch: int,
        *,
        pushed: int,
    ) -> None:
        slots, capacity, k = self._gather.local.shape
        columns, world, programs = weight.shape[0], self.world_size, self._sms or INTERPRETED_PROGRAMS

        def grid(meta):
            tiles = world * triton.cdiv(rows, meta["BLOCK_M"]) * triton.cdiv(columns, meta["BLOCK_N"])
            return (min(programs, tiles),)

        legal = begin_at_16_bytes(
            weight.element_size(), (weight.data_ptr(), out.data_ptr()), (k, weight.stride(0), out.stride(0))
        )
        launch(
            all_gather_gemm[grid],
            self._gather.local,
            weight,
            out,
            words,
            self._errors,
            world * rows,
            columns,
            k,
            slots,
            capacity,
            weight.stride(0),
            out.stride(0),
            self.rank,
            epoch,
            pushed,
            self._budget,
            WORLD=world,
            TMA_LEGAL=self._has_tma and legal,
            FENCE=self._needs_fence,
            UPCAST=self._upcasts,
        )
