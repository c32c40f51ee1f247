"""Which room of the packages may import which, read from the source."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREIGN = {"torch", "triton", "numpy"}
WITHOUT = {
    "search": {"torch", "triton"},
    "logs": FOREIGN,
    "ranks": {"triton", "numpy"},
}  # ranks: torch's store and groups
MOST_MODULES = 12
FOR_KERNELS = {"dist_autotune", "dist_autotune.for_operations"}  # of the tuner


@dataclass(frozen=True)
class Package:
    """Rooms and the modules beside them.

    levels: from top to bottom; a room may import rooms of the levels below its own, and the modules beside.
    """

    name: str
    root: Path
    levels: tuple[tuple[str, ...], ...]
    beside: set[str]
    entrances: set[str]  # they may import every room

    @property
    def level(self) -> dict[str, int]:
        return {room: number for number, rooms in enumerate(self.levels) for room in rooms}

    def rooms(self) -> dict[str, Path]:
        found = self.root.glob("*/__init__.py")
        return {path.parent.name: path for path in found if path.parent.name != "kernels"}

    def sources(self) -> list[Path]:
        found = [*self.root.glob("*.py"), *self.root.glob("*/*.py")]
        return sorted(path for path in found if path.parent.name != "kernels" or path.parent == self.root)


TUNER = Package(
    "dist_autotune",
    ROOT / "dist_autotune",
    (
        ("cli",),
        ("doctor", "script", "reports"),
        ("tuner",),
        ("repeats",),
        ("launch", "bits"),
        ("compilation", "timing"),
        ("storage", "logs"),
        ("triton_api", "search"),
        ("ranks",),
    ),
    {"codec", "errors", "formatting", "options", "settings", "tables", "version"},
    {"__init__", "__main__", "for_operations", "stock_triton", "torchtitan"},
)
KERNELS = Package(
    "dist_autotune.kernels",
    ROOT / "kernels",
    (
        ("ep",),
        ("tp",),
        ("gemm_ar",),
        ("ag_gemm", "gemm_rs", "moe", "elementwise_add"),
        ("gemm", "exchange"),
        ("agreement",),
        ("launches", "symm"),
    ),
    {
        "__init__",
        "compat",
        "configs",
        "epilogues",
        "matrices",
        "products",
        "rings",
        "signals",
        "tensors",
        "tiles",
    },
    {"ag_moe", "moe_rs", "persistent_gemm"},  # import paths of operations that share a room
)
PACKAGES = (TUNER, KERNELS)
EACH = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def imported(source: str, room: str, package: str) -> Iterator[str]:
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


def breaches(package: Package, source: str, room: str, name: str = "") -> list[str]:
    """Return the imports of a module that the room it stands in may not have."""
    found, level = [], package.level
    for module in imported(source, room, package.name):
        first, *_ = module.split(".")
        target = module.removeprefix(f"{package.name}.").partition(".")[0]
        if target in level and target != module:
            allowed = target == room or (level[target] > level[room] if room else name in package.entrances)
        elif target == "kernels":
            allowed = room == "doctor" or name == "torchtitan"
        elif package is KERNELS and first == "dist_autotune" and not module.startswith(package.name):
            allowed = module in FOR_KERNELS
        else:
            allowed = first not in WITHOUT.get(room, ())
        if not allowed:
            found.append(module)
    return found


SOURCES = {
    path.relative_to(ROOT).as_posix(): (package, path) for package in PACKAGES for path in package.sources()
}


@pytest.mark.parametrize(("package", "path"), SOURCES.values(), ids=SOURCES)
def test_a_room_imports_only_what_stands_below_it(package: Package, path: Path) -> None:
    room = "" if path.parent == package.root else path.parent.name
    assert breaches(package, path.read_text(), room, path.stem) == []


@EACH
def test_every_room_has_a_level_and_says_what_it_is_for(package: Package) -> None:
    assert set(package.rooms()) == set(package.level)
    for path in package.rooms().values():
        tree = ast.parse(path.read_text())
        assert len(ast.get_docstring(tree) or "") > 30
        assert package is KERNELS or len(tree.body) == 1, f"{path}: public names are those of dist_autotune"


@EACH
def test_modules_beside_the_rooms_are_few(package: Package) -> None:
    assert {path.stem for path in package.root.glob("*.py")} == package.beside | package.entrances


def test_no_room_is_crowded() -> None:
    roots = (TUNER.root, KERNELS.root, ROOT / "benchmarks")
    paths = (path for root in roots for path in root.rglob("*.py") if path.stem != "__init__")
    modules = Counter(path.parent for path in paths)
    assert [folder.name for folder, count in modules.items() if count > MOST_MODULES] == []


def test_each_note_of_the_kernels_stands_once_and_is_cited() -> None:
    texts = [re.sub(r"\n\s*(# )?", "\n", path.read_text()) for path in KERNELS.root.rglob("*.py")]
    proofs = (ROOT / "docs/protocol.md").read_text()
    notes = Counter(name for text in texts for name in re.findall(r"\n\[Note: ([^]]+)\]", text))
    notes.update(re.findall(r"\n### \[Note: ([^]]+)\]", proofs))
    named = [name for text in texts for name in re.findall(r"[Ss]ee\s+\[Note:\s+([^]]+)\]", text)]
    cited = {" ".join(name.split()) for name in named}
    assert set(notes.values()) == {1}
    assert set(notes) == cited


def test_every_file_that_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:\w+/)+[\w./]*|\w+\.\w+|\.ci/run)`", text) + re.findall(r"\]\(([^)#]+)", text)
    assert len(named) > 40
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [room for room in TUNER.level if f"dist_autotune/{room}/" not in text] == []
