"""Programs on several ranks under `dist-autotune run`: one fails, leaves early, or launches nothing."""

import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kernels_for_tests import records
from programs import printed, start_program

from dist_autotune.logs.records import ContextSettled, RunStarted, SessionOpened
from dist_autotune.options import Options
from dist_autotune.script.boundaries import NamedCalls, OptimizerSteps
from dist_autotune.script.program import Program
from dist_autotune.script.tuned_program import TunedProgram
from dist_autotune.triton_api.interception import INTERCEPTION
from ranks import Result, assert_all_ok, run_ranks

PROGRAMS = Path(__file__).parent / "programs"
OPTIONS = ("--n-repeat", "1", "--n-warmup", "0", "--no-progress")
OPTIONS += ("--timeout-s", "600")  # longer than a program may run: nothing here may wait for it
BEGINNING = f"""
import os, sys
sys.path.insert(0, {str(PROGRAMS)!r})
import torch
import torch.distributed as dist
from scaled import Model, batches, scale, scale_kernel

if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank = dist.get_rank() if dist.is_initialized() else 0
torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def train(steps):
    for x, y in batches(rank, steps):
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

"""


def start(text: str, ranks: int = 2, options: Sequence[str] = OPTIONS, **environment: str) -> list[Result]:
    path = Path("program.py").absolute()
    path.write_text(BEGINNING + text)
    return start_program(path, ranks=ranks, environment=environment, options=options)


def configs(ranks: int = 2) -> list[list[str]]:
    return [[record.config for record in records(ContextSettled, rank=rank)] for rank in range(ranks)]


def assert_agreed() -> None:
    first, second = configs()
    assert first
    assert second == first


def test_a_rank_that_raises_does_not_end_the_other():
    raising, other = start("train(2)\nif rank == 0: raise ValueError('mine')\ntrain(8)\nprint('end', rank)")
    assert raising.error == "ValueError: mine"
    assert other.ok
    assert printed(1) == "end 1\n"
    assert "goes on with what is tuned: rank 0 failed" in other.stderr
    assert "ValueError: mine" in other.stderr


def test_a_rank_that_leaves_early_does_not_keep_the_other_waiting():
    assert_all_ok(results := start("train(2 if rank == 0 else 9)\nprint('end', rank)"))
    assert "the program has ended" in results[1].stderr


def test_a_rank_without_a_launch_has_a_part_in_all_runs():
    results = start("if rank == 0:\n    train(9)\nelse:\n    for _ in range(9):\n        optimizer.step()\n")
    assert_all_ok(results)
    assert_agreed()
    assert "1 context in 3 runs on 2 ranks" in results[0].stderr


STEPS_OF_MANY_KINDS = """
from torch.utils.checkpoint import checkpoint

launched = []  # the config of each forward pass and of each recomputation
model.second.register_forward_pre_hook(lambda *_: launched.append(scale_kernel.best_config.kwargs["BLOCK"]))
parameters = list(model.parameters())
if rank == 0:  # in the backward pass, an optimizer for each parameter
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in parameters}
    for p in parameters:
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
else:  # one that steps once for each group
    optimizer = torch.optim.AdamW([{"params": [p]} for p in parameters], lr=0.01)
for x, y in batches(rank, 14):
    launched.clear()
    out = checkpoint(model, x, use_reentrant=False)
    torch.nn.functional.mse_loss(out, y).backward()
    assert len(launched) == 2 and len(set(launched)) == 1, launched
    if rank == 1:
        groups = optimizer.param_groups
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups
        optimizer.zero_grad()
"""


def test_ranks_with_steps_in_backward_and_several_steps_a_step_make_the_same_runs():
    assert_all_ok(start(STEPS_OF_MANY_KINDS))
    assert_agreed()
    runs = [len(records(RunStarted, rank=rank)) for rank in range(2)]
    assert runs[0] == runs[1]
    assert [len(records(SessionOpened, rank=rank)) for rank in range(2)] == [1, 1]


def test_a_group_that_is_made_anew_is_tuned_anew_with_all_its_ranks():
    again = (
        "init_method=f'file://{os.getcwd()}/store', rank=rank, world_size=2"  # no key of the first group's
    )
    text = f"train(2)\ndist.destroy_process_group()\ndist.init_process_group('gloo', {again})\ntrain(9)\n"
    assert_all_ok(start(text))
    assert_agreed()
    assert [len(records(SessionOpened, rank=rank)) for rank in range(2)] == [2, 2]


def test_what_forks_of_data_loaders_do_is_not_tuned():
    assert_all_ok(
        start(
            "class Rows(torch.utils.data.Dataset):\n"
            "    def __len__(self): return 8\n"
            "    def __getitem__(self, i): return scale(torch.full((3,), float(i)), 2.0).sum()\n"
            "train(1)\n"
            "loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context='fork')\n"
            "print(sum(float(x) for x in loader))\n"
            "train(8)\n",
            BLOCKS="16",
        )
    )
    assert printed(0) == printed(1) == f"{sum(6.0 * i for i in range(8))}\n"


