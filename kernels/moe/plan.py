"""Sorts the choices of one call by expert: the memory, and the two launches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from ..configs import INTERPRETED
from ..launches.prepared import PlainLaunches
from .launch import HEIGHTS
from .routing import ENTRY, LOWEST_HEIGHT_BITS, count_choices, place_choices

LOWEST = 2**LOWEST_HEIGHT_BITS.value  # rows of a block of the first table
PROGRAMS = 1 if INTERPRETED else 64  # that count, and that place
BLOCK = 256 if INTERPRETED else 1024
WARPS = 8
BY_EXPERT = 1  # an order of tables, see `routing`
SHARED_ORDERS = 3  # of the tables of a sorting that both operations of a layer use
SHARED_PARTS = 16 if INTERPRETED else 64  # of the choices of all ranks in such a sorting, at most
ALIGNED_WORDS = 4  # each part of the memory begins at 16 bytes

_COUNT, _PLACE = (PlainLaunches(kernel, num_warps=WARPS) for kernel in (count_choices, place_choices))


class Plan:
    """The sorted choices of up to `most` (token, expert) pairs.

    Kernels read `rows`, `sources`, `offsets`, `tables`, `ends` (see `routing`), and `counters`, three words
    for each stage, which are 0 when the first kernel after the sorting starts. `starts` is where the choices
    of each expert start; dropped ones are those of one more expert. All of it lies in `words`, from which
    another plan of the same sizes can be made. stages: 1 for kernels that wait for no chunk; else a stage for
    each rank.
    """

    def __init__(
        self,
        *,
        world_size: int,
        experts: int,
        most: int,
        orders: int,
        by_first: bool,
        device: torch.device,
        words: torch.Tensor | None = None,
        stages: int | None = None,
    ) -> None:
        self.experts = experts
        stages = stages or world_size
        self.capacity = _blocks(most, experts)
        padded = triton.next_power_of_2(experts + 1)
        shared, parts_of_chunk = orders == SHARED_ORDERS, _parts(world_size, orders)
        self._of_counts = {"WORLD": world_size, "STAGES": stages, "PARTS": parts_of_chunk, "BLOCK": BLOCK}
        self._of_counts["SHARED"] = shared
        of_tables = {"ORDERS": orders, "HEIGHTS": HEIGHTS, "BY_FIRST": by_first}
        of_tables |= {"EXPERTS": padded, "SEARCH_BITS": search_bits(stages, padded)}
        self._of_places = self._of_counts | of_tables
        self._kind = world_size, padded, orders, by_first, stages
        shapes = _shapes(world_size, experts, most, orders, stages)
        if words is None:
            with torch.inference_mode(False):  # calls in other modes write it
                words = torch.empty(_length(shapes), dtype=torch.int32, device=device)
        self.words = words  # written by the kernels of a call
        parts, begin = {}, 0
        for name, shape in shapes.items():
            parts[name] = words[begin : begin + math.prod(shape)].view(shape)
            begin += _aligned(math.prod(shape))
        counted = math.prod(shapes["starts"])
        self._zeroed = parts["zeroed"]
        self._counts, self.counters = self._zeroed[: counted + 2], self._zeroed[counted + 2 :]
        self._starts, self.offsets = parts["starts"], parts["offsets"]
        self._chosen, self._within = parts["chosen"], parts["within"]
        self.starts = self._starts[: experts + 1]
        self.rows, self.sources = parts["rows"], parts["sources"]
        # Of a shared sorting: the weight of each sorted choice; 0 for a dropped one.
        self.weights = parts["weights"].view(torch.float32)
        self._groups, self.ends, self.tables = parts["groups"], parts["ends"], parts["tables"]

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
        weights: torch.Tensor | None = None,
    ) -> None:
        """Enqueue the sorting of `pairs` choices; it starts when the choices of all ranks have come.

        weights: of the choices, in the places of `ids`; then both operations of a layer share the sorting.
        """
        (self._zeroed if weights is None else self.words).zero_()  # a routing has no undefined word
        given = (ids, flags, errors)
        unsorted = self.weights if weights is None else weights
        # Of the numbers, only ticks may need 64 bits. Parts of `words` are aligned like `words`.
        aligned = tuple([tensor.data_ptr() % 16 == 0 for tensor in (*given, self.words, unsorted)])
        kind = (self._kind, ids.device, aligned, patience_ticks.bit_length() > 31)
        counts = (self._counts, self._starts, self.offsets, self._chosen, self._within)
        numbers = (pairs, self.experts, topk, stride, tokens, told, rank, first, patience_ticks)
        _COUNT.launch(kind, (PROGRAMS, 1, 1), (*given, *counts), numbers, self._of_counts)
        placed = (self.rows, self.sources, self._groups, self.ends, self.tables)
        tensors = (unsorted, self.weights, *counts, *placed)
        sizes = (self.experts, stride, first, self.capacity)
        grid = (len(self.ends) + PROGRAMS, 1, 1)
        _PLACE.launch(kind, grid, tensors, sizes, self._of_places)


@dataclass(frozen=True)
class Routing:
    """The sorting of the choices of all ranks: by expert, within an expert by rank, this one first.

    `AllGatherMoE.route` makes it; later calls of this rank with the same choices take it. Sorted rows lie in
    its order; after those of all experts are the rows of choices that are dropped.
    """

    plan: Plan
    tokens: tuple[int, ...]  # of each rank
    topk: int

    @classmethod
    def of_words(cls, words: torch.Tensor, *, tokens: tuple[int, ...], topk: int, experts: int) -> Routing:
        """Return the routing that `words` hold."""
        plan = shared_plan(len(tokens), experts, sum(tokens) * topk, words.device, words)
        return cls(plan, tokens, topk)

    @property
    def words(self) -> torch.Tensor:
        """The routing as one tensor, int32, for autograd, which saves nothing but tensors."""
        return self.plan.words

    @property
    def rows(self) -> torch.Tensor:
        """int32 [T * topk]: the number of each sorted choice in the order of all ranks, t * topk + j."""
        return self.plan.rows

    @property
    def weights(self) -> torch.Tensor:
        """float32 [T * topk]: the weight of each sorted choice; 0 for a dropped choice."""
        return self.plan.weights

    @property
    def ends(self) -> torch.Tensor:
        """int32 [experts]: the sorted choice after the last one of each expert."""
        return self.plan.starts[1:]

    def sources(self, tokens_per_rank: int) -> torch.Tensor:
        """Return the sorted choices in a layout with so many tokens of each rank, rank by rank."""
        if all(count == tokens_per_rank for count in self.tokens):
            return self.rows
        begins = self.plan.offsets  # on the device: numbers from the host would wait for it
        rank = torch.bucketize(self.rows, begins[1:], right=True, out_int32=True)
        return self.rows - begins[rank] + rank * tokens_per_rank * self.topk


class Sorting(NamedTuple):
    """The choices of all ranks as the kernel of a call reads them."""

    plan: Plan
    topk: int
    order: int  # the first of the tables'
    routing: Routing | None  # in whose order the rows lie
    is_gathered: bool  # all chunks are here, and the kernel takes them for one rank's

    @property
    def is_shared(self) -> bool:
        return self.routing is not None

    @property
    def offsets(self) -> torch.Tensor:
        offsets = self.plan.offsets
        return offsets[:: len(offsets) - 1].contiguous() if self.is_gathered else offsets

    @property
    def ends(self) -> torch.Tensor:
        ends = self.plan.ends[self.order * HEIGHTS :]
        return ends[:, -1].contiguous() if self.is_gathered else ends

    @property
    def tables(self) -> torch.Tensor:
        return self.plan.tables[self.order * HEIGHTS :]


def shared_plan(
    world_size: int, experts: int, most: int, device: torch.device, words: torch.Tensor | None = None
) -> Plan:
    """Return a plan that both operations of a layer can use."""
    sizes = {"world_size": world_size, "experts": experts, "most": most, "orders": SHARED_ORDERS}
    return Plan(**sizes, by_first=False, device=device, words=words)


def words_of_shared(world_size: int, experts: int, most: int) -> int:
    """Return the length of a shared plan's `words`."""
    return _length(_shapes(world_size, experts, most, SHARED_ORDERS, world_size))


