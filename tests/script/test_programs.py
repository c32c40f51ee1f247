"""Small programs as people write them, through `dist-autotune run`: each ends as without it, and is tuned."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
from kernels_for_tests import records
from programs import printed, start_program

from dist_autotune.logs.records import ContextSettled
from ranks import assert_all_ok

PROGRAMS = Path(__file__).parent / "programs"
ONE_OF_EACH = ("--n-repeat", "1", "--n-warmup", "0", "--no-progress")
FRAMEWORKS = {"hugging_face": "transformers", "with_lightning": "lightning"}


def run(name: str, ranks: int, *, options: Sequence[str] | None, arguments: Sequence[str] = ()) -> list[str]:
    """Return what each rank prints. Without options: stock Triton, with the first config alone."""
    blocks = "16" if options is None and not arguments else "16 32 64"
    environment = {"BLOCKS": blocks}
    assert_all_ok(
        start_program(
            PROGRAMS / f"{name}.py", *arguments, ranks=ranks, environment=environment, options=options
        )
    )
    return [printed(rank) for rank in range(ranks)]


def skip_without(name: str) -> None:
    package = FRAMEWORKS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install {package}")


def settled(ranks: int) -> list[dict[str, str]]:
    """Return the config of each context on each rank."""
    return [
        {each.context: each.config for each in records(ContextSettled, rank=rank)} for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("plain_loop", 1),
        ("plain_loop", 2),
        ("accumulation", 1),
        ("two_optimizers", 1),
        ("hugging_face", 1),
        ("hugging_face", 2),
        ("with_lightning", 1),
        ("with_lightning", 2),
    ],
)
def test_a_program_prints_the_same_losses_and_all_its_ranks_take_the_same_configs(name, ranks):
    skip_without(name)
    bare = run(name, ranks, options=None)
    tuned = run(name, ranks, options=ONE_OF_EACH)
    assert tuned == bare
    assert all(len(text.splitlines()) >= 8 for text in tuned)
    first, *others = settled(ranks)
    assert first
    assert others == [first] * (ranks - 1)
