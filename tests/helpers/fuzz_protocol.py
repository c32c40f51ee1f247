"""Random sessions of 2 to 8 virtual ranks; what must hold is checked at every exchange.

    python tests/helpers/fuzz_protocol.py --sessions 10000 --seed 1      # prints what was seen; minutes
    python tests/helpers/fuzz_protocol.py --program 123456               # one program again

A program is a few calls of one tuned function, so one or more sessions. Its number reproduces it. The
command ends with 1, and the number of the first program that broke a promise.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import argparse
import sys
import time
from collections import Counter
from random import Random

from protocol_invariants import Witness, check_endings, check_winners
from random_programs import Program, draw_program
from virtual_ranks import VirtualGroup
from virtual_tuners import VirtualRank, virtual_world

FIRST_PROGRAM_OF_SEED = 10_000_000  # programs of different seeds are different ones


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
    counts["programs"] += 1
    counts[f"programs of {program.world_size} ranks"] += 1
    counts[f"programs in {program.options['mode']} mode"] += 1
    counts["payloads merged in another order"] += group.trees
    return ranks


def play_number(number: int, counts: Counter[str]) -> Program:
    random = Random(number)
    program = draw_program(random)
    play(program, random, counts)
    return program


def play_sessions(first: int, sessions: int, counts: Counter[str]) -> None:
    """Play programs from number `first` on until they have had so many sessions."""
    number = first
    while counts["sessions"] < sessions:
        try:
            play_number(number, counts)
        except Exception as error:
            raise AssertionError(f"program {number}: {type(error).__name__}: {error}") from error
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--program", type=int, help="play this one only")
    chosen = parser.parse_args()
    counts: Counter[str] = Counter()
    began = time.monotonic()
    if chosen.program is not None:
        print(play_number(chosen.program, counts))
        print(dict(counts))
        return 0
    play_sessions(chosen.seed * FIRST_PROGRAM_OF_SEED, chosen.sessions, counts)
    for name, count in sorted(counts.items()):
        print(f"{count:10d}  {name}")
    print(f"seed {chosen.seed}: no promise broken, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
