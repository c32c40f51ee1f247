"""The consumer in plain Triton: a persistent GEMM that waits for rows of A before it reads them.

Tiles of the own chunk come first, then chunk by chunk as they arrive. Before a tile a program polls ARRIVED,
which the peer's side stream writes, unless it knows that the tile's rows are here. At the end one program
parts from each peer, and the last one waits for the own chunk's pushes (`exchange.chunks`). Rejected: a wait
inside the K loop, as Triton's pipeliner moves the loads above it (tests/aot/test_signals_aot.py).

Sessions on four H100 (2026-11-26) picked it at one of six shapes, 8192 x 1792 x 4096: 1.28 of cuBLAS's time
alone. They picked the specialised kernel at four.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..configs import CANDIDATES, prune_overlapped, take_first, upcasts
from ..epilogues import NO_ACTIVATION, apply_epilogue, apply_scales, sums_of_a_result
from ..exchange.chunks import part_from_peers, wait_for_rows
from ..exchange.flags import NO_PERMIT
from ..exchange.operation import DeviceFacts
from ..exchange.peers import Peers
from ..exchange.stores import count_stored, let_peers_write, may_store, memory_of, part_from_all
from ..gemm.configs import class_of_rows
from ..launches.settled import Tensors, TunedKernel
from ..products import factors_of, halves, multiply_tile, store_rows
from ..signals import GIVEN_UP
from ..tensors import begin_at_16_bytes, lies_by_columns, pitch_of
from ..tiles import claim_number, grouped_tile, reset_counter, rotated_chunk
from .call import Consumer, GatherMemory, Product
from .gather_buffer import scaled_pitch


@triton.autotune(
    configs=CANDIDATES,
    key=[
        "size_class",
        "N",
        "K",
        "TMA_LEGAL",
        "BY_COLUMNS",
        "ACTIVATION",
        "STORERS",
    ],  # and the types of all tensors
    prune_configs_by={"early_config_prune": prune_overlapped},
    do_bench=take_first,  # outside a tuned function: a launch waits for peers, who would pick another config
)
@triton.jit(
    do_not_specialize=[
        *("row_scale_ptr", "column_scale_ptr", "bias_ptr"),
        *("M", "rank", "patience_ticks", "size_class"),
    ]
)
def all_gather_gemm(
    table_ptr,  # int64 [2, WORLD]: where gather buffer and flags of each rank lie
    counts_ptr,  # int32 [WORLD + 2], 0 between launches: programs that have stored to each peer; programs
    # that have begun, and that have ended
    a_ptr,  # gather buffer [WORLD, capacity, K]; the first M / WORLD rows of each chunk count
    flags_ptr,  # int32 [FLAGS, WORLD]
    errors_ptr,  # int64 [WORLD], in memory that the host reads without waiting
    b_ptr,  # weight [N, K], its rows, or BY_COLUMNS its columns, contiguous and stride_b apart
    c_ptr,  # out [M, N], or [M, N / 2] under a gated activation; rows stride_cm apart
    row_scale_ptr,  # float32 [WORLD, capacity], after the rows of A; or None
    column_scale_ptr,  # float32 [N], or None
    bias_ptr,  # [N], or None
    M,
    N,
    K,
    capacity,
    stride_b,
    stride_cm,
    rank,
    patience_ticks,
    size_class,  # of the rows of a chunk, for the key of the tuning
    WORLD: tl.constexpr,
    TMA_LEGAL: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    FENCE: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter has no arithmetic in bfloat16 and fp8
    ACTIVATION: tl.constexpr,  # of `epilogues`
    STORERS: tl.constexpr,  # programs that store chunk `rank` to the peers, beside those that multiply; or 0
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Write C = activation(row_scale * (A @ B.T) * column_scale + bias).

    Chunk `rank` comes first, then the others in the order in which they arrive.
    """
    peers = Peers(flags_ptr, errors_ptr, rank, patience_ticks)
    m = M // WORLD
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_per_chunk = tiles_m * tiles_n
    USE_TMA: tl.constexpr = TMA and TMA_LEGAL
    a_pitch = K
    if row_scale_ptr is not None:
        a_pitch = scaled_pitch(K)
    factors = factors_of(
        *(a_ptr, a_pitch, WORLD * capacity, b_ptr, stride_b, N, K),
        *(BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, BY_COLUMNS),
    )
    c_desc = c_ptr
    SUMS: tl.constexpr = sums_of_a_result(ACTIVATION)
    SUBTILE: tl.constexpr = EPILOGUE_SUBTILE and SUMS == 1  # gated tiles are half as wide as it is
    if USE_TMA:
        STORE_N: tl.constexpr = BLOCK_N // 2 if SUBTILE else BLOCK_N // SUMS
        # Three dimensions, so that the hardware cuts a chunk's last tile off at row m instead of writing
        # into the next chunk.
        chunk_stride = tl.cast(m, tl.int64) * stride_cm
        c_desc = tl.make_tensor_descriptor(
            c_ptr, [WORLD, m, N // SUMS], [chunk_stride, stride_cm, 1], [1, BLOCK_M, STORE_N]
        )

    program = tl.program_id(0)
    programs = tl.num_programs(0)
    if STORERS:
        program = claim_number(counts_ptr + WORLD)
        if program == 0:
            let_peers_write(table_ptr, peers, WORLD)
        own_ptr = a_ptr + tl.cast(rank * capacity, tl.int64) * a_pitch
        if program < STORERS:
            _store_chunk(
                *(own_ptr, a_ptr, program, m, capacity, a_pitch, table_ptr, counts_ptr, peers),
                *(WORLD, STORERS),
            )
            program = WORLD * tiles_per_chunk + STORERS  # after all tiles
        program -= STORERS
        programs -= STORERS

    here = rank  # the chunk of which this program knows so many rows to be here; its own needs no wait
    arrived = m
    for tile in tl.range(program, WORLD * tiles_per_chunk, programs):
        chunk, inner = rotated_chunk(tile, tiles_per_chunk, WORLD, rank)
        pid_m, pid_n = grouped_tile(inner, tiles_m, tiles_n, GROUP_M)
        row = pid_m * BLOCK_M
        col = pid_n * BLOCK_N
        needed = min(row + BLOCK_M, m)
        if (chunk != here) | (needed > arrived):
            arrived = wait_for_rows(chunk, needed, peers, WORLD, FENCE and USE_TMA)
            here = chunk
        acc = multiply_tile(
            *(factors, chunk * capacity, row, m, col),
            *(tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), BLOCK_K, USE_TMA, BY_COLUMNS, UPCAST),
        )
        rows = row + tl.arange(0, BLOCK_M)
        columns = col + tl.arange(0, BLOCK_N)
        acc = apply_scales(
            *(acc, rows, columns, row_scale_ptr, column_scale_ptr, m, N, chunk * capacity, a_pitch // 4)
        )
        acc = apply_epilogue(acc, rows, columns, None, bias_ptr, m, N, ACTIVATION)
        if STORERS:  # no kernel after this one writes NaN
            acc = tl.where(arrived >= GIVEN_UP, float("nan"), acc)
        if USE_TMA:
            _store_tma(acc, c_desc, chunk, row, col // SUMS, SUBTILE)
        else:
            c_rows_ptr = c_ptr + tl.cast(chunk * m + rows, tl.int64) * stride_cm
            store_rows(acc, c_rows_ptr, rows < m, col // SUMS, N // SUMS, False)

    if STORERS:
        if reset_counter(counts_ptr + WORLD, tl.num_programs(0)):
            part_from_all(m, peers, WORLD)
    else:
        part_from_peers(m, peers, WORLD, True)


@triton.jit
def _store_chunk(
    own_ptr,  # this rank's chunk
    a_ptr,
    program,
    m,
    capacity,
    a_pitch,
    table_ptr,
    counts_ptr,
    peers,
    WORLD: tl.constexpr,
    STORERS: tl.constexpr,
):
    """Store this program's share of the chunk to each peer, the one before this rank first; tell them."""
    BLOCK: tl.constexpr = 8192
    elements = tl.cast(m, tl.int64) * a_pitch
    for step in range(1, WORLD):
        peer = (peers.rank + WORLD - step) % WORLD
        end = tl.where(may_store(peer, NO_PERMIT, False, peers, WORLD), elements, 0)
        slot_ptr = memory_of(peer, table_ptr, a_ptr) + tl.cast(peers.rank * capacity, tl.int64) * a_pitch
        for begin in range(tl.cast(program, tl.int64) * BLOCK, end, STORERS * BLOCK):
            places = begin + tl.arange(0, BLOCK)
            rows = tl.load(own_ptr + places, mask=places < end)
            tl.store(slot_ptr + places, rows, mask=places < end)
        count_stored(peer, counts_ptr, STORERS, m, table_ptr, peers, WORLD)


@triton.jit
def _store_tma(tile, c_desc, chunk, row, col, SUBTILE: tl.constexpr):
    """Store a tile of a chunk by TMA; SUBTILE: one half of its columns after the other."""
    if SUBTILE:
        left, right = halves(tile)
        _store_tma(left, c_desc, chunk, row, col, False)
        _store_tma(right, c_desc, chunk, row, col + left.shape[1], False)
    else:
        c_desc.store([chunk, row, col], tile.to(c_desc.dtype)[None, :, :])


_KERNEL = TunedKernel(all_gather_gemm, operation="AllGatherGemm")


class PlainConsumer(Consumer):
    """Multiplies in one kernel, which waits.

    storers: how many programs store this rank's chunk to the peers; 0: it is pushed.
    """

    def __init__(self, product: Product, held: GatherMemory, facts: DeviceFacts, *, storers: int = 0) -> None:
        super().__init__(_KERNEL)
        _, weight, out, epilogue, *_ = product
        gather, self._tensors, self._beside = held.gather, held[:-2], storers
        strides, addresses = (pitch_of(weight), out.stride(0)), (weight.data_ptr(), out.data_ptr())
        steps = (gather.stride(1) | strides[0]) * weight.element_size() | strides[1] * out.element_size()
        self._size_class = class_of_rows(len(out) // held.world_size)
        self._sizes, self._further = (len(out), len(weight), gather.shape[2]), (gather.shape[1], *strides)
        self._constants = {
            "TMA_LEGAL": facts.has_tma and begin_at_16_bytes(1, addresses, (steps,)),
            "BY_COLUMNS": lies_by_columns(weight),
            "FENCE": facts.needs_fence,
            "UPCAST": upcasts(weight.dtype),
            "ACTIVATION": epilogue.activation or NO_ACTIVATION,
            "STORERS": storers,
        }

    def _arguments(self, operands: Product) -> tuple[tuple[int, ...], Tensors]:
        _, weight, out, ending, *_ = operands
        return (), (weight, out, ending.scale_a, ending.scale_b, ending.bias)
