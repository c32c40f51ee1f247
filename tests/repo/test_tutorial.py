"""docs/tutorial.md: its files are written and its commands run, in order, and print what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from documents import blocks, page
from programs import printed, start_program

from ranks import assert_all_ok

PAGE = page("docs/tutorial.md")


def test_each_command_prints_what_the_page_shows() -> None:
    for program in blocks(PAGE, "python"):
        name = re.match(r"# (\w+\.py)\n", program)
        assert name is not None
        Path(name[1]).write_text(program)
    commands = [
        part for block in blocks(PAGE, "console") for part in re.split(r"^\$ ", block, flags=re.M)[1:]
    ]
    assert len(commands) == 7
    for command, _, shown in (part.partition("\n") for part in commands):
        output = masked(output_of(command))
        for line in shown.splitlines():
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
