"""A script with evaluations, accumulation, checkpoints: it settles, ships its bundle, runs strict."""

from pathlib import Path

import pytest
from kernels_for_tests import records
from programs import printed, start_program
from typer.testing import CliRunner

from dist_autotune.cli.commands import app
from dist_autotune.logs.records import SessionClosed, SessionOpened
from ranks import assert_all_ok

PROGRAM = Path(__file__).parent / "programs" / "evaluates.py"
WAYS = {
    "step_tuner": {"arguments": ["--tuned"], "options": None},
    "run": {"arguments": [], "options": ["--n-repeat", "1", "--n-warmup", "0", "--no-progress"]},
}


def start(way: str, **environment: str) -> list[str]:
    """Return what each rank prints: the losses of its evaluations."""
    arguments, options = WAYS[way]["arguments"], WAYS[way]["options"]
    environment = {"BLOCKS": "16 32 64", **environment}
    assert_all_ok(start_program(PROGRAM, *arguments, environment=environment, options=options))
    return [printed(rank) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_it_ends_settled_ships_its_bundle_and_runs_strict(way, tmp_path, monkeypatch):
    losses = start(way)
    assert all(len(text.splitlines()) == 3 for text in losses)
    for rank in range(2):
        opened = {each.session: each.thunk for each in records(SessionOpened, rank=rank)}
        ended = {opened[each.session]: each.outcome for each in records(SessionClosed, rank=rank)}
        train = "train" if way == "step_tuner" else "evaluates.py"
        assert ended == {train: "settled", "evaluate": "settled"}

    run = CliRunner().invoke
    assert run(app, ["cache", "export", "tuned.json"]).exit_code == 0
    monkeypatch.setenv("DIST_AUTOTUNE_CACHE_DIR", str(tmp_path / "server"))
    assert run(app, ["cache", "import", "tuned.json"]).exit_code == 0
    assert start(way, DIST_AUTOTUNE_MODE="strict") == losses
