"""The memory of an `ExpertParallel`, and the launches of its kernels: see `slots`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch.nn.functional import grouped_mm

from dist_autotune import tunable

from ..configs import INTERPRETED, capability
from ..launches.prepared import PlainLaunches
from ..launches.settled import Grid, TunedKernel, UnplannedLaunches, kinds_of
from ..moe.launch import lies_for_tma, size_class
from ..signals import GIVEN_UP
from ..symm import SymmetricMemory, SymmetricTensor
from ..tensors import begin_at_16_bytes, lies_by_columns, pitch_of
from .combine_kernels import collect_dots, combine_rows, grade_rows
from .dispatch_kernels import gather_rows, send_tokens
from .product_kernel import multiply_rows
from .slots import COLUMNS, DONE
from .sorting_kernels import count_choices, place_choices

SEGMENTS = 4 if INTERPRETED else 16  # of all positions, counted and placed side by side
BLOCK_POSITIONS = 64 if INTERPRETED else 1024
BLOCK_COLUMNS = 128 if INTERPRETED else 4096  # that a program copies at a time; twice as many of few tokens
KEYS, POSITIONS = (32, 32) if INTERPRETED else (16, 512)  # of a dispatch in one launch
PART_COLUMNS = 32 if INTERPRETED else 2048  # that a program adds, of a combine in one launch
SIDE_BY_SIDE = 4  # rows that it reads at once: 4096 tokens of an H200 take 0.84 of the time with one
INTERPRETED_SMS = 1
INTERPRETED_PROGRAMS = 2  # of a product
TMA_CAPABILITY = 9
GROUPED_CAPABILITIES = (9, 10)  # on others torch's host reads the offsets, and multiplies expert by expert
TORCH, OURS = "grouped_mm", "multiply_rows"  # products of rows that are here

_SEND, _GATHER, _COMBINE = map(TunedKernel, (send_tokens, gather_rows, combine_rows))
_GRADE, _MULTIPLY = map(TunedKernel, (grade_rows, multiply_rows))
_COUNT, _PLACE, _COLLECT = map(PlainLaunches, (count_choices, place_choices, collect_dots))


@dataclass(frozen=True, eq=False)
class Dispatched:
    """What a dispatch has brought: the rows of this rank's experts, and where they came from.

    rows: [C, H], or of `dispatch_matmul` [C, N], by expert, within an expert by source rank and token; after
    `offsets[-1]` undefined.
    offsets: int32 [experts / W + 1], on the device: where the rows of each expert begin.
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    sources: torch.Tensor  # int32 [C]: the position of each row, see `slots`
    places: torch.Tensor  # int32 [tokens_per_rank * topk]: rows of own tokens at own experts
    topk_ids: torch.Tensor  # [T, topk], contiguous


def check_is_dispatched(d: Dispatched) -> None:
    if not isinstance(d, Dispatched):
        name = type(d).__name__
        raise TypeError(f"d is a {name}; what dispatch or dispatch_matmul returned is needed")


class Sizes(NamedTuple):
    tokens: int  # of a rank, at most
    hidden: int
    experts: int  # of a rank
    topk: int
    capacity: int  # rows of a rank

    def check_dispatched(self, d: Dispatched) -> None:
        """Raise unless `d` is a dispatch of an operation of these sizes: kernels index with what it holds."""
        check_is_dispatched(d)
        topk = d.topk_ids.shape[1]
        given = topk, len(d.places) // topk, len(d.offsets) - 1, len(d.sources)
        needed = self.topk, self.tokens, self.experts, self.capacity
        if given != needed:
            text = "topk={}, {} tokens of a rank, {} experts of a rank, capacity={}"
            other = f"d is of an operation with other sizes: {text.format(*given)}"
            raise ValueError(f"{other}; {text.format(*needed)} are needed")


