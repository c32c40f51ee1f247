"""What waits for its compilation: in which order, for how long, what becomes of it. No process is made."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dist_autotune.compilation import backlog, preflight
from dist_autotune.compilation.backlog import Backlog, CompileState
from dist_autotune.compilation.pool import COMPILED, FAILED, Compilation, CompileOutcome, PoolOptions
from dist_autotune.compilation.preflight import Planned
from dist_autotune.launch.rank_context import Beginning, RankContext
from dist_autotune.storage.scope import ContextIdentity


class FakeProcess:
    """Compiles nothing; a test says what it tells."""

    def __init__(self, compilations: list[Compilation], options: PoolOptions, priorities: list[int]) -> None:
        self.known = [compilation.key for compilation in compilations]
        self.prefer(priorities)
        self.has_begun, self.has_ended, self.is_closed = True, False, False
        self.told: list[CompileOutcome] = []

    def prefer(self, priorities: list[int]) -> None:
        self._priorities = priorities

    @property
    def keys(self) -> list[str]:
        """Return what is still compiled, in order."""
        by_priority = sorted(zip(self._priorities, self.known, strict=True), key=lambda each: -each[0])
        return [key for priority, key in by_priority if priority]

    def tell(self, key: str, ending: str = COMPILED, reason: str = "") -> None:
        self.told.append(CompileOutcome(self.known.index(key), ending, reason))

    def read(self) -> list[CompileOutcome]:
        told, self.told = self.told, []
        return told

    def close(self) -> None:
        self.is_closed = True


@dataclass(eq=False)
class FakeContext:
    """What a backlog asks of a context; its incumbent takes a millisecond."""

    name: str
    launches_per_run: int
    search: Any = field(
        default_factory=lambda: SimpleNamespace(
            waiting=False, is_tuned_by_launches=True, device_ms=(1.0, 1.0), promise=1.0
        )
    )
    outside_race: set[str] = field(default_factory=set)
    announced: bool = True
    compile: CompileState = field(default_factory=lambda: CompileState(is_preflighted=True))
    bans: dict[str, str] = field(default_factory=dict)


class World:
    """A backlog, the processes that it has made, and what it has done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.processes: list[FakeProcess] = []
        self.events: list[str] = []
        self.seconds = 0.0
        self.backlog = Backlog(PoolOptions(in_background=True, jobs=2), self._loading)
        monkeypatch.setattr(backlog, "PoolProcess", self._make)
        monkeypatch.setattr(backlog, "time", SimpleNamespace(monotonic=lambda: self.seconds))
        monkeypatch.setattr(preflight, "current_device", lambda: 0)
        monkeypatch.setattr(preflight, "plan", lambda launch, configs, hooks_s: Planned(configs))

    @property
    def process(self) -> FakeProcess:
        """Return the only process that is under way."""
        (process,) = (each for each in self.processes if not each.is_closed)
        return process

    def add(self, name: str, *candidates: str, launches: int = 1, load_s: float = 0.0) -> Any:
        """Let a new context wait; loading each candidate takes `load_s`."""
        context = FakeContext(name, launches)
        configs = {candidate: self._compilation(candidate, load_s) for candidate in candidates}
        self.backlog.add(context, None, configs)
        return context

    def add_form(self, context: Any, **keys: str) -> None:
        """Let a context wait for another form of its candidates, whose binaries have these keys."""
        self.backlog.add(
            context, None, {candidate: self._compilation(key) for candidate, key in keys.items()}
        )

    def _compilation(self, key: str, load_s: float = 0.0) -> Compilation:
        def compile_() -> None:
            self.seconds += load_s
            self.events.append(f"load {key}")

        return Compilation(key, compile_, lambda kernel: None)

    def advance(self) -> list[tuple[str, Any]]:
        """Return the contexts that are done, with their counts."""
        return [(context.name, counts) for context, counts in self.backlog.advance()]

    def _make(self, *about: Any) -> FakeProcess:
        self.processes.append(FakeProcess(*about))
        return self.processes[-1]

    @contextlib.contextmanager
    def _loading(self, context: str, candidate: str) -> Iterator[None]:
        yield


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_context_waits_for_its_candidates_in_all_forms_of_launch(world):
    context = world.add("a", "a1", "a2")
    world.advance()
    world.process.tell("a1")
    world.advance()
    assert (context.compile.left, world.events) == (1, ["load a1"])
    world.add_form(context, a1="a1 too", a2="a2 too")
    world.advance()
    assert (context.compile.left, world.process.keys) == (2, ["a2", "a1 too", "a2 too"])
    for key in ("a1 too", "a2 too", "a2"):
        world.process.tell(key)
        world.seconds += 10.0
    ((_, counts),) = world.advance()
    assert (counts.compiled, context.compile.left, context.bans) == (4, 0, {})
    assert world.events == ["load a1", "load a1 too", "load a2 too", "load a2"]


