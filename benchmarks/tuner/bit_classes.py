"""How many configs of real kernels change bits, and what tuning without changing one leaves of the gain.

    ./launch.sh --nproc 2 -m benchmarks.tuner.bit_classes [--subjects NAME...] [--sessions N] [--json FILE]

Each subject is tuned once with bits="check", from nothing. A row is a kernel with one key: its configs, their
classes, how many do not repeat themselves, the time with the first config, the least of all configs and the
least of those that change no bit, and the share of the gain that is kept. Then bits="same" tunes N times, and
the bits of the result are compared from session to session.

Subjects: elementwise_add, persistent_matmul at three shapes; with several ranks AllGatherGemm and
GemmReduceScatter; with flash-linear-attention installed a DeltaNet and a gated linear attention layer,
forward and backward, gradients compared. Traps: a race drops slow configs after few samples, so their times
are rough; inputs are random normal, where other orders of addition show.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common.arms import Plan
from benchmarks.common.options import add_record_options, new_parser
from benchmarks.common.ranks import ON_GPU, Ranks, run_on_ranks, time_limit
from benchmarks.common.records import describe_run, leave_record

from dist_autotune import TunedContext, TuningError, contextual_autotune  # isort: skip  after common
from dist_autotune.kernels.ag_gemm import AllGatherGemm  # isort: skip
from dist_autotune.kernels.elementwise_add import elementwise_add  # isort: skip
from dist_autotune.kernels.gemm_rs import GemmReduceScatter  # isort: skip
from dist_autotune.kernels.persistent_gemm import persistent_matmul  # isort: skip

Subject = tuple[Callable[[], Any], list[Any]]  # a function, and what it changes
Maker = Callable[[], Subject]
LIMIT_S = 540.0
SIZES = {"square": (4096, 4096, 4096), "few rows": (256, 4096, 4096), "deep": (512, 1024, 16384)}
COLUMNS = (
    "subject", "kernel", "configs", "classes", "unsteady", "first ms", "best ms", "same bits ms", "kept %",
)  # fmt: skip


def random(*shape: int) -> torch.Tensor:
    size = shape if ON_GPU else tuple(min(each, 64) for each in shape)
    return torch.randn(size, device="cuda" if ON_GPU else "cpu").to(torch.bfloat16)


def subjects(ranks: Ranks) -> dict[str, Maker]:
    """Return what can be tuned here."""
    found: dict[str, Maker] = {}

    def add() -> Subject:
        a, b = random(4096, 4096), random(4096, 4096)
        return lambda: elementwise_add(a, b), []

    def matmul(m: int, n: int, k: int) -> Subject:
        a, b = random(m, k), random(k, n)
        return lambda: persistent_matmul(a, b), []

    def ag_gemm() -> Subject:
        shard, weight = random(1024, 4096), random(2048, 4096)
        op = AllGatherGemm(shard.shape[0], shard.shape[1], shard.dtype)
        return lambda: op(shard, weight), []

    def gemm_rs() -> Subject:
        a, weight = random(2048, 4096), random(4096, 4096)
        op = GemmReduceScatter(a.shape[0], weight.shape[0], a.dtype)
        return lambda: op(a, weight), []

    def layer(name: str) -> Subject:
        import fla.layers

        model = getattr(fla.layers, name)(hidden_size=1024, num_heads=4).cuda().bfloat16()
        x = random(2, 2048, 1024)

        def step() -> Any:
            y = model(x)[0]
            y.float().square().mean().backward()
            return y

        return step, [model]

    found["add"] = add
    for name, size in SIZES.items():
        found[f"matmul {name}"] = lambda size=size: matmul(*size)
    if ranks.world_size > 1:
        found |= {"ag_gemm": ag_gemm, "gemm_rs": gemm_rs}
    if ON_GPU and importlib.util.find_spec("fla") is not None:
        found |= {name: lambda name=name: layer(name) for name in ("DeltaNet", "GatedLinearAttention")}
    return found


def row(subject: str, context: TunedContext) -> list[str]:
    """Return the figures of one kernel and key."""
    times, classes = context.timings, context.bit_classes
    unsteady = sum("repeat itself" in reason for reason in context.banned.values())
    same = [ms for text, ms in times.items() if classes.get(text) == 0]
    first_ms = times.get(next((text for text, number in classes.items() if not number), ""))
    figures = [str(len({*classes, *context.banned})), str(len(set(classes.values()))), str(unsteady)]
    if first_ms is None or not same:
        return [subject, context.kernel, *figures, "-", "-", "-", "-"]
    best_ms, same_ms = min(times.values()), min(same)
    gain = first_ms - best_ms
    kept = f"{100 * (first_ms - same_ms) / gain:.0f}" if gain > 0 else "-"
    return [subject, context.kernel, *figures, *(f"{ms:.4f}" for ms in (first_ms, best_ms, same_ms)), kept]


def examine(ranks: Ranks, name: str, make: Maker, sessions: int) -> tuple[list[list[str]], str]:
    """Return the rows of a subject, and what its sessions with equal bits came to."""
    function, changed = make()
    options = {"is_dist": ranks.world_size > 1, "cache": False, "log_dir": None, "preserve": changed}
    checked = contextual_autotune(function, bits="check", name=f"{name} check", **options)
    checked()
    assert checked.report is not None
    rows = [row(name, context) for context in checked.report.contexts]
    same = contextual_autotune(function, bits="same", name=f"{name} same", **options)
    seen: list[str] = []
    for _ in range(sessions):
        try:
            same()
        except TuningError as error:
            return rows, f"{name}: {error}"
        assert same.report is not None
        seen += {context.output_digest for context in same.report.contexts}
        same.retune()
    return rows, f"{name}: {len(set(seen)) - 1} changes of bits in {sessions} sessions" if seen else ""


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--subjects", nargs="+", help="by name; all that run here when left out")
    parser.add_argument("--sessions", type=int, default=20 if ON_GPU else 1, help='with bits="same", of each')
    add_record_options(parser)
    options = parser.parse_args()

    def body(ranks: Ranks) -> int:
        rows: list[list[str]] = []
        notes: list[str] = []
        with time_limit(LIMIT_S):
            for name, make in subjects(ranks).items():
                if options.subjects is None or name in options.subjects:
                    new, note = examine(ranks, name, make, options.sessions)
                    rows += new
                    notes.append(note)
        plan = Plan(warm_ups=0, iterations=options.sessions, limit_s=LIMIT_S)
        title = "Classes of bits"
        record = describe_run(ranks, op="bit_classes", title=title, commit=options.commit, plan=plan)
        record["table"] = {"columns": COLUMNS, "rows": rows, "figures": COLUMNS[2:], "notes": notes}
        leave_record(record, options, ranks)
        return 0

    run_on_ranks(body)


if __name__ == "__main__":
    main()
