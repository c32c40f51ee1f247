"""`dist-autotune replay`: true logs verify, changed ones are found, other searches use their samples."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from example_files import write_session
from kernels_for_tests import Bench, double, launch, numbers, out_of_resources
from rank_programs import tune
from typer.testing import CliRunner, Result

from dist_autotune import tunable
from dist_autotune.cli import replay
from dist_autotune.cli.commands import app
from dist_autotune.cli.replay import Verdict
from dist_autotune.reports.history import load_history
from ranks import assert_all_ok, run_ranks

LOGS = Path(".autotune_logs")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def verdicts() -> list[Verdict]:
    history = load_history(LOGS)
    assert not history.skipped
    return replay.verify(history.sessions)


def assert_as_recorded(*, sessions: int) -> None:
    found = verdicts()
    assert len(found) == sessions
    for verdict in found:
        assert verdict.differences == []
        assert verdict.compared > 0


def change(rank: int, event: str, edit: Callable[[dict[str, Any]], bool]) -> None:
    """Let `edit` change records of one rank's log in place, until it has changed one."""
    path = LOGS / f"rank-{rank}.jsonl"
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        record = json.loads(line)
        if record["event"] == event and edit(record):
            lines[number] = json.dumps(record)
            path.write_text("\n".join(lines) + "\n")
            return
    raise AssertionError(f"no {event} of rank {rank} was changed")


# ---- sessions of one process


def racing(bench: Bench) -> None:
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 1.0005, 128: 30.0})
    other = bench.kernel({16: 1.0, 32: 2.0}, double)
    bench.tune(lambda: (launch(kernel, numbers()), launch(other, numbers())), search="racing")()


def whole_runs(bench: Bench) -> None:
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

    def thunk() -> None:
        launch(kernel, numbers())
        bench.spend({1: 2.0, 2: 1.0}[tunable("chunks", [1, 2])])

    bench.tune(thunk, objective="thunk")()


def banned(bench: Bench) -> None:
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    kernel.fn.failures[32] = out_of_resources
    bench.tune(lambda: launch(kernel, numbers()), n_repeat=3)()


def starved(bench: Bench) -> None:
    kernel, calls = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0}), []

    def thunk() -> None:
        calls.append(None)
        if len(calls) < 3:
            launch(kernel, numbers())

    bench.tune(thunk)()


def partial(bench: Bench) -> None:
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})
    bench.tune(lambda: launch(kernel, numbers()), max_runs=3)()


def online(bench: Bench) -> None:
    step = bench.tuned({16: 3.0, 32: 1.0, 64: 2.0}, mode="online")
    while not step.settled:
        step()


@pytest.mark.parametrize("program", [racing, whole_runs, banned, starved, partial, online])
def test_a_session_replays_as_it_was_recorded(program: Callable[[Bench], None]) -> None:
    program(Bench())
    assert_as_recorded(sessions=1)
    result = run()
    assert (result.exit_code, "as recorded" in result.stdout) == (0, True)


def test_what_a_cached_result_leads_to_is_recomputed_too(tmp_path: Path) -> None:
    bench = Bench()
    for _ in range(2):
        kernel = bench.kernel({16: 3.0, 32: 1.0})
        bench.tune(lambda kernel=kernel: launch(kernel, numbers()), cache=tmp_path / "cache")()
    assert_as_recorded(sessions=2)


def test_a_session_goes_on_from_the_contexts_that_earlier_ones_have_settled() -> None:
    bench, sizes = Bench(), [64]
    kernel = bench.kernel({16: 3.0, 32: 1.0})
    tuned = bench.tune(lambda: [launch(kernel, numbers(n)) for n in sizes], objective="thunk")
    tuned()
    sizes.append(8)
    tuned(), tuned()
    tuned.retune()
    tuned()
    assert_as_recorded(sessions=3)


def test_a_session_that_ended_with_its_first_run_replays_as_it_was_recorded() -> None:
    bench, fails = Bench(), [False]
    kernel = bench.kernel({16: 3.0, 32: 1.0, 64: 2.0})

    def thunk() -> torch.Tensor:
        y = launch(kernel, numbers())
        if fails.pop():
            raise ValueError("mine")
        fails.append(False)
        return y

    tuned = bench.tune(thunk, bits="same", max_runs=4)
    for fails[:] in ([False], [True], [False]):
        with contextlib.suppress(ValueError):
            tuned()
    assert len(found := verdicts()) == 3
    assert [each for verdict in found for each in verdict.differences] == []
    assert run().exit_code == 0


# ---- sessions of several ranks


