"""The gather of few rows by mail: one launch sends this rank's rows to its peers, and keeps what they send.

A copy engine needs a launch, a permit and some driver calls for each chunk, about 15 us whatever its size. Up
to 64 rows of a rank go in stamped words, as those of `GemmAllReduce` do: see `exchange.mail`. cuBLAS then
multiplies the gathered rows. What a rank's row is made of does not matter here: its words are moved as int32.

A program sends parts of own rows as long as there are some, then takes parts of the peers' rows, the next
rank's first. Who receives nothing within `patience_ticks` records the peer and writes NaN in its place.

No GPU has run it yet (docs/not-yet-run.md), so calls take this way only where the caller asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ..configs import INTERPRETED, not_too_large, take_first
from ..exchange.mail import (
    MOST_ROWS,
    TICKETS,
    Mail,
    can_take,
    leave,
    open_mail,
    receive_part,
    send_parts,
    stamp_of,
    take_ticket,
)
from ..gemm.configs import class_of_rows
from ..launches.settled import TunedKernel, TunedLaunch
from ..symm import SymmetricMemory
from .gather_buffer import RowFormat

LOW_LATENCY = "low-latency"  # this way, in a `tunable`
BY_MAIL = 2  # the same on ballots

# Each element of a word is NaN, in fp8 or in a wider type; a scale in fp8 is finite then.
NAN_OF_FP8, NAN = 0x7F7F7F7F, 0x7FFF7FFF


def candidate(block: int, per_sm: int, warps: int) -> triton.Config:
    """Return the config of parts of so many words, and so many programs on an SM."""
    return triton.Config({"BLOCK": block, "PER_SM": per_sm}, num_warps=warps, num_stages=1)


GPU_CANDIDATES = [
    candidate(512, 1, 4),
    candidate(1024, 1, 4),
    candidate(256, 2, 2),
    candidate(2048, 1, 8),
    candidate(512, 2, 4),
]
CANDIDATES = [candidate(16, 1, 4), candidate(8, 2, 4)] if INTERPRETED else GPU_CANDIDATES


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Return the candidates whose parts are no longer than a row needs; never none."""
    return not_too_large(configs, BLOCK={**named_args, **kwargs}["length"])


@triton.autotune(
    configs=CANDIDATES,
    key=["size_class", "length", "WORLD"],
    prune_configs_by={"early_config_prune": prune},
    do_bench=take_first,
)
@triton.jit(do_not_specialize=["rows", "capacity", "size_class", "rank", "lost_word", "patience_ticks"])
def exchange_shards(
    table_ptr,  # int64 [WORLD]: where the mail of each rank lies
    mail_ptr,  # int64 [2, WORLD, capacity, length]
    ticket_ptr,  # int64 [1]
    lost_ptr,  # int32 [1]
    errors_ptr,  # int64 [WORLD], in memory that the host reads without waiting
    shard_ptr,  # int32 [rows, length]: the words of this rank's rows
    gathered_ptr,  # int32 [WORLD, rows, length], of which the own rows are in place
    rows,
    capacity,  # rows of a slot
    size_class,  # of rows
    length,  # words of a row
    rank,
    lost_word,  # written in place of words that do not come
    patience_ticks,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,  # words of a part
    PER_SM: tl.constexpr,  # the grid's: programs on an SM, at most
):
    """Send this rank's rows to its peers, and write theirs to `gathered_ptr`."""
    blocks = tl.cdiv(length, BLOCK)
    parts = rows * blocks
    programs = tl.num_programs(0)
    call, part = take_ticket(ticket_ptr)
    stamp = stamp_of(call, rows)
    mail = Mail(table_ptr, mail_ptr, capacity, length, lost_ptr, errors_ptr, rank, stamp, patience_ticks)
    order = send_parts(shard_ptr, part, parts, blocks, ticket_ptr, mail, WORLD, BLOCK)
    for item in range(order, parts * (WORLD - 1), programs):
        sender = (rank + 1 + item // parts) % WORLD
        row = item % parts // blocks
        first = item % blocks * BLOCK
        words, is_lost = receive_part(
            shard_ptr, row, first, mail, shard_ptr, sender, sender + 1, WORLD, BLOCK, True
        )
        places = first + tl.arange(0, BLOCK)
        to_ptr = gathered_ptr + (tl.cast(sender, tl.int64) * rows + row) * length
        tl.store(to_ptr + places, tl.where(is_lost != 0, lost_word, words), mask=places < length)
    if order == programs - 1:
        tl.atomic_add(ticket_ptr, -parts - programs + TICKETS, sem="relaxed", scope="gpu")


_KERNEL = TunedKernel(exchange_shards, operation="AllGatherGemm")


class GatherByMail:
    """The gather of up to 64 rows of each rank in one launch, for one operation; opening is collective.

    capacity: rows of a rank, at most. Only where `can_open`.
    """

    def __init__(self, memory: SymmetricMemory, row: RowFormat, capacity: int, errors: torch.Tensor) -> None:
        self._width, self._dtype = row.memory
        self._rank, self._world_size, self._device = memory.rank, memory.world_size, memory.device
        self._nan = NAN_OF_FP8 if row.is_scaled else NAN
        self._memory, self._lost = open_mail(memory, capacity, self._width, self._dtype, errors)

    @staticmethod
    def can_open(row: RowFormat) -> bool:
        """Return whether rows of that format can go by mail."""
        return can_take(1, *row.memory)

    def can_take(self, size_class: int) -> bool:
        """Return whether calls of a class of all ranks' rows can go so."""
        return size_class <= self._world_size * MOST_ROWS

    def prepare(self, sms: int, gathered: torch.Tensor, shard: torch.Tensor) -> Callable[[int], None]:
        """Return what enqueues the exchange, given the patience, on the current stream.

        shard [rows, row of memory], a part of gathered [W * rows, row of memory], which is contiguous. Both
        are kept.
        """
        tensors = (*self._memory, shard.view(torch.int32), gathered.view(torch.int32))
        rows, length = tensors[-2].shape
        size_class, world = class_of_rows(rows), self._world_size
        numbers = (rows, self._memory.mail.shape[2], size_class, length, self._rank, self._nan)

        def grid(meta: dict[str, Any]) -> tuple[int, int, int]:
            """Return how many programs run: at most the parts that a rank receives."""
            parts = rows * triton.cdiv(length, meta["BLOCK"]) * max(1, world - 1)
            return min(parts, meta["PER_SM"] * sms), 1, 1

        launch = TunedLaunch(_KERNEL, grid, {"WORLD": world}, held=tensors, numbers=numbers)
        return lambda patience_ticks: launch((), (), (patience_ticks,))

    def send_nan(self, sms: int, rows: int, patience_ticks: int) -> None:
        """Enqueue the exchange of a call that this rank refuses: its rows are NaN."""
        size = self._world_size, rows, self._width * self._dtype.itemsize // 4
        gathered = torch.full(size, self._nan, dtype=torch.int32, device=self._device)
        self.prepare(sms, gathered.flatten(0, 1), gathered[self._rank])(patience_ticks)

    def leave(self) -> None:
        """Let each peer find this rank given up, but for words that it has sent before."""
        leave(self._lost, self._rank)
