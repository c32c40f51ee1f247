"""What ranks tell each other, and how it merges: in any order, in any tree, as large as that of one rank."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dist_autotune.search.messages import (
    Announcement,
    Crash,
    Message,
    Offer,
    Opening,
    Part,
    RunReport,
    merge,
)

digests = st.sampled_from(["a", "b", "c"])
times = st.floats(0, 1e6)


@st.composite
def announcements(draw: Any, rank: int) -> Announcement:
    order = tuple((name, f"BLOCK={name}") for name in draw(st.permutations(["a", "b", "c"])))
    claim = draw(st.none() | st.tuples(st.just(rank), digests, st.none() | times))
    shared = tuple(sorted(draw(st.sets(digests, min_size=1))))
    return Announcement(rank, "matmul", "64", order, shared, claim=claim)


@st.composite
def parts(draw: Any, rank: int) -> Part:
    bans = dict.fromkeys(draw(st.sets(digests)), (rank, f"reason {rank}"))
    announcement = draw(st.none() | announcements(rank))
    fields: dict[str, Any] = {"ran": draw(st.none() | digests), "bans": bans, "announcement": announcement}
    kind = draw(st.sampled_from(["timed", "untimed", "pending"]))
    if kind == "timed":
        ms = draw(times)
        return Part(worst_ms=ms, best_ms=ms, measured=1, **fields)
    return Part(unmeasured=int(kind == "untimed"), pending=int(kind == "pending"), **fields)


@st.composite
def messages(draw: Any, rank: int) -> Message:
    kind = draw(st.sampled_from([RunReport, RunReport, RunReport, Opening]))
    facts = {"version": {draw(st.sampled_from(["1", "2"])): rank}}
    offers = {name: Offer(rank, name, draw(times), "r", "k") for name in draw(st.sets(digests))}
    if kind is Opening:
        sessions = draw(st.sets(digests))
        crashes = {s: Crash(rank, 3, "noon", draw(st.integers(0, 2)), {"x": draw(digests)}) for s in sessions}
        return Opening(rank, facts, offers, crashes)
    return RunReport(
        rank,
        facts,
        offers=offers,
        parts={name: draw(parts(rank)) for name in draw(st.sets(st.sampled_from(["x", "y"])))},
        run=draw(parts(rank)),
        elapsed_s=draw(times),
    )


def all_ranks(n: int) -> st.SearchStrategy[tuple[Message, ...]]:
    return st.tuples(*(messages(rank) for rank in range(n)))


@given(all_ranks(4))
def test_any_tree_of_encoded_messages_gives_the_same_bytes(four):
    a, b, c, d = (message.encode() for message in four)
    trees = [
        merge(merge(merge(a, b), c), d),
        merge(merge(d, b), merge(c, a)),
        merge(c, merge(d, merge(a, b))),
    ]
    assert len(set(trees)) == 1
