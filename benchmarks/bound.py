"""How fast an all-gather + GEMM could be, from what the same run measured of its two parts."""

from __future__ import annotations


def all_gather_gemm_ms(gemm_ms: float, copies_ms: float, ranks: int, pieces: int) -> float:
    """Return the least milliseconds from the start until the product of the last rows is done.

    `gemm_ms`: the product alone, on data that is there; `copies_ms`: the copies alone, chunk after chunk,
    each in `pieces` parts. The own chunk is multiplied first, each part no sooner than it has arrived; the
    product never runs faster than alone, the copies never faster than alone, and neither slows the other.
    Tiles have no size here, so a last wave that is not full is only counted as far as it is in `gemm_ms`.
    """
    if ranks == 1:
        return gemm_ms
    parts = (ranks - 1) * pieces
    work_ms = gemm_ms / (ranks * pieces)
    done_ms = gemm_ms / ranks
    for part in range(1, parts + 1):
        done_ms = max(done_ms, copies_ms * part / parts) + work_ms
    return done_ms
