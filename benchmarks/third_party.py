"""A training script that knows nothing of dist_autotune, started five ways, each from empty caches.

    python -m benchmarks.third_party [--nproc N] [--steps N] [--arms NAME...] [--turns N] [--search NAME]
                                     [--json FILE] [-- SCRIPT ...]

    untuned      through `dist_autotune run`, DIST_AUTOTUNE_MODE=cached, no results: first configs, no trial
    stock        alone: triton.autotune benchmarks each key, on each rank by itself
    tuned        through `dist_autotune run`
    restarted    through `dist_autotune run`, with the bundle that `tuned` left
    pinned       alone, stock, with the same picks in Triton's own format: nothing is benchmarked

SCRIPT (default: examples/train_third_party.py) prints `step I loss HEX ms T` on rank 0. Every arm begins with
no compiled kernel. First steps hold the compilation of what they launch. A step counts as slow when it takes
more than three times the median of the settled ones; "meanwhile" is the mean step of the sessions, but for
the first, over the settled one, "runs" the steps until all was settled. An arm that is still tuning at its
end has no settled step. Losses of `restarted` and `pinned` run with the same configs: they must be equal in
every bit. With several ranks the picks of `stock` are compared by kernel, in the order of their keys.

Traps: arms run one after the other, on a host that may be faster and slower in turns. With --turns N `tuned`
and `restarted` run N times by turns, each restart for as many steps as the sessions before it, and a note has
the mean step of each session over that of all restarts. `stock` may take long: --limit-s ends it, and then
its time is a bound.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.common.arms import Plan
from benchmarks.common.options import add_record_options, new_parser
from benchmarks.common.processes import ROOT, environment_without_torchrun, run_limited
from benchmarks.common.ranks import ON_GPU, Ranks
from benchmarks.common.records import describe_run, write_json
from benchmarks.common.render import summary
from dist_autotune import TuningReport
from dist_autotune.reports.history import load_history

SCRIPT = ROOT / "examples/train_third_party.py"
STEP = re.compile(r"^step (\d+) loss (\S+) ms ([\d.]+)$")
PICK = re.compile(  # what TRITON_PRINT_AUTOTUNING=1 prints of one key
    r"Triton autotuning for function (\w+),\nwith key as (.*),\nfinished after [\d.]+s,\n"
    r"best config selected: (.*);"
)
RUN = ("-m", "dist_autotune", "run")
ARMS = ("untuned", "stock", "tuned", "restarted", "pinned")
SHORT_STEPS = 40  # of arms in which nothing is tuned
COLUMNS = (
    "arm", "first step s", "settled ms", "meanwhile", "slowest ms", "slow steps", "contexts", "tried", "runs"
)  # fmt: skip
SLOW = 3.0  # times the median of the settled steps


@dataclass
class Ended:
    """What an arm printed."""

    trouble: str = ""
    ms: list[float] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    picks: list[dict[str, str]] = field(default_factory=list)  # of each rank, by kernel and key
    reports: list[TuningReport] = field(default_factory=list)  # of its sessions, as its logs tell them

    @property
    def settled_ms(self) -> float:
        """Return the median of the last fifth of all steps."""
        return statistics.median(self.ms[-max(1, len(self.ms) // 5) :])

    @property
    def runs(self) -> int:
        """Return the steps of its sessions."""
        return sum(report.runs for report in self.reports)

    @property
    def is_settled(self) -> bool:
        """Return whether steps were made behind the last session: others are no settled ones."""
        return self.runs < len(self.ms)

    def slow_steps(self) -> int:
        return sum(ms > SLOW * self.settled_ms for ms in self.ms[1:])


class Arms:
    """Starts the arms in a directory of their own."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.top, self.options = directory, options
        self.directory = directory  # of the turn
        self.restarted_steps = SHORT_STEPS

    def start(self, arm: str, turn: int = 1) -> Ended:
        """Run an arm to its end."""
        self.directory = self.top / str(turn)
        place = self.directory / arm
        place.mkdir(parents=True)
        prepare = getattr(self, f"_prepare_{arm}")
        command, variables = prepare(place)
        environment = {
            **environment_without_torchrun(),
            "TRITON_CACHE_DIR": str(place / "triton"),
            "DIST_AUTOTUNE_CACHE_DIR": str(place / "cache"),
            "DIST_AUTOTUNE_LOG_DIR": str(place / "logs"),
            "TRITON_PRINT_AUTOTUNING": "1",
            **variables,
        }
        output = place / "output"
        output.mkdir()
        begin = [sys.executable]
        if self.options.nproc > 1:
            ranks = ["--standalone", "--nproc-per-node", str(self.options.nproc)]
            begin += ["-m", "torch.distributed.run", *ranks, "--log-dir", str(output), "--redirects", "3"]
        with (output / "stdout.log").open("w") as file:
            trouble = run_limited([*begin, *command], environment, self.options.limit_s, file)
        ended = read(place, trouble)
        if arm == "tuned" and self.options.turns > 1:
            self.restarted_steps = max(SHORT_STEPS, ended.runs)
        return ended

    def _script(self, steps: int = SHORT_STEPS) -> list[str]:
        program = self.options.script or [str(SCRIPT)]
        return [*program, "--steps", str(min(self.options.steps, steps))]

    def _prepare_stock(self, place: Path) -> tuple[list[str], dict[str, str]]:
        return self._script(), {}

    def _prepare_tuned(self, place: Path) -> tuple[list[str], dict[str, str]]:
        return [*RUN, "--search", self.options.search, *self._script(self.options.steps)], {}

    def _prepare_untuned(self, place: Path) -> tuple[list[str], dict[str, str]]:
        return [*RUN, *self._script()], {"DIST_AUTOTUNE_MODE": "cached"}

    def _prepare_restarted(self, place: Path) -> tuple[list[str], dict[str, str]]:
        bundle = self.directory / "bundle.json"
        cache("export", str(bundle), results=self.directory / "tuned/cache")
        cache("import", str(bundle), results=place / "cache")
        return [*RUN, "--search", self.options.search, *self._script(self.restarted_steps)], {}

    def _prepare_pinned(self, place: Path) -> tuple[list[str], dict[str, str]]:
        cache("export", "--format", "triton", str(place / "triton"), results=self.directory / "tuned/cache")
        return self._script(), {"TRITON_CACHE_AUTOTUNING": "1"}