def _shapes(world_size: int, experts: int, most: int, orders: int, stages: int) -> dict[str, tuple[int, ...]]:
    counted, tables = stages * _parts(world_size, orders) * (experts + 1), orders * HEIGHTS
    padded = triton.next_power_of_2(experts + 1)
    return {
        "zeroed": (counted + 2 + 3 * stages,),
        "starts": (counted,),
        "offsets": (world_size + 1,),
        **dict.fromkeys(("chosen", "within", "rows", "sources"), (most,)),
        "weights": (most if orders == SHARED_ORDERS else 0,),
        "groups": (tables, 2, stages * padded),
        "ends": (tables, stages),
        "tables": (tables, _blocks(most, experts), ENTRY.value),
    }


def _parts(world_size: int, orders: int) -> int:
    """Return how many parts of a chunk are counted apart: a power of two."""
    most = SHARED_PARTS // world_size if orders == SHARED_ORDERS else 1
    return 1 << max(most.bit_length() - 1, 0)


def _blocks(most: int, experts: int) -> int:
    """Return how many blocks of the lowest height there may be."""
    return most // LOWEST + experts + 1


def _aligned(words: int) -> int:
    return -(-words // ALIGNED_WORDS) * ALIGNED_WORDS


def _length(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(_aligned(math.prod(shape)) for shape in shapes.values())


def search_bits(stages: int, padded_experts: int) -> int:
    """Return how many halvings find one of the groups of a table."""
    return (stages * padded_experts - 1).bit_length()