def test_a_candidate_that_fails_in_one_form_is_not_waited_for_in_another(world):
    context = world.add("a", "a1", "a2")
    world.add_form(context, a1="a1 too", a2="a2 too")
    world.advance()
    world.process.tell("a1")
    world.process.tell("a1 too", FAILED, "too large")
    world.advance()
    assert (context.compile.left, context.bans, world.events) == (1, {"a1": "too large"}, [])
    world.process.tell("a2", FAILED, "too large, too")
    world.process.tell("a2 too")
    ((_, counts),) = world.advance()
    assert (counts.compiled, counts.failed, world.events) == (1, 2, [])
    assert context.bans == {"a1": "too large", "a2": "too large, too"}
    assert world.processes[0].is_closed  # what waits later gets another one


def test_a_context_that_is_tuned_no_more_stops_asking(world):
    starved, other = world.add("a", "a1", "a2"), world.add("b", "b1")
    world.advance()
    starved.search.is_tuned_by_launches = False
    world.advance()
    assert world.process.keys == ["b1"]  # what is compiled now goes on
    assert (starved.compile.left, starved.compile.is_preflighted, other.compile.left) == (0, False, 1)
    assert "a" not in [name for name, _ in world.advance()]
    other.search.is_tuned_by_launches = False
    world.advance()
    assert [each.is_closed for each in world.processes] == [True]


def test_what_the_search_names_later_is_compiled_by_the_same_process(world):
    context, other = world.add("a", "a1", "a2", "a3"), world.add("b", "b1", "b2")
    context.outside_race, other.search.device_ms = {"a2", "a3"}, (0.5, 0.5)
    world.advance()
    assert (world.process.keys, context.compile.left) == (["a1", "b1", "b2"], 1)
    world.process.tell("a1")
    assert [name for name, _ in world.advance()] == ["a"]
    assert (context.compile.left, world.events) == (0, ["load a1"])
    context.outside_race = {"a1", "a3"}
    assert world.advance() == []
    assert (world.process.keys, context.compile.left) == (["a2", "b1", "b2"], 1)
    context.search.promise = 0.1
    world.advance()
    assert world.process.keys == ["b1", "b2", "a2"]
    world.process.tell("a2")
    world.process.tell("a3")  # nobody waits for it: it is not loaded
    ((name, counts),) = world.advance()
    assert (name, counts.compiled, world.events) == ("a", 2, ["load a1", "load a2"])
    assert len(world.processes) == 1


def test_what_the_search_names_later_is_compiled_once_too():
    nothing: Any = SimpleNamespace()
    context = RankContext("k[]", "[]", ContextIdentity("k", nothing, (), "[]", {}), nothing, rank=0)
    context.search = search = SimpleNamespace(is_tuned_by_launches=True, waves=0)
    context.compile.is_preflighted = True
    assert not context.is_to_preflight
    search.waves = 1
    assert context.is_to_preflight
    context.compile.waves = 1
    assert not context.is_to_preflight


def test_what_only_this_rank_thought_slow_is_compiled_before_the_search_tries_it():
    nothing: Any = SimpleNamespace()
    about = ContextIdentity("k[]", nothing, (), "[]", {"a": "A: 1", "b": "A: 2", "c": "A: 3"})
    search: Any = SimpleNamespace(
        is_tuned_by_launches=True, waves=0, digests=["a", "b", "c"], outside_race={"c"}
    )
    for left_out, is_wanted in (({"b"}, True), ({"c"}, False), ({"of another rank"}, False)):
        context = RankContext("k[]", "[]", about, nothing, rank=0)
        context.beginning = Beginning(unlikely=left_out)
        context.compile.is_preflighted = True
        context.follow(search)
        assert context.is_to_preflight == is_wanted
        context.compile.waves = search.waves
        context.follow(search)
        assert not context.is_to_preflight


def test_loading_adds_a_quarter_of_the_time_from_run_to_run_and_one_candidate_in_any_case(world):
    context = world.add("a", *"abcdefgh", load_s=0.01)
    world.advance()
    for key in "abcdefgh":
        world.process.tell(key)
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


@pytest.mark.parametrize("how", ["ends", "never begins"])
def test_after_processes_that_come_to_nothing_this_one_compiles_a_candidate_a_run(world, how):
    world.add("a", "a1", "a2", "a3")
    for _ in range(backlog.MOST_FAILED_STARTS):
        world.advance()
        world.process.has_ended = how == "ends"
        world.process.has_begun = how == "ends"
        world.seconds += backlog.START_S + 1
    world.backlog._advanced = None
    world.advance()
    assert all(each.is_closed for each in world.processes)
    assert world.events == ["load a1"]
    world.advance()
    ((_, counts),) = world.advance()
    assert (world.events, counts.compiled) == (["load a1", "load a2", "load a3"], 3)
    assert counts.remark.startswith("compiled in this process, without a limit: child processes do not start")


def test_where_nothing_can_be_forked_this_process_compiles(world, monkeypatch):
    def no_fork(*args: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(backlog, "PoolProcess", no_fork)
    world.add("a", "a1")
    ((_, counts),) = world.advance()
    assert (world.events, counts.compiled) == (["load a1"], 1)
    assert "no child (Resource temporarily unavailable)" in counts.remark