class Launches:
    """Enqueues the kernels of exchanges on the current stream. What is held is allocated here; collective."""

    def __init__(
        self, memory: SymmetricMemory, errors: torch.Tensor, sizes: Sizes, dtype: torch.dtype
    ) -> None:
        world, device = memory.world_size, memory.device
        self.rank, self.sizes, self._errors, self._memory = memory.rank, sizes, errors, memory
        tokens = (2, world, sizes.tokens)  # see [Note: two slots take turns]
        self.tokens = memory.allocate((*tokens, sizes.hidden), dtype)
        self._ids = memory.allocate((*tokens, sizes.topk), torch.int32)
        self._weights = memory.allocate((*tokens, sizes.topk), torch.float32)
        self._counts = memory.allocate((2, world), torch.int32)
        self._choices = memory.allocate((2, sizes.tokens, sizes.topk, sizes.hidden), dtype)
        self._dots = memory.allocate((2, sizes.tokens, sizes.topk), torch.float32)
        self.flags = memory.allocate((2, world), torch.int32)
        self._state = memory.hold(torch.zeros((2, COLUMNS.value), dtype=torch.int32, device=device))
        found = torch.zeros((sizes.experts, SEGMENTS), dtype=torch.int32, device=device)
        self._found = memory.hold(found)
        self._sent_to = self._table(self.tokens, self._ids, self._weights, self._counts, self.flags)
        self._returned_to = self._table(self._choices, self.flags)
        self._graded_to = self._table(self._dots, self.flags)
        self._launch = UnplannedLaunches().launch
        held = (self._ids.local, self._counts.local, self.flags.local, errors, self._state, self._found)
        self._kind = (device, world, *sizes, *kinds_of(held))  # of kernels that are not tuned
        self._sms = 0
        if device.type == "cuda":
            self._sms = torch.cuda.get_device_properties(device).multi_processor_count

    def _table(self, *tensors: SymmetricTensor) -> torch.Tensor:
        """Return the int64 [tensors, W] table of where each rank's parts lie; it keeps them mapped."""
        tables = [each.addresses() for each in tensors]
        table = self._memory.hold(torch.stack(tables))
        table.points_to = tuple(peer for each in tensors for peer in each.peers)  # type: ignore[attr-defined]
        return table

    def new_dispatch(self, ids: torch.Tensor, columns: int) -> Dispatched:
        """Return a dispatch to be filled."""
        sizes, device = self.sizes, ids.device
        offsets, places = (
            torch.empty(length, dtype=torch.int32, device=device)
            for length in (sizes.experts + 1, sizes.tokens * sizes.topk)
        )
        sources = torch.empty(sizes.capacity, dtype=torch.int32, device=device)
        return Dispatched(self.new_rows(columns), offsets, sources, places, ids)

    def new_rows(self, columns: int) -> torch.Tensor:
        return self.tokens.local.new_empty((self.sizes.capacity, columns))

    def leave(self) -> None:
        """Come to no exchange that has not been completed, see [Note: an exchange is lost once]."""
        completed = self._state[:, DONE.value]
        for peer, flags in enumerate(self.flags.peers):
            if peer != self.rank:
                raised = flags[:, self.rank]
                raised += GIVEN_UP.value * (raised - completed <= 1)  # else this rank is given up there

    # ---- the launches

    def _of_row(self, *, at_once: bool = False) -> dict[str, int]:
        block = min(triton.next_power_of_2(self.sizes.hidden), BLOCK_COLUMNS << at_once)
        shape = {"H": self.sizes.hidden, "K": self.sizes.topk}
        return {**shape, "WORLD": self._memory.world_size, "BLOCK": block}

    def _grid(self, items: int) -> Grid:
        sms = self._sms or INTERPRETED_SMS
        return lambda meta: (max(1, min(items, meta["PER_SM"] * sms)), 1, 1)

    def send(
        self,
        x: torch.Tensor,
        d: Dispatched,
        weights: torch.Tensor | None,
        patience_ticks: int,
        *,
        to_all: bool = False,
        fp8: bool = False,
        at_once: bool = False,
    ) -> None:
        """Enqueue what sends tokens; at_once: it fills `d`, too, save rows that are `to_all`."""
        sizes, world = self.sizes, self._memory.world_size
        held = (self.tokens, self._ids, self._weights, self._counts, self.flags)
        items = world * sizes.tokens * sizes.topk if at_once else len(x)
        tensors = (
            *(x, d.topk_ids, self._weights.local if weights is None else weights),
            *(each.local for each in held),
            *(self._sent_to, self._errors, self._state, d.rows, d.sources, d.places, d.offsets),
        )
        numbers = (
            *(size_class(len(x)), len(x), sizes.tokens, sizes.experts, sizes.capacity, self.rank),
            *(patience_ticks, x.stride(0)),
        )
        constants = {
            **self._of_row(at_once=at_once),
            "RANKS": triton.next_power_of_2(world),
            "WEIGHTED": weights is not None,
            "TO_ALL": to_all or fp8,
            "FP8": fp8,
            "AT_ONCE": at_once,
            "GATHERS": at_once and not to_all,
            "CHOICES": triton.next_power_of_2(sizes.topk),
            "KEYS": KEYS,
            "POSITIONS": POSITIONS,
        }
        self._launch(_SEND, self._grid(items), tensors, numbers, constants)

    def sort(self, d: Dispatched, patience_ticks: int, *, fp8: bool = False) -> None:
        sizes, world = self.sizes, self._memory.world_size
        held = (self._ids.local, self._counts.local, self.flags.local, self._errors, self._state, self._found)
        positions = world * sizes.tokens * sizes.topk
        length = -(-positions // (SEGMENTS * BLOCK_POSITIONS)) * BLOCK_POSITIONS
        of_all = (sizes.tokens, sizes.experts, self.rank, length)
        constants = {"K": sizes.topk, "WORLD": world, "RANKS": triton.next_power_of_2(world), "FP8": fp8}
        constants["BLOCK"] = BLOCK_POSITIONS
        kind, grid = (self._kind, patience_ticks.bit_length() > 31, fp8), (sizes.experts, SEGMENTS, 1)
        _COUNT.launch(kind, grid, held, (*of_all, patience_ticks), constants)
        constants |= {"SEGMENTS": SEGMENTS, "EXPERTS": triton.next_power_of_2(sizes.experts)}
        numbers = (*of_all, sizes.capacity, patience_ticks)
        _PLACE.launch(kind, grid, (*held, d.sources, d.places, d.offsets), numbers, constants)

    def gather(self, x: torch.Tensor, d: Dispatched, *, fp8: bool = False) -> None:
        sizes = self.sizes
        tensors = (x, self.tokens.local, d.rows, d.sources, d.offsets, self._state)
        numbers = (size_class(len(x)), len(x), sizes.tokens, sizes.experts, self.rank, x.stride(0))
        self._launch(_GATHER, self._grid(sizes.capacity), tensors, numbers, {**self._of_row(), "FP8": fp8})

    def combine(
        self,
        rows: torch.Tensor | None,
        d: Dispatched,
        weights: torch.Tensor,
        out: torch.Tensor,
        patience_ticks: int,
        *,
        returns: bool,
        sums: bool,
    ) -> None:
        """Enqueue the return of rows, or the sums, or both.

        rows: of this rank's experts, None if they are where those of peers are.
        """
        sizes, tokens, of_row = self.sizes, len(d.topk_ids), self._of_row(at_once=returns and sums)
        given = self._choices.local if rows is None else rows
        part = min(PART_COLUMNS, of_row["BLOCK"]) if returns else of_row["BLOCK"]
        parts = tokens * triton.cdiv(sizes.hidden, part) * sums
        tensors = (
            *(given, self._choices.local, self.flags.local, self._returned_to),
            *(d.sources, d.offsets, self._errors, self._state, d.topk_ids, weights, d.places, out),
        )
        numbers = (
            *(size_class(tokens), tokens, sizes.tokens, sizes.experts, sizes.capacity, self.rank),
            *(patience_ticks, 0 if rows is None else rows.stride(0), out.stride(0)),
        )
        constants = {
            **of_row,
            "RETURNS": returns,
            "SUMS": sums,
            "ALL_RETURNED": rows is None,
            "PART": part,
            "SIDE_BY_SIDE": min(sizes.topk, SIDE_BY_SIDE),
        }
        grid = self._grid(max(parts, sizes.capacity * returns))
        self._launch(_COMBINE, grid, tensors, numbers, constants)

    def grade(
        self, grad: torch.Tensor, rows: torch.Tensor, d: Dispatched, out: torch.Tensor, patience_ticks: int
    ) -> None:
        sizes = self.sizes
        tensors = (
            *(grad, self.tokens.local, rows, self._weights.local, out, self._dots.local),
            *(self.flags.local, self._graded_to, d.sources, d.offsets, self._errors, self._state),
        )
        numbers = (
            *(size_class(len(grad)), len(grad), sizes.tokens, sizes.experts, self.rank, patience_ticks),
            *(grad.stride(0), rows.stride(0)),
        )
        self._launch(_GRADE, self._grid(sizes.capacity), tensors, numbers, self._of_row())

    def collect(self, ids: torch.Tensor, out: torch.Tensor, patience_ticks: int) -> None:
        programs = max(1, min(-(-out.numel() // BLOCK_POSITIONS), self._sms or INTERPRETED_SMS))
        tensors = (self._dots.local, ids, out, self.flags.local, self._errors, self._state)
        numbers = (len(ids), self.sizes.tokens, self.sizes.experts, self.rank, patience_ticks)
        constants = {"K": self.sizes.topk, "WORLD": self._memory.world_size, "BLOCK": BLOCK_POSITIONS}
        _COLLECT.launch(
            (self._kind, *kinds_of(tensors), *numbers), (programs, 1, 1), tensors, numbers, constants
        )

    def product(self, rows: torch.Tensor, weight: torch.Tensor, d: Dispatched) -> torch.Tensor:
        """Return each row times its expert's matrix: by torch's grouped product or ours, as tuned."""
        key = (size_class(len(d.topk_ids) * self.sizes.topk), *weight.shape)
        if _torch_takes(rows, weight) and tunable("ep product", (TORCH, OURS), key=key) == TORCH:
            return grouped_mm(rows.detach(), weight.detach().mT, offs=d.offsets[1:])
        products = self.new_rows(weight.shape[1])
        self.multiply(rows, weight, d, products)
        return products

    def multiply(
        self, rows: torch.Tensor | None, weight: torch.Tensor, d: Dispatched, out: torch.Tensor | None
    ) -> None:
        """Enqueue the product of rows by expert.

        rows: None for those of the dispatch under way, where they have arrived. out: None if the products go
        back to the ranks of their tokens.
        """
        sizes, (experts, columns, inner) = self.sizes, weight.shape
        given = self.tokens.local if rows is None else rows
        programs, choices = self._sms or INTERPRETED_PROGRAMS, len(d.topk_ids) * sizes.topk
        has_tma = INTERPRETED or capability(weight.device) >= TMA_CAPABILITY

        def grid(meta: dict[str, Any]) -> tuple[int, int, int]:
            blocks = min(sizes.capacity, triton.cdiv(sizes.capacity, meta["BLOCK_M"]) + experts)
            return max(1, min(programs, blocks * triton.cdiv(columns, meta["BLOCK_N"]))), 1, 1

        tensors = (
            *(given, weight, self._choices.local if out is None else out),
            *(d.sources, d.offsets, self.flags.local, self._returned_to, self._state),
        )
        numbers = (
            *(size_class(choices), columns, inner, experts, sizes.tokens, self.rank),
            *(inner if rows is None else rows.stride(0), weight.stride(0), pitch_of(weight)),
        )
        constants = {
            "TOPK": sizes.topk,
            "WORLD": self._memory.world_size,
            "EXPERTS": triton.next_power_of_2(experts),
            "FROM_SLOTS": rows is None,
            "TO_PEERS": out is None,
            "TMA_LEGAL": has_tma and lies_for_tma(weight),
            "BY_COLUMNS": lies_by_columns(weight),
            "UPCAST": INTERPRETED and weight.dtype == torch.bfloat16,
        }
        self._launch(_MULTIPLY, grid, tensors, numbers, constants)


def _torch_takes(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether torch multiplies them while its host waits for no count.

    In bfloat16, at 16 bytes, on GPUs that it has a grouped kernel for.
    """
    has_kernel = rows.device.type == "cpu" or capability(rows.device) in GROUPED_CAPABILITIES
    pitches = (rows.stride(0), weight.shape[1])  # of the product, too
    begin = begin_at_16_bytes(rows.element_size(), (rows.data_ptr(),), pitches)
    return has_kernel and rows.dtype == torch.bfloat16 and begin and lies_for_tma(weight)
