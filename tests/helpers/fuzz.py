"""Random sessions by the thousand; the test suite plays a few of each kind.

    python tests/helpers/fuzz.py protocol --sessions 10000 --seed 1     # virtual ranks; minutes
    python tests/helpers/fuzz.py bits --sessions 1000                   # virtual ranks whose outputs differ
    python tests/helpers/fuzz.py ranks --sessions 300                   # real processes
    python tests/helpers/fuzz.py protocol --only 123456                 # that one again

It prints what was seen, and ends with 1 and the number of the first case that broke a promise.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # no thread pools: they do not survive the fork of a rank

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import random_outputs
from protocol_invariants import Witness, check_endings, check_winners
from random_programs import Program, draw_program
from rank_scenes import SESSION_LIMIT_S, Scene, check_scene, draw_scene, play_scenes
from virtual_ranks import VirtualGroup
from virtual_tuners import VirtualRank, virtual_world

from ranks import run_ranks

CASES_OF_SEED = 10_000_000  # those of different seeds are different ones
SCENES_A_SET = 12  # played by one set of forked ranks


# ---- virtual ranks


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
    counts["payloads merged in another order"] += group.trees
    return ranks


VIRTUAL: dict[str, tuple[Any, Any]] = {
    "protocol": (draw_program, play),
    "bits": (random_outputs.draw, random_outputs.play),
}


def play_sessions(kind: str, first: int, sessions: int, counts: Counter[str]) -> None:
    """Play programs from number `first` on until they have had so many sessions."""
    draw, play_drawn = VIRTUAL[kind]
    number = first
    while counts["sessions"] < sessions:
        random = Random(number)
        drawn = draw(random)
        try:
            play_drawn(drawn, random, counts)
        except Exception as error:
            raise AssertionError(f"program {number}: {type(error).__name__}: {error}\n{drawn}") from error
        counts["programs"] += 1
        number += 1


# ---- real processes


def play_set(scenes: Sequence[Scene], counts: Counter[str], *, init: Any = "file") -> None:
    """Play scenes of one world size with one set of ranks; raises AssertionError where one goes wrong."""
    with tempfile.TemporaryDirectory(prefix="scenes-") as directory:
        limit_s = SESSION_LIMIT_S * len(scenes)
        results = run_ranks(
            play_scenes, scenes[0].world_size, list(scenes), Path(directory), timeout_s=limit_s, init=init
        )
    for at, scene in enumerate(scenes):
        try:
            check_scene(scene, at, results)
        except Exception as error:
            raise AssertionError(f"scene {scene.number}: {type(error).__name__}: {error}\n{scene}") from error
        counts["sessions"] += 1
        counts[f"sessions of {scene.world_size} ranks"] += 1
        counts[f"fault: {scene.fault.kind if scene.fault else 'none'}"] += 1
        counts["sessions with interpreted kernels"] += scene.is_interpreted
        counts["sessions without a config"] += not scene.has_config


def sets_of_scenes(first: int, sessions: int) -> Iterator[list[Scene]]:
    """Give scenes in sets that one set of ranks can play: where one dies, it plays no other."""
    waiting: dict[int, list[Scene]] = {}
    for number in range(first, first + sessions):
        scene = draw_scene(Random(number), number)
        if scene.is_deadly:
            yield [scene]
            continue
        scenes = waiting.setdefault(scene.world_size, [])
        scenes.append(scene)
        if len(scenes) == SCENES_A_SET:
            yield waiting.pop(scene.world_size)
    yield from waiting.values()


def play_scenes_of_ranks(first: int, sessions: int, counts: Counter[str]) -> None:
    for at, scenes in enumerate(sets_of_scenes(first, sessions)):
        play_set(scenes, counts, init="tcp" if at % 3 == 2 else "file")
        print(f"{counts['sessions']} sessions", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=[*VIRTUAL, "ranks"])
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="play this case alone")
    chosen = parser.parse_args()
    first, sessions = chosen.seed * CASES_OF_SEED, chosen.sessions
    if chosen.only is not None:
        first, sessions = chosen.only, 1
    counts: Counter[str] = Counter()
    began = time.monotonic()
    if chosen.kind == "ranks":
        play_scenes_of_ranks(first, sessions, counts)
    else:
        play_sessions(chosen.kind, first, sessions, counts)
    for seen, count in sorted(counts.items()):
        print(f"{count:10d}  {seen}")
    print(f"no promise broken, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(
        0
    )  # torch's thread-local objects take the interpreter's lock when a thread ends, and abort at its end
