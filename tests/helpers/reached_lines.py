"""Print which share of kernels/ the tests on GPUs reach, of host code and of what is compiled for the device.

    export TRITON_CACHE_DIR=$PWD/reached/triton COVERAGE_RCFILE=$PWD/reached/rc
    printf '[run]\nbranch=true\nparallel=true\nsource=kernels\npatch=fork,_exit\n' >reached/rc
    DIST_AUTOTUNE_TEST_GPU=1 python -m coverage run -m pytest -q -c pyproject.toml tests
    python -m coverage combine; python -m coverage json -o reached/host.json
    python tests/helpers/reached_lines.py reached/host.json reached/triton

coverage.py does not see what runs on a device. A statement of a `jit` function counts as reached if code that
Triton compiled names its line or a later line of its block: what a constexpr condition leaves out is never
named. A branch of the device is a block of `if`, `for` or `while`.
"""

from __future__ import annotations

import ast
import collections
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
PLACE = re.compile(rb'loc\("[^"]*?/kernels/([^"]+\.py)":(\d+):')
COMPILED = (".source", ".ttir", ".ttgir")


@dataclass
class Reached:
    """Counts of one folder."""

    host: int = 0
    of_host: int = 0
    branches: int = 0
    of_branches: int = 0
    device: int = 0
    of_device: int = 0
    blocks: int = 0
    of_blocks: int = 0

    def __add__(self, other: Reached) -> Reached:
        return Reached(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def is_jit(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(it) for it in node.decorator_list)


def blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse"):
        if block := getattr(statement, name, None):
            yield block


def device_counts(tree: ast.AST, named: set[int]) -> tuple[Reached, set[int]]:
    """Return the counts of the device, and the lines of jit functions: they are none of the host's."""
    total, lines = Reached(), set()

    def walk(block: list[ast.stmt]) -> bool:
        passed = False  # a later statement of the block was reached
        for statement in reversed(block):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            inner = list(blocks_of(statement))
            end = inner[0][0].lineno - 1 if inner else statement.end_lineno
            passed |= not named.isdisjoint(range(statement.lineno, max(end, statement.lineno) + 1))
            for each in inner:
                has_run = walk(each)
                total.blocks += has_run
                total.of_blocks += 1
                passed |= has_run
            total.device += passed
            total.of_device += 1
        return passed

    for node in ast.walk(tree):
        if is_jit(node):
            walk(node.body)
            lines.update(range(node.body[0].lineno, node.end_lineno + 1))
    return total, lines


def host_counts(found: dict, of_device: set[int]) -> Reached:
    """Return the counts of coverage.py's report of a file."""
    count = Reached()
    for kind, is_reached in (("executed", True), ("missing", False)):
        statements = len(set(found[f"{kind}_lines"]) - of_device)
        branches = sum(abs(start) not in of_device for start, _ in found.get(f"{kind}_branches", ()))
        count += Reached(statements * is_reached, statements, branches * is_reached, branches)
    return count


def named_lines(cache: Path) -> dict[str, set[int]]:
    """Return the lines that compiled code names, of each file under kernels/."""
    named: dict[str, set[int]] = collections.defaultdict(set)
    for path in cache.rglob("*"):
        if path.suffix in COMPILED:
            for name, line in PLACE.findall(path.read_bytes()):
                named[name.decode()].add(int(line))
    return named


def folders(report: dict, named: dict[str, set[int]]) -> dict[str, Reached]:
    counts: dict[str, Reached] = collections.defaultdict(Reached)
    files = {name.rpartition("kernels/")[2]: found for name, found in report["files"].items()}
    for path in sorted(KERNELS.rglob("*.py")):
        name = str(path.relative_to(KERNELS))
        count, of_device = device_counts(ast.parse(path.read_text()), named.get(name, set()))
        folder = name.split("/")[0] if "/" in name else "."
        counts[folder] += count + host_counts(files[name], of_device)
    return counts


def share(reached: int, of: int) -> str:
    return f"{reached}/{of} {reached / of:.0%}" if of else "-"


def main(report: str, cache: str) -> None:
    counts = folders(json.loads(Path(report).read_text()), named_lines(Path(cache)))
    counts["all"] = sum(counts.values(), Reached())
    print("| folder | host lines | host branches | device lines | device branches |\n|---|--:|--:|--:|--:|")
    for folder, count in counts.items():
        pairs = zip(astuple(count)[::2], astuple(count)[1::2], strict=True)
        print(f"| {folder} | " + " | ".join(share(*pair) for pair in pairs) + " |")


if __name__ == "__main__":
    main(*sys.argv[1:])
