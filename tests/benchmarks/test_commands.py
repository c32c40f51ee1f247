"""Commands: those of benchmarks/readme.sh and of the pages, and what every program says of itself."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

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


# ---- commands on the pages parse, and every program tells what it does and takes


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
COMMAND = re.compile(r"-m (benchmarks[.\w]+)([^`|]*)")
COMMANDS = sorted(
    {(found[1], found[2].strip()) for page in PAGES for found in COMMAND.finditer(page.read_text())}
)
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "benchmarks").rglob("*.py")
    if 'if __name__ == "__main__":' in path.read_text()
)


# Programs are imported by other tests, too.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")


@pytest.mark.parametrize(("module", "arguments"), COMMANDS, ids=str)
def test_a_command_of_a_page_parses(module, arguments, parser_of):
    parser_of(module, *shlex.split(arguments))


NEEDED = {"benchmarks.regret": ["--op", "gemm_rs"], "benchmarks.common.render": ["RECORD"]}


@pytest.mark.parametrize("module", PROGRAMS)
def test_a_program_tells_what_it_does_how_it_starts_and_what_it_takes(module, parser_of):
    parser = parser_of(module, *NEEDED.get(module, []))
    summary, usage = parser.description.split("\n\n")[:2]
    assert summary.endswith(".")
    assert re.match(rf" +(\./launch\.sh|python)( --[\w-]+( \d+)?)* -m {module}\b", usage), usage
    unexplained = [action.dest for action in parser._actions if action.help is None]
    assert unexplained == []
