"""Random scenes of real ranks, a handful of each kind; hundreds by `python tests/helpers/fuzz.py ranks`."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random

import pytest
from fuzz import play_set
from rank_scenes import Call, Fault, Played, Scene, check_scene, draw_scene

from ranks import Result


def scenes_with(*kinds: str, world_size: int = 2) -> list[Scene]:
    """Return the first scene with each kind of fault; "": without."""
    found: dict[str, Scene] = {}
    for number in itertools.takewhile(lambda _: len(found) < len(kinds), range(2000)):
        scene = draw_scene(Random(number), number)
        kind = scene.fault.kind if scene.fault is not None else ""
        is_tuned = scene.has_config and all(len(kernel.candidates[0]) > 1 for kernel in scene.kernels)
        if scene.world_size == world_size and is_tuned and kind in kinds:
            found.setdefault(kind, scene)
    return [found[kind] for kind in kinds]


def test_ranks_that_fail_and_live_on_agree_in_the_next_call():
    counts: Counter[str] = Counter()
    play_set(scenes_with("", "raise", "exit", "interrupt", "absent", world_size=3), counts)
    assert counts["sessions"] == 5


@pytest.mark.parametrize("kind", ["kill", "quit"])
def test_a_rank_that_dies_is_named_by_the_others(kind):
    play_set(scenes_with(kind, world_size=3), Counter(), init="tcp")


def test_a_stopped_rank_goes_on_with_the_others_when_it_wakes():
    play_set(scenes_with("stop", world_size=3), Counter())


# ---- the checks see what they are there for


def played(*errors: str, seconds: float = 1.0) -> Played:
    texts = {"PeerFailed": "rank 1 failed, so this call ends on rank 0 too: Boom: of this scene"}
    return Played([Call(error, texts.get(error, ""), seconds, 1.5) for error in errors], {}, 5, 3)


@pytest.mark.parametrize(
    ("zero", "one", "complaint"),
    [
        (played("PeerFailed", ""), played("Boom", ""), ""),
        (played("", ""), played("Boom", ""), "rank 0"),
        (played("PeerFailed", "PeerFailed"), played("Boom", ""), "rank 0"),
        (played("PeerFailed", ""), played("KeyboardInterrupt", ""), "rank 1"),
        (played("PeerFailed", "", seconds=12.0), played("Boom", ""), "seconds=12"),
    ],
    ids=["right", "not told", "not alone", "another error", "late"],
)
def test_a_rank_that_ends_otherwise_than_it_should_is_found(zero, one, complaint):
    scene = Scene(0, 2, {}, (), Fault("raise", 1, 2), {}, False)
    results = [Result(rank=rank, value=[own], exitcode=0) for rank, own in enumerate((zero, one))]
    if not complaint:
        check_scene(scene, 0, results)
        return
    with pytest.raises(AssertionError, match=complaint):
        check_scene(scene, 0, results)
