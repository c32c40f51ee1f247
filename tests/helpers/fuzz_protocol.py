"""Random sessions of 2 to 8 virtual ranks; what must hold is checked at every exchange.

A program is a few calls of one tuned function, so one or more sessions. Its number reproduces it.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from protocol_invariants import Witness, check_endings, check_winners
from random_programs import Program, draw_program
from virtual_ranks import VirtualGroup
from virtual_tuners import VirtualRank, virtual_world


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


def play_sessions(first: int, sessions: int, counts: Counter[str]) -> None:
    """Play programs from number `first` on until they have had so many sessions."""
    number = first
    while counts["sessions"] < sessions:
        random = Random(number)
        program = draw_program(random)
        try:
            play(program, random, counts)
        except Exception as error:
            text = f"program {number}: {type(error).__name__}: {error}\n{program}"
            raise AssertionError(text) from error
        number += 1