def test_functions_that_the_program_tunes_itself_are_tuned_as_without_the_command():
    text = (
        "from dist_autotune import contextual_autotune\n"
        "own = contextual_autotune(is_dist=True, n_repeat=1, n_warmup=0, name='own')"
        "(lambda x: scale(x, 3.0))\n"
        "train(1)\n"
        "assert torch.equal(own(torch.ones(100)), torch.full((100,), 3.0))\n"
        "assert own.settled and own.report.runs == 4\n"
        "train(8)\nassert torch.equal(own(torch.ones(100)), torch.full((100,), 3.0))\n"
        "def alone():\n"
        "    from dist_autotune import contextual_autotune\n"
        "    contextual_autotune(is_dist=True, name='alone')(lambda: scale(torch.ones(50), 3.0))()\n"
        "alone()\n"
    )
    results = start(text)
    assert_all_ok(results)
    assert_agreed()
    opened = [record.thunk for record in records(SessionOpened)]
    assert opened == ["program.py", "own", "alone"]
    said, *others = (re.sub(r"\s+", " ", each.stderr) for each in results)
    assert "In all: 3 contexts of 3 functions, 3 settled, 3 tuned" in said
    for name in opened:  # also of the function that is gone
        assert f"{name}: 1 context in " in said
        assert f"Gain of {name}: launches " in said
    assert f"Report: dist-autotune report {Path('.autotune_logs').absolute()}" in said.replace("/ ", "/")
    assert "In all" not in "".join(others)


def test_an_optimizer_step_inside_a_tuned_function_ends_no_run():
    text = (
        "from dist_autotune import StepTuner\n"
        "tuner = StepTuner(is_dist=True, n_repeat=1, n_warmup=0)\n"
        "while not tuner.settled:\n    with tuner.step(): train(1)\nprint(tuner.report.runs)"
    )
    results = start(text)
    assert_all_ok(results)
    assert printed(0) == printed(1) == "3\n"
    assert [record.thunk for record in records(SessionOpened)] == ["program.py"]  # where the steps are


def test_in_the_strict_mode_one_process_launches_what_is_tuned_and_nothing_else():
    text = "train(9)\nprint('trained')\nscale(torch.zeros(12), 2.0)"
    (new,) = start("train(9)", ranks=1, DIST_AUTOTUNE_MODE="strict")
    assert str(new.error).startswith("NotTuned: scale_kernel[n=32, x_ptr.dtype=float32, ")  # its first launch
    assert_all_ok(start("train(9)", ranks=1))
    (other,) = start(text, ranks=1, DIST_AUTOTUNE_MODE="strict")
    assert printed(0) == "trained\n"
    assert str(other.error).startswith("NotTuned: scale_kernel[n=12, ")
    assert "Nearest tuned keys: [n=32, " in str(other.error)


def test_without_an_optimizer_a_named_function_ends_the_runs():
    text = "with torch.no_grad():\n    for x, _ in batches(rank): model(x)\n"
    assert_all_ok(start(text, options=[*OPTIONS, "--step", "scaled:Model.forward"]))
    assert_agreed()
    ended = start(text)
    assert_all_ok(ended)
    assert "No step was tuned: no optimizer of torch.optim has stepped" in ended[0].stderr


def test_ranks_without_a_process_group_are_told_why_nothing_was_tuned():
    ended = start("from ranks import meet\nmeet()\ndist.destroy_process_group()\ntrain(4)")
    assert_all_ok(ended)
    assert "No step was tuned: 2 ranks were started and have made no process group. Call " in ended[0].stderr


def test_a_rank_without_the_command_costs_the_others_the_time_out_once():
    results = start(
        "from dist_autotune.script.script_tuner import ScriptTuner\n"
        "if rank == 1: ScriptTuner.end_run = lambda self: None\n"
        "train(4)\nprint('end', rank)",
        options=[*OPTIONS[:-1], "2"],
    )
    assert_all_ok(results)
    assert [printed(rank) for rank in range(2)] == ["end 0\n", "end 1\n"]
    waited = r"goes on with what is tuned: Rank 0 waited [2-9]\S* s for rank 1"  # longer on a busy machine
    assert len(re.findall(waited, results[0].stderr)) == 1


# ---- afterwards


def state() -> tuple[object, ...]:
    """Return what a tuned program replaces while it runs."""
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    forward = sys.modules["scaled"].Model.forward if "scaled" in sys.modules else None
    return dict(INTERCEPTION.calls), list(sys.meta_path), dict(hooks), hasattr(forward, "__wrapped__")


@pytest.mark.parametrize("ending", ["", "raise ValueError('mine')", "sys.exit(3)"])
@pytest.mark.parametrize("step", [None, "scaled:Model.forward"], ids=["optimizer", "named"])
def test_when_the_program_has_ended_all_is_as_it_was(ending, step):
    Path("program.py").write_text(f"{BEGINNING}train(5)\n{ending}")

    def run(rank):
        boundary = OptimizerSteps() if step is None else NamedCalls(step)
        options = Options(is_dist=True, mode="online", n_repeat=1, n_warmup=0)
        tuned, before = TunedProgram(Program("program.py"), options, boundary), state()
        with contextlib.suppress(ValueError, SystemExit):
            tuned.run()
        assert state() == before
        return tuned.findings[0].report.runs

    assert assert_all_ok(run_ranks(run, 1, init="none")) == [3]
