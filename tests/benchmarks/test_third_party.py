"""benchmarks/third_party.py: its arms, with a script whose kernel runs in the interpreter."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from programs import printed, start_program

from benchmarks import third_party
from ranks import assert_all_ok

SCRIPT = """
import sys, time
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"BLOCK": size}) for size in (64, 16)], key=["n"])
@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, 2 * tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)

weight = torch.ones(64, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(int(sys.argv[sys.argv.index("--steps") + 1])):
    began = time.perf_counter()
    doubled = torch.empty(64)
    double[lambda meta: (triton.cdiv(64, meta["BLOCK"]),)](weight.detach(), doubled, 64)
    loss = (weight * doubled).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item().hex()} ms {1e3 * (time.perf_counter() - began):.3f}")
"""


def run_forked(command: Sequence[str], environment: dict[str, str], limit_s: float, output: Any) -> str:
    """Stand for `run_limited`: a process that has imported torch already."""
    begin = [sys.executable, *third_party.RUN]
    assert list(command[: len(begin)]) == begin
    script = next(index for index, word in enumerate(command) if word.endswith(".py"))
    options, program, arguments = command[len(begin) : script], Path(command[script]), command[script + 1 :]
    assert_all_ok(start_program(program, *arguments, ranks=1, environment=environment, options=options))
    output.write(printed(0))
    return ""


def test_a_script_is_tuned_and_its_bundle_leaves_nothing_to_try(tmp_path: Path, monkeypatch) -> None:
    script, record = tmp_path / "train.py", tmp_path / "record.json"
    script.write_text(SCRIPT)
    options = ["--steps", "20", "--search", "expected", "--turns", "2", "--json", str(record)]
    monkeypatch.setattr(third_party, "run_limited", run_forked)
    monkeypatch.setattr(sys, "argv", ["", *options, "--arms", "tuned", "restarted", "--", str(script)])

    assert third_party.main() == 0
    told = json.loads(record.read_text())
    arms, notes = told["arms"], told["table"]["notes"]
    assert {name: len(arm["ms"]) for name, arm in arms.items()} == dict.fromkeys(
        ["tuned", "restarted", "tuned 2", "restarted 2"], 20
    )
    assert [" of one of the restarts" in note for note in notes] == [True, True]
    assert len({tuple(arm["losses"]) for arm in arms.values()}) == 1  # a block's size changes no bit here
    (report,) = arms["tuned"]["reports"]
    assert len(report["contexts"][0]["timings"]) == 2
    (again,) = arms["restarted"]["reports"]
    assert [context["status"] for context in again["contexts"]] == ["cached"]
    assert not again["outlook"]
