"""How many configs of real kernels change bits, and what tuning without changing one leaves of the gain.

    ./launch.sh --nproc 2 -m benchmarks.tuner.bit_classes [--subjects NAME...] [--sessions N] [--json FILE]

Each subject is tuned once with bits="check", from nothing. A row is a kernel with one key: its configs, their
classes, how many do not repeat themselves, the time with the first config, the least of all configs and the
least of those that change no bit, and the share of the gain that is kept. Then bits="same" tunes N times, and
the bits of the result are compared from session to session.

Subjects: elementwise_add, persistent_matmul at three shapes, a matrix product that splits K and adds with
atomics, AllGatherGemm, GemmReduceScatter, AllGatherMoE and MoEReduceScatter. On a GPU, where it is installed:
Liger's DyT, fused MoE, MLP and int8 x int2 product (`pip install liger-kernel`, 1 MB, needs torch and Triton
alone); flash-linear-attention's DeltaNet and gated linear attention. Those with parameters run forward and
backward, and gradients are compared. What cannot be made here is left out with the reason.

Traps: a race drops slow configs after few samples, so their times are rough; inputs are random normal, where
other orders of addition show. A config of the split product with four parts or more may repeat itself by
chance; the interpreter adds in one order, always.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.common.arms import Plan
from benchmarks.common.options import add_record_options, new_parser
from benchmarks.common.ranks import ON_GPU, Ranks, run_on_ranks, time_limit
from benchmarks.common.records import describe_run, leave_record

from dist_autotune import TunedContext, TuningError, contextual_autotune  # isort: skip  after common
from dist_autotune.kernels.ag_gemm import AllGatherGemm  # isort: skip
from dist_autotune.kernels.ag_moe import AllGatherMoE  # isort: skip
from dist_autotune.kernels.elementwise_add import elementwise_add  # isort: skip
from dist_autotune.kernels.gemm_rs import GemmReduceScatter  # isort: skip
from dist_autotune.kernels.moe_rs import MoEReduceScatter  # isort: skip
from dist_autotune.kernels.persistent_gemm import persistent_matmul  # isort: skip

Subject = Callable[[], Any]  # makes the same outputs from the same inputs, and changes nothing
Maker = Callable[[Ranks], Subject]
DEVICE, TOKENS = ("cuda", 1024) if ON_GPU else ("cpu", 8)
LIMIT_S = 540.0
SIZES = {"square": (4096, 4096, 4096), "few rows": (256, 4096, 4096), "deep": (512, 1024, 16384)}
COLUMNS = (
    "subject", "kernel", "configs", "classes", "unsteady", "first ms", "best ms", "same bits ms", "kept %",
)  # fmt: skip


def random(*shape: int) -> torch.Tensor:
    size = shape if ON_GPU else tuple(min(each, 32) for each in shape)
    return torch.randn(size, device=DEVICE).to(torch.bfloat16)


# -- this project's own --------------------------------------------------------------------------------------


def add(ranks: Ranks) -> Subject:
    a, b = random(4096, 4096), random(4096, 4096)
    return lambda: elementwise_add(a, b)


def matmul(ranks: Ranks, m: int, n: int, k: int) -> Subject:
    a, b = random(m, k), random(k, n)
    return lambda: persistent_matmul(a, b)


def ag_gemm(ranks: Ranks) -> Subject:
    shard, weight = random(1024, 4096), random(2048, 4096)
    op = AllGatherGemm(shard.shape[0], shard.shape[1], shard.dtype)
    return lambda: op(shard, weight)


def gemm_rs(ranks: Ranks) -> Subject:
    a, weight = random(2048, 4096), random(4096, 4096)
    op = GemmReduceScatter(a.shape[0], weight.shape[0], a.dtype)
    return lambda: op(a, weight)


def ag_moe(ranks: Ranks) -> Subject:
    x, weight, (ids, _) = random(TOKENS, 2048), random(8, 1024, 2048), choices(8)
    op = AllGatherMoE(x.shape[0], x.shape[1], x.dtype)
    return lambda: op(x, weight, ids)


def moe_rs(ranks: Ranks) -> Subject:
    (ids, shares), weight = choices(8), random(8, 2048, 1024)
    y = torch.randn(ranks.world_size * ids.numel(), weight.shape[2], device=DEVICE).to(torch.bfloat16)
    op = MoEReduceScatter(ids.shape[0], weight.shape[1], y.dtype)
    return lambda: op(y, weight, ids, shares)


def choices(experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts and their weights for this rank's tokens."""
    shares, ids = torch.rand(TOKENS, experts, device=DEVICE).topk(2)
    return ids, shares / shares.sum(1, keepdim=True)


# -- a product whose parts are added with atomics ------------------------------------------------------------


