"""docs/tutorial.md: its files are written and its commands run, in order, and print what the page shows."""

import re
from pathlib import Path

from documents import blocks, page
from shown_commands import assert_prints, commands_of

PAGE = page("docs/tutorial.md")


def test_each_command_prints_what_the_page_shows() -> None:
    for program in blocks(PAGE, "python"):
        Path(re.match(r"# (\w+\.py)\n", program)[1]).write_text(program)
    commands = commands_of(PAGE)
    assert len(commands) == 7
    for command, shown in commands:
        assert_prints(command, shown)
