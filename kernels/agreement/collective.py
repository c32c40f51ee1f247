"""A collective of the process group in place of an overlapped exchange.

With few rows a copy has no product to hide behind: a collective and cuBLAS are faster than signals. But a
collective ends only if every rank makes it. So, unlike other choices, ranks must agree on it.

    eager       each rank votes in each call, see `ballots`. Once all vote for the collective, all make it,
                and no host waits for another until a vote differs
    captured    no vote, as a graph may be captured again: the collective is made if eager calls of this key
                make it. That is the same on all ranks, as they make calls in the same order

Ranks agree for each key: the size class of the rows or, over experts, of the tokens. Beside its vote a rank
names the terms of the call, a number that is equal on ranks whose parts of the collective fit together: the
rows, or over experts a digest of the kind of call, the tokens, topk and experts.

A rank's vote is fixed by the caller, or a `tunable` among the group's ranks, judged by the time of the whole
run. Its key is equal on all ranks, so sessions try it on all ranks in the same runs. Votes are needed all the
same: a rank may call outside of a session, or on other terms.

Before the first collective of a key is enqueued, votes show a peer that comes on other terms, or not at all.
Later a following call or `check` shows it; until then a call waits for such a peer, or for one that does not
replay its graph, as long as the process group waits.
"""

from __future__ import annotations

import datetime
import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist

from dist_autotune import tunable
from dist_autotune.for_operations import CachedChoice

from ..symm import SymmetricMemory, SymmetricMemoryError
from ..tensors import check_ways, remember
from .ballots import COLLECTIVE, Ballots
from .errors import PeerTimeout, RefusedByPeer

WAYS = ("overlapped", "collective")  # the first unless a tuner knows better
# Of all ranks together: up to so many it is tried. With twice as many, overlapping was faster at every
# published shape on two and four H200, by 2 to 93 %.
MOST_ROWS = 4096

_log = logging.getLogger(__name__)

