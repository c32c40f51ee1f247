"""What waits for its compilation: for how long, and what becomes of it. No process is made."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dist_autotune.compilation import compiler, preflight
from dist_autotune.compilation.child import Ending
from dist_autotune.compilation.compiler import CompileOptions, Compiler, CompileState
from dist_autotune.compilation.preflight import Compilation, Planned


class FakeChild:
    """Compiles nothing; a test says how its work ends."""

    def __init__(self, killed: list[str], keys: list[str]) -> None:
        self.keys, self.endings, self.is_over = keys, dict[str, Ending](), False
        self.told, self.is_still, self._killed = 0, False, killed
        self.seconds = 0.0  # of the work under way

    def poll(self) -> list[tuple[int, Ending]]:
        told, self.told = self.told, len(self.endings)
        self.is_over |= self.told == len(self.keys)
        return [(place, self.endings[key]) for place, key in enumerate(self.keys[: self.told])][told:]

    def stands_still(self) -> bool:
        return self.is_still

    def lasted_s(self) -> float:
        return self.seconds

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

    def _make(self, work: Any, limit_s: float, *, yields: bool) -> FakeChild:
        self.is_in_child = True
        keys = [each() for each in work]
        self.is_in_child = False
        assert yields
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


def test_few_children_compile_many_candidates_and_what_stood_behind_a_crash_goes_to_another(world):
    many = [f"a{number}" for number in range(20)]
    context = world.want("a", *many)
    world.advance()
    children = {*world.children.values()}
    assert sorted(len(child.keys) for child in children) == [10, 10]
    crashed = world.children["a0"]
    world.end("a0")
    world.end("a2", reason="a crash")
    crashed.is_over = True
    world.advance()
    assert (context.bans, world.children["a4"].keys) == ({"a2": "a crash"}, many[4::2])
    world.end("a1", *many[3:])
    world.advance()
    world.seconds += 10.0
    world.advance()
    assert (context.compile.left, world.killed) == (0, [])


def test_what_stands_behind_a_slow_candidate_goes_to_another_child_that_is_free(world):
    context = world.want("a", "a1", "a2", "a3")
    world.advance()
    slow = world.children["a1"]
    slow.seconds = 3.0
    world.advance()
    assert (slow.keys, world.children["a2"].keys) == (["a1", "a2", "a3"], ["a2", "a3"])
    world.children["a2"].seconds = 3.0
    world.advance()
    assert world.children["a3"] is world.children["a2"]  # two jobs are allowed
    world.end("a1")
    world.advance()
    world.advance()
    assert (world.killed, world.children["a3"].keys) == (["a2", "a3"], ["a3"])
    world.end("a2", "a3")
    world.seconds += 10.0
    assert (world.advance()[0][1].compiled, context.bans) == (3, {})


def test_what_a_child_that_stands_still_has_left_is_compiled_by_another_and_the_third_one_has_its_time(world):
    context = world.want("a", "a1", "a2", "a3")
    world.advance()
    world.end("a1")
    for number in range(2):
        world.children["a2"].is_still = True
        world.advance()
        assert (len(world.killed), world.children["a2"].keys) == (2 * number + 2, ["a2", "a3"])
    world.children["a2"].is_still = True
    world.advance()
    assert len(world.killed) == 4
    world.end("a2", reason="did not compile within 60 s")
    world.end("a3")
    ((_, counts),) = world.advance()
    assert counts.remark == "a process stood still; another has compiled the rest"
    assert (context.compile.left, [*context.bans]) == (0, ["a2"])


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
