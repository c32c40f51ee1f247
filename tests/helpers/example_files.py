"""A cache entry, and the logs of a small session on two ranks, written as a session writes them.

Three candidates are timed, a fourth is banned. Rank 1 is slower at two of them, so that the ranks
alone would choose differently: rank 0 config 0, rank 1 config 1.
"""

from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from dist_autotune.logs import records
from dist_autotune.logs.writer import SessionLog
from dist_autotune.storage.winners import Entry, EntryKey

CONFIGS = ("BLOCK=64", "BLOCK=128", "BLOCK=256", "BLOCK=512")
MS = {0: (1.0, 1.5, 3.0), 1: (4.0, 2.0, 3.3)}  # rank -> config id -> ms of each sample
SAMPLES = 2


KEY = EntryKey(
    kernel="matmul", kernel_digest="k1", key="4096, 'fp16'", constants="", candidates=("c0", "c1"),
    device="test device", capability="9.0", triton_version="3.6.0", world_size=2,
)  # fmt: skip


def entry(winner: str = "c1", **key: object) -> Entry:
    return Entry(
        key=structs.replace(KEY, **key),
        winner=winner,
        config="BLOCK=128",
        ms=0.25,
        timings={"BLOCK=64": 0.5, "BLOCK=128": 0.25},
        created_at="2026-01-02T03:04:05Z",
        package_version="0.1.0",
    )


def write_session(
    directory: Path,
    name: str = "s1",
    *,
    thunk: str = "layer",
    ranks: tuple[int, ...] = (0, 1),
    part: slice = slice(None),
    change: Callable[[records.Record], records.Record] = lambda record: record,
) -> None:
    """Write what `ranks`, of the two there are, log of one session, or a part of it, each record changed."""
    for rank in ranks:
        with SessionLog(directory, rank) as log:
            for record in session_records(name, rank, thunk)[part]:
                log.write(change(record))


def session_records(name: str = "s1", rank: int = 0, thunk: str = "layer") -> list[records.Record]:
    here = {"session": name, "rank": rank}
    about = {**here, "context": "c0ffee", "kernel": "matmul", "key": "4096, 'fp16'"}
    out: list[records.Record] = [
        records.SessionOpened(
            **here, thunk=thunk, world_size=2, ranks=(0, 1), mode="replay", search="exhaustive",
            objective="kernel", n_warmup=0, n_repeat=SAMPLES,
            device="test device", versions={"triton": "3.6.0"}, pid=1, started_at="2026-01-02T03:04:05Z",
            clock="EventClock",
        ),
        records.ContextAdmitted(**about, run=0, candidates=CONFIGS, incumbent=0),
        records.Banned(
            **about, run=0, config_id=3, config=CONFIGS[3], by_rank=1,
            reason="out of resource:\nshared memory <48>",
        ),
    ]  # fmt: skip
    run = 0
    for config_id in range(3):
        config = {"config_id": config_id, "config": CONFIGS[config_id]}
        times = [MS[0][config_id], MS[1][config_id]]
        for k in range(1, SAMPLES + 1):
            own_ms = times[rank]
            out += [
                records.RunStarted(**here, run=run, plan={"c0ffee": config_id}, elapsed_s=run / 10),
                records.Trial(
                    **about, **config, run=run, kind="sample", k=k, n=SAMPLES, launches=1, ms=own_ms,
                    median_ms=own_ms, elapsed_s=run / 10,
                ),
                records.Agreed(
                    **about, **config, run=run, ms=max(times), fastest_rank_ms=min(times), counted=True,
                ),
                records.Exchanged(**here, run=run, sent_bytes=100, received_bytes=200, ms=0.1),
            ]  # fmt: skip
            run += 1
    timings = {CONFIGS[i]: max(MS[0][i], MS[1][i]) for i in range(3)}
    return [
        *out,
        records.ContextSettled(
            **about,
            run=run,
            status="tuned",
            config_id=1,
            config=CONFIGS[1],
            ms=2.0,
            timings=timings,
            fastest_rank_ms=1.5,
            default_ms=4.0,
            judge="launch",
            banned={CONFIGS[3]: "rank 1: out of resource:\nshared memory <48>"},
        ),
        records.SessionClosed(**here, runs=run + 1, contexts=1, outcome="settled"),
    ]
