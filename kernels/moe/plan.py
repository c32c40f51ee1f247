"""The memory in which the choices of one call are sorted, and the two launches that do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from ..configs import INTERPRETED
from .routing import ENTRY, LOWEST_HEIGHT_BITS, count_choices, place_choices

LOWEST = 2**LOWEST_HEIGHT_BITS.value  # rows of a block of the first table
PROGRAMS = 1 if INTERPRETED else 64  # that count, and that place
BLOCK = 256 if INTERPRETED else 1024
WARPS = 8


class Plan:
    """Where the choices of up to `most` (token, expert) pairs go when they are sorted.

    What the kernels read: `rows`, `sources`, `offsets`, `tables`, `ends` (see `routing`), and `counters`,
    three words for each rank, which are 0 when the first kernel behind the sorting starts.
    """

    def __init__(
        self,
        *,
        world_size: int,
        experts: int,
        most: int,
        orders: int,
        heights: int,
        by_first: bool,
        device: torch.device,
    ) -> None:
        self.experts = experts
        self.capacity = most // LOWEST + experts + 1  # blocks of the lowest height
        counted, tables = world_size * (experts + 1), orders * heights
        padded = triton.next_power_of_2(experts + 1)
        self._constants = {"WORLD": world_size, "BLOCK": BLOCK}
        bits = search_bits(world_size, padded)
        self._of_tables = {"ORDERS": orders, "HEIGHTS": heights, "BY_FIRST": by_first}
        self._of_tables |= {"EXPERTS": padded, "SEARCH_BITS": bits}

        self.held: list[torch.Tensor] = []  # what the kernels of a call write

        def words(*shape: int) -> torch.Tensor:
            self.held.append(torch.empty(shape, dtype=torch.int32, device=device))
            return self.held[-1]

        self._zeroed = words(counted + 1 + 3 * world_size)
        self._counts, self.counters = self._zeroed[: counted + 1], self._zeroed[counted + 1 :]
        self._starts, self.offsets = words(counted), words(world_size + 1)
        self._within, self.rows, self.sources = words(most), words(most), words(most)
        self._groups = words(tables, 2, world_size * padded)
        self.ends, self.tables = words(tables, world_size), words(tables, self.capacity, ENTRY.value)

    def sort(
        self,
        ids: torch.Tensor,
        flags: torch.Tensor,
        errors: torch.Tensor,
        *,
        pairs: int,
        topk: int,
        stride: int,
        tokens: int,
        told: int,
        rank: int,
        first: int,
        patience_ticks: int,
    ) -> None:
        """Enqueue the sorting of `pairs` choices, which starts when those of all ranks have come."""
        self._zeroed.zero_()
        counts = (self._counts, self._starts, self.offsets, self._within)
        numbers = (pairs, self.experts, topk, stride, tokens, told, rank, first, patience_ticks)
        launch: Callable[..., Any] = count_choices[(PROGRAMS,)]
        launch(ids, flags, errors, *counts, *numbers, **self._constants, num_warps=WARPS)
        placed = (self.rows, self.sources, self._groups, self.ends, self.tables)
        sizes = (self.experts, stride, first, self.capacity)
        launch = place_choices[(len(self.ends) + PROGRAMS,)]
        launch(ids, *counts, *placed, *sizes, **self._of_tables, **self._constants, num_warps=WARPS)


def search_bits(world_size: int, padded_experts: int) -> int:
    """Return how many halvings find one of the groups of a table."""
    return (world_size * padded_experts - 1).bit_length()
