"""Runs the commands that a page shows, and compares what they print with what it shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from documents import blocks
from programs import printed, start_program

from ranks import assert_all_ok


def commands_of(text: str) -> list[tuple[str, str]]:
    """Return each command of a page's console blocks, with the lines below it."""
    return re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", "".join(blocks(text, "console")), re.MULTILINE)


def assert_prints(command: str, shown: str) -> None:
    """Run a command in this directory; fail where it does not print a line that is shown, numbers aside."""
    output = masked(output_of(command))
    for line in shown.splitlines():
        if line.startswith("Tuned:"):  # not if a race drops the first config before it has a time
            continue
        assert masked(line.removesuffix("...")) in output, f"{command}: {line}"


def masked(text: str) -> str:
    """Return a text without numbers, spaces and line ends, which differ, nor the directory it is about."""
    text = "".join(text.split())
    text = text.replace(f"{Path.cwd()}/", "").replace(os.environ["DIST_AUTOTUNE_CACHE_DIR"], "cache")
    return re.sub(r"[-+]?\d[\d.]*", "#", text)


def output_of(command: str) -> str:
    """Return what a command prints; its ranks are forked."""
    words = shlex.split(command)
    environment = dict(word.split("=") for word in words if re.match(r"[A-Z_]+=", word))
    words = words[len(environment) :]
    if words[0] == "dist-autotune":
        started = [sys.executable, "-m", "dist_autotune", *words[1:]]
        return subprocess.run(started, check=True, capture_output=True, text=True, timeout=60).stdout
    ranks = next((int(word) for word in words if word.isdecimal()), 2)
    options = () if words[:1] == ["torchrun"] else None
    ended = start_program(Path(words[-1]).absolute(), ranks=ranks, environment=environment, options=options)
    assert_all_ok(ended)
    return "".join(printed(rank) for rank in range(ranks)) + ended[0].stderr
