"""Draws session.svg: what the README's program and `dist-autotune report` print on two CPU ranks.

TRITON_INTERPRET=1 python docs/pictures/session.py
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parent
README = PICTURES.parents[1] / "README.md"
WIDTH = 120  # columns
COMMANDS = {  # as a reader types them, and as they are run here
    "./launch.sh layer.py": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "layer.py"],
    "dist-autotune report": ["-m", "dist_autotune", "report"],
}


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as directory:
        program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
        assert program is not None
        Path(directory, "layer.py").write_text(program[1])
        here = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "OMP_NUM_THREADS": "1"}
        here["DIST_AUTOTUNE_CACHE_DIR"] = f"{directory}/cache"
        for shown, arguments in COMMANDS.items():
            command = [sys.executable, *arguments]
            ended = subprocess.run(
                command,
                cwd=directory,
                env=os.environ | here,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
            )
            console.print(Text(f"$ {shown}", "bold"))
            console.print(Text.from_ansi(ended.stdout.replace(f"{directory}/", "")))
    console.save_svg(str(PICTURES / "session.svg"), title="two ranks in Triton's interpreter")


if __name__ == "__main__":
    main()
