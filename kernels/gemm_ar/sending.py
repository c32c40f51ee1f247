"""The product of few rows, whose kernel sends it: low-latency calls without a pass over the product.

Reading the weight is what takes time. A program multiplies BLOCK_N rows of the weight, or a part of their
columns, by all rows of `a`; as many stages as fit shared memory are on their way. Of a weight with few rows
SPLIT programs share a tile: each leaves its float32 sums, and the last to come adds them up, in their order;
it waits for nobody. The result is rounded, stamped and stored to the mail of all ranks, this one's too (see
`exchange.mail`). `exchange_rows` after it sends nothing, and finds a rank's own words as it does a peer's.

    sums     float32 [tiles, SPLIT, BLOCK_N, BLOCK_M]: what programs that share a tile have found
    arrived  int32 [tiles]: how many of them have come; the last one resets it

`exchange_rows` is a dependent launch: it may begin once all programs of this kernel have multiplied. So it
takes room from none of them. It ends after this kernel, and counts the call there, which is read here.

Measured on two H200, 2026-11-27, before what receives took its present form, in graphs, the median of 24: 1,
8 and 64 rows of 8192 x 28672 take 62.4, 63.1 and 69.7 us; cuBLAS and then `exchange_rows` 67.6, 68.5 and
79.0; cuBLAS and NCCL 74.0, 74.6 and 86.1. A kernel that only reads the weight takes 53.9 us (4.36 TB/s), this
one 55.7, 56.5 and 60.9 in a row of 20, cuBLAS 58.8, 60.1 and 64.2. Without the dependent launch a call takes
0.3 to 2.1 us more.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..compat import compiled_for
from ..configs import INTERPRETED, capability, fitting, take_first
from ..exchange.mail import MOST_ROWS, TICKET_BITS, MailMemory, stamp_of, word_of
from ..gemm.configs import class_of_rows
from ..launches.settled import TunedKernel, TunedLaunch
from ..signals import count_up
from ..symm import SymmetricMemory

LARGEST_STEP = 256  # of the candidates' along K
QUANTUM = 16  # of K, and of bytes: what rows are loaded by


def candidate(height: int, block_n: int, block_k: int, split: int, stages: int) -> triton.Config:
    """Return the config of tiles that hold `height` rows of `a`."""
    kwargs = {"BLOCK_M": height, "BLOCK_N": block_n, "BLOCK_K": block_k, "SPLIT": split}
    return triton.Config(kwargs, num_warps=4, num_stages=stages)


# Won at N = 8192 on H200 or H100; tiles in four parts are for narrower weights.
GPU_CANDIDATES = [
    candidate(16, 64, 128, 1, 8),
    candidate(16, 64, 128, 2, 5),
    candidate(16, 64, 256, 1, 5),
    candidate(16, 64, 128, 4, 5),
    candidate(32, 64, 128, 1, 8),
    candidate(32, 64, 128, 2, 4),
    candidate(32, 64, 256, 1, 4),
    candidate(32, 64, 128, 4, 4),
    candidate(64, 64, 128, 1, 6),
    candidate(64, 64, 64, 1, 12),
    candidate(64, 64, 128, 2, 3),
    candidate(64, 64, 128, 4, 3),
]
CPU_CANDIDATES = [candidate(height, *tile, 1) for height in (16, 64) for tile in ((32, 32, 2), (64, 64, 1))]
CANDIDATES = CPU_CANDIDATES if INTERPRETED else GPU_CANDIDATES


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Return the candidates that hold all rows of a class, and no more than they must."""
    args = {**named_args, **kwargs}
    height = min(each.kwargs["BLOCK_M"] for each in configs if each.kwargs["BLOCK_M"] >= args["size_class"])
    lowest = [config for config in configs if config.kwargs["BLOCK_M"] == height]
    return fitting(lowest, args["a_ptr"].element_size())


@triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "N", "K", "WORLD"],
    prune_configs_by={"early_config_prune": prune},
    do_bench=take_first,
)
@triton.jit(do_not_specialize=["rows", "capacity", "size_class", "rank"])
def multiply_and_send(
    table_ptr,  # int64 [WORLD]: where the mail of each rank lies
    ticket_ptr,
    sums_ptr,
    arrived_ptr,
    a_ptr,  # [rows, K], rows stride_a apart
    weight_ptr,  # [N, K], rows stride_weight apart
    rows,
    capacity,  # rows of a slot
    size_class,  # of rows
    N,
    K,
    stride_a,
    stride_weight,
    rank,
    WORLD: tl.constexpr,
    STEP_K: tl.constexpr,  # a power of two that divides K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,  # programs that share a tile
):
    """Send the words of a @ weight.T to all ranks."""
    TARGET: tl.constexpr = compiled_for()
    call = (tl.load(ticket_ptr) >> TICKET_BITS) + 1
    tile = tl.program_id(0) // SPLIT
    split = tl.program_id(0) % SPLIT
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT)
    first = split * steps * BLOCK_K
    last = tl.minimum(first + steps * BLOCK_K, K)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask = offs_m[:, None] < rows
    a_ptrs = a_ptr + tl.cast(offs_m, tl.int64)[:, None] * stride_a + offs_k[None, :]
    offs_n = (tile * BLOCK_N + tl.arange(0, BLOCK_N)) % N  # those after the end are not sent
    weight_ptrs = weight_ptr + tl.cast(offs_n, tl.int64)[:, None] * stride_weight + offs_k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in tl.range(first, last, BLOCK_K):
        if STEP_K % BLOCK_K == 0:
            weight = tl.load(weight_ptrs + k, eviction_policy="evict_first")
            a = tl.load(a_ptrs + k, mask=mask, other=0.0)
        else:
            is_here = offs_k[None, :] < tl.multiple_of(K - k, STEP_K)
            weight = tl.load(weight_ptrs + k, mask=is_here, other=0.0, eviction_policy="evict_first")
            a = tl.load(a_ptrs + k, mask=mask & is_here, other=0.0)
        if TARGET == "cpu":  # the interpreter has no arithmetic in bfloat16
            weight, a = weight.to(tl.float32), a.to(tl.float32)
        acc = tl.dot(weight, a.T, acc)
    if TARGET == "cuda":
        tl.extra.cuda.gdc_launch_dependents()

    is_whole = SPLIT == 1
    if SPLIT > 1:
        places = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + offs_m[None, :]
        of_tile_ptr = sums_ptr + tile * (SPLIT * BLOCK_N * BLOCK_M) + places
        tl.store(of_tile_ptr + split * (BLOCK_N * BLOCK_M), acc)
        is_whole = count_up(arrived_ptr + tile, "acq_rel") == SPLIT - 1
        if is_whole:
            tl.store(arrived_ptr + tile, 0)
            tl.debug_barrier()  # one thread has acquired what others released, for the loads of all
            acc = tl.load(of_tile_ptr, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                acc += tl.load(of_tile_ptr + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    if is_whole:
        part = tl.trans(acc).to(a_ptr.dtype.element_ty).to(tl.int16, bitcast=True)
        even, odd = tl.split(tl.reshape(part, (BLOCK_M, BLOCK_N // 2, 2)))
        elements = ((odd.to(tl.int64) & 0xFFFF) << 16) | (even.to(tl.int64) & 0xFFFF)
        words = word_of(stamp_of(call, rows), elements)
        length = N // 2
        cols = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        within = offs_m[:, None] * length + cols[None, :]
        slot = ((call & 1) * WORLD + rank) * capacity * length
        for peer in range(0, WORLD):
            mail_ptr = tl.load(table_ptr + peer).to(tl.pointer_type(tl.int64))
            tl.store(
                tl.multiple_of(mail_ptr, 16) + slot + within, words, mask=mask & (cols[None, :] < length)
            )


_KERNEL = TunedKernel(multiply_and_send, operation="GemmAllReduce")


class SendMemory(NamedTuple):
    """The tensors of one operation, which no call changes."""

    table: torch.Tensor
    ticket: torch.Tensor
    sums: torch.Tensor
    arrived: torch.Tensor


def open_sums(memory: SymmetricMemory, mail: MailMemory, m: int, n: int) -> SendMemory:
    """Allocate what programs that share a tile leave to each other, in calls with up to m rows."""
    tiles = {name: [config.kwargs[name] for config in CANDIDATES] for name in ("BLOCK_M", "BLOCK_N", "SPLIT")}
    rows = min(height for height in tiles["BLOCK_M"] if height >= min(m, MOST_ROWS))
    columns = n + max(tiles["BLOCK_N"])
    sums = torch.empty(max(tiles["SPLIT"]) * columns * rows, dtype=torch.float32, device=memory.device)
    arrived = torch.zeros(triton.cdiv(n, min(tiles["BLOCK_N"])), dtype=torch.int32, device=memory.device)
    return SendMemory(mail.table, mail.ticket, memory.hold(sums), memory.hold(arrived))


def pays_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether operations of that type have the kernel there: 16-bit types, from Hopper on."""
    return dtype in (torch.float16, torch.bfloat16) and (device.type != "cuda" or capability(device) >= 9)


def can_send(a: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the kernel, if there is one, can multiply them."""
    return (
        len(a) <= MOST_ROWS
        and a.shape[1] % QUANTUM == 0
        and all(each.data_ptr() % QUANTUM == 0 and _lies_by_rows(each) for each in (a, weight))
    )


def _lies_by_rows(rows: torch.Tensor) -> bool:
    return rows.stride(1) == 1 and (len(rows) == 1 or rows.stride(0) % (QUANTUM // rows.element_size()) == 0)


def prepare(
    rank: int, world_size: int, capacity: int, memory: SendMemory, a: torch.Tensor, weight: torch.Tensor
) -> TunedLaunch:
    """Return the launch for operands that lie so; it is called with (), the operands, and ()."""
    (rows, k), n = a.shape, len(weight)

    def grid(meta: dict[str, Any]) -> tuple[int, int, int]:
        return triton.cdiv(n, meta["BLOCK_N"]) * meta["SPLIT"], 1, 1

    constants = {"WORLD": world_size, "STEP_K": math.gcd(k, LARGEST_STEP)}
    numbers = (rows, capacity, class_of_rows(rows), n, k, a.stride(0), weight.stride(0), rank)
    return TunedLaunch(_KERNEL, grid, constants, held=tuple(memory), numbers=numbers)
