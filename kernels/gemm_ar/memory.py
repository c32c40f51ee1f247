"""What a rank of `GemmAllReduce` holds for W ranks, and the launches that read and write it.

parts    [m, N], symmetric: this rank's product, which its peers read
sums     [m / W, N], symmetric: the sums of the rows that this rank owns, in two-shot calls
words, ticket: see `pull`; mail: see `exchange.mail`
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton

from ..exchange import mail
from ..launches.settled import TunedLaunch
from ..symm import SymmetricMemory
from ..tensors import OwnBuffer, check_factors, check_out, check_overlap, check_rows, check_tensor
from . import low_latency, pull, sending
from .rows import MOST_COLUMNS_OF_NORM, Ends, RowsLaunch
from .ways import COLLECTIVE, LOW_LATENCY, OVERLAPPED, TWO_SHOT

GATHER = "gather"  # the second launch of two shots


class RowsMemory:
    """The memory of one operation for up to m rows of n columns; opening is collective.

    errors: int64 [W], the operation's.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        m: int,
        n: int,
        dtype: torch.dtype,
        errors: torch.Tensor,
        *,
        has_low_latency: bool,
    ) -> None:
        self.rank, self.world_size = memory.rank, memory.world_size
        self.parts = memory.allocate((m, n), dtype)
        self.own = OwnBuffer(self.parts.local)
        self.sums = memory.allocate((triton.cdiv(m, self.world_size), n), dtype)
        self._words = memory.allocate((pull.WORDS, self.world_size), torch.int64)
        ticket = memory.hold(torch.zeros(1, dtype=torch.int64, device=memory.device))
        self.table_of_parts, self._table_of_sums, table_of_words = (
            memory.hold(each.addresses()) for each in (self.parts, self.sums, self._words)
        )
        self._own_table = memory.hold(self.table_of_parts[self.rank :].clone())
        self._own_table.points_to = (self.parts.local,)  # type: ignore[attr-defined]
        self.held = pull.PullMemory(table_of_words, self._words.local, ticket, errors)
        self.mail: mail.MailMemory | None = None
        self.sending: sending.SendMemory | None = None
        if has_low_latency and self.world_size > 1:
            self.mail, self._lost = mail.open_mail(memory, m, n, dtype, errors)
            if sending.pays_on(memory.device, dtype):
                self.sending = sending.open_sums(memory, self.mail, m, n)

    def check(self, given: tuple[Any, ...]) -> None:
        """Raise TypeError or ValueError unless these are arguments of a call, see `GemmAllReduce._plan`."""
        a, weight, out, residual, norm_weight, _, multiplies = given
        own = self.parts.local
        (most, columns), dtype, device = own.shape, own.dtype, own.device
        if multiplies:
            check_factors(a, weight, most, columns, dtype, device)
            self.own.check_beside("a", a, "op.part", "this rank writes")
        else:
            check_tensor("part", a, dtype, device)
            if a.shape[1] != columns:
                raise ValueError(f"part has shape {list(a.shape)}; it must be [M, n={columns}]")
            check_rows("part", a.shape[0], "m", most)
            check_overlap("part", a, own, "M", "op.part")
        rows = a.shape[0]
        check_out(out, [rows, columns], dtype, device)
        self.own.check_beside("out", out, "op.part", "peers read")
        self.own.check_beside("residual", residual, "op.part", "this rank writes")
        if residual is None and norm_weight is None:
            return
        if residual is None or norm_weight is None:
            here, missing = ("residual", "norm_weight")[:: 1 if norm_weight is None else -1]
            raise ValueError(f"{here} is given and {missing} is not; pass both, or neither")
        check_tensor("residual", residual, dtype, device)
        if list(residual.shape) != [rows, columns]:
            raise ValueError(f"residual has shape {list(residual.shape)}; it must be [{rows}, {columns}]")
        check_tensor("norm_weight", norm_weight, dtype, device, 1, "one dimension is needed")
        if list(norm_weight.shape) != [columns]:
            raise ValueError(f"norm_weight has shape {list(norm_weight.shape)}; it must be [{columns}]")
        if columns > MOST_COLUMNS_OF_NORM:
            raise ValueError(f"n={columns}: the norm takes up to {MOST_COLUMNS_OF_NORM} columns")

    def prepare_send(self, a: torch.Tensor, weight: torch.Tensor) -> TunedLaunch:
        """Return what multiplies operands that lie so, and sends the product to all ranks."""
        assert self.mail is not None
        assert self.sending is not None
        return sending.prepare(self.rank, self.world_size, self.mail.mail.shape[2], self.sending, a, weight)

    def prepare(self, what: str, part: torch.Tensor, ends: Ends, programs: int, *, sent: bool) -> RowsLaunch:
        """Return the launch of a way, or the last one of it; of a collective, what ends its sums.

        part: the rows of `parts` that a call has. sent: see `low_latency.prepare`.
        """
        rows, place = len(part), (self.rank, self.world_size, programs)
        if what == LOW_LATENCY:
            assert self.mail is not None
            return low_latency.prepare(place, part, self.mail, ends, sent=sent)
        chunk = triton.cdiv(rows, self.world_size)
        of_all = functools.partial(pull.prepare, memory=self.held, ends=ends, m=rows)
        if what == TWO_SHOT:  # the sums of the own rows
            first = min(self.rank * chunk, rows)
            return of_all(place, self.table_of_parts, first=first, rows=min(chunk, rows - first))
        if what in (GATHER, OVERLAPPED):  # what reads the sums of all ranks, and ends them
            return of_all(place, self._table_of_sums, rows=rows, chunk=chunk)
        if what == COLLECTIVE:  # as one rank of one, which waits for nobody
            return of_all((0, 1, programs), self._own_table, rows=rows)
        return of_all(place, self.table_of_parts, rows=rows)

    def stand_in(self, way: str, rows: int, programs: int, patience_ticks: int, eps: float) -> None:
        """Enqueue, in place of this rank's part of a call by that way, what its peers wait for."""
        row = self.parts.local.new_full((max(1, rows), self.parts.local.shape[1]), math.nan)
        place, ends = (self.rank, self.world_size, programs), (None, None, row, None)
        if way == LOW_LATENCY:
            assert self.mail is not None
            launches = [low_latency.prepare(place, row, self.mail, ends, sent=False)]
        else:
            refused = pull.REFUSED.value
            reads_none = pull.prepare(place, self._own_table, self.held, ends, rows=0, m=refused)
            launches = [reads_none] * (2 if way == TWO_SHOT else 1)
        for launch in launches:
            launch(ends, patience_ticks, eps)

    def leave(self) -> None:
        """Let each peer find this rank given up."""
        pull.leave(self._words, self.rank)
        if self.mail is not None:
            mail.leave(self._lost, self.rank)
