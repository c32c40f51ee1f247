"""Tables of real kernels: every candidate timed at many keys, for tests of searches that try a few of them.

    ./launch.sh --nproc 1 -m benchmarks.tuner.record_tables [--subjects NAME...] [--tables FILE]

Each function is tuned with search="exhaustive" at each of its sizes; the table holds the agreed times and the
bans of all its contexts, as the log has them.

Subjects: a blocked matrix product with 72 configs at 30 shapes; the same kernel with 300 configs drawn from
4,800 at 6 shapes; RMSNorm by rows with 20 configs at 24 shapes; persistent_matmul and the product of
AllGatherMoE with their own candidates. Where they are installed: Liger's kernels, with configs for what its
own rules set; on a GPU the kernels that two layers of flash-linear-attention launch, forward and backward,
each by itself, as the layers keep the device waiting for the host.

A table also holds what each candidate's launch takes of the device: programs, registers of a thread, spilled
ones, bytes of shared memory.

Traps: calls follow each other, so small operands lie in the L2 cache; three samples a candidate, so equal
times differ by about 1 %. Without a GPU tiny sizes run in the interpreter: behaviour, not speed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

from benchmarks.common.options import new_parser
from benchmarks.common.ranks import ON_GPU, Ranks, run_on_ranks, time_limit

from dist_autotune import TunedContext, contextual_autotune  # isort: skip  after common
from dist_autotune.kernels.ag_moe import AllGatherMoE  # isort: skip
from dist_autotune.kernels.persistent_gemm import persistent_matmul  # isort: skip
from dist_autotune.launch.dispatcher import Dispatcher  # isort: skip
from dist_autotune.triton_api.footprint import device_properties  # isort: skip
from dist_autotune.triton_api.launch import key_of  # isort: skip

DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16  # bf16 is wrong in the interpreter
LIMIT_S = 540.0
LEAST_MS = 0.005 if ON_GPU else 0.0
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


# -- this project's products ---------------------------------------------------------------------------------


def persistent_calls() -> Iterator[Call]:
    for m, n, k in shapes(20 if ON_GPU else 1):
        a, b = tensor(m, k), tensor(k, n)
        yield lambda a=a, b=b: persistent_matmul(a, b)


def moe_calls() -> Iterator[Call]:
    """Yield products of tokens with their experts on a single rank."""
    hidden_sizes = (2048, 4096, 7168) if ON_GPU else (32,)
    tokens_of_ranks = (512, 4096, 8192) if ON_GPU else (8,)
    for hidden, tokens in itertools.product(hidden_sizes, tokens_of_ranks):
        operation = AllGatherMoE(
            tokens, hidden, DTYPE, backend="torch" if ON_GPU else "shm", max_topk=4, collective=False
        )
        weight, ids = tensor(8, hidden // 2, hidden), torch.randint(8, (tokens, 4), device=DEVICE)
        x = tensor(tokens, hidden)
        yield partial(operation, x, weight, ids, tokens=[tokens])
        operation.close()


# -- kernels of other packages -------------------------------------------------------------------------------


LIGER_ROWS = 2048 if ON_GPU else 4
LIGER_WIDTHS = (2816, 4096, 5632, 8192, 11008, 14336, 18944, 28672) if ON_GPU else (48,)


def liger_configs(name: str, sizes: Sequence[int], warps: Sequence[int]) -> list[triton.Config]:
    if not ON_GPU:
        sizes, warps = sizes[:2], warps[:2]
    return [triton.Config({name: size}, num_warps=each) for size in sizes for each in warps]


def swiglu_calls() -> Iterator[Call]:
    from liger_kernel.ops import swiglu

    configs = liger_configs("BLOCK_SIZE", (256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16))
    for kernel in (swiglu._swiglu_forward_kernel_tiled, swiglu._swiglu_backward_kernel_tiled):
        tuned = triton.autotune(configs, ["n_cols"])(kernel)
        for columns in LIGER_WIDTHS:
            x = [tensor(LIGER_ROWS, columns) for _ in range(3)]
            grid = lambda meta, n=columns: (LIGER_ROWS, triton.cdiv(n, meta["BLOCK_SIZE"]))  # noqa: E731
            yield partial(tuned[grid], *x, columns, 1.0, columns)


def block_norm_calls() -> Iterator[Call]:
    from liger_kernel.ops import rms_norm as norm

    configs = liger_configs("BLOCK_ROW", (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16))
    tuned = triton.autotune(configs, ["n_rows", "n_cols"])(norm._block_rms_norm_forward_kernel)
    for rows, columns in itertools.product((1024, 16384, 65536) if ON_GPU else (4,), (128, 256, 512)):
        x, y, w = tensor(rows, columns), tensor(rows, columns), tensor(columns)
        scales = torch.empty(rows, device=DEVICE)
        grid = lambda meta, count=rows: (triton.cdiv(count, meta["BLOCK_ROW"]),)  # noqa: E731
        yield partial(
            tuned[grid], y, columns, x, columns, w, 1, scales, 1, rows, columns, 1e-6, 0.0,
            norm._CASTING_MODE_LLAMA.value, elementwise_affine=True, BLOCK_SIZE=columns,
        )  # fmt: skip


def cross_entropy_calls() -> Iterator[Call]:
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel

    configs = liger_configs("BLOCK_SIZE", (1024, 2048, 4096, 8192, 16384, 32768), (4, 8, 16, 32))
    tuned = triton.autotune(configs, ["n_cols", "n_non_ignore"])(liger_cross_entropy_kernel)
    vocabularies = (32000, 50257, 128256, 151936) if ON_GPU else (64,)
    for tokens, columns in itertools.product((512, 4096) if ON_GPU else (4,), vocabularies):
        x, losses = tensor(tokens, columns), torch.empty(tokens, device=DEVICE)
        target = torch.randint(columns, (tokens,), device=DEVICE)
        yield partial(
            tuned[(tokens,)], x, columns, target, 1, None, losses, None, 1, None, 0, None, 0, columns,
            tokens, 0.0, 0.0, -100, 0.0, 0.0, "mean", None, False, False, False,
            HAS_WEIGHT=False, HAS_SOFTCAPPING=False, HAS_GRADIENTS=True,
        )  # fmt: skip


def attention_calls(hidden: int) -> Iterator[Call]:
    """Yield the launches of two layers' steps, each by itself."""
    import fla.layers

    for name in ("DeltaNet", "GatedLinearAttention"):
        model = getattr(fla.layers, name)(hidden_size=hidden, num_heads=hidden // 256).cuda().bfloat16()
        x = tensor(4, 2048, hidden)
        with captured() as calls:
            y = model(x)[0]
            torch.autograd.grad(y.float().square().mean(), list(model.parameters()), allow_unused=True)
        yield from calls


@contextlib.contextmanager
def captured() -> Iterator[list[Call]]:
    """Collect the first launch of each autotuned kernel and key; their first configs run."""
    stock: Callable[..., Any] = Autotuner.run
    known: set[Any] = set()
    calls: list[Call] = []

    def run(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
        if (found := (id(tuner), key_of(tuner, args, kwargs))) not in known and len(tuner.configs) > 1:
            known.add(found)
            calls.append(partial(tuner.run, *args, **kwargs))
        configs, tuner.configs = tuner.configs, tuner.configs[:1]
        try:
            return stock(tuner, *args, **kwargs)
        finally:
            tuner.configs = configs

    Autotuner.run = run
    try:
        yield calls
    finally:
        Autotuner.run = stock


def subjects() -> dict[str, Callable[[], Iterator[Call]]]:
    """Return what can be tuned here."""
    few = 30 if ON_GPU else 2
    found: dict[str, Callable[[], Iterator[Call]]] = {
        "persistent": persistent_calls,
        "norm": norm_calls,
        "moe": moe_calls,
        "matmul": lambda: matmul_calls(matmul_configs(), shapes(few)),
        "many": lambda: matmul_calls(many_matmul_configs(), shapes(6 if ON_GPU else 1)),
    }
    if importlib.util.find_spec("liger_kernel") is not None:
        found["cross_entropy"] = cross_entropy_calls
        if ON_GPU:  # the interpreter passes numbers as they are, and these convert them
            found |= {"swiglu": swiglu_calls, "block_norm": block_norm_calls}
    if ON_GPU and importlib.util.find_spec("fla") is not None:
        found |= {f"fla{hidden}": partial(attention_calls, hidden) for hidden in (1024, 2048)}
    return found


Footprints = dict[tuple[str, str], dict[str, tuple[int, ...]]]  # by kernel and key, by candidate's text


@contextlib.contextmanager
def footprints() -> Iterator[Footprints]:
    """Collect programs, registers, spilled registers and shared bytes of the launches that are timed."""
    found: Footprints = {}
    stock = Dispatcher.__dict__["_keep_share"]

    def keep(context: Any, candidate: str, programs: int, kernel: Any) -> None:
        stock.__func__(context, candidate, programs, kernel)
        if kernel is not None:
            counts = (programs, kernel.n_regs or 0, kernel.n_spills or 0, kernel.metadata.shared)
            name = context.identity.source.short_name, context.identity.key_text
            found.setdefault(name, {})[context.texts[candidate]] = counts

    Dispatcher._keep_share = staticmethod(keep)
    try:
        yield found
    finally:
        Dispatcher._keep_share = stock


def table_row(subject: str, context: TunedContext, found: Footprints) -> dict[str, Any]:
    """Return the times, bans and footprints of one kernel and key."""
    return {
        "subject": subject,
        "kernel": context.kernel,
        "key": context.key_text or ", ".join(map(str, context.key)),
        "ms": {text: round(ms, 6) for text, ms in context.timings.items()},
        "banned": sorted(context.banned),
        "launch_bound": context.launch_bound,
        "footprints": found.get((context.kernel, context.key_text), {}),
    }


def grouped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a table of each kernel, [key][config]; ms of null: banned; of 0: no candidate of the key.

    Left out are keys whose best time is near the clock's step, or of which the host hid some.
    """
    rows = [row for row in rows if row["ms"] and not row["launch_bound"]]
    kernels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if min(row["ms"].values()) >= LEAST_MS:
            kernels.setdefault((row["subject"], row["kernel"]), []).append(row)
    tables = []
    for (subject, kernel), of_kernel in kernels.items():
        configs = [*dict.fromkeys(text for row in of_kernel for text in (*row["ms"], *row["banned"]))]
        table: dict[str, Any] = {"subject": subject, "kernel": kernel, "configs": configs}
        table["keys"] = [row["key"] for row in of_kernel]
        table["ms"] = [
            [row["ms"].get(text, None if text in row["banned"] else 0) for text in configs]
            for row in of_kernel
        ]
        for place, name in enumerate(("programs", "registers", "spills", "shared_bytes")):
            table[name] = [
                [row["footprints"].get(text, [None] * 4)[place] for text in configs] for row in of_kernel
            ]
        tables.append(table)
    return tables


def device_facts() -> dict[str, Any]:
    if not ON_GPU:
        return {"device": "CPU, Triton's interpreter"}
    device = device_properties(0)
    return {
        "device": device.name,
        "sms": device.multi_processor_count,
        "shared_bytes_of_sm": device.shared_memory_per_multiprocessor,
        "registers_of_sm": device.regs_per_multiprocessor,
        "threads_of_sm": device.max_threads_per_multi_processor,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--subjects", nargs="+", help="by name; all that run here when left out")
    parser.add_argument("--tables", type=Path, default=Path("tables.json"), help="the file to write")
    options = parser.parse_args()

    def body(ranks: Ranks) -> int:
        rows: list[dict[str, Any]] = []

        def record(name: str) -> None:
            for call in known[name]():
                tuned = contextual_autotune(
                    call, search="exhaustive", n_warmup=1, n_repeat=3, cache=False, log_dir=None, name=name
                )
                tuned()
                assert tuned.report is not None
                rows.extend(table_row(name, context, found) for context in tuned.report.contexts)
                ranks.say(f"{name}: {tuned.report.runs} runs, {tuned.report.seconds:.1f} s")
                # After each call: what a limit ends loses one.
                options.tables.write_text(json.dumps({**device_facts(), "kernels": grouped(rows)}))

        known = subjects()
        with time_limit(LIMIT_S), footprints() as found:
            failed = [name for name in options.subjects or known if ranks.attempt(partial(record, name))]
        return 1 if failed else 0

    run_on_ranks(body)


if __name__ == "__main__":
    main()
