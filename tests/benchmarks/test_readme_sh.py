"""benchmarks/readme.sh: what it refuses, the commands of all its parts, and some parts on CPU ranks."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 200


def run(*arguments: str, root: Path = ROOT, scripts: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the script of `root`; `scripts` come first on the path."""
    path = [str(directory) for directory in (scripts, Path(sys.executable).parent) if directory]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*path, os.environ["PATH"]]),
        "VIRTUAL_ENV": sys.prefix,
    }
    command = [str(root / "benchmarks/readme.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


def tools(directory: Path, **texts: str) -> Path:
    """Make shell scripts of these names in `directory`; return it."""
    directory.mkdir(parents=True)
    for name, text in texts.items():
        path = directory / name.replace("_", "-" if name == "nvidia_smi" else ".")
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    return directory


@pytest.fixture
def no_gpu(tmp_path: Path) -> Path:
    """Return a directory whose nvidia-smi sees nothing."""
    return tools(tmp_path / "bin", nvidia_smi="exit 9")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["speed"], "no part or option speed"),
        (["--fast"], "no part or option --fast"),
        (["--out"], "--out needs a directory"),
        (["check"], "here is no GPU; --nproc N runs tiny shapes on CPU ranks"),
        (["--nproc", "1", "add", "tp"], "tp needs 2 ranks"),
        (["--nproc", "2", "--out", "/dev/null/x", "check"], "cannot make the directory /dev/null/x"),
    ],
    ids=["part", "option", "value", "GPUs", "ranks", "directory"],
)
def test_bad_arguments_end_it_with_the_reason(arguments: list[str], reason: str, no_gpu: Path) -> None:
    ended = run(*arguments, scripts=no_gpu)

    assert ended.returncode != 0
    assert reason in ended.stderr


@pytest.mark.parametrize(("nproc", "gpus"), [(1, 0), (2, 0), (1, 1), (2, 2)], ids=str)
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_every_command_of_every_part_is_one_that_its_program_takes(nproc, gpus, tmp_path, parser_of):
    started = tmp_path / "started"
    note = f'printf "%q " "$@" >>{started}; echo >>{started}'
    root = tmp_path / "root"
    tools(root, launch_sh=note)
    (root / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks/readme.sh", root / "benchmarks")
    scripts = tools(tmp_path / "bin", nvidia_smi="echo 'GPU 0: NVIDIA'\n" * gpus, python3=note)
    options = ("--nproc", str(nproc), "--limit-s", "100000")
    parts = run("--list", *options, root=root, scripts=scripts).stdout.split()
    ended = run(*options, root=root, scripts=scripts)

    assert "== failed: none; to be run: none" in ended.stdout, ended.stdout + ended.stderr
    assert len(parts) == (5 if nproc == 1 else 15)
    commands = [shlex.split(line) for line in started.read_text().splitlines()]
    programs = [line[line.index("-m") + 1 :] for line in commands if "-m" in line]
    assert len(programs) > len(parts)

    for module, *arguments in programs:
        if module.startswith("benchmarks."):
            parser_of(module, *arguments)
