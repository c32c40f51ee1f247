"""A key that is launched in several forms: each candidate is compiled for all of them before it is tried."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from candidates import GOOD, kernel_of_forms, settle, tuned

from dist_autotune.compilation.compiler import FORMS

Form = tuple[Any, Any]  # shift and FORM of a launch
TWO_FORMS: dict[str, Sequence[Form]] = {
    "a constant": [(None, "forward"), (None, "backward")],
    "an argument that is None": [(None, ""), (17, "")],
    "divisibility by 16": [(16, ""), (17, "")],
}


def launching(tuner: Any, forms: Callable[[], Sequence[Form]], mode: str = "online", **options: Any) -> Any:
    """Return a tuned function that launches the kernel in all `forms` of the moment."""
    x, y = torch.zeros(1), torch.zeros(1)

    def launch() -> None:
        for shift, form in forms():
            tuner[(1,)](x, y, shift, form)

    return tuned(launch, mode=mode, **options)


def launched(device: Any) -> set[tuple[Any, int]]:
    return {(constants["FORM"], constants["BLOCK"]) for constants in device.launched}


def preflighted(logs: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in (logs / "rank-0.jsonl").read_text().splitlines()]
    (record,) = [record for record in records if record["event"] == "preflighted"]
    return record


@pytest.mark.parametrize(
    ("forms", "mode"), [*zip(TWO_FORMS.values(), ("online", "replay", "online"), strict=True)], ids=TWO_FORMS
)
def test_no_trial_compiles_whatever_form_a_launch_has(device, compiler, tmp_path, forms, mode):
    function = launching(kernel_of_forms(GOOD, 64, 128), lambda: forms, mode, log_dir=str(tmp_path))
    settle(function)
    assert compiler.compiled_here() == [GOOD, GOOD]  # the first config, by its first launches
    assert sorted(compiler.compilations()) == [GOOD, GOOD, 64, 64, 128, 128]
    assert launched(device) == {(form, block) for _, form in forms for block in (GOOD, 64, 128)}
    assert preflighted(tmp_path)["compiled"] == 4


@pytest.mark.parametrize("mode", ["online", "replay"])
def test_a_candidate_that_fails_in_one_form_is_banned(device, mode):
    function = launching(kernel_of_forms(GOOD, 64, 128), lambda: [(None, "good"), (None, "bad")], mode)
    settle(function)
    (context,) = function.report.contexts
    ((text, reason),) = context.banned.items()
    assert text.startswith("BLOCK: 64")
    assert "CompileTimeAssertionFailure" in reason
    assert launched(device) == {(form, block) for form in ("good", "bad") for block in (GOOD, 128)}


def test_forms_above_the_bound_are_left_to_their_launches(device, compiler, tmp_path):
    forms = [(None, str(number)) for number in range(FORMS + 2)]
    function = launching(kernel_of_forms(GOOD, 64), lambda: forms, "replay", log_dir=str(tmp_path))
    settle(function)
    record = preflighted(tmp_path)
    assert record["compiled"] == FORMS
    assert record["remark"] == f"forms after the first {FORMS} left to their launches"
    assert compiler.compiled_here() == [GOOD] * len(forms) + [64] * 2
    assert launched(device) == {(form, block) for _, form in forms for block in (GOOD, 64)}


@pytest.mark.parametrize("late", [False, True], ids=["one form", "another form in a trial"])
def test_a_run_whose_timed_launch_has_compiled_is_made_again(device, compiler, late):
    runs: list[int] = []

    def forms() -> list[Form]:
        runs.append(len(runs))
        return [(None, "first"), (None, "second")] if late and len(runs) > 1 else [(None, "first")]

    function = launching(kernel_of_forms(GOOD, 64), forms, "replay")
    function()
    assert function.report.runs == (4 if late else 3)
    assert compiler.compiled_here()[:2] == ([GOOD, 64] if late else [GOOD])