def cache(*arguments: str, results: Path) -> None:
    """Run `dist-autotune cache`. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "dist_autotune", "cache", *arguments]
    environment = {**environment_without_torchrun(), "DIST_AUTOTUNE_CACHE_DIR": str(results)}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def read(place: Path, trouble: str) -> Ended:
    """Return what the ranks of an arm printed into `place`."""
    ended = Ended(trouble)
    of_ranks = sorted(place.glob("output/*/attempt_0/*/stdout.log")) or [place / "output/stdout.log"]
    for rank, path in enumerate(of_ranks):
        text = path.read_text(errors="replace")
        ended.picks.append(picks_of(text))
        if rank == 0:
            steps = [found for line in text.splitlines() if (found := STEP.match(line))]
            ended.losses = [found[2] for found in steps]
            ended.ms = [float(found[3]) for found in steps]
    if not ended.ms and not trouble:
        ended.trouble = "printed no step"
    ended.reports = [session.report for session in load_history(place / "logs").sessions]
    return ended


def picks_of(text: str) -> dict[str, str]:
    """Return the picks that stock Triton printed, by kernel and key."""
    return {f"{kernel}[{key}]": config for kernel, key, config in PICK.findall(text)}


def disagreements(picks: list[dict[str, str]]) -> tuple[int, int]:
    """Return on how many keys some ranks' picks differ, and how many keys all ranks have."""
    common = set.intersection(*map(set, picks)) if picks else set()
    return sum(len({of_rank[key] for of_rank in picks}) > 1 for key in common), len(common)


# ---- the record


