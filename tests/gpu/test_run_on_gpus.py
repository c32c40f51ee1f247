"""`dist-autotune run` on two GPUs: a script under torchrun, with it and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from kernels_for_tests import records

from dist_autotune.logs.records import ContextSettled, RunStarted

pytestmark = pytest.mark.gpu(devices=2)

STEPS = "4000"  # of milliseconds: meanwhile the other configs are compiled
SCRIPT = str(Path(__file__).parents[1] / "script" / "programs" / "plain_loop.py")


def torchrun(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environ = {**os.environ, "STEPS": STEPS, **environment}
    ended = subprocess.run([*launcher, *command], env=environ, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended


def lines(ended: subprocess.CompletedProcess[str]) -> Counter[str]:
    """Return what both ranks have printed: their lines come in any order."""
    return Counter(ended.stdout.splitlines())


def test_a_script_prints_the_same_losses_and_its_ranks_take_the_same_configs():
    bare = lines(torchrun(SCRIPT, BLOCKS="16"))
    tuned = torchrun("-m", "dist_autotune", "run", "--n-repeat", "1", "--n-warmup", "0", SCRIPT)
    assert lines(tuned) == bare
    first, second = ([each.config for each in records(ContextSettled, rank=rank)] for rank in range(2))
    assert first
    assert second == first
    again = torchrun("-m", "dist_autotune", "run", SCRIPT)
    assert lines(again) == bare
    assert not any(record.plan for record in records(RunStarted)[-1:])  # all came from the cache
