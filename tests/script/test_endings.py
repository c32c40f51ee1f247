"""A program under `dist-autotune run` sees what it would see without it, and ends as it would."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dist_autotune.cli.commands import main
from ranks import run_ranks

ENDINGS = {
    "returns": "print('fine', type(__builtins__), __doc__, __spec__, __package__)",
    "has exit handlers": "import atexit, sys; x = 5; atexit.register(lambda: print(sys.modules[__name__].x))",
    "exits": "import sys; print('before'); sys.exit(3)",
    "exits with a text": "raise SystemExit('why')",
    "exits with None": "raise SystemExit",
    "raises": "def f():\n    raise ValueError('mine')\n\nf()",
    "raises from another error": "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e",
    "raises what the command line would catch": "raise FileNotFoundError(2, 'no such file', 'data.bin')",
    "has a syntax error": "def f(:\n    pass",
    "is interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "is ended": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "warns": "import warnings; warnings.warn('careful')",
    "has a hook of its own": "import sys; sys.excepthook = lambda *a: print('hooked', a[0].__name__); 1 / 0",
    "exits at once": "import os; os._exit(7)",
}
LOOKS_AROUND = """
import os, sys, pickle

class Thing: pass

print(sys.argv, __name__, __file__, sys.path[0], sys.modules["__main__"].__name__)
print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
print("torch" in sys.modules, "triton" in sys.modules, sys.stdout.errors)
print(os.path.basename(sys.excepthook.__code__.co_filename) if hasattr(sys.excepthook, "__code__") else "own")
"""


def start(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": "", **environment}
    return subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=120
    )


def run_both(*command: str, **environment: str) -> list[subprocess.CompletedProcess[str]]:
    return [start(*command, **environment), start("-m", "dist_autotune", "run", *command, **environment)]


@pytest.mark.parametrize("text", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_program_ends_as_it_does_without_the_command(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(text)
    bare, run = run_both(str(path))
    assert (run.returncode, run.stdout) == (bare.returncode, bare.stdout)
    remark = (
        ""
        if bare.returncode
        else "dist_autotune: No step was tuned: no optimizer of torch.optim has stepped. "
    )
    assert run.stderr.startswith(bare.stderr)
    assert run.stderr.removeprefix(bare.stderr).startswith(remark)
    assert bool(run.stderr.removeprefix(bare.stderr)) == bool(remark)


@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_a_program_finds_the_arguments_and_modules_that_it_would(tmp_path, is_module):
    (tmp_path / "looking.py").write_text(LOOKS_AROUND)
    command = ["-m", "looking"] if is_module else ["looking.py"]
    bare, run = run_both(*command, "--lr", "1", "--", "-m", "x y", "--step", "é")
    assert bare.returncode == 0
    assert (run.returncode, run.stdout) == (bare.returncode, bare.stdout)


def test_the_variable_off_runs_the_program_alone(tmp_path):
    (tmp_path / "program.py").write_text(
        "import sys; print([each for each in sys.meta_path if type(each).__name__ == 'ImportHooks'])"
    )
    bare, run = run_both("program.py", DIST_AUTOTUNE_MODE="off")
    assert (run.returncode, run.stdout, run.stderr) == (0, bare.stdout, "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["missing.py"], "There is no file missing.py"),
        (["--objective", "worst", "program.py"], "objective='worst': expected one of"),
        (["--n-repeat", "few", "program.py"], "Invalid value for '--n-repeat'"),
        (["--step", "nowhere", "program.py"], "--step 'nowhere': expected module:function"),
        (["--unknown", "program.py"], "--unknown"),
        ([], "SCRIPT"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_used_is_named_and_nothing_is_run(tmp_path, capfd, arguments, text):
    (tmp_path / "program.py").write_text("print('ran')")
    (ended,) = run_ranks(become_the_command, 1, arguments, init="none")
    assert (ended.exitcode, capfd.readouterr().out) == (2, "")
    assert text in ended.stderr


def become_the_command(rank, arguments):
    sys.argv = ["dist-autotune", "run", *arguments]
    main()


def test_each_option_of_the_decorator_is_one_of_the_command_or_cannot_be():
    import dataclasses

    from dist_autotune.cli.run import OPTIONS
    from dist_autotune.options import Options

    no_text_can_name = {"mode", "group", "preserve", "clock"}
    of_replay = {"bits", "outputs"}
    options = {field.name for field in dataclasses.fields(Options)}
    assert OPTIONS.keys() | no_text_can_name | of_replay == options


def test_the_program_may_set_what_torch_and_triton_read_when_they_are_imported(tmp_path):
    (tmp_path / "program.py").write_text(
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "import triton.language as tl, triton\nprint(type(triton.jit(lambda: None)).__name__)"
    )
    ended = start("-m", "dist_autotune", "run", "program.py", TRITON_INTERPRET="")
    assert ended.stdout == "InterpretedFunction\n"


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background"])
def started_from(request):
    """Let the tests have been started from a terminal, or in the background, which ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("started_from")
def test_ctrl_c_from_outside_ends_it_as_it_ends_a_program(tmp_path):
    (tmp_path / "waits.py").write_text("print('ready', flush=True); import time; time.sleep(60)")
    command = ["env", "--default-signal=INT", sys.executable, "-m", "dist_autotune", "run", "waits.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert stderr.startswith('Traceback (most recent call last):\n  File "')
    assert str(Path("waits.py").resolve()) in stderr or "waits.py" in stderr
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert "runpy" not in stderr
