"""Random sessions of real processes joined by gloo: times, keys, failing configs, ranks that go wrong.

A scene is one tuned function on 2 to 4 ranks; its number reproduces it. Where nobody dies, a set of forked
ranks plays scene after scene.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

from rank_scenes import SESSION_LIMIT_S, Scene, check_scene, draw_scene, play_scenes

from ranks import Result, run_ranks

SCENES_A_SET = 12  # played by one set of forked ranks


def play_sessions(first: int, sessions: int, counts: Counter[str]) -> None:
    """Play so many scenes from number `first` on; raises AssertionError where one goes wrong."""
    began = time.monotonic()
    for at, scenes in enumerate(sets_of_scenes(first, sessions)):
        play(scenes, counts, init="tcp" if at % 3 == 2 else "file")
        print(f"{counts['sessions']} sessions, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


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
