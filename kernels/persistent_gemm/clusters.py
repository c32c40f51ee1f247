"""Programs of two CTAs, on neighbouring SMs (`CTAS`): they halve a tile's rows, and share its columns.

    CTA 0   rows of A from 0 on             B's columns, loaded once, by CTA 0: TMA writes them to the
    CTA 1   rows of A from BLOCK_M / 2 on   shared memory of both, and counts the bytes in both (multicast)

So L2 sends B once to two SMs: what counts where rows begin between cache lines. Starting two CTAs at once,
and their meeting at the end, cost about a microsecond; and a slot is free when the other CTA has said so.

Both run the same program: partitions, visits and steps are the same. Of a ring's mbarriers each CTA has its
own `full` and `empty`, and there is one more for both:

    empty_in_both   an arrival of the readers of each CTA. CTA 0 waits for it before it loads B into both

**It ends** as one CTA does: CTA 1 loads rows of A when its own readers have given the slot back, CTA 0 rows
and columns when both CTAs' have; readers need nothing of the other CTA but B. B may arrive in CTA 1 before
its `full` expects any bytes. They count all the same: the phase cannot complete before its loader's own
arrival, and it is the right one: CTA 1's readers have seen the one before, or the slot would not be free.

The compiler lets both CTAs meet before the first use of an mbarrier, and at the end: nobody arrives at, or
loads into, a CTA that is gone.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..compat import tma_load


@gluon.constexpr_function
def _layout(ctas, of_both):
    """Return which of a row of mbarriers each CTA has: its own, or both the one of CTA 0."""
    return mbarrier.MBarrierLayout([[0 if of_both else 1]] * (ctas // 2))


@gluon.jit
def allocate_mbarriers(COUNT: gl.constexpr, OF_BOTH: gl.constexpr = False):
    """Return COUNT mbarriers for each CTA of the program, or for both together."""
    CTAS: gl.constexpr = gl.num_ctas()
    gl.static_assert(CTAS <= 2, "only pairs of CTAs have been tried")
    EACH: gl.constexpr = 1 if OF_BOTH else CTAS
    return gl.allocate_shared_memory(gl.int64, [COUNT, EACH], _layout(CTAS, OF_BOTH))


@gluon.jit
def load_for_both(desc, coord, bar, buf):
    """Start a copy of the descriptor's block to `buf` of each CTA."""
    if gl.num_ctas() > 1:
        tma_load(desc, coord, bar, buf, multicast=True)
    else:
        tma_load(desc, coord, bar, buf)
