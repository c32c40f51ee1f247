"""Random sessions of real processes joined by gloo: times, keys, failing configs, ranks that go wrong.

    python tests/helpers/fuzz_ranks.py --sessions 300 --seed 1      # prints what was seen; minutes
    python tests/helpers/fuzz_ranks.py --scene 123456               # one scene again

A scene is one tuned function on 2 to 4 ranks; its number reproduces it. Where nobody dies, a set of forked
ranks plays scene after scene. The command ends with 1, and the number of the scene, where a rank ended
otherwise than it should have, or too late.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # no thread pools: they do not survive a fork
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

from rank_scenes import SESSION_LIMIT_S, Scene, check_scene, draw_scene, play_scenes

from ranks import Result, run_ranks

FIRST_SCENE_OF_SEED = 10_000_000
SCENES_A_SET = 12  # played by one set of forked ranks


def play(scenes: Sequence[Scene], counts: Counter[str], *, init: str = "file") -> None:
    """Play scenes of one world size with one set of ranks; raises AssertionError where one goes wrong."""
    assert len({scene.world_size for scene in scenes}) == 1
    with tempfile.TemporaryDirectory(prefix="scenes-") as directory:
        results = run_ranks(
            play_scenes,
            scenes[0].world_size,
            list(scenes),
            Path(directory),
            timeout_s=SESSION_LIMIT_S * len(scenes),
            init=init,
        )
    for at, scene in enumerate(scenes):
        _check(scene, at, results, counts)


def _check(scene: Scene, at: int, results: list[Result], counts: Counter[str]) -> None:
    try:
        check_scene(scene, at, results)
    except Exception as error:
        raise AssertionError(f"scene {scene.number}: {type(error).__name__}: {error}\n{scene}") from error
    counts["sessions"] += 1
    counts[f"sessions of {scene.world_size} ranks"] += 1
    counts[f"fault: {scene.fault.kind if scene.fault else 'none'}"] += 1
    counts["sessions with interpreted kernels"] += scene.is_interpreted
    counts["sessions without a config"] += not scene.has_config
    counts["sessions in which a config fails"] += any(kernel.failures for kernel in scene.kernels)
    for result in results:
        for played in (result.value or [])[at : at + 1]:
            counts["runs"] += played.runs
            counts["calls"] += len(played.calls)


def sets_of_scenes(first: int, sessions: int) -> list[list[Scene]]:
    """Return scenes in sets that one set of ranks can play."""
    sets: list[list[Scene]] = []
    open_sets: dict[int, list[Scene]] = {}
    for number in range(first, first + sessions):
        scene = draw_scene(Random(number), number)
        if scene.is_deadly:
            sets.append([scene])
            continue
        scenes = open_sets.get(scene.world_size)
        if scenes is None or len(scenes) == SCENES_A_SET:
            scenes = open_sets[scene.world_size] = []
            sets.append(scenes)
        scenes.append(scene)
    return sets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scene", type=int, help="play this one only")
    chosen = parser.parse_args()
    counts: Counter[str] = Counter()
    began = time.monotonic()
    first, sessions = chosen.seed * FIRST_SCENE_OF_SEED, chosen.sessions
    if chosen.scene is not None:
        first, sessions = chosen.scene, 1
    for at, scenes in enumerate(sets_of_scenes(first, sessions)):
        play(scenes, counts, init="tcp" if at % 3 == 2 else "file")
        print(f"{counts['sessions']} sessions, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    for name, count in sorted(counts.items()):
        print(f"{count:10d}  {name}")
    print(f"seed {chosen.seed}: every rank ended as it should, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
