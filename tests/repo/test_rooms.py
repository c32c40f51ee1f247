"""Which room of the packages may import which, read from the source; and that a breach is found."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dist_autotune"

# From top to bottom: a room may import rooms of the levels below its own, and the modules beside the rooms.
LEVELS = (
    ("cli",),
    ("doctor", "script", "reports"),
    ("tuner",),
    ("launch", "bits"),
    ("compilation", "timing"),
    ("storage", "logs"),
    ("triton_api", "search"),
    ("ranks",),
)
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
BESIDE = {"codec", "combinations", "errors", "formatting", "options", "regular_files", "settings", "version"}
ENTRANCES = {"__init__", "__main__"}  # they may import every room
FOREIGN = {"torch", "triton", "numpy"}
WITHOUT = {
    "search": FOREIGN,
    "logs": FOREIGN,
    "ranks": {"triton", "numpy"},
}  # ranks: torch's store and groups
MOST_MODULES = 12

KERNELS = ROOT / "kernels"
BENCHMARKS = ROOT / "benchmarks"
KERNEL_LEVELS = (
    ("tp",),
    ("gemm_ar",),
    ("ag_gemm", "gemm_rs", "moe", "elementwise_add"),
    ("gemm", "exchange"),
    ("launches", "symm"),
)
KERNEL_LEVEL = {room: number for number, rooms in enumerate(KERNEL_LEVELS) for room in rooms}
KERNEL_ENTRANCES = {"ag_moe", "moe_rs", "persistent_gemm"}  # import paths of operations that share a room
KERNELS_BESIDE = {
    *("compat", "configs", "epilogues", "matrices", "rings", "signals", "tensors", "tiles"),
}


def imported(source: str, room: str, package: str = "dist_autotune") -> Iterator[str]:
    """Yield what a module of `room` imports, from the top of the package or of the installed ones."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (package, room) if room else (package,)
            base = (
                ".".join((*above[: len(above) - node.level + 1], node.module or ""))
                if node.level
                else node.module
            )
            base = (base or "").rstrip(".")
            if base == package:
                yield from (f"{base}.{alias.name}" for alias in node.names)
            else:
                yield base


def breaches(source: str, room: str, name: str = "") -> list[str]:
    """Return the imports of a module that the room it stands in may not have."""
    found = []
    for module in imported(source, room):
        first, *rest = module.split(".")
        if first == "dist_autotune":
            target = rest[0]
            if target == "kernels":
                found += [module] if room != "doctor" else []
            elif target in LEVEL:
                allowed = name in ENTRANCES if not room else target == room or LEVEL[target] > LEVEL[room]
                if not allowed:
                    found.append(module)
        elif first in WITHOUT.get(room, ()):
            found.append(module)
    return found


def kernel_breaches(source: str, room: str, name: str = "") -> list[str]:
    """Return the imports of a module of `kernels` that the room it stands in may not have."""
    found = []
    for module in imported(source, room, "dist_autotune.kernels"):
        target = module.removeprefix("dist_autotune.kernels.").partition(".")[0]
        if module.startswith("dist_autotune.kernels.") and target in KERNEL_LEVEL:
            below = room and KERNEL_LEVEL[target] > KERNEL_LEVEL[room]
            if not (target == room or below or (not room and name in KERNEL_ENTRANCES)):
                found.append(module)
    return found


def crowded(paths: Iterable[Path]) -> list[str]:
    """Return the folders with more modules than a room may have."""
    modules = Counter(path.parent for path in paths if path.stem != "__init__")
    return [folder.name for folder, count in modules.items() if count > MOST_MODULES]


