"""What waits for its compilation: for how long, and what becomes of it. No process is made."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dist_autotune.compilation import compiler, preflight
from dist_autotune.compilation.child import NO_FORK, STOOD_STILL, Ending
from dist_autotune.compilation.compiler import CompileOptions, Compiler, CompileState
from dist_autotune.compilation.preflight import Compilation, Planned
from dist_autotune.compilation.workers import Work


class FakeChild:
    """Compiles nothing; a test says how its work ends."""

    def __init__(self, killed: list[str], keys: list[str]) -> None:
        self.keys, self.endings, self.is_over, self.why_left = keys, dict[str, Ending](), False, ""
        self._told, self._killed = 0, killed

    def poll(self) -> list[tuple[int, Ending]]:
        told, self._told = self._told, len(self.endings)
        self.is_over |= self._told == len(self.keys)
        return [(self.keys.index(key), ending) for key, ending in self.endings.items()][told:]

    def leave(self, why: str) -> None:
        self.is_over, self.why_left = True, why

    def stands_still(self) -> bool:
        return False

    def kill(self) -> None:
        self._killed += [] if self.is_over else [key for key in self.keys if key not in self.endings]
        self.is_over = True


@dataclass(eq=False)
class FakeContext:
    name: str
    compile: CompileState = field(default_factory=CompileState)
    bans: dict[str, str] = field(default_factory=dict)


class World:
    """A compiler, the children that it has made, and what it has loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.children: dict[str, FakeChild] = {}  # by the key of what they compile
        self.killed: list[str] = []
        self.loaded: list[str] = []
        self.seconds = 0.0
        self.compiler = Compiler(CompileOptions(in_background=True, jobs=2), self._loading)
        monkeypatch.setattr(compiler, "Child", self._make)
        clock = SimpleNamespace(monotonic=lambda: self.seconds)
        monkeypatch.setattr(compiler, "time", clock)
        monkeypatch.setattr(preflight, "current_device", lambda: 0)
        monkeypatch.setattr(preflight, "plan", lambda launch, configs, hooks_s: Planned(configs))

    def want(self, name: str, *candidates: str, load_s: float = 0.0) -> FakeContext:
        """Let a new context wait; loading each candidate takes `load_s`."""
        context = FakeContext(name)
        self.want_form(context, load_s, **dict(zip(candidates, candidates, strict=True)))
        return context

    def want_form(self, context: Any, load_s: float = 0.0, **keys: str) -> None:
        """Let a context wait for a form of its candidates, whose binaries have these keys."""
        configs = {candidate: self._compilation(key, load_s) for candidate, key in keys.items()}
        self.compiler.want(context, None, configs)

    def _compilation(self, key: str, load_s: float) -> Compilation:
        def compile_() -> str:
            if not self.is_in_child:
                self.seconds += load_s
                self.loaded.append(key)
            return key

        return Compilation(key, compile_, lambda kernel: None)

    def end(self, *keys: str, reason: str = "") -> None:
        """Let the children of these end."""
        for key in keys:
            self.children[key].endings[key] = Ending(reason)

    def advance(self) -> list[tuple[str, Any]]:
        """Return the contexts that are complete, with their counts."""
        return [(context.name, counts) for context, counts in self.compiler.advance()]

    is_in_child = False

    def _make(self, work: Work) -> FakeChild:
        self.is_in_child = True
        keys = [each() for each in work.pieces]
        self.is_in_child = False
        assert work.yields
        self.workers, self.moves = work.workers(0), [keys[place] for place in work.moves]
        child = FakeChild(self.killed, keys)
        self.children.update(dict.fromkeys(keys, child))
        return child

    @contextlib.contextmanager
    def _loading(self, context: str, candidate: str) -> Iterator[None]:
        yield


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_context_waits_for_its_candidates_in_all_forms_of_launch(world):
    context = world.want("a", "a1", "a2")
    world.advance()
    world.end("a1")
    world.advance()
    assert (context.compile.left, world.loaded) == (1, ["a1"])
    world.want_form(context, a1="a1 too", a2="a2 too")
    world.end("a2")
    world.advance()
    assert (context.compile.left, [*world.children]) == (2, ["a1", "a2", "a1 too", "a2 too"])
    world.end("a1 too", "a2 too")
    world.seconds += 10.0
    ((_, counts),) = world.advance()
    assert (counts.compiled, context.compile.left, context.bans) == (4, 0, {})
    assert world.loaded == ["a1", "a2", "a1 too", "a2 too"]


