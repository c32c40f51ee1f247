"""Random sessions by the thousand; the test suite plays a few of each kind.

    python tests/helpers/fuzz.py protocol --sessions 10000 --seed 1     # virtual ranks; minutes
    python tests/helpers/fuzz.py bits --sessions 1000                   # virtual ranks whose outputs differ
    python tests/helpers/fuzz.py ranks --sessions 300                   # real processes
    python tests/helpers/fuzz.py protocol --only 123456                 # that one again

It prints what was seen, and ends with 1 and the number of the first case that broke a promise.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # no thread pools: they do not survive the fork of a rank
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import time
from collections import Counter

import fuzz_bits
import fuzz_protocol
import fuzz_ranks

CASES_OF_SEED = 10_000_000  # those of different seeds are different ones
KINDS = {
    "protocol": fuzz_protocol.play_sessions,
    "bits": fuzz_bits.play_sessions,
    "ranks": fuzz_ranks.play_sessions,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="play this case alone")
    chosen = parser.parse_args()
    first, sessions = chosen.seed * CASES_OF_SEED, chosen.sessions
    if chosen.only is not None:
        first, sessions = chosen.only, 1
    counts: Counter[str] = Counter()
    began = time.monotonic()
    KINDS[chosen.kind](first, sessions, counts)
    for name, count in sorted(counts.items()):
        print(f"{count:10d}  {name}")
    print(f"no promise broken, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
