"""How calls of `GemmAllReduce` add up the ranks' products, and how all ranks come to take the same way.

    one-shot     each rank reads the rows of all ranks and adds them
    two-shot     each rank adds the rows it owns, then reads the others' sums
    collective   the process group's all-reduce

It is one choice of all ranks, as none ends alone: fixed by the caller; or a `tunable` among the group's
ranks, judged by the time of the whole run. In an eager call each rank says on its ballot which way it would
take. Where all say the same they take it, else the first, which needs nobody's word. A captured call takes
the way of the last eager call with as many rows.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch.distributed as dist

from dist_autotune import tunable

from ..exchange.collective import Collective
from ..symm import SymmetricMemory
from ..tensors import remember

ONE_SHOT, TWO_SHOT, COLLECTIVE = "one-shot", "two-shot", "collective"
WAYS = (ONE_SHOT, TWO_SHOT, COLLECTIVE)  # their places are on ballots; the first is taken where ranks differ
MOST_ROWS_OF_SHOTS = 2048  # above, the collective is what an untuned call takes


class Ways(Collective):
    """The ways of one operation; opening is collective.

    fixed: one of WAYS, or None, which tunes it. Raises ValueError on all ranks if they pass different ones,
    or the collective where their process group has none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        memory: SymmetricMemory,
        *,
        fixed: str | None,
        timeout_s: float,
    ) -> None:
        memory.require_equal("way", str(fixed))
        self._way = fixed
        self._taken: dict[int, str] = {}  # by rows, in the last eager call
        made = None if fixed is None else fixed == COLLECTIVE
        super().__init__("GemmAllReduce", "gemm_ar way", group, memory, fixed=made, timeout_s=timeout_s)

    def choose(self, rows: int, key: tuple[Hashable, ...]) -> str:
        """Return the way that this rank would take; key: what it depends on besides, equal on all ranks."""
        if self._world_size == 1:
            return COLLECTIVE  # of which nothing is left
        if self._way is not None or self._ballots is None:
            return self._way or ONE_SHOT
        ways = WAYS if rows <= MOST_ROWS_OF_SHOTS else (COLLECTIVE, *WAYS[:-1])
        key, ranks = (rows, self._world_size, *key), self._group or dist.group.WORLD
        return tunable(self._choice, ways, key=key, among=ranks)

    def settle(self, way: str, rows: int, *, is_capturing: bool) -> str:
        """Return the way of this call, the same on all ranks. To be asked once in each.

        It waits for the peers' hosts unless this rank would take the first way. Raises PeerTimeout.
        """
        if self._ballots is None:
            return way
        if is_capturing:
            return self._taken.get(rows, ONE_SHOT)
        place = WAYS.index(way)
        is_agreed = self._ballots.agree(len(WAYS) * rows + place if place else 0)
        return remember(self._taken, rows, way if is_agreed else ONE_SHOT)
