"""Tables of real kernels: every candidate timed at many keys, for tests of searches that try a few of them.

    ./launch.sh --nproc 1 -m benchmarks.tuner.record_tables [--subjects NAME...] [--tables FILE]

Each function is tuned with search="exhaustive" at each of its sizes; the table holds the agreed times and the
bans of all its contexts, as the log has them.

Subjects: a blocked matrix product with 72 configs at 30 shapes; the same kernel with 300 configs drawn from
4,800 at 6 shapes; RMSNorm by rows with 20 configs at 24 shapes;
persistent_matmul with its own candidates at 20 shapes. On a GPU, where they are installed: layers of
flash-linear-attention, forward and backward, at 6 sizes.

Traps: calls follow each other, so small operands lie in the L2 cache; three samples a candidate, so equal
times differ by about 1 %. Without a GPU tiny sizes run in the interpreter: behaviour, not speed.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks, run_on_ranks, time_limit

from dist_autotune import TunedContext, contextual_autotune  # isort: skip  after common
from dist_autotune.kernels.persistent_gemm import persistent_matmul  # isort: skip

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16  # bf16 is wrong in the interpreter
LIMIT_S = 540.0
WIDTHS = (512, 1024, 1536, 2048, 3072, 4096, 5120, 8192) if ON_GPU else (16, 32)
Call = Callable[[], Any]


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


# -- a blocked product ---------------------------------------------------------------------------------------


@triton.jit
def blocked_matmul(
    a_ptr, b_ptr, c_ptr, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Store row-major a [m, k] @ b [n, k].T to c [m, n]; programs take GROUP_M rows of blocks together."""
    blocks_m, blocks_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    group, place = tl.program_id(0) // (GROUP_M * blocks_n), tl.program_id(0) % (GROUP_M * blocks_n)
    rows = tl.minimum(blocks_m - group * GROUP_M, GROUP_M)
    pid_m, pid_n = group * GROUP_M + place % rows, place // rows
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first_k in range(0, k, BLOCK_K):
        offs_k = first_k + tl.arange(0, BLOCK_K)
        in_k = offs_k < k
        a = tl.load(a_ptr + offs_m[:, None] * k + offs_k, mask=(offs_m[:, None] < m) & in_k, other=0.0)
        b = tl.load(b_ptr + offs_n * k + offs_k[:, None], mask=(offs_n < n) & in_k[:, None], other=0.0)
        total = tl.dot(a, b, total)
    inside = (offs_m[:, None] < m) & (offs_n < n)
    tl.store(c_ptr + offs_m[:, None] * n + offs_n, total.to(c_ptr.dtype.element_ty), mask=inside)


def matmul_configs() -> list[triton.Config]:
    sizes = (64, 128, 256) if ON_GPU else (16, 32)
    return [
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8}, num_warps=warps, num_stages=stages
        )
        for m, n, k, warps, stages in itertools.product(sizes, sizes, (32, 64), (4, 8), (3, 4))
    ]


def many_matmul_configs() -> list[triton.Config]:
    """Return 300 of 4,800, the same in every process."""
    values = ((16, 32, 64, 128, 256),) * 2 + ((16, 32, 64, 128), (1, 4, 8, 16), (4, 8, 16), (2, 3, 4, 5))
    drawn = random.Random(0).sample(list(itertools.product(*values)), 300 if ON_GPU else 6)
    return [
        triton.Config(
            {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group}, num_warps=warps, num_stages=stages
        )
        for m, n, k, group, warps, stages in drawn
    ]


def matmul_calls(configs: Sequence[triton.Config], shapes: list[tuple[int, int, int]]) -> Iterator[Call]:
    kernel = triton.autotune(configs, key=["m", "n", "k"])(blocked_matmul)
    for m, n, k in shapes:
        a, b, c = tensor(m, k), tensor(n, k), torch.empty(m, n, device=DEVICE, dtype=DTYPE)

        def multiply(a: torch.Tensor = a, b: torch.Tensor = b, c: torch.Tensor = c) -> None:
            (m, n), k = c.shape, a.shape[1]
            kernel[lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)](
                a, b, c, m, n, k
            )

        yield multiply


def shapes(count: int) -> list[tuple[int, int, int]]:
    """Return products of rows, columns and depths as models have them, the same in every process."""
    drawn = random.Random(1)
    rows = (16, 64, 256, 1000, *WIDTHS) if ON_GPU else WIDTHS
    return [(drawn.choice(rows), drawn.choice(WIDTHS), drawn.choice(WIDTHS)) for _ in range(count)]


