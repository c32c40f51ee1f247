"""What a kernel does in place of the side stream where it stores into its peers' memory itself.

It gives the permits, takes the peers', and raises their flags, at the same points of a call. Peers need not
know: see [Note: rows leave with the tile].

    table    int64 [2, WORLD]: where each rank's memory for others' rows lies, and where its flags lie
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..signals import SYSTEM, count_up, notify
from .chunks import wait_and_check_rows
from .flags import AFTER, ARRIVED, FREE, ROWS_SENT
from .peers import is_lost, wait_for_flag


@triton.jit
def let_peers_write(table_ptr, peers, WORLD: tl.constexpr):
    """Give each peer its permit; by the first program to begin."""
    for peer in range(0, WORLD):
        if peer != peers.rank:
            notify(_flag_there(FREE, peer, table_ptr, peers, WORLD), 1)


@triton.jit
def _flag_there(FLAG: tl.constexpr, peer, table_ptr, peers, WORLD: tl.constexpr):
    """Return where the peer's flag about this rank is."""
    flags_ptr = tl.load(table_ptr + WORLD + peer).to(tl.pointer_type(tl.int32))
    return flags_ptr + FLAG * WORLD + peers.rank


@triton.jit
def memory_of(peer, table_ptr, like_ptr):
    """Return where the peer's memory for others' rows begins; `like_ptr` has the type of the elements."""
    theirs_ptr = tl.load(table_ptr + peer).to(tl.pointer_type(like_ptr.dtype.element_ty))
    return tl.multiple_of(theirs_ptr, 16)  # as all that is allocated


@triton.jit
def may_store(peer, KIND: tl.constexpr, ANNOUNCED: tl.constexpr, peers, WORLD: tl.constexpr):
    """Return whether this program may store into the peer's memory: not if the peer is given up.

    Waits for the peer's permit, and gives the peer up if none comes in time. ANNOUNCED: does not wait, as the
    peer's choices are here, which follow its permit; the side stream takes that.
    """
    if not ANNOUNCED:
        wait_for_flag(FREE, KIND, peer, peers, WORLD)
    return is_lost(peer, peers, WORLD) == 0


@triton.jit
def count_stored(
    peer,
    counts_ptr,
    parts,
    rows,
    table_ptr,
    peers,
    WORLD: tl.constexpr,
    stored=1,
    ANNOUNCED: tl.constexpr = False,
):
    """Count parts that this program has stored into a peer's memory; whoever counts the last tells the peer.

    counts: int32 [WORLD], zeros. stored: how many parts this program has stored, of `parts` of all programs.
    ANNOUNCED: see `may_store`.
    """
    if count_up(counts_ptr + peer, "acq_rel", SYSTEM, stored) == parts - stored:
        tl.store(counts_ptr + peer, 0)
        tell_of_rows(peer, rows, table_ptr, peers, WORLD, ANNOUNCED)


@triton.jit
def tell_of_rows(peer, rows, table_ptr, peers, WORLD: tl.constexpr, ANNOUNCED: tl.constexpr):
    """Raise the peer's ARRIVED, as all rows are in its memory; nothing is raised for a peer that is given up.

    A program that left out rows had read that in AFTER[peer] before it counted. AFTER is never lowered, and
    the last one to count acquires all counts: so it reads the same.
    """
    if is_lost(peer, peers, WORLD) == 0:
        permit = 1
        if not ANNOUNCED:
            # Lowers a permit alone, not the mark of a peer that another program is giving up.
            permit = tl.atomic_cas(peers.flags_ptr + FREE * WORLD + peer, 1, 0, sem="relaxed", scope=SYSTEM)
            if permit == 1:
                sent_ptr = _flag_there(ROWS_SENT, peer, table_ptr, peers, WORLD)
                tl.atomic_xchg(sent_ptr, rows, sem="relaxed", scope=SYSTEM)
        if permit == 1:
            notify(_flag_there(ARRIVED, peer, table_ptr, peers, WORLD), rows)


@triton.jit
def part_from_all(m, peers, WORLD: tl.constexpr):
    """Part from each peer and lower what it has raised; by the last program to end."""
    for peer in range(0, WORLD):
        if peer != peers.rank:
            wait_and_check_rows(peer, m, peers, WORLD)
            for place in tl.static_range(2):
                at_ptr = peers.flags_ptr + place * WORLD + peer
                following = tl.atomic_add(at_ptr + AFTER * WORLD, 0, sem="relaxed", scope="gpu")
                tl.atomic_xchg(at_ptr + ROWS_SENT * WORLD, following, sem="relaxed", scope="gpu")
