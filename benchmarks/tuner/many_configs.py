"""A kernel with thousands of configs: what a fresh session compiles, and how good its pick is.

    ./launch.sh --nproc 1 -m benchmarks.tuner.many_configs [--shape M N K] [--others N] [--search NAME]

The blocked product of `record_tables`, with 4,800 combinations of values. A session without any result
tunes it; a second one draws others; another times N of them at random, one after another (`exhaustive`). Then
the picks meet in turns. Wanted: at most 150 compiled, and picks within 3 % of the best of 1,000. The exit
code says whether it is so.

Traps: Triton's own cache is as empty as TRITON_CACHE_DIR: name a new folder, or the seconds are not those of
compiling. Without a GPU 640 tiny configs run in the interpreter: behaviour, not speed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks, run_on_ranks, time_limit

import triton  # isort: skip  after common
from benchmarks.tuner.record_tables import matmul_calls  # isort: skip

from dist_autotune import TunedContext, contextual_autotune

LIMIT_S = 590.0
MOST_COMPILED, MOST_LOSS = 150, 0.03
FINAL_ROUNDS = 101 if ON_GPU else 3
SIZES = (16, 32, 64, 128, 256) if ON_GPU else (16, 32)
VALUES: dict[str, Sequence[int]] = {
    "BLOCK_M": SIZES,
    "BLOCK_N": SIZES,
    "BLOCK_K": (16, 32, 64, 128) if ON_GPU else (16, 32),
    "GROUP_M": (1, 4, 8, 16),
    "num_warps": (4, 8, 16) if ON_GPU else (1, 2, 4, 8),
    "num_stages": (2, 3, 4, 5) if ON_GPU else (1, 2, 3, 4, 5),
}


def config(num_warps: int, num_stages: int, **blocks: int) -> triton.Config:
    return triton.Config(blocks, num_warps=num_warps, num_stages=num_stages)


def tuned(configs: Sequence[triton.Config], shape: tuple[int, int, int], **options: Any) -> TunedContext:
    """Tune the product in a fresh session; return its context."""
    (call,) = matmul_calls(configs, [shape])
    function = contextual_autotune(call, cache=False, log_dir=None, share=False, **options)
    function()
    report = function.report
    assert report is not None
    (context,) = report.contexts
    compiled = len(context.timings) + len(context.banned)
    best = "" if context.ms is None else f"{context.ms:.4f} ms, {context.config_text}"
    print(f"{report.runs} runs, {report.seconds:.1f} s, {compiled} compiled: {best}", flush=True)
    return context


def main() -> None:
    parser = new_parser(__doc__)
    default = (4096, 4096, 4096) if ON_GPU else (32, 32, 32)
    parser.add_argument("--shape", type=int, nargs=3, default=default, help="rows, columns and depth")
    parser.add_argument("--others", type=int, default=1000 if ON_GPU else 4, help="timed, to compare with")
    parser.add_argument("--search", choices=("auto", "expected"), default="auto", help="of the sessions")
    options = parser.parse_args()
    shape = tuple(options.shape)

    def body(ranks: Ranks) -> int:
        with time_limit(LIMIT_S):
            spaces = [
                [config(*values) for values in itertools.product(*VALUES.values())],
                [config(*values) for values in itertools.product(*(each[::-1] for each in VALUES.values()))],
            ]
            found = [tuned(space, shape, search=options.search) for space in spaces]
            drawn = random.Random(2).sample(range(len(spaces[0])), options.others)
            others = tuned(
                [spaces[0][each] for each in drawn], shape, search="exhaustive", n_warmup=1, n_repeat=3
            )
            picks = {str(each.config): each.config for each in (*found, others)}
            final = tuned([*picks.values()], shape, search="exhaustive", n_warmup=3, n_repeat=FINAL_ROUNDS)
        ms = dict.fromkeys(picks, 1.0) | dict(final.timings)  # one pick alone is not timed
        losses = [ms[str(each.config)] / ms[str(others.config)] - 1 for each in found]
        compiled = [len(each.timings) + len(each.banned) for each in found]
        for loss, count, each in zip(losses, compiled, found, strict=True):
            print(
                f"{count} compiled, {100 * loss:+.1f} % against the best of {options.others}; {each.untried}"
            )
        return int(max(losses) > MOST_LOSS or max(compiled) > MOST_COMPILED)

    run_on_ranks(body)


if __name__ == "__main__":
    main()