SOURCES = sorted(path for path in PACKAGE.glob("*/*.py") if path.parent.name != "kernels")
SOURCES += sorted(PACKAGE.glob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_room_imports_only_what_stands_below_it(path: Path) -> None:
    room = "" if path.parent == PACKAGE else path.parent.name
    assert breaches(path.read_text(), room, path.stem) == []


def test_every_room_has_a_level_and_says_what_it_is_for() -> None:
    rooms = {
        path.parent.name: path for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "kernels"
    }
    assert set(rooms) == set(LEVEL)
    for path in rooms.values():
        tree = ast.parse(path.read_text())
        assert len(ast.get_docstring(tree) or "") > 30
        assert len(tree.body) == 1, f"{path}: public names are those of dist_autotune alone"


def test_modules_beside_the_rooms_are_few() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == BESIDE | ENTRANCES


def test_no_room_is_crowded() -> None:
    assert crowded(path for package in (PACKAGE, KERNELS, BENCHMARKS) for path in package.rglob("*.py")) == []
    assert crowded(PACKAGE / "search" / f"{number}.py" for number in range(12)) == []
    assert crowded(PACKAGE / "search" / f"{number}.py" for number in range(13)) == ["search"]


@pytest.mark.parametrize(
    "path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.relative_to(KERNELS).as_posix()
)
def test_a_room_of_kernels_imports_only_what_stands_below_it(path: Path) -> None:
    room = "" if path.parent == KERNELS else path.parent.name
    assert kernel_breaches(path.read_text(), room, path.stem) == []


def test_every_room_of_kernels_has_a_level_and_says_what_it_is_for() -> None:
    rooms = {path.parent.name: path for path in KERNELS.glob("*/__init__.py")}
    assert set(rooms) == set(KERNEL_LEVEL)
    assert all(len(ast.get_docstring(ast.parse(path.read_text())) or "") > 30 for path in rooms.values())
    assert {path.stem for path in KERNELS.glob("*.py")} == KERNELS_BESIDE | KERNEL_ENTRANCES | {"__init__"}


@pytest.mark.parametrize(
    ("room", "name", "source", "breach"),
    [
        ("gemm", "roles", "from ..ag_gemm.plain import Shape", "dist_autotune.kernels.ag_gemm.plain"),
        ("gemm", "roles", "from ..exchange import push", "dist_autotune.kernels.exchange"),
        ("symm", "base", "def f():\n    from .. import moe", "dist_autotune.kernels.moe"),
        ("moe", "plan", "from ..gemm_rs import plain", "dist_autotune.kernels.gemm_rs"),
        ("", "tiles", "from .gemm.roles import run", "dist_autotune.kernels.gemm.roles"),
    ],
)
def test_a_breach_in_kernels_is_found(room: str, name: str, source: str, breach: str) -> None:
    assert kernel_breaches(source, room, name) == [breach]


@pytest.mark.parametrize(
    ("room", "source", "breach"),
    [
        ("search", "import torch", "torch"),
        ("search", "from numpy import array", "numpy"),
        ("ranks", "from ..search.messages import Payload", "dist_autotune.search.messages"),
        ("ranks", "def f():\n    from ..tuner import session", "dist_autotune.tuner"),
        ("storage", "from ..logs.records import Note", "dist_autotune.logs.records"),
        ("tuner", "from dist_autotune.kernels import symm", "dist_autotune.kernels"),
        ("timing", "from .. import cli", "dist_autotune.cli"),
        ("", "from .tuner.session import Session", "dist_autotune.tuner.session"),
    ],
)
def test_a_breach_is_found(room: str, source: str, breach: str) -> None:
    assert breaches(source, room) == [breach]


def test_each_note_of_the_kernels_stands_once_and_is_cited() -> None:
    texts = [re.sub(r"\n\s*(# )?", "\n", path.read_text()) for path in KERNELS.rglob("*.py")]
    notes = Counter(name for text in texts for name in re.findall(r"\n\[Note: ([^]]+)\]", text))
    named = [name for text in texts for name in re.findall(r"[Ss]ee\s+\[Note:\s+([^]]+)\]", text)]
    cited = {" ".join(name.split()) for name in named}
    assert set(notes.values()) == {1}
    assert set(notes) == cited


def test_every_file_that_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:\w+/)+[\w./]*|\w+\.\w+|\.ci/run)`", text) + re.findall(r"\]\(([^)#]+)", text)
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [room for room in LEVEL if f"dist_autotune/{room}/" not in text] == []
