"""`dist-autotune run` on two GPUs: a script with it and without it. CPU ranks: test_programs.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels_for_tests import records

from dist_autotune.logs.records import ContextSettled, RunStarted

SCRIPT = str(Path(__file__).parents[1] / "script" / "programs" / "plain_loop.py")
STEPS = "1500"  # of milliseconds: meanwhile the other configs are compiled


def torchrun(directory: Path, *command: str, **environment: str) -> list[str]:
    """Return what each rank has printed: to a file of its own, as lines in one pipe may be torn."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    redirected = ["--redirects", "3", "--log-dir", str(directory)]
    environ = {**os.environ, **environment}
    ended = subprocess.run(
        [*launcher, *redirected, *command], env=environ, capture_output=True, text=True, timeout=300
    )
    errors = [path.read_text() for path in sorted(directory.rglob("stderr.log"))]
    assert ended.returncode == 0, "\n".join([ended.stderr, *errors])
    return [path.read_text() for path in sorted(directory.rglob("stdout.log"))]


@pytest.mark.gpu(devices=2, seconds=60, limit_s=240)
def test_a_script_prints_the_same_losses_and_its_ranks_take_the_same_configs(tmp_path):
    bare = torchrun(tmp_path / "bare", SCRIPT, STEPS=STEPS, BLOCKS="16")
    assert len(bare) == 2
    assert all(f"{int(STEPS) - 1} " in printed for printed in bare)
    run = ("-m", "dist_autotune", "run")
    tuned = torchrun(tmp_path / "tuned", *run, "--n-repeat", "1", "--n-warmup", "0", SCRIPT, STEPS=STEPS)
    assert tuned == bare
    first, second = ([each.config for each in records(ContextSettled, rank=rank)] for rank in range(2))
    assert first
    assert second == first
    again = torchrun(tmp_path / "again", *run, SCRIPT, STEPS=STEPS)
    assert again == bare
    assert not any(record.plan for record in records(RunStarted)[-1:])  # all came from the cache
