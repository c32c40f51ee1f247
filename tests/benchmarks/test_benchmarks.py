"""The benchmarks: only right results are timed, in turns; what cannot run is told; records become pages."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import run_program, torchrun

from benchmarks.common import arms as arms_module
from benchmarks.common import records, render
from benchmarks.common.arms import Arm, Plan, Timed, measure
from benchmarks.common.ranks import Ranks, Unsupported
from benchmarks.fresh_sessions.sessions import Sessions
from ranks import assert_all_ok, run_ranks

QUICK = ("--json", "record.json", "--commit", "0ff1ce", "--warm-ups", "0", "--iterations", "1")
PLAN = Plan(warm_ups=2, iterations=3, limit_s=60.0)


# ---- whole programs


@dataclass(frozen=True)
class Times:
    """What a benchmark leaves on ranks of the CPU: the arms with a time, and what its sessions tuned."""

    arms: set[str]
    arguments: tuple[str, ...] = ()
    most_error: float = 8e-3  # one bfloat16 rounding
    tuned: frozenset[str] = frozenset()
    ranks: int = 2


PICKS = ("alone", "kernel", "run")
IN_STEP = {f"{pick}, step" for pick in PICKS} | {f"{pick}, GEMM" for pick in PICKS}
# Interpreted kernels cut a bfloat16 off, and round a float16.
ROUNDED, ONE_ROUNDING = ("--dtype", "fp16"), 1e-3
OF_EXPERTS = ("--hidden", "16", "--ffn", "32", "--experts", "2", "--tokens", "12", "--zipf", "1.2", *ROUNDED)
BENCHMARKS = {
    "ag_gemm": Times(
        {"ours", "ours, copied", "ours, no overlap", "ours, low latency", "ours, by stores"}
        | {"gloo + GEMM", "gloo + own GEMM", "GEMM", "copies", "gloo gather"},
        (*ROUNDED, "--m", "96"),
        ONE_ROUNDING,
        tuned=frozenset({"all_gather_gemm"}),
    ),
    "ep": Times(
        {
            f"{name}{part}"
            for name in ("ours", "all-to-all")
            for part in ("", ", dispatch", ", dispatch and combine", ", step")
        }
        | {"all-gather", "ours, products"},
        ("--tokens", "6", "--experts", "4", *ROUNDED),
        ONE_ROUNDING,
        frozenset({"gather_rows", "combine_rows", "send_tokens"}),
    ),
    "gemm_rs": Times(
        {
            "ours",
            "ours, fp8",
            "ours, fp8, by stores",
            "ours, by stores",
            "GEMM + gloo",
            "own GEMM + gloo",
            "GEMM",
            "gloo scatter",
        },
        ("--fp8", "--by-stores"),
        most_error=0.05,  # two roundings to fp8
        tuned=frozenset({"gemm_reduce_scatter", "gemm_rs way"}),
    ),
    "gemm_ar": Times(
        {"ours", "ours, norm", "GEMM + gloo", "GEMM + gloo, norm", "GEMM"},
        ROUNDED,
        ONE_ROUNDING,
        tuned=frozenset({"add_rows", "exchange_rows", "gemm_ar way"}),
    ),
    "moe_rs": Times(
        {"ours", "ours, tokens not given", "ours, by stores", "grouped_mm", "grouped GEMM, ours"}
        | {"grouped_mm + gloo", "own GEMM + gloo", "gloo scatter"},
        (*OF_EXPERTS, "--by-stores"),
        ONE_ROUNDING,
        tuned=frozenset({"moe_reduce_scatter", "moe_rs way"}),
    ),
    "overlap": Times(
        IN_STEP | {"torch, step", "all-reduce"},
        ("--m", "24", "--n", "16", "--k", "16", "--mib", "0.01"),
        tuned=frozenset({"persistent_gemm"}),
    ),
    "parallel_layers": Times({"ours", "gloo + torch", "gloo + own GEMM"}, ("--layers", "mlp")),
    "training_step": Times(
        {"first configs", "stock", "by launches", "by step", "gloo + torch", "async TP"},
        most_error=1e-4,
    ),
    "persistent_gemm": Times({"cuBLAS", "ours"}, ("--parts",), tuned=frozenset({"plain_gemm"}), ranks=1),
    "operations.elementwise_add": Times({"copy", "torch.add", "ours"}, most_error=0.0, ranks=1),
}


@pytest.mark.usefixtures("tried_once")
@pytest.mark.parametrize(("name", "times"), BENCHMARKS.items(), ids=BENCHMARKS)
def test_a_benchmark_times_the_arms_that_can_run_and_are_right(name: str, times: Times) -> None:
    printed = run_program(f"benchmarks.{name}", *QUICK, *times.arguments, ranks=times.ranks)
    record = json.loads(Path("record.json").read_text())
    (case,) = record["cases"]
    arms = {arm["name"]: arm for arm in case["arms"]}
    assert {name for name, arm in arms.items() if "unavailable" not in arm} == times.arms
    assert max(arms[name].get("error", 0.0) for name in times.arms) <= times.most_error
    assert min(arms[name]["ms"] for name in times.arms) > 0
    # Two ranks of the CPU lack nothing but GPUs.
    assert all("GPU" in arm["unavailable"] for name, arm in arms.items() if name not in times.arms)
    found = {context["kernel"]: context["status"] for context in case.get("tuned", {}).get("contexts", [])}
    assert {found.get(name) for name in times.tuned} <= {"tuned", "cached"}, found
    assert f"**{records.INTERPRETER_NOTE}**" in render.page(record)
    assert records.INTERPRETER_NOTE in printed.splitlines()
    wanted = f"./launch.sh --cpu --nproc {times.ranks} -m benchmarks.{name} --warm-ups 0 --iterations 1"
    assert sorted(record["command"].split()) == sorted([*wanted.split(), *times.arguments])
    assert record["commit"] == "0ff1ce"


ON_GPUS = {
    "ag_gemm": ("--m", "2048", "--n", "512", "--k", "1024"),
    "persistent_gemm": ("--m", "1024", "--n", "1000", "--k", "512", "--parts"),
    "operations.elementwise_add": ("--rows", "2048", "--columns", "2048"),
}
BY_RANKS = [
    pytest.param(name, ranks, marks=pytest.mark.gpu(devices=ranks, seconds=25), id=name)
    for name, ranks in (("ag_gemm", 2), ("persistent_gemm", 1), ("operations.elementwise_add", 1))
]


@pytest.mark.parametrize(("name", "ranks"), BY_RANKS)
def test_on_gpus_every_arm_is_right_and_timed(tmp_path: Path, name: str, ranks: int) -> None:
    options = (*ON_GPUS[name], "--json", "record.json", "--iterations", "5")
    result = torchrun(f"benchmarks.{name}", *options, ranks=ranks)
    assert result.returncode == 0, result.stderr
    (case,) = json.loads((tmp_path / "record.json").read_text())["cases"]
    arms = {arm["name"]: arm for arm in case["arms"]}
    graphs = ("ours, graph", "ours, copied, graph")
    nccl = ("NCCL + GEMM", "NCCL + GEMM, graph", "NCCL + own GEMM", "NCCL + own GEMM, graph", "NCCL gather")
    of_ag_gemm = ("ours", "ours, copied", *graphs, *nccl, "GEMM", "copies")
    for each in of_ag_gemm if name == "ag_gemm" else arms:
        assert 0 < arms[each]["ms"] < 50, arms[each]


# ---- timing


def test_arms_take_turns_each_behind_another_arm_and_every_second_round_is_reversed() -> None:
    out: list[str] = []
    calls = [lambda name=name: out.append(name) for name in "abc"]
    clock = SimpleNamespace(time=lambda call: (call(), (1.0, 0.5))[1])
    one_rank = SimpleNamespace(gather=lambda value: [value], synchronize=lambda: None)
    times = arms_module._rounds(calls, clock, lambda: out.append("new inputs"), one_rank, 3)
    new = ["new inputs"]
    assert out == [*new, "c", "a", "b", "c", *new, "a", "c", "b", "a", *new, "c", "a", "b", "c"]
    assert times == [[(1.0, 0.5)] * 3] * 3


@pytest.mark.parametrize(("late", "told"), [([0, 0], False), ([0, 1], False), ([0, 2], True), ([4, 0], True)])
def test_an_arm_for_which_the_device_waits_often_on_some_rank_is_marked(late, told) -> None:
    class Gathering:  # of two ranks, of which this is the last
        def gather(self, value: Any) -> list[Any]:
            median, host, _, found = value
            return [(median, host, late[0] / 10, found), value]

    times = [Timed(0.1 * i, 0.05, 0.31 if i < late[1] else 0.29) for i in range(10)]
    arm = Arm(name="a", prepare=lambda: lambda: torch.zeros(1), error=lambda _: 0.0, limit=1.0)
    row = arms_module._row(arm, times, 0.0, 0.3, Gathering())  # type: ignore[arg-type]
    assert row["host_bound"] is told
    assert (row["ms"], row["host_ms"]) == (pytest.approx(0.45), 0.05)


class Inputs:
    """One number on each rank, new at every refresh; an arm is right if it returns it doubled."""

    def __init__(self) -> None:
        self.x = torch.zeros(1)
        self.refreshes = 0

    def refresh(self) -> None:
        self.refreshes += 1
        self.x.fill_(float(self.refreshes))

    def arm(self, name: str, call: Any, **options: Any) -> Arm:
        def error(result: torch.Tensor) -> float:
            return abs(float(result / (2 * self.x)) - 1)

        return Arm(name=name, prepare=lambda: call, error=error, limit=0.01, **options)


def measured(rank: int) -> dict[str, Any]:
    inputs, out = Inputs(), torch.zeros(1)
    first: list[torch.Tensor] = []

    def stale() -> torch.Tensor:
        first.append(2 * inputs.x)
        return first[0]

    def unsupported() -> Any:
        raise Unsupported("not here")

    def raises_on_one() -> torch.Tensor:
        if rank == 1:
            raise RuntimeError("out of memory\nmore")
        return 2 * inputs.x

    def poison() -> None:
        out.fill_(float("nan"))

    refuses = inputs.arm("refuses", None)
    arms = [
        inputs.arm("right", lambda: 2 * inputs.x, work=1.0, rate="GB/s"),
        Arm(name="refuses", prepare=unsupported, error=refuses.error, limit=0.0),
        inputs.arm("raises", raises_on_one),
        inputs.arm("wrong", lambda: (3 if rank == 1 else 2) * inputs.x),
        inputs.arm("does nothing", lambda: out, poison=poison),
        inputs.arm("stale", stale),
    ]
    found = measure(arms, Ranks(), inputs.refresh, PLAN)
    return {arm["name"]: arm for arm in found["arms"]}


def test_only_arms_that_are_right_on_all_ranks_and_all_inputs_have_a_time() -> None:
    zero, one = assert_all_ok(run_ranks(measured, 2))
    assert zero == one  # what a record holds is the same on all ranks
    assert zero["right"]["error"] == 0
    assert zero["right"]["rate"] == pytest.approx(1 / zero["right"]["ms"])
    assert len(zero["right"]["ranks_ms"]) == 2
    reasons = {name: arm["unavailable"] for name, arm in zero.items() if "unavailable" in arm}
    assert reasons.pop("stale").startswith("wrong result: relative error")
    assert reasons == {
        "refuses": "not here",
        "raises": "rank 1: RuntimeError: out of memory",
        "wrong": "rank 1: wrong result: relative error 5.0e-01, at most 1.0e-02 is explained",
        "does nothing": "wrong result: relative error nan, at most 1.0e-02 is explained",
    }


# ---- regret: sessions that tune, their picks as they were, and what is made of the times


@pytest.mark.usefixtures("tried_once")
def test_two_sessions_tune_and_every_pick_and_alternative_is_timed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    common = ("--op", "ag_gemm", "--shapes", "32x16x16", "--sessions", "2", "--directory", str(kept))
    common += ("--warm-ups", "1", "--iterations", "2", "--json", "record.json", "--commit", "0ff1ce")
    sessions = Sessions(kept)
    for number in (1, 2):
        sessions.of(number).mkdir(parents=True)
        (sessions.of(number) / "begin").touch()
        environment = sessions.environment(number)
        run_program("benchmarks.regret", *common, "--session", str(number), environment=environment)
    assert list(sessions.picks("32 x 16 x 16", 2)) == [1, 2]
    run_program("benchmarks.regret", *common, "--timing", "yes", "--ran-as", "python -m benchmarks.regret")
    record = json.loads(Path("record.json").read_text())
    (case,) = record["cases"]
    assert case["trouble"] == case["remarks"] == case["trouble_at_closing"] == []
    ms = {arm["name"]: arm["ms"] for arm in case["arms"]}
    again = [name for name in ms if name.endswith(" again")]
    assert len(again) == 1
    assert set(ms) == {plan["arm"] for plan in case["plans"]} | set(again)
    regrets = case["regrets"][""]
    arm_of = {str(number): plan["arm"] for plan in case["plans"] for number in plan["sessions"]}
    assert set(arm_of) == {"1", "2"}
    least = min(time for name, time in ms.items() if name not in again)
    for session, percent in regrets["percent"].items():
        assert percent == pytest.approx(100 * (ms[arm_of[session]] / least - 1))
    fixed = {choice for plan in case["plans"] for choice in plan["choices"]}
    ways = {'ag_gemm consumer "plain"', 'ag_gemm way "collective"'}
    assert ways <= fixed
    page = render.page(record)
    for part in (
        "regret of 2 sessions, 2 x CPU",
        "| session 1 | session 2 | median | worst |",
        "## Each arm",
    ):
        assert part in page
    assert "they show behaviour, not speed" in page
