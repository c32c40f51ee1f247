"""Small programs as people write them, through `dist-autotune run`: each ends as without it, and is tuned."""

import functools
import importlib.util
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from kernels_for_tests import launch, numbers, records
from programs import printed, start_program

from dist_autotune.logs.records import ContextSettled, RunStarted
from ranks import assert_all_ok

PROGRAMS = Path(__file__).parent / "programs"
RECIPES = (Path(__file__).parents[2] / "docs" / "training-scripts.md").read_text()
ONE_OF_EACH = ("--n-repeat", "1", "--n-warmup", "0", "--no-progress")
FRAMEWORKS = {  # package, and what of it the program uses: it may be imported when it is asked for
    "hugging_face": ("transformers", ("Trainer", "TrainingArguments")),
    "with_lightning": ("lightning", ("Trainer",)),
}


def run(name: str, ranks: int, *, options: Sequence[str] | None, arguments: Sequence[str] = ()) -> list[str]:
    """Return what each rank prints. Without options: stock Triton, with the first config alone."""
    blocks = "16" if options is None and not arguments else "16 32 64"
    environment = {"BLOCKS": blocks}
    assert_all_ok(
        start_program(
            PROGRAMS / f"{name}.py", *arguments, ranks=ranks, environment=environment, options=options
        )
    )
    return [printed(rank) for rank in range(ranks)]


@functools.cache
def run_bare(name: str, ranks: int) -> list[str]:
    return run(name, ranks, options=None)


def import_framework(name: str) -> None:
    """Import it here, once and not on each rank, or skip the test; it warns of what is no matter here."""
    package, names = FRAMEWORKS.get(name, ("", ()))
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install transformers accelerate lightning")
    with warnings.catch_warnings(action="ignore"):
        for each in names:
            getattr(importlib.import_module(package), each)


def settled(ranks: int) -> list[dict[str, str]]:
    """Return the config of each context on each rank."""
    return [
        {each.context: each.config for each in records(ContextSettled, rank=rank)} for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("plain_loop", 2),
        ("accumulation", 1),
        ("two_optimizers", 1),
        ("hugging_face", 2),
        ("with_lightning", 2),
    ],
)
def test_a_program_prints_the_same_losses_and_all_its_ranks_take_the_same_configs(name, ranks):
    import_framework(name)
    bare = run_bare(name, ranks)
    tuned = run(name, ranks, options=ONE_OF_EACH)
    assert tuned == bare
    assert all(len(text.splitlines()) >= 8 for text in tuned)
    first, *others = settled(ranks)
    assert first
    assert others == [first] * (ranks - 1)


@pytest.mark.torchrun
def test_torchrun_starts_the_ranks_of_a_tuned_program(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "dist_autotune", "run", *ONE_OF_EACH, str(PROGRAMS / "plain_loop.py")]
    ended = subprocess.run([*launcher, *program], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert len(ended.stdout.splitlines()) == 2 * 14
    assert ended.stderr.count("1 context in 3 runs on 2 ranks") == 1  # rank 0 alone says so
    first, second = settled(2)
    assert first
    assert second == first


def recipe(name: str) -> str:
    (text,) = re.findall(rf"```python\n# {name}\n(.*?)```", RECIPES, re.DOTALL)
    return text


@pytest.mark.parametrize(
    ("name", "module"), [("hugging_face", "tuned_trainer"), ("with_lightning", "tuned_lightning")]
)
def test_the_recipe_of_a_framework_tunes_its_steps(tmp_path, monkeypatch, name, module):
    import_framework(name)
    (tmp_path / f"{module}.py").write_text(recipe(f"{module}.py"))
    monkeypatch.syspath_prepend(tmp_path)
    bare = run_bare(name, 2)
    assert run(name, 2, options=None, arguments=["--tuned"]) == bare
    plans = [[each.plan for each in records(RunStarted, rank=rank)] for rank in range(2)]
    assert plans[0] == plans[1]
    assert any(plans[0])  # its steps are runs; a kernel of less than 1 % of one keeps its config


def test_the_recipe_of_an_evaluation_settles_both(bench, kernel):
    x, weight = numbers(), torch.zeros(1, requires_grad=True)
    names = {
        "model": lambda x: launch(kernel, x),
        "loss_of": lambda y, _: (y * weight).sum(),
        "steps": [[(x, x)] * 2] * 200,
        "held_out": [],
        "optimizer": torch.optim.SGD([weight], lr=0.1),
    }
    text = recipe("train_and_evaluate.py").partition("assert ")[0]
    exec(text, names)
    assert not names["evaluate"].settled  # 200 steps hold no evaluation
    names["evaluate"](numbers(96), numbers(96))
    assert (names["tuner"].settled, names["evaluate"].settled) == (True, True)
    assert {16, 32} <= set(bench.blocks(n=96))