# -- kernels that memory bounds ------------------------------------------------------------------------------


@triton.autotune(
    [triton.Config({"ROWS": rows}, num_warps=warps) for rows in (1, 2, 4, 8) for warps in (1, 2, 4, 8, 16)],
    key=["rows", "columns"],
)
@triton.jit
def rms_norm(x_ptr, w_ptr, y_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store x / sqrt(mean(x * x) + 1e-6) * w by rows; COLUMNS is the next power of two."""
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    offs_n = tl.arange(0, COLUMNS)[None, :]
    inside = (offs_m < rows) & (offs_n < columns)
    x = tl.load(x_ptr + offs_m * columns + offs_n, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / columns + 1e-6)
    y = x * scale * tl.load(w_ptr + offs_n, mask=offs_n < columns, other=0.0)
    tl.store(y_ptr + offs_m * columns + offs_n, y.to(y_ptr.dtype.element_ty), mask=inside)


def norm_calls() -> Iterator[Call]:
    for rows, columns in itertools.product((64, 1024, 16384) if ON_GPU else (4,), WIDTHS):
        x, w = tensor(rows, columns), tensor(columns)

        def norm(x: torch.Tensor = x, w: torch.Tensor = w) -> torch.Tensor:
            y = torch.empty_like(x)
            grid = lambda meta: (triton.cdiv(x.shape[0], meta["ROWS"]),)  # noqa: E731
            rms_norm[grid](x, w, y, *x.shape, COLUMNS=triton.next_power_of_2(x.shape[1]))
            return y

        yield norm


# -- this project's product, and layers of another package ---------------------------------------------------


def persistent_calls() -> Iterator[Call]:
    for m, n, k in shapes(20):
        a, b = tensor(m, k), tensor(k, n)
        yield lambda a=a, b=b: persistent_matmul(a, b)


def attention_calls() -> Iterator[Call]:
    import fla.layers

    for name, hidden, tokens in itertools.product(
        ("DeltaNet", "GatedLinearAttention"), (1024, 2048), (1024, 2048, 4096)
    ):
        model = getattr(fla.layers, name)(hidden_size=hidden, num_heads=4).cuda().bfloat16()
        x = tensor(2, tokens, hidden)

        def step(model: torch.nn.Module = model, x: torch.Tensor = x) -> None:
            y = model(x)[0]
            torch.autograd.grad(y.float().square().mean(), list(model.parameters()), allow_unused=True)

        yield step


def subjects() -> dict[str, Callable[[], Iterator[Call]]]:
    """Return what can be tuned here."""
    few = 30 if ON_GPU else 2
    found: dict[str, Callable[[], Iterator[Call]]] = {
        "norm": norm_calls,
        "matmul": lambda: matmul_calls(matmul_configs(), shapes(few)),
        "many": lambda: matmul_calls(many_matmul_configs(), shapes(6 if ON_GPU else 1)),
    }
    if ON_GPU:
        found["persistent"] = persistent_calls
        if importlib.util.find_spec("fla") is not None:
            found["fla"] = attention_calls
    return found


def table_row(subject: str, context: TunedContext) -> dict[str, Any]:
    """Return the times and bans of one kernel and key."""
    return {
        "subject": subject,
        "kernel": context.kernel,
        "key": context.key_text or ", ".join(map(str, context.key)),
        "ms": {text: round(ms, 6) for text, ms in context.timings.items()},
        "banned": sorted(context.banned),
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--subjects", nargs="+", help="by name; all that run here when left out")
    parser.add_argument("--tables", type=Path, default=Path("tables.json"), help="the file to write")
    options = parser.parse_args()

    def body(ranks: Ranks) -> int:
        rows: list[dict[str, Any]] = []
        with time_limit(LIMIT_S):
            for name, calls in subjects().items():
                if options.subjects is not None and name not in options.subjects:
                    continue
                for call in calls():
                    tuned = contextual_autotune(
                        call,
                        search="exhaustive",
                        n_warmup=1,
                        n_repeat=3,
                        cache=False,
                        log_dir=None,
                        name=name,
                    )
                    tuned()
                    assert tuned.report is not None
                    rows += [table_row(name, context) for context in tuned.report.contexts]
                    ranks.say(f"{name}: {tuned.report.runs} runs, {tuned.report.seconds:.1f} s")
                device = torch.cuda.get_device_name() if ON_GPU else "CPU, Triton's interpreter"
                options.tables.write_text(json.dumps({"device": device, "rows": rows}))  # after each subject
        return 0

    run_on_ranks(body)


if __name__ == "__main__":
    main()
