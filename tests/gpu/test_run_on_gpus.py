"""`dist-autotune run` on two ranks that torchrun starts: a script with it and without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernels_for_tests import records

from dist_autotune.logs.records import ContextSettled, RunStarted

SCRIPT = str(Path(__file__).parents[1] / "script" / "programs" / "plain_loop.py")
STEPS = [
    pytest.param("40", marks=pytest.mark.torchrun, id="CPU ranks"),
    # 1500 of milliseconds: meanwhile the other configs are compiled
    pytest.param("1500", marks=pytest.mark.gpu(devices=2, seconds=60, limit_s=240), id="2 GPUs"),
]


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


@pytest.mark.parametrize("steps", STEPS)
def test_a_script_prints_the_same_losses_and_its_ranks_take_the_same_configs(steps, tmp_path):
    bare = torchrun(tmp_path / "bare", SCRIPT, STEPS=steps, BLOCKS="16")
    assert len(bare) == 2
    assert all(f"{int(steps) - 1} " in printed for printed in bare)
    run = ("-m", "dist_autotune", "run")
    tuned = torchrun(tmp_path / "tuned", *run, "--n-repeat", "1", "--n-warmup", "0", SCRIPT, STEPS=steps)
    assert tuned == bare
    first, second = ([each.config for each in records(ContextSettled, rank=rank)] for rank in range(2))
    assert first
    assert second == first
    if not torch.cuda.is_available():
        return  # a second start of CPU ranks: tests/script/test_ranks_of_programs.py
    again = torchrun(tmp_path / "again", *run, SCRIPT, STEPS=steps)
    assert again == bare
    assert not any(record.plan for record in records(RunStarted)[-1:])  # all came from the cache
