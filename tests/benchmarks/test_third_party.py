"""benchmarks/third_party.py: its arms, with a script whose kernel runs in the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.common.processes import with_benchmarks

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


def test_a_script_is_tuned_and_its_bundle_leaves_nothing_to_try(tmp_path: Path) -> None:
    script, record = tmp_path / "train.py", tmp_path / "record.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "benchmarks.third_party", "--steps", "30", "--limit-s", "60"]
    command += [
        "--search",
        "expected",
        "--arms",
        "tuned",
        "restarted",
        "--json",
        str(record),
        "--",
        str(script),
    ]
    ended = subprocess.run(
        command, env={**with_benchmarks(os.environ), "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    arms = json.loads(record.read_text())["arms"]
    assert [len(arm["ms"]) for arm in arms.values()] == [30, 30]
    assert len({tuple(arm["losses"]) for arm in arms.values()}) == 1  # a block's size changes no bit here
    (session,) = arms["tuned"]["sessions"]
    assert len(session["report"]["contexts"][0]["timings"]) == 2
    assert all(not session["report"]["outlook"] for session in arms["restarted"]["sessions"])
