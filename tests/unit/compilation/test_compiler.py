"""What waits for its compilation: for how long, and what becomes of it. No process is made."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dist_autotune.compilation import compiler, preflight
from dist_autotune.compilation.compiler import Compiler, CompileState
from dist_autotune.compilation.pool import (
    COMPILED,
    FAILED,
    Compilation,
    CompileOptions,
    CompileOutcome,
)
from dist_autotune.compilation.preflight import Planned
from dist_autotune.launch.rank_context import Beginning, RankContext, RunLaunches
from dist_autotune.storage.scope import ContextIdentity


class FakePool:
    """Compiles nothing; a test says what it tells."""

    def __init__(self, compilations: list[Compilation], options: CompileOptions) -> None:
        self.keys = [compilation.key for compilation in compilations]
        self.has_ended = self.is_closed = False
        self.told: list[CompileOutcome] = []

    def tell(self, key: str, ending: str = COMPILED, reason: str = "") -> None:
        self.told.append(CompileOutcome(self.keys.index(key), ending, reason))

    def read(self) -> list[CompileOutcome]:
        told, self.told = self.told, []
        return told

    def close(self) -> None:
        self.is_closed = True


@dataclass(eq=False)
class FakeContext:
    name: str
    compile: CompileState = field(default_factory=CompileState)
    bans: dict[str, str] = field(default_factory=dict)


class World:
    """A compiler, the pools that it has made, and what it has loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[FakePool] = []
        self.loaded: list[str] = []
        self.seconds = 0.0
        self.compiler = Compiler(CompileOptions(in_background=True, jobs=2), self._loading)
        monkeypatch.setattr(compiler, "Pool", self._make)
        clock = SimpleNamespace(monotonic=lambda: self.seconds)
        monkeypatch.setattr(compiler, "time", clock)
        monkeypatch.setattr(preflight, "current_device", lambda: 0)
        monkeypatch.setattr(preflight, "plan", lambda launch, configs, hooks_s: Planned(configs))

    @property
    def pool(self) -> FakePool:
        """Return the only pool that is under way."""
        (pool,) = (each for each in self.pools if not each.is_closed)
        return pool

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
        def compile_() -> None:
            self.seconds += load_s
            self.loaded.append(key)

        return Compilation(key, compile_, lambda kernel: None)

    def advance(self) -> list[tuple[str, Any]]:
        """Return the contexts that are complete, with their counts."""
        return [(context.name, counts) for context, counts in self.compiler.advance()]

    def _make(self, *about: Any) -> FakePool:
        self.pools.append(FakePool(*about))
        return self.pools[-1]

    @contextlib.contextmanager
    def _loading(self, context: str, candidate: str) -> Iterator[None]:
        yield


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_context_waits_for_its_candidates_in_all_forms_of_launch(world):
    context = world.want("a", "a1", "a2")
    world.advance()
    world.pool.tell("a1")
    world.advance()
    assert (context.compile.left, world.loaded) == (1, ["a1"])
    world.want_form(context, a1="a1 too", a2="a2 too")
    world.pool.tell("a2")
    world.pool.has_ended = True
    world.advance()
    assert (context.compile.left, world.pool.keys) == (2, ["a1 too", "a2 too"])
    for key in world.pool.keys:
        world.pool.tell(key)
    world.seconds += 10.0
    ((_, counts),) = world.advance()
    assert (counts.compiled, context.compile.left, context.bans) == (4, 0, {})
    assert world.loaded == ["a1", "a2", "a1 too", "a2 too"]


def test_a_candidate_that_fails_in_one_form_is_not_waited_for_in_another(world):
    context = world.want("a", "a1", "a2")
    world.want_form(context, a1="a1 too", a2="a2 too")
    world.advance()
    world.pool.tell("a1")
    world.pool.tell("a1 too", FAILED, "too large")
    world.advance()
    assert (context.compile.left, context.bans, world.loaded) == (1, {"a1": "too large"}, [])
    world.pool.tell("a2", FAILED, "too large, too")
    world.pool.tell("a2 too")
    ((_, counts),) = world.advance()
    assert (counts.compiled, counts.failed, world.loaded) == (1, 2, [])
    assert context.bans == {"a1": "too large", "a2": "too large, too"}
    assert world.pools[0].is_closed


def test_a_context_that_is_tuned_no_more_waits_no_longer(world):
    starved, other = world.want("a", "a1", "a2"), world.want("b", "b1")
    world.advance()
    world.compiler.keep_only(lambda context: context is other)
    world.pool.tell("a1")
    world.advance()
    assert (starved.compile, other.compile.left, world.loaded) == (CompileState(), 1, [])
    world.compiler.keep_only(lambda context: False)
    assert [each.is_closed for each in world.pools] == [True]


@pytest.mark.parametrize(
    ("of_this_rank", "of_search", "wanted"),
    [({"b"}, None, {"c"}), ({"b"}, {"c"}, {"b"}), ({"b"}, {"b", "c"}, set()), (set(), set(), {"b", "c"})],
)
def test_what_the_search_names_is_compiled_once_whatever_this_rank_thought_slow(
    of_this_rank, of_search, wanted
):
    nothing: Any = SimpleNamespace()
    about = ContextIdentity("k[]", nothing, (), "[]", {"a": "A: 1", "b": "A: 2", "c": "A: 3"})
    context = RankContext("k[]", about, nothing, rank=0, beginning=Beginning(unlikely=of_this_rank))
    context.run.choice = "a"
    if of_search is not None:
        context.order: Any = SimpleNamespace(is_tuned_by_launches=True, outside_race=of_search)
    assert (context.wanted_candidates, context.is_to_preflight) == (wanted, bool(wanted))
    context.compile.asked |= wanted
    context.run = RunLaunches(choice="a")
    assert not context.is_to_preflight


def test_loading_adds_a_quarter_of_the_time_from_run_to_run_and_one_candidate_in_any_case(world):
    context = world.want("a", *"abcdefgh", load_s=0.01)
    world.advance()
    for key in "abcdefgh":
        world.pool.tell(key)
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


def test_after_pools_that_come_to_nothing_this_process_compiles_a_candidate_a_run(world):
    world.want("a", "a1", "a2", "a3")
    for _ in range(compiler.MOST_FAILED_POOLS):
        world.advance()
        world.pool.has_ended = True
    world.compiler._advanced = None
    world.advance()
    assert all(each.is_closed for each in world.pools)
    assert world.loaded == ["a1"]
    world.advance()
    ((_, counts),) = world.advance()
    assert (world.loaded, counts.compiled) == (["a1", "a2", "a3"], 3)
    assert counts.remark.startswith("compiled in this process, without a limit: child processes do not start")


def test_where_nothing_can_be_forked_this_process_compiles(world, monkeypatch):
    def no_fork(*args: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(compiler, "Pool", no_fork)
    world.want("a", "a1")
    ((_, counts),) = world.advance()
    assert (world.loaded, counts.compiled) == (["a1"], 1)
    assert "no child (Resource temporarily unavailable)" in counts.remark
