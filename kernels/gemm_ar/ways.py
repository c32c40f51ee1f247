"""How calls of `GemmAllReduce` add up the ranks' products, and how all ranks come to take the same way.

    low-latency  each rank sends its rows to all, in words with a stamp, and adds what comes: few rows alone
    one-shot     each rank reads the rows of all ranks and adds them
    two-shot     each rank adds the rows it owns, then reads the others' sums
    collective   the process group's all-reduce
    overlapped   `GemmReduceScatter`, which sends rows while it multiplies; then all read the others' sums

It is one choice of all ranks, as none ends alone: fixed by the caller; or a `tunable` among the group's
ranks, judged by the time of the whole run. In an eager call each rank says on its ballot which way it would
take. Once all say the same they take it, until one does not; else one-shot, which needs nobody's word. A
captured call takes the way of the last eager call of its kind: the class of rows, see `gemm.configs`, with a
norm or without, and whether it may be overlapped.
"""

from __future__ import annotations

from collections.abc import Hashable

from ..agreement.collective import Collective
from ..symm import SymmetricMemory

ONE_SHOT, TWO_SHOT, COLLECTIVE = "one-shot", "two-shot", "collective"
LOW_LATENCY = "low-latency"
OVERLAPPED = "overlapped"
WAYS = (ONE_SHOT, TWO_SHOT, COLLECTIVE, LOW_LATENCY, OVERLAPPED)
_ON_BALLOTS = (ONE_SHOT, COLLECTIVE, TWO_SHOT, LOW_LATENCY, OVERLAPPED)  # by number, see `ballots`
OVERLAPPED_FROM = 1024  # rows, as a choice: the product of fewer is too short to hide what is sent
MOST_ROWS_OF_SHOTS = 2048  # above, the collective is what an untuned call takes


class Ways(Collective):
    """The ways of one operation; opening is collective.

    fixed: one of WAYS, or None, which tunes it; the same on all ranks. most_low_latency: rows of such a call.
    Raises ValueError on all ranks if it is the collective, which their process group has not.
    """

    def __init__(self, memory: SymmetricMemory, *, fixed: str | None, most_low_latency: int) -> None:
        self._way, self._most_low_latency = fixed, most_low_latency
        made = {COLLECTIVE: True, ONE_SHOT: False, TWO_SHOT: False}.get(str(fixed))
        super().__init__("GemmAllReduce", "gemm_ar way", memory, fixed=made)

    def options(self, rows: int, *, can_overlap: bool) -> tuple[str, ...]:
        """Return the ways that calls of a class of rows may take, first the one that nobody tuned.

        can_overlap: there is a product, whose rows all ranks share evenly.
        """
        if self._world_size == 1:
            return (COLLECTIVE,)  # of which nothing is left
        can_be_low = rows <= self._most_low_latency
        if self._way is not None or self._ballots is None:
            way = self._way or ONE_SHOT
            if way == OVERLAPPED and not can_overlap:
                return (TWO_SHOT,)
            return (ONE_SHOT if way == LOW_LATENCY and not can_be_low else way,)
        ways = [COLLECTIVE, *WAYS[:2]] if rows > MOST_ROWS_OF_SHOTS else [*WAYS[:3]]
        if can_be_low:
            ways.insert(0, LOW_LATENCY)
        if can_overlap and rows >= OVERLAPPED_FROM:
            ways.append(OVERLAPPED)
        return tuple(ways)

    def settle(self, key: Hashable, way: str, rows: int, *, is_capturing: bool) -> str:
        """Return the way of this call, the same on all ranks. To be asked once in each.

        It waits for the peers' hosts if this rank would take another way than the last call with that key
        did. Raises PeerTimeout, and ValueError as `Ballots.agree` does.
        """
        return _ON_BALLOTS[self.agree(key, rows, vote=_ON_BALLOTS.index(way), is_capturing=is_capturing)]

    def of_peers(self, went_ahead: tuple[int, int] | None) -> tuple[str, int]:
        """Return the way and the rows of peers that have gone ahead; 0 rows: any, as there are no ballots."""
        if went_ahead is not None:
            return _ON_BALLOTS[went_ahead[0]], went_ahead[1]
        way = self._way or ONE_SHOT
        if way not in (ONE_SHOT, TWO_SHOT):
            raise RuntimeError(
                f"hosts share no memory, by which a rank could tell how peers make a {way} call"
            )
        return way, 0