# Torch's, under the names that they have since 2.13, which deprecates the others.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collective:
    """The collective of one operation, and the agreement on making it; opening is collective.

    operation, choice: names in errors and of the `tunable`. fixed: always or never; None: tuned, for up to
    `most_rows` of all ranks. further: whether calls take a way beside WAYS, always, never or as tuned. Raises
    on all ranks if they pass different values, or if their process group or hosts cannot do what is fixed.
    """

    def __init__(
        self,
        operation: str,
        choice: str,
        memory: SymmetricMemory,
        *,
        fixed: bool | None,
        most_rows: float = MOST_ROWS,
        further: bool | None = False,
    ) -> None:
        memory.require_equal("collective", str(fixed))
        check_ways(collective=fixed)
        self._operation, self._choice, self._group = operation, choice, memory.group
        self._fixed, self._timeout_s, self._most_rows = fixed, memory.timeout_s, most_rows
        self._world_size, self._is_on_cpu = memory.world_size, memory.device.type == "cpu"
        # How many have been made in the last eager call, if ranks agreed on them; else None.
        self.made: int | None = None
        self._votes: dict[Hashable, CachedChoice[str]] = {}
        is_open = memory.world_size > 1 and (fixed is not False or further is not False)
        self._ballots = self._open_ballots(memory, further) if is_open else None

    def _open_ballots(self, memory: SymmetricMemory, further: bool | None) -> Ballots | None:
        """Return the ranks' ballots; None if there is one way alone, or none can and none must be opened."""
        if self._fixed is not False and not self._has_backend(memory):
            self._fixed = False
            if further is False:
                return None
        try:
            return Ballots(self._operation, self._group, self._timeout_s)
        except SymmetricMemoryError as error:  # on all ranks
            if self._fixed or further:
                raise
            _log.info("%s makes no collectives: %s", self._operation, error)
            return None

    def _has_backend(self, memory: SymmetricMemory) -> bool:
        device, backends = memory.device.type, str(dist.get_backend_config(self._group))
        memory.require_equal("the process group's backends", backends)
        backend = dict(pair.split(":") for pair in backends.split(",")).get(device)
        if backend is None or (device == "cuda" and backend != "nccl"):
            if self._fixed:
                needed = "NCCL" if device == "cuda" else "a backend"
                raise ValueError(f"collective=True needs {needed} on {device}; the group has {backends}")
            return False
        return True

    def vote(self, rows: int, key: tuple[Hashable, ...], *further: str) -> int:
        """Return the way that this rank votes for, by its number in WAYS; `rows` are those of all ranks.

        key: of the `tunable`, beside rows and ranks; equal on all ranks. further: ways beside WAYS, which
        such calls may take; they are numbered on.
        """
        ways = (*WAYS, *further)
        if self._fixed or self._ballots is None:
            return int(bool(self._fixed))
        if self._fixed is False or rows > self._most_rows:
            ways = (WAYS[0], *further)
        if len(ways) == 1:
            return 0
        vote = self._votes.get((rows, key))
        if vote is None:
            ask = functools.partial(self.choose, ways, (rows, self._world_size, *key))
            vote = remember(self._votes, (rows, key), CachedChoice(ask))
        return (*WAYS, *further).index(vote())

    def choose(self, ways: tuple[str, ...], key: tuple[Hashable, ...]) -> str:
        """Return the way of these that this rank would take; key: what it depends on, equal on all ranks."""
        if len(ways) == 1:
            return ways[0]
        return tunable(self._choice, ways, key=key, among=self._group or dist.group.WORLD)

    def agree(
        self, key: Hashable, terms: int, sizes: int | None = None, *, vote: int, is_capturing: bool
    ) -> int:
        """Return the way of a call, by number: the same on all ranks. Call it once in each.

        sizes: of this rank's part, for peers that refuse the call; None: the terms. It waits for the peers'
        hosts if this rank votes for another way than the last call of that key took, and raises as
        `Ballots.agree` does.
        """
        if self._ballots is None:
            return vote
        if is_capturing:
            return self._ballots.standing(key)
        self.made = None
        way = self._ballots.agree(key, vote, terms, sizes)
        if way == COLLECTIVE:
            self.made = 0
        return way

    def refuse(self) -> tuple[int, int] | None:
        """Count a call that this rank refuses; return way and sizes of the ranks that have gone ahead.

        None: all go, as there are no ballots. Raises RefusedByPeer if no rank goes, and as `agree` does.
        """
        if self._ballots is None:
            return None
        went_ahead = self._ballots.refuse()
        if went_ahead is None:
            raise RefusedByPeer
        return went_ahead

    def ahead(self) -> tuple[int, int] | None:
        """Return as `refuse` does, for a rank that has failed; None also where nobody makes a collective."""
        if self._ballots is None or not self._ballots.has_collective():
            return None
        went_ahead = self._ballots.refuse()
        return went_ahead if went_ahead is not None and went_ahead[0] == COLLECTIVE else None

    def leave_next(self) -> tuple[int, int] | None:
        """Leave the next call, as `Ballots.leave_next` does."""
        return None if self._ballots is None else self._ballots.leave_next()

    def leave(self) -> None:
        """Tell who waits for this rank in an agreement that it comes to no further call."""
        if self._ballots is not None:
            self._ballots.leave()

    def check(self) -> None:
        """Wait for the peers' hosts to come to the calls so far; raise if one did not, or on other terms."""
        if self._ballots is not None:
            self._ballots.check()

    def differing(self) -> str:
        """Return how the ranks' rows differ in one of the last eager calls; "" if they do not."""
        named = {} if self._ballots is None else self._ballots.differing()
        return ", ".join(f"rank {rank} has {rows} rows" for rank, rows in named.items())

    def all_gather(self, gathered: torch.Tensor, shard: torch.Tensor) -> None:
        """Write the shards of all ranks to `gathered`, of which `shard` may be the own part."""
        if self._world_size > 1:
            self._make(all_gather, gathered, shard)
        elif shard.data_ptr() != gathered.data_ptr():
            gathered.copy_(shard)

    def start_all_gather(self, gathered: torch.Tensor, shard: torch.Tensor) -> Callable[[], None]:
        """Enqueue the same beside later work; return a function that orders still later work after it."""
        if self._world_size == 1:
            return lambda: None
        return self._start(all_gather, gathered, shard)

    def reduce_scatter(self, out: torch.Tensor, sums: torch.Tensor) -> None:
        """Write this rank's part of the ranks' `sums`, added up, to `out`; both are contiguous."""
        if self._world_size == 1:
            out.copy_(sums)
        elif self._is_on_cpu:  # gloo's own has no time-out
            parts = torch.empty_like(sums)
            self._make(dist.all_to_all_single, parts, sums)
            out.copy_(parts.view(self._world_size, *out.shape).sum(0, dtype=torch.float32))
        else:
            self._make(reduce_scatter, out, sums)

    def all_reduce(self, sums: torch.Tensor) -> None:
        """Add up the ranks' `sums`, contiguous, in place."""
        if self._world_size == 1:
            return
        if self._is_on_cpu:  # gloo's own has no time-out
            parts = sums.new_empty((self._world_size * sums.shape[0], *sums.shape[1:]))
            self._make(all_gather, parts, sums)
            sums.copy_(parts.view(self._world_size, *sums.shape).sum(0, dtype=torch.float32))
        else:
            self._count()
            dist.all_reduce(sums, group=self._group)

    def _make(self, collective: Callable[..., Any], to: torch.Tensor, given: torch.Tensor) -> None:
        if self._is_on_cpu:
            self._start(collective, to, given)()
        else:
            self._count()
            collective(to, given, group=self._group)

    def _start(
        self, collective: Callable[..., Any], to: torch.Tensor, given: torch.Tensor
    ) -> Callable[[], None]:
        self._count()
        work = collective(to, given, group=self._group, async_op=True)
        return functools.partial(self._wait_for, work) if self._is_on_cpu else work.wait

    def _count(self) -> None:
        if self.made is not None:
            self.made += 1

    def _wait_for(self, work: dist.Work) -> None:
        try:
            work.wait(datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise PeerTimeout(
                f"{self._operation}: all ranks agreed on a collective, and one did not take part: {error}. "
                "Find out what it is doing. Close it on all ranks and open another"
            ) from error