def two_ranks(rank: int) -> None:
    bench, x = Bench(), numbers()
    kernel = bench.kernel({16: 3.0, 32: 1.0 + rank, 64: 2.5, 128: 1.0})
    if rank == 1:
        kernel.fn.failures[128] = out_of_resources
    own = bench.kernel({16: 1.0, 32: 2.0}, double)

    def thunk() -> None:
        launch(kernel, x)
        if rank == 0:
            launch(own, x)

    tune(bench, thunk, n_repeat=3, n_warmup=1, rank_reduce="mean")()


@pytest.fixture
def logs_of_two_ranks() -> None:
    assert_all_ok(run_ranks(two_ranks, 2))


def changed_winner(record: dict[str, Any]) -> bool:
    if record["kernel"] != "add":
        return False
    record["config_id"] = 0
    return True


def changed_plan(record: dict[str, Any]) -> bool:
    if record["run"] < 2:
        return False
    record["plan"] = dict.fromkeys(record["plan"], 3)
    return True


def changed_payload(record: dict[str, Any]) -> bool:
    for part in record["payload"]["parts"].values():
        if "worst_ms" in part and record["run"] > 1:
            part["total_fs"] = 7
            return True
    return False


@pytest.mark.usefixtures("logs_of_two_ranks")
@pytest.mark.parametrize(
    ("rank", "event", "edit", "about", "what"),
    [
        (0, "context_settled", changed_winner, "add[64", "context_settled of rank 0: config_id"),
        (1, "run_started", changed_plan, "rank 1", "run_started: plan"),
        (1, "merged", changed_payload, "rank 1", "merged"),
        (0, "merged", changed_payload, "rank 1", "merged"),
    ],
    ids=["winner", "plan", "payload of one rank", "payload, as the first rank has it"],
)
def test_a_changed_record_is_found_and_named(rank, event, edit, about, what):
    change(rank, event, edit)
    (verdict,) = verdicts()
    first = verdict.differences[0]
    assert about in first.about
    assert first.what == what
    result = run()
    assert result.exit_code == 1
    assert what in result.stdout


@pytest.mark.usefixtures("logs_of_two_ranks")
def test_a_missing_rank_is_named_and_the_decisions_are_recomputed_without_it() -> None:
    (LOGS / "rank-1.jsonl").unlink()
    (verdict,) = verdicts()
    assert [(d.about, d.recomputed) for d in verdict.differences] == [("rank 1", "rank-1.jsonl")]
    assert verdict.compared > 10
    assert run().exit_code == 1


# ---- directories that cannot be replayed


def test_a_session_that_did_not_record_what_ranks_said_is_named() -> None:
    write_session(LOGS)
    result = run()
    assert result.exit_code == 1
    assert "the merged reports of this run" in result.stdout


# ---- another search on the recorded samples


def noisy(rank: int) -> None:
    """Samples whose median and whose minimum disagree, on two ranks that disagree."""
    bench, runs = Bench(), {16: 0, 32: 0}
    series = {16: [2.0, 2.0, 9.0, 2.0, 2.0], 32: [1.0, 3.0, 3.0, 3.0, 1.5]}

    def ms(block: int) -> Callable[[Any], float]:
        def next_ms(_: Any) -> float:
            runs[block] += 1
            return series[block][(runs[block] - 1) % 5] + rank

        return next_ms

    kernel = bench.kernel({16: ms(16), 32: ms(32)})
    tune(bench, lambda: launch(kernel, numbers()), n_repeat=5, n_warmup=0)()


def test_the_same_search_on_the_same_samples_picks_the_same_in_as_many_runs() -> None:
    assert_all_ok(run_ranks(noisy, 2))
    (found,) = replay.what_if(load_history(LOGS).sessions, {})
    assert (found.runs, found.recorded_runs, found.resampled) == (10, 10, 0)
    assert found.pick == found.recorded
    assert (found.pick.config.split(",")[0], found.pick.ms) == ("BLOCK: 16", 3.0)


def test_another_search_on_recorded_samples_is_a_table_and_json() -> None:
    racing(Bench())
    options = "--search", "exhaustive", "--n-repeat", "2", "--n-warmup", "0"
    assert "exhaustive 0+2" in run(*options).stdout
    session, other = json.loads(run("--json", *options).stdout)["another_search"]
    assert {each["search"] for each in (session, other)} == {"exhaustive 0+2"}
    assert {each["pick"]["regret_percent"] for each in (session, other)} == {0.0}
    refused = run("--search", "best")
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert "expected one of" in refused.stderr
