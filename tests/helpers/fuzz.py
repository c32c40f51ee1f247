"""Random sessions of virtual ranks by the thousand; the test suite plays a few.

    python tests/helpers/fuzz.py --sessions 10000 --seed 1     # minutes
    python tests/helpers/fuzz.py --only 123456                 # that one again

It prints what was seen, and ends with 1 and the number of the first program that broke a promise.
"""

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # no thread pools: they do not survive the fork of a rank

import argparse
import sys
import time
from collections import Counter
from random import Random

from protocol_invariants import Witness, check_endings, check_winners
from random_programs import Program, draw_program
from virtual_ranks import VirtualGroup
from virtual_tuners import VirtualRank, virtual_world

PROGRAMS_OF_SEED = 10_000_000  # those of different seeds are different ones


def play(program: Program, random: Random, counts: Counter[str]) -> list[VirtualRank]:
    """Return the ranks after they have lived through a program; `random` orders what happens at once.

    Raises AssertionError where a promise is broken.
    """
    witness = Witness(program, counts)
    group = VirtualGroup(program.world_size, random, witness.look)
    with virtual_world():
        ranks = witness.ranks = [VirtualRank(program, agreement) for agreement in group.agreements]
        group.run(lambda agreement: ranks[agreement.rank].live())
    check_endings(program, ranks, counts)
    if program.is_plain:
        check_winners(program, [rank.endings[0] for rank in ranks], counts)
    counts[f"programs of {program.world_size} ranks"] += 1
    counts[f"programs in {program.options['mode']} mode"] += 1
    return ranks


def play_sessions(first: int, sessions: int, counts: Counter[str]) -> None:
    """Play programs from number `first` on until they have had so many sessions."""
    number = first
    while counts["sessions"] < sessions:
        random = Random(number)
        program = draw_program(random)
        try:
            play(program, random, counts)
        except Exception as error:
            raise AssertionError(f"program {number}: {type(error).__name__}: {error}\n{program}") from error
        counts["programs"] += 1
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="play this program alone")
    chosen = parser.parse_args()
    first, sessions = chosen.seed * PROGRAMS_OF_SEED, chosen.sessions
    if chosen.only is not None:
        first, sessions = chosen.only, 1
    counts: Counter[str] = Counter()
    began = time.monotonic()
    play_sessions(first, sessions, counts)
    for seen, count in sorted(counts.items()):
        print(f"{count:10d}  {seen}")
    print(f"no promise broken, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(
        0
    )  # torch's thread-local objects take the interpreter's lock when a thread ends, and abort at its end
