"""As what a number of rows is tuned: rows are what changes from call to call, with batches and sequences.

Tuning tries dozens of configs. So numbers of rows are put into classes, each named after its largest one, and
all of a class take the config that the first of them was tuned to. Every config is right for all of them.

    1 .. 128        multiples of 16        16, 32, 48, 64, 80, 96, 112, 128
    more            four a doubling        160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, ...

A class ends where waves of tiles mostly do, at halves and quarters of powers of two, and no number of rows
above 128 is tuned as more than a quarter more.
"""

from __future__ import annotations

STEP = 16  # the least that tiles differ in
FINE_UNTIL = 128
CLASSES_A_DOUBLING = 4


def class_of_rows(rows: int) -> int:
    """Return the largest number of rows that is tuned as this one is."""
    step = STEP
    if rows > FINE_UNTIL:
        step = (1 << (rows - 1).bit_length() - 1) // CLASSES_A_DOUBLING
    return -(-rows // step) * step
