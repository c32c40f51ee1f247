"""launch.sh: the command that it puts together on each kind of machine, and one real start."""

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch.sh"
CLEARED = ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "CONDA_PREFIX", "VIRTUAL_ENV")

# Stands for a python3 that lacks nothing: it answers every question with yes and prints what it is to run.
YES_MAN = """#!/bin/bash
case $* in
  *version.py*) exit ${CPU_BUILD:-0} ;;
  "-P - "*) echo "$MISSING" ;;
  *"-m pip install"*) exit 0 ;;
  -P* | -c*) exit 0 ;;
  *) echo "interpret=${TRITON_INTERPRET:-0} devices=${CUDA_VISIBLE_DEVICES-all} $*" ;;
esac
"""


@dataclass
class Machine:
    """A machine with an environment in which nothing is missing, and with as many GPUs as a test says."""

    directory: Path

    def __post_init__(self) -> None:
        (self.directory / "bin").mkdir()
        self._write("bin/python3", YES_MAN)
        self._write("program.py", "")

    def run(self, *arguments: str, gpus: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        self._write("bin/nvidia-smi", "#!/bin/bash\n" + "echo 'GPU 0: NVIDIA'\n" * gpus)
        path = f"{self.directory}/bin:{os.environ['PATH']}"
        environ = {name: value for name, value in os.environ.items() if name not in CLEARED}
        return subprocess.run(
            [LAUNCH, *arguments],
            env=environ | {"PATH": path, "VIRTUAL_ENV": str(self.directory)} | variables,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def _write(self, name: str, text: str) -> None:
        path = self.directory / name
        path.write_text(text)
        path.chmod(0o755)


def _words(value: object) -> str | None:
    return " ".join(value) if isinstance(value, list) else None


@pytest.fixture
def machine(tmp_path):
    directory = tmp_path / "machine"
    directory.mkdir()
    return Machine(directory)


@pytest.mark.parametrize(
    ("gpus", "options", "variables", "ranks", "reason"),
    [
        (8, [], {}, 8, ""),
        (8, ["--nproc", "2"], {}, 2, ""),
        (1, ["--nproc", "1"], {}, 1, ""),
        (8, [], {"CUDA_VISIBLE_DEVICES": "0,1"}, 2, ""),
        (8, [], {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7,8,9"}, 8, ""),
        (0, [], {}, 2, "no GPU"),
        (1, [], {}, 2, "1 GPU, two are needed"),
        (8, ["--cpu"], {}, 2, "--cpu"),
        (8, [], {"CPU_BUILD": "1"}, 2, "the installed torch is a CPU build"),
    ],
    ids=str,
)
def test_ranks_run_on_visible_gpus_or_on_the_cpu_and_one_line_says_why(
    machine, gpus, options, variables, ranks, reason
):
    result = machine.run(*options, "program.py", gpus=gpus, **variables)
    devices = "" if reason else variables.get("CUDA_VISIBLE_DEVICES", "all")
    begin = f"interpret={int(bool(reason))} devices={devices} -m torch.distributed.run --standalone"
    assert result.stdout.startswith(begin)
    assert result.stdout.endswith(f" --nproc-per-node {ranks} -- program.py\n")
    assert result.stderr.count("\n") == bool(reason)
    assert result.stderr.startswith(reason and f"launch.sh: {reason}: {ranks} CPU ranks (gloo, ")


@pytest.mark.parametrize(
    "options",
    [["--nnodes", "2", "--rdzv-endpoint", "host0:29500"], ["--nnodes=2", "--rdzv_endpoint=host0"]],
    ids=_words,
)
@pytest.mark.parametrize("gpus", [1, 8])
def test_torchrun_options_pass_through_for_several_hosts(machine, gpus, options):
    result = machine.run(*options, "program.py", "--nnodes", "mine", gpus=gpus)
    expected = (
        f"-m torch.distributed.run {' '.join(options)} --nproc-per-node {gpus} -- program.py --nnodes mine\n"
    )
    assert result.stdout.endswith(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "missing.py: no such file"),
        (["--nproc", "0", "program.py"], "--nproc 0: the number of ranks is 1 or more"),
        (["--nproc", "two", "program.py"], "--nproc two: the number of ranks is 1 or more"),
        (["--nproc"], "an option before FILE lacks its value"),
        (["--nproc", "2"], "no FILE given; ./launch.sh --help"),
        (["-x", "program.py"], "unknown option -x; ./launch.sh --help"),
        (["--nproc", "9", "program.py"], "--nproc 9: more ranks than GPUs (8); --cpu runs them on the CPU"),
    ],
    ids=_words,
)
def test_mistakes_are_named_in_one_line(machine, arguments, message):
    result = machine.run(*arguments, gpus=8)
    assert (result.returncode, result.stderr, result.stdout) == (2, f"launch.sh: {message}\n", "")


@pytest.mark.parametrize("command", [("program.py",), ("test", "program.py")], ids=_words)
def test_an_environment_keeps_the_install_of_another_checkout_unless_told(machine, command):
    other = {"MISSING": f"dist-autotune from {machine.directory}"}
    refused = machine.run(*command, gpus=8, **other)
    assert (refused.returncode, refused.stdout) == (2, "")
    named, advice = refused.stderr.splitlines()
    assert named == (
        f"launch.sh: the environment {machine.directory} has dist-autotune from {machine.directory}."
    )
    assert advice.startswith(f"launch.sh: --here replaces it by {LAUNCH.parent}")
    told = machine.run(*command[:-1], "--here", command[-1], gpus=8, **other)
    said = f"launch.sh: replaces the install from {machine.directory} in {machine.directory}"
    assert (told.returncode, told.stderr.splitlines()[0]) == (0, said)
    assert "program.py" in told.stdout
    gone = machine.run(*command, gpus=8, MISSING="dist-autotune from /no/such/place")
    assert (gone.returncode, "replaces the install from /no/such/place" in gone.stderr) == (0, True)


def test_all_tests_have_several_workers_and_those_on_gpus_and_chosen_ones_none(machine):
    lines = machine.run("test", "-x").stdout.splitlines()
    worlds = [(line.rpartition("/")[2], "-n " in line, "--dist worksteal" in line) for line in lines]
    assert worlds == [("tests -x", True, True), ("aot -x", True, True)]
    (line,) = machine.run("test", "--gpu", "--part", "1/2").stdout.splitlines()
    assert line.endswith("/tests --part 1/2")
    assert "-n " not in line
    (line,) = machine.run("test", "program.py", "-k", "some").stdout.splitlines()
    assert line.endswith("pyproject.toml program.py -k some")


@pytest.mark.torchrun
@pytest.mark.slow
def test_a_python_that_has_the_libraries_starts_two_cpu_ranks_and_a_failing_rank_fails_the_command(tmp_path):
    """It needs no package index: the environment that is made sees the libraries."""
    tree = tmp_path / "tree"
    for name in ("dist_autotune", "kernels"):
        shutil.copytree(LAUNCH.parent / name, tree / name)
    for name in ("launch.sh", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(LAUNCH.parent / name, tree)
    libraries = tmp_path / "libraries"  # of this environment, all but the project
    libraries.mkdir()
    places = [Path(place) for place in sys.path if Path(place, "torch").is_dir() or "site-packages" in place]
    for path in itertools.chain.from_iterable(place.iterdir() for place in places):  # .pth files add some
        if "dist_autotune" not in path.name and not (libraries / path.name).exists():
            (libraries / path.name).symlink_to(path)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, sys, time\n"
        "import dist_autotune.kernels as kernels\n"
        "rank = os.environ['RANK']\n"
        "facts = [rank, os.environ['WORLD_SIZE'], os.environ['TRITON_INTERPRET']]\n"
        "facts += [sys.prefix, kernels.__file__]\n"
        "pathlib.Path('written').joinpath(rank).write_text('|'.join(facts + sys.argv[1:]))\n"
        "pathlib.Path('written').joinpath(rank).rename(f'rank-{rank}')\n"
        "while not pathlib.Path('rank-0').exists(): time.sleep(0.01)\n"
        "sys.exit(3 if rank == '1' else 0)\n"
    )
    Path("written").mkdir()
    environ = {name: value for name, value in os.environ.items() if name not in CLEARED} | {
        "PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(libraries),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
    }
    # torchrun alone calls --m an ambiguous abbreviation
    command = [tree / "launch.sh", "--cpu", program, "one", "two words", "--m", "3"]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert result.returncode != 0
    made, installed, device = result.stderr.splitlines()[:3]
    assert made == f"launch.sh: making the virtual environment {tree}/.venv --system-site-packages"
    assert installed.endswith(f"--no-build-isolation -e {tree}")
    assert "2 CPU ranks (gloo, " in device
    expected = ["2", "1", f"{tree}/.venv", f"{tree}/kernels/__init__.py", "one", "two words", "--m", "3"]
    assert [Path(f"rank-{rank}").read_text().split("|") for rank in range(2)] == [
        ["0", *expected],
        ["1", *expected],
    ], result.stderr