class Machine(Ranks):
    """The ranks that the arms had; no process group is open here."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size
        self.device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


def table(arms: dict[str, Ended]) -> dict[str, Any]:
    """Return what the arms did, a row each."""
    return {
        "columns": COLUMNS,
        "figures": COLUMNS[1:],
        "rows": list(map(row, arms, arms.values())),
        "notes": notes(arms),
    }


def row(name: str, ended: Ended) -> tuple[str, ...]:
    if not ended.ms:
        return (name, *["-"] * (len(COLUMNS) - 1))
    later = ended.ms[1:] or ended.ms
    contexts = [context for report in ended.reports for context in report.contexts]
    meanwhile = statistics.fmean(ended.ms[1 : ended.runs] or [ended.settled_ms])
    trials = sum(len(context.timings) > 1 for context in contexts)
    return (
        name,
        f"{ended.ms[0] / 1e3:.2f}",
        f"{ended.settled_ms:.2f}" if ended.is_settled else "-",
        f"{meanwhile / ended.settled_ms:.2f}" if ended.is_settled else "-",
        f"{max(later):.0f}",
        str(ended.slow_steps()),
        str(len(contexts)),
        str(trials),
        str(ended.runs),
    )


def notes(arms: dict[str, Ended]) -> list[str]:
    """Return the sentences below the table."""
    said = [f"{name}: {ended.trouble}." for name, ended in arms.items() if ended.trouble]
    for name, ended in arms.items():
        if ended.ms and not ended.is_settled:
            last = f"its last steps, in the median {ended.settled_ms:.2f} ms, are no settled ones"
            said.append(f"{name}: not settled after {ended.runs} steps; {last}.")
    if stock := arms.get("stock"):
        differ, keys = disagreements(stock.picks)
        if len(stock.picks) > 1:
            said.append(f"Stock Triton's ranks pick differently on {differ} of {keys} keys.")
    restarts = [ended for name, ended in arms.items() if name.startswith("restarted")]
    for name, ended in arms.items():
        same = [each.ms[1 : ended.runs] for each in restarts if each.ms[1:]]
        if name.startswith("tuned") and ended.is_settled and ended.runs > 1 and same:
            ratio = statistics.fmean(ended.ms[1 : ended.runs]) / statistics.fmean(map(statistics.fmean, same))
            said.append(f"{name}: a step of its {ended.runs} takes {ratio:.3f} of one of the restarts.")
    if {"restarted", "pinned"} <= arms.keys():
        ours, theirs = arms["restarted"].losses, arms["pinned"].losses
        equal = "equal in every bit" if ours and ours == theirs else "NOT equal"
        said.append(f"Losses of restarted and pinned, {min(len(ours), len(theirs))} steps: {equal}.")
    return said


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--nproc", type=int, default=1, help="ranks of each arm")
    parser.add_argument("--steps", type=int, default=800, help="of tuned; the other arms make 40 at most")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="in this order")
    parser.add_argument("--turns", type=int, default=1, help="of tuned and restarted, one after the other")
    parser.add_argument("--search", default="auto", help="of tuned and restarted: auto, racing or expected")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for each arm")
    parser.add_argument("script", nargs="*", help="and its arguments, after --")
    add_record_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="third-party-") as top:
        arms = Arms(Path(top), options)
        ended = {}
        turns = [(arm, 1) for arm in ARMS if arm in options.arms]
        turns += [
            (arm, turn)
            for turn in range(2, options.turns + 1)
            for arm in ("tuned", "restarted")
            if arm in options.arms
        ]
        for arm, turn in turns:
            name = arm if turn == 1 else f"{arm} {turn}"
            ended[name] = arms.start(arm, turn)
            print("  ".join(map(" ".join, zip(COLUMNS, row(name, ended[name]), strict=True))), flush=True)
    machine, plan = (
        Machine(options.nproc),
        Plan(warm_ups=0, iterations=options.steps, limit_s=options.limit_s),
    )
    title = "A training script of third-party kernels, unchanged"
    record = describe_run(machine, op="third_party", title=title, commit=options.commit, plan=plan)
    record |= {
        "figures": "wall clock",
        "table": table(ended),
        "arms": msgspec.to_builtins(ended),
    }
    print(summary(record))
    if options.json:
        write_json(options.json, record)
    return int(any(each.trouble for each in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
