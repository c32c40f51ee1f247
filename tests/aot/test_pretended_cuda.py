"""That settled calls hand to the driver what Triton's own way does, byte for byte, through Triton's own C."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler, which Triton wants, too"),
]

PROGRAM = Path(__file__).with_name("settled_on_pretended_cuda.py")
OF_DESCRIPTORS = ("descriptors", "a counter", "a bias", "copies")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return by case what was handed over, how many descriptors were encoded, and the us of a call."""
    directory = tmp_path_factory.mktemp("cuda")
    tests, root = PROGRAM.parents[1:3]
    roots = [str(path) for path in (PROGRAM.parent, tests / "helpers", root)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environ |= {"PYTHONPATH": os.pathsep.join(roots), "TRITON_CACHE_DIR": str(directory / "triton")}
    command = [sys.executable, "-W", "ignore", PROGRAM, str(directory)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return {end.pop("case"): end for end in map(json.loads, done.stdout.splitlines())}


def test_settled_calls_hand_over_the_same_bytes(ends):
    assert list(ends) == [*OF_DESCRIPTORS, "rows of all ranks"]
    for name, end in ends.items():
        assert end["prepared"]["written"] == end["own"]["written"]
        assert len(bytes.fromhex(end["own"]["written"])) > (4 * 128 if name in OF_DESCRIPTORS else 128)
    assert len({end["own"]["written"] for end in ends.values()}) == len(ends)


def test_settled_calls_encode_no_descriptor_and_do_less(ends, capsys):
    for name, end in ends.items():
        prepared, own = end["prepared"], end["own"]
        assert (prepared["encoded"], own["encoded"]) == (0, 4 if name in OF_DESCRIPTORS else 0)
        assert prepared["functions"] < (0.8 * own["functions"] if name in OF_DESCRIPTORS else 80)
        with capsys.disabled():
            text = ", ".join(f"{way['functions']} functions, {way['us']:.1f} us" for way in (prepared, own))
            print(f"\n  a settled call with {name}, and by Triton's own way: {text}", end="")
