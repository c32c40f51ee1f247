"""launch.sh: the command that it puts together on each kind of machine, and one real start."""

import os
import subprocess
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
