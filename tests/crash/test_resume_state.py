"""What ranks say of a session that crashed, and the state that is made again from its words: no process."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dist_autotune.search.messages import Announcement, Part, Payload, femtoseconds
from dist_autotune.search.resume import relive
from dist_autotune.search.rules import Rules
from dist_autotune.search.state import Tuning
from dist_autotune.search.strategies import STRATEGIES
from dist_autotune.search.unfinished import EXACT, INEXACT, Crash, Past, merged_crashes
from dist_autotune.tuner import decisions


def test_pasts_and_crashes_merge_in_any_order():
    pasts = [
        Past("b", 1, "cpu", 5, "x"),
        Past("b", 0, "cpu", 5, "x"),
        Past("a", 2, "cpu", 5, "z"),
        Past("a", 3, "cpu", 4, "y"),
    ]
    crashes = [
        Crash(1, 7, "then", EXACT, {"c": "1"}),
        Crash(0, 7, "then", INEXACT, {"c": "1", "d": "2"}),
        Crash(2, 7, "later", EXACT, {"e": "3"}),
        Crash(3, 6, "before", EXACT, {"f": "4"}),
    ]
    for one, two, three in [(0, 1, 2), (3, 2, 0), (1, 3, 2)]:
        left = pasts[one].merged(pasts[two]).merged(pasts[three])
        assert left == pasts[three].merged(pasts[two].merged(pasts[one]))
        maps = [{"s": crashes[each]} for each in (one, two, three)]
        left = merged_crashes(merged_crashes(maps[0], maps[1]), maps[2])
        assert left == merged_crashes(maps[2], merged_crashes(maps[1], maps[0]))
    everything = crashes[3].merged(crashes[2]).merged(crashes[1]).merged(crashes[0])
    assert everything == Crash(1, 7, "then", EXACT, {"c": "1", "e": "3"})  # of the last run, the exact


NAMES = ("first", "second")
DIGESTS = ("a", "b", "c")


def announcement(name):
    order = tuple((digest, f"config {digest}") for digest in DIGESTS)
    return Announcement(0, name, "64", order, DIGESTS, kernel_id=name, family=name, slot="64")


def what_is_said(draw, tuning, name):
    """Draw what the ranks say of one context after a run: mostly that they ran what was planned."""
    context = tuning.contexts.get(name)
    planned = context.digests[context.planned] if context is not None else DIGESTS[0]
    ms = draw(st.sampled_from([0.5, 1.0, 1.01, 2.0, 3.0]))
    part = Part(
        ran=draw(st.sampled_from([planned] * 6 + ["b", None])),
        worst_ms=ms,
        best_ms=ms,
        total_fs=femtoseconds(ms),
        measured=draw(st.sampled_from([1, 1, 1, 0])),
        pending=draw(st.sampled_from([0, 0, 1])) if tuning.rules.mode == "online" else 0,
        bans=draw(st.sampled_from([{}] * 8 + [{"c": (0, "too large")}])),
    )
    return part if context is not None else replace(part, announcement=announcement(name))


def state_of(tuning):
    contexts = {
        name: (context.status, context.winner, context.trial, context.waiting, context.planned, context.count,
               context.banned, context.times.ms, context.times.warmup_ms)
        for name, context in tuning.contexts.items()
    }  # fmt: skip
    plan = decisions.plan_of(tuning), tuning.judged_run, tuning.planned_runs, tuning.has_trial
    return contexts, plan, tuning.runs, tuning.done, tuning.closing


@given(st.data())
@settings(max_examples=300)
def test_the_same_words_make_the_same_state(data):
    search = data.draw(st.sampled_from(["exhaustive", "racing"]))
    rules = Rules(
        strategy=STRATEGIES[search],
        search=search,
        n_warmup=1,
        n_repeat=2,
        rank_reduce="max",
        objective=data.draw(st.sampled_from(["kernel", "thunk"])),
        mode=data.draw(st.sampled_from(["replay", "online"])),
        max_runs=data.draw(st.sampled_from([None, 7])),
    )
    tuning = Tuning(rules)
    events = [{"open": "session"}]
    tuning.open()
    for run in range(data.draw(st.integers(1, 40))):
        names = data.draw(st.sampled_from([NAMES, NAMES, NAMES[:1], ()]))
        parts = {name: what_is_said(data.draw, tuning, name) for name in names}
        whole = replace(parts[names[0]], ran=None, bans={}, announcement=None) if names else Part()
        said = Payload("run", parts=parts, run=whole, elapsed_s=run / 10)
        events.append({"merged": said.decisive()})
        tuning.step(tuning.kernels.unite(said, tuning.contexts)[0])
        if tuning.done or (tuning.closing and data.draw(st.booleans())):
            events.append({"open": "session"})
            tuning.open()
    past = Past.of("session", 0, "cpu", events)
    again = Tuning(rules)
    relive(again, past.events)
    assert state_of(again) == state_of(tuning)