def test_a_context_that_is_tuned_no_more_waits_no_longer(world):
    starved = world.want("a", "a1", "a2")
    world.advance()
    other = world.want("b", "b1")
    world.advance()
    world.compiler.keep_only(lambda context: context is other)
    world.advance()
    assert (starved.compile, other.compile.left, world.killed) == (CompileState(), 1, ["a1", "a2"])
    world.compiler.keep_only(lambda context: False)
    assert world.killed == ["a1", "a2", "b1"]


def test_one_child_compiles_all_that_waits_and_no_other_begins_while_its_workers_are_all_that_may_be(world):
    many = [f"a{number}" for number in range(20)]
    context = world.want("a", *many)
    world.advance()
    assert (world.children["a0"].keys, world.workers) == (many, 2)
    world.end("a2", reason="a crash")
    world.end("a0", *many[4:])
    other = world.want("b", "b1", "b2")
    world.advance()
    assert (context.bans, "b1" in world.children) == ({"a2": "a crash"}, False)
    world.end("a1")
    world.advance()
    assert (world.children["b2"].keys, world.workers) == (["b1", "b2"], 1)
    world.end("a3", "b1", "b2")
    world.seconds += 10.0
    world.advance()
    assert (context.compile.left, other.compile.left, world.killed) == (0, 0, [])


def test_another_child_compiles_what_one_has_left_and_what_the_third_leaves_has_failed(world):
    context = world.want("a", "a1", "a2", "a3")
    world.advance()
    world.end("a1")
    world.advance()
    for moves in (["a2", "a3"], []):
        world.children["a2"].leave("a process stood still")
        world.advance()
        world.advance()
        assert (world.children["a2"].keys, world.moves) == (["a2", "a3"], moves)
    world.end("a3")
    world.advance()
    world.children["a2"].leave("the compiler was ended by SIGKILL")
    ((_, counts),) = world.advance()
    assert counts.remark == "a process stood still; another has compiled the rest"
    assert (context.compile.left, context.bans) == (0, {"a2": "the compiler was ended by SIGKILL"})


@pytest.mark.parametrize(
    ("running", "own", "ranks", "workers"),
    [(2, 0, 1, 8), (12, 0, 1, 4), (12, 8, 1, 8), (12, 0, 2, 2), (40, 1, 1, 1), (0, 0, 1, 8)],
)
def test_beside_steps_no_more_compile_than_cores_are_free(monkeypatch, running, own, ranks, workers):
    monkeypatch.setattr(compiler.os, "sched_getaffinity", lambda pid: range(16))
    monkeypatch.setattr(compiler, "running_tasks", lambda: running)
    options = CompileOptions(local_ranks=ranks, in_background=True)
    assert options.workers_now(own) == workers
    assert CompileOptions(jobs=5, in_background=True).workers_now(own) == 5


def test_loading_adds_a_quarter_of_the_time_from_run_to_run_and_one_candidate_in_any_case(world):
    world.compiler._options = CompileOptions(in_background=True, jobs=8)
    context = world.want("a", *"abcdefgh", load_s=0.01)
    world.advance()
    world.end(*"abcdefgh")
    world.advance()
    assert context.compile.left == 7  # no time has passed
    world.seconds += 0.1
    world.advance()
    assert context.compile.left == 4  # 25 ms, of which the third was the last to begin
    world.advance()
    assert context.compile.left == 3
    world.seconds += 10.0
    world.advance()
    assert context.compile.left == 0


@pytest.mark.parametrize(("why", "times"), [(NO_FORK, 1), (STOOD_STILL, 3)])
def test_where_no_child_can_do_anything_this_process_compiles(world, why, times):
    context = world.want("a", "a1")
    for _ in range(times):
        world.advance()
        world.children["a1"].leave(why)
    world.advance()
    assert (world.loaded, context.bans) == (["a1"], {})


def test_a_process_that_stands_still_ends_no_child_with_a_candidate_that_two_have_left(world):
    world.want("a", "a1")
    for _ in range(2):
        world.advance()
        world.children["a1"].leave(STOOD_STILL)
    world.want("b", "b1")
    world.advance()
    assert (world.children["a1"].keys, world.moves) == (["a1", "b1"], [])


def test_where_nothing_can_be_forked_this_process_compiles_a_candidate_a_run(world, monkeypatch):
    def no_fork(*args: Any, **options: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(compiler, "Child", no_fork)
    world.want("a", "a1", "a2")
    world.advance()
    assert world.loaded == ["a1"]
    ((_, counts),) = world.advance()
    assert (world.loaded, counts.compiled) == (["a1", "a2"], 2)
    assert "no child (Resource temporarily unavailable)" in counts.remark