@triton.autotune(
    [triton.Config({"BLOCK": block, "SPLIT": split}) for split in (1, 2, 4, 8) for block in (32, 64)],
    key=["m", "n", "k"],
)
@triton.jit
def split_matmul(a_ptr, b_ptr, c_ptr, m, n, k, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """Add a part of row-major a [m, k] @ b [k, n] to c, float32, which must hold zeros; blocks are square."""
    offs_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first_k in range(tl.program_id(2) * BLOCK, k, SPLIT * BLOCK):
        offs_k = first_k + tl.arange(0, BLOCK)
        a_mask, b_mask = (offs_m < m) & (offs_k[None, :] < k), (offs_k[:, None] < k) & (offs_n < n)
        a = tl.load(a_ptr + offs_m * k + offs_k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * n + offs_n, mask=b_mask, other=0.0)
        total = tl.dot(a, b, total)
    tl.atomic_add(c_ptr + offs_m * n + offs_n, total, mask=(offs_m < m) & (offs_n < n), sem="relaxed")


def split(ranks: Ranks) -> Subject:
    a, b = random(512, 8192), random(8192, 1024)
    (m, k), n = a.shape, b.shape[1]

    def multiply() -> torch.Tensor:
        c = torch.zeros(m, n, device=DEVICE)
        split_matmul[lambda c: (-(-m // c["BLOCK"]), -(-n // c["BLOCK"]), c["SPLIT"])](a, b, c, m, n, k)
        return c

    return multiply


# -- those of other packages ---------------------------------------------------------------------------------


def with_gradients(forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> Subject:
    """Return a function of the result and of the gradients by `inputs`."""

    def step() -> Any:
        y = forward()
        return y, *torch.autograd.grad(y.float().square().mean(), inputs, allow_unused=True)

    return step


def parameter(*shape: int, scale: float = 0.02) -> torch.Tensor:
    return (scale * random(*shape)).requires_grad_()


def linear_attention(ranks: Ranks, name: str) -> Subject:
    import fla.layers

    model = getattr(fla.layers, name)(hidden_size=1024, num_heads=4).cuda().bfloat16()
    x = random(2, 2048, 1024)
    return with_gradients(lambda: model(x)[0], list(model.parameters()))


def liger_dyt(ranks: Ranks) -> Subject:
    from liger_kernel.ops import LigerDyTFunction

    x, alpha = parameter(4096, 4096, scale=1.0), parameter(1)
    gamma, beta = parameter(4096), parameter(4096)
    return with_gradients(lambda: LigerDyTFunction.apply(x, alpha, gamma, beta), [x, alpha, gamma, beta])


def liger_mlp(ranks: Ranks) -> Subject:
    from liger_kernel.ops import LigerMLPFunction

    x, down = parameter(2, 2048, 1024, scale=1.0), parameter(1024, 4096)
    gate, up = parameter(4096, 1024), parameter(4096, 1024)
    return with_gradients(lambda: LigerMLPFunction.apply(x, gate, up, down), [x, gate, up, down])


def liger_moe(ranks: Ranks) -> Subject:
    from liger_kernel.ops import LigerFusedMoEFunction

    (ids, shares), x = choices(8), parameter(TOKENS, 1024, scale=1.0)
    gate_up, down = parameter(8, 2048, 1024), parameter(8, 1024, 1024)
    shares.requires_grad_()

    def forward() -> torch.Tensor:
        y: torch.Tensor = LigerFusedMoEFunction.apply(x, gate_up, down, ids.int(), shares)
        return y

    return with_gradients(forward, [x, gate_up, down, shares])


def liger_int2(ranks: Ranks) -> Subject:
    from liger_kernel.ops.experimental.mm_int8int2 import matmul as multiply

    a = torch.randint(-128, 128, (1024, 4096), device=DEVICE, dtype=torch.int8)
    packed = torch.randint(0, 256, (1024, 2048), device=DEVICE, dtype=torch.uint8)
    return lambda: multiply(a, packed)


def subjects(ranks: Ranks) -> dict[str, Maker]:
    """Return what can be tuned here."""
    found: dict[str, Maker] = {"add": add, "split": split}
    found |= {f"matmul {name}": partial(matmul, m=m, n=n, k=k) for name, (m, n, k) in SIZES.items()}
    found |= {"ag_gemm": ag_gemm, "gemm_rs": gemm_rs, "ag_moe": ag_moe, "moe_rs": moe_rs}
    if ON_GPU and importlib.util.find_spec("liger_kernel") is not None:
        found |= {"liger DyT": liger_dyt, "liger MLP": liger_mlp}
        found |= {"liger MoE": liger_moe, "liger int2": liger_int2}
    if ON_GPU and importlib.util.find_spec("fla") is not None:
        for name in ("DeltaNet", "GatedLinearAttention"):
            found[f"fla {name}"] = partial(linear_attention, name=name)
    return found


# -- the table -----------------------------------------------------------------------------------------------


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
    try:
        function = make(ranks)
    except (ImportError, ValueError, RuntimeError) as error:  # the same on all ranks
        return [], f"{name}: left out, {type(error).__name__}: {error}"
    options = {"is_dist": ranks.world_size > 1, "cache": False, "log_dir": None}
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
