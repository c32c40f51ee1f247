"""The record that a benchmark leaves: what was run, on what and how; and the options about it."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.arms import QUANTILES, Plan
from benchmarks.common.options import NOT_MEASURED, add_record_options, kept_arguments
from benchmarks.common.processes import ROOT
from benchmarks.common.ranks import ON_GPU, Ranks
from benchmarks.common.render import summary
from dist_autotune.doctor.examination import versions
from dist_autotune.settings import variables
from dist_autotune.storage.scope import Device

SCHEMA_VERSION = 1
INTERPRETER_NOTE = "Wall-clock times (interpreter, no GPU): they show behaviour, not speed."


def add_run_options(parser: argparse.ArgumentParser, *, warm_ups: int) -> None:
    """Add the options that every benchmark of arms has; `warm_ups` is the default on a GPU."""
    launches, calls = (warm_ups, 40) if ON_GPU else (6, 3)
    parser.add_argument("--warm-ups", type=int, default=launches, help="launches of all arms")
    parser.add_argument("--iterations", type=int, default=calls, help="timed calls of each arm")
    add_record_options(parser)


def describe_run(ranks: Ranks, *, op: str, title: str, commit: str | None, plan: Plan) -> dict[str, Any]:
    """Return the part of a record that says what was run, on what, and how."""
    found = {name: text for name, text in versions().items() if text is not None}
    hardware: dict[str, Any] = {"world_size": ranks.world_size, "device": "CPU, Triton's interpreter"}
    if ON_GPU:
        properties = torch.cuda.get_device_properties(ranks.device)
        hardware["device"] = properties.name
        hardware["sms"] = properties.multi_processor_count
        hardware["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["driver"] = Device.current().driver
        if not torch.version.hip:
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "schema": SCHEMA_VERSION,
        "op": op,
        "title": title,
        "figures": "CUDA events" if ON_GPU else INTERPRETER_NOTE,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware,
        "versions": found,
        "variables": {name: text for name, text in variables().items() if not name.endswith("_DIR")},
        "commit": commit or _commit(),
        "command": _command(ranks),
        "warm_ups": plan.warm_ups,
        "iterations": plan.iterations,
        "quantiles": QUANTILES,
    }


def clocks_seen(ranks: Ranks) -> dict[str, str]:
    """Return what nvidia-smi says of this rank's GPU just now; empty without it."""
    fields = ("clocks.sm", "clocks.max.sm", "power.draw", "temperature.gpu")
    if not ON_GPU:
        return {}
    gpu = f"GPU-{torch.cuda.get_device_properties(ranks.device).uuid}"
    query = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    said = _output(query)
    return dict(zip(fields, map(str.strip, said.split(",")), strict=False)) if said else {}


def leave_record(
    record: dict[str, Any], options: argparse.Namespace, ranks: Ranks, *, shows: bool = True
) -> None:
    """Write the record where the options say so, and show its table; on rank 0."""
    if options.json is not None and ranks.rank == 0:
        write_json(options.json, record)
    if shows:
        ranks.say(f"\n{summary(record)}")


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write the record; figures that JSON does not know are errors, not text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def _command(ranks: Ranks) -> str:
    """Return the command that starts the same again from the root of the tree."""
    program, *arguments = sys.argv
    path = Path(program).resolve().with_suffix("")
    module = ".".join(path.relative_to(ROOT).parts) if path.is_relative_to(ROOT) else program
    kept, cpu = kept_arguments(arguments, NOT_MEASURED), [] if ON_GPU else ["--cpu"]
    return shlex.join(["./launch.sh", *cpu, "--nproc", str(ranks.world_size), "-m", module, *kept])


def _commit() -> str:
    """Return the commit of this tree, with a mark if files that git knows have changed since."""
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}{' with changes' if changed else ''}" if commit else "unknown"


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
