"""`persistent_matmul` against float32: in the interpreter (the plain body), and on a GPU (every variant)."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ag_gemm_runs import error_ratio
from gemm_runs import SHARED_BYTES, a_shape, fitting, matrix, plan_of, poisoned
from gpu_cases import covering
from operation_runs import DEVICE

from dist_autotune import contextual_autotune
from dist_autotune.kernels.gemm import copies, operation
from dist_autotune.kernels.gemm import launch as launching
from dist_autotune.kernels.gemm.configs import GLUON_CANDIDATES, PLAIN_CANDIDATES, PLAIN_GPU_CANDIDATES
from dist_autotune.kernels.gemm.copies import NOTHING, Copies
from dist_autotune.kernels.gemm.operation import plain_gemm
from dist_autotune.kernels.gemm.pruning import fits, is_wanted
from dist_autotune.kernels.matrices import as_matrix
from dist_autotune.kernels.persistent_gemm import PARTS, SCHEDULERS, VARIANTS, persistent_matmul

KINDS = [name for name in VARIANTS if name != "auto"]
HALVES = [torch.float16, torch.bfloat16]
OUTS = [*HALVES, torch.float32]
LAYOUTS = [*itertools.product(("row", "column"), repeat=2)]


def check(
    m: int, n: int, k: int, dtype: torch.dtype = torch.float16, *, layouts=("row", "row"), **options: Any
):
    """Compare one call into an output full of NaN with float32."""
    a, b = matrix(m, k, dtype, layouts[0]), matrix(k, n, dtype, layouts[1])
    out = poisoned(m, n, options.pop("out_dtype", dtype))
    assert persistent_matmul(a, b, out, **options) is out
    assert error_ratio(out, a, b.T) < 1


def layouts_and_types(*shape: int) -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    return {
        f"{layouts}, {out_dtype}": (shape, {"layouts": layouts, "out_dtype": out_dtype})
        for layouts, out_dtype in itertools.product(LAYOUTS, OUTS)
    }


def schedules(
    *shape: int, programs: tuple[int | None, ...]
) -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    return {
        f"{scheduler}, {count} programs": (shape, {"scheduler": scheduler, "programs": count})
        for scheduler, count in itertools.product(SCHEDULERS, programs)
    }


# ---- the plain body, through the public function

TINY = [(1, 1, 1), (1, 33, 7), (33, 1, 65), (5, 3, 1), (31, 33, 63), (64, 64, 64)]
CALLS = {f"{shape}": (shape, {}) for shape in TINY}
CALLS |= schedules(97, 130, 20, programs=(1, 3, 40)) | layouts_and_types(37, 45, 29)
CALLS |= {f"{variant}, where there is no TMA": ((40, 50, 60), {"variant": variant}) for variant in VARIANTS}


@pytest.mark.parametrize(("shape", "options"), CALLS.values(), ids=CALLS)
def test_any_shape_layout_type_schedule_and_variant_gives_the_product(shape, options):
    check(*shape, **options)


@pytest.mark.parametrize("candidate", PLAIN_CANDIDATES, ids=str)
def test_every_candidate_of_the_plain_body_is_right(candidate, monkeypatch):
    monkeypatch.setattr(plain_gemm, "configs", [candidate])
    check(70, 90, 50, torch.bfloat16)


def test_any_strides_of_operands_and_result():
    a, b = matrix(70, 66, torch.float16)[::2, ::3], matrix(44, 90, torch.float16)[::2, 1::2]
    out = poisoned(70, 45 * 3, torch.float16)[::2, ::3]
    persistent_matmul(a, b, out)
    assert error_ratio(out, a, b.T) < 1


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0)], ids=str)
def test_empty_shapes(shape):
    m, n, k = shape
    a, b = matrix(m, k, torch.float16), matrix(k, n, torch.float16)
    out = poisoned(m, n, torch.float16)
    assert torch.equal(persistent_matmul(a, b, out), torch.zeros_like(out))
    assert persistent_matmul(a, b).shape == (m, n)


def test_the_result_has_the_type_of_a_or_the_one_asked_for():
    a, b = matrix(8, 8, torch.bfloat16), matrix(8, 8, torch.bfloat16)
    assert persistent_matmul(a, b).dtype is torch.bfloat16
    assert persistent_matmul(a, b, out_dtype=torch.float32).dtype is torch.float32


def test_it_is_tuned_in_context_for_each_number_of_programs(monkeypatch):
    monkeypatch.setattr(plain_gemm, "configs", PLAIN_CANDIDATES)
    a, b = matrix(33, 65, torch.float16), matrix(65, 48, torch.float16)
    errors = []

    @contextual_autotune(n_warmup=0, n_repeat=1, cache=False, log_dir=None, progress=False)
    def call():
        for programs in (1, 3):
            errors.append(error_ratio(persistent_matmul(a, b, programs=programs), a, b.T))

    call()
    place = plain_gemm.keys.index("programs")
    assert {context.key[place] for context in call.report.contexts} == {1, 3}
    for context in call.report.contexts:
        assert (context.kernel, context.status) == ("plain_gemm", "tuned")
        assert len(context.timings) == 2  # the third tile is more than twice as large as the matrix
    assert max(errors) < 1


# ---- wrong calls


def half(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16, device=DEVICE, **options)


def product(*shapes: tuple[int, ...], **options: Any) -> Callable[[], Any]:
    return lambda: persistent_matmul(*(half(*shape) for shape in shapes), **options)


AB = ((2, 3), (3, 5))
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no matrix": (product((2, 3, 4), (4, 5)), ValueError, r"a has shape \(2, 3, 4\)"),
    "inner sizes": (product((2, 3), (4, 5)), ValueError, "a has 3 columns, b has 4 rows"),
    "type of a": (lambda: persistent_matmul(half(2, 3).int(), half(3, 5)), TypeError, "a is torch.int32"),
    "two types": (
        lambda: persistent_matmul(half(2, 3), half(3, 5).bfloat16()), TypeError, "b is torch.bfloat16"
    ),
    "shape of out": (product(*AB, (2, 4)), ValueError, r"\(2, 5\)"),
    "type of out": (
        lambda: persistent_matmul(half(2, 3), half(3, 5), half(2, 5).double()), TypeError, "torch.float64"
    ),
    "out_dtype": (product(*AB, out_dtype=torch.int8), TypeError, "torch.int8"),
    "two wishes": (product(*AB, (2, 5), out_dtype=torch.float32), TypeError, "leave one of them out"),
    "shared places": (
        lambda: persistent_matmul(half(2, 3), half(3, 5), half(1, 5).expand(2, 5)),
        *(ValueError, r"strides \(0, 1\)"),
    ),
    "variant": (product(*AB, variant="fast"), ValueError, "no variant 'fast'; there are 'auto', 'pipelined'"),
    "scheduler": (product(*AB, scheduler="random"), ValueError, "no scheduler 'random'"),
    "programs": (product(*AB, programs=0), ValueError, "programs is 0"),
    "half a program": (product(*AB, programs=2.5), TypeError, "programs is 2.5; it must be a whole number"),
    "a list": (lambda: persistent_matmul([[1.0]], half(1, 5)), TypeError, "a is a list"),
    "a list for out": (lambda: persistent_matmul(half(2, 3), half(3, 5), [1]), TypeError, "out is a list"),
    "devices": (
        lambda: persistent_matmul(half(2, 3), half(3, 5).to("meta")), ValueError, "b is on meta; move"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_told_with_its_values(name):
    call, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        call()


# ---- what of the Gluon body can be tested without a GPU


@pytest.mark.parametrize(
    ("make", "transposed", "pitch"),
    [
        pytest.param(lambda: half(6, 8), False, 8, id="rows"),
        pytest.param(lambda: half(8, 6).T, None, 0, id="columns no multiple of 16 bytes apart"),
        pytest.param(lambda: half(8, 16).T, True, 16, id="columns"),
        pytest.param(lambda: half(6, 24)[:, 8:20], False, 24, id="a part of rows"),
        pytest.param(lambda: half(1, 5), False, 8, id="one row: its stride leads nowhere"),
        pytest.param(lambda: half(1, 5).T, True, 8, id="one column"),
        pytest.param(lambda: half(6, 5), None, 0, id="rows no multiple of 16 bytes apart"),
        pytest.param(lambda: half(6, 24)[:, 1:9], None, 0, id="not at a multiple of 16 bytes"),
        pytest.param(lambda: half(6, 16)[:, ::2], None, 0, id="nothing contiguous"),
        pytest.param(lambda: half(1, 8).expand(6, 8), None, 0, id="expanded"),
    ],
)
def test_what_tma_can_address(make, transposed, pitch):
    tensor = make()
    found = as_matrix(tensor)
    if transposed is None:
        assert found is None
    else:
        view = tensor.T if transposed else tensor
        assert (found.transposed, found.rows, found.columns, found.pitch) == (transposed, *view.shape, pitch)


def test_there_are_candidates_of_every_variant_for_every_output():
    for out_bytes, tensor_memory in itertools.product((2, 4), (False, True)):
        usable = [
            c for c in GLUON_CANDIDATES if fits(c, out_bytes, SHARED_BYTES, tensor_memory=tensor_memory)
        ]
        variants = {config.kwargs["VARIANT"] for config in usable}
        assert variants >= {"pipelined", "persistent", "persistent_pipelined", "cooperative"}
        assert ("pingpong" in variants) is not tensor_memory


def test_parts_of_a_variant_are_all_of_it():
    def of(wanted):
        return [str(config) for config in GLUON_CANDIDATES if is_wanted(config.kwargs, wanted)]

    assert sorted(of("cooperative") + of("pingpong")) == sorted(of("warp_specialized"))
    assert all(of(name) for name in (*VARIANTS, *PARTS))
    assert sorted(itertools.chain(*map(of, KINDS))) == sorted(of("auto"))


def test_no_two_candidates_are_the_same():
    for offered in (GLUON_CANDIDATES, PLAIN_GPU_CANDIDATES):
        assert len({str(config) for config in offered}) == len(offered)


def test_two_threads_do_not_ask_the_tuner_at_once(monkeypatch):
    """Arguments of a launch are in the tuner while it is under way, and its config until it is remembered."""
    both, were_both, steps = threading.Barrier(2), [], []

    class Tuner:
        configs = ()

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return self.launch

        def launch(self, *args: Any, **constants: Any) -> None:
            steps.append("launch")
            try:
                both.wait(0.5)
                were_both.append(True)
            except threading.BrokenBarrierError:
                were_both.append(False)

    monkeypatch.setattr(launching, "tuned_gemm", Tuner())
    monkeypatch.setattr(launching._SETTLED, "find", lambda shape: None)
    monkeypatch.setattr(launching._SETTLED, "remember", lambda *args: steps.append("remember"))
    matrices = [as_matrix(torch.zeros(64, 64, dtype=torch.bfloat16)) for _ in range(3)]
    given = (*matrices, a_shape(64, 64, 64, device=torch.device("cpu")))
    threads = [threading.Thread(target=launching.launch, args=given) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert were_both == [False, False]
    assert steps == ["launch", "remember"] * 2


# ---- on a GPU


def each_candidate(variant: str, out_dtype: torch.dtype) -> list[Any]:
    """Return the candidates of a variant that fit this GPU."""
    return fitting(out_dtype, lambda kwargs: is_wanted(kwargs, variant))


MUST_BE = plan_of(NOTHING)  # what TMA cannot address


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that leaves the Gluon body one candidate; a call that falls back then fails.

    Copied is what must be, or what the given plan says.
    """

    def choose(config: Any, plan: Callable[..., Any] = MUST_BE) -> None:
        monkeypatch.setattr(launching.tuned_gemm, "configs", [config])
        monkeypatch.setattr(operation, "_run_plain", lambda *args: pytest.fail("the plain body was used"))
        monkeypatch.setattr(launching, "plan_copies", plan)
        monkeypatch.setattr(operation, "_PLANS", {})  # it is asked for tensors in known places, too

    return choose


GPU_SHAPES = [(208, 416, 304), (2000, 1000, 2000), (1024, 1024, 8), (128, 256, 64), (1, 8, 8), (8, 8, 4096)]
GPU_SHAPES += [(4104, 3336, 1032)]  # several waves of every tile; rows begin between cache lines


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("variant", KINDS)
def test_every_candidate_on_a_gpu(variant, dtype, only):
    for config in covering(each_candidate(variant, dtype)):
        only(config)
        options = {"variant": variant, "layouts": ("row", "column" if config.kwargs["JOINED"] else "row")}
        for shape in GPU_SHAPES:
            check(*shape, dtype, **options)
            check(*shape, dtype, **options)  # by the short way, with new inputs


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", OUTS, ids=str)
def test_any_width_takes_all_types_and_schedules_on_a_gpu(out_dtype, only):
    candidates = each_candidate("warp_specialized", out_dtype)
    for config in covering([each for each in candidates if each.kwargs["JOINED"]]):
        only(config)
        check(1000, 1304, 520, layouts=("row", "column"), out_dtype=out_dtype, scheduler="strided")
        check(700, 1304, 136, layouts=("row", "column"), out_dtype=out_dtype, scheduler="dynamic")


ON_A_GPU = layouts_and_types(520, 264, 200) | schedules(1500, 1304, 136, programs=(None, 1, 7))


@pytest.mark.gpu
@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize(("shape", "options"), ON_A_GPU.values(), ids=ON_A_GPU)
def test_each_variant_takes_all_layouts_types_and_schedules_on_a_gpu(shape, options, variant, only):
    for config in each_candidate(variant, options.get("out_dtype", torch.float16))[:1]:
        only(config)
        check(*shape, variant=variant, **options)


# What is copied, and who deals out tiles.
ROUTES = {"TMA": ((1024, 768, 512), NOTHING, "grouped"), "a counter": ((1024, 768, 512), NOTHING, "dynamic")}
OF_COPIES = {"copies": ((1000, 1304, 520), Copies(a=True, b=True), "grouped")}
OF_COPIES |= {"copies, odd sizes": ((999, 333, 501), Copies(a=True, b=True), "grouped")}


def on_hopper(test: Callable[..., None]) -> Callable[..., None]:
    """Return a GPU test that does nothing on other GPUs, as nothing is copied there."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        if fixtures.get("which") == NOTHING or torch.cuda.get_device_capability()[0] == 9:
            test(**fixtures)

    return pytest.mark.gpu(run)


@on_hopper
@pytest.mark.parametrize(
    ("shape", "which", "scheduler"), (ROUTES | OF_COPIES).values(), ids=ROUTES | OF_COPIES
)
def test_a_captured_call_follows_its_inputs(shape, which, scheduler, only):
    m, n, k = shape
    only(each_candidate("warp_specialized", torch.bfloat16)[0], plan_of(which))
    a, b = matrix(m, k, torch.bfloat16), matrix(n, k, torch.bfloat16).T
    outs = [poisoned(m, n, torch.bfloat16) for _ in range(3)]
    persistent_matmul(a, b, outs[0], scheduler=scheduler)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:  # in the graph's memory one room may follow the other
            persistent_matmul(a, b, out, scheduler=scheduler)
    for _ in range(3):
        for tensor in (a, b):
            tensor.normal_()
        for out in outs:
            out.fill_(math.nan)
        others = [poisoned(m, k, torch.bfloat16) for _ in range(8)]
        graph.replay()
        assert max(error_ratio(out, a, b.T) for out in outs) < 1
        assert all(other.isnan().all() for other in others)  # the scratch memory is the graph's own
        del others


@on_hopper
@pytest.mark.parametrize(
    ("shape", "which", "scheduler"), (ROUTES | OF_COPIES).values(), ids=ROUTES | OF_COPIES
)
def test_back_to_back_calls_on_two_streams_share_neither_counter_nor_scratch_memory(
    shape, which, scheduler, only
):
    m, n, k = shape
    only(each_candidate("warp_specialized", torch.float16)[0], plan_of(which))
    inputs = [(matrix(m, k, torch.float16), matrix(k, n, torch.float16)) for _ in range(2)]
    outs = [poisoned(m, n, torch.float16) for _ in range(20)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for number, out in enumerate(outs):
        with torch.cuda.stream(streams[number % 2]):
            persistent_matmul(*inputs[number % 2], out, scheduler=scheduler)
    torch.cuda.synchronize()
    for number, out in enumerate(outs):
        a, b = inputs[number % 2]
        assert error_ratio(out, a, b.T) < 1


# ---- on a GPU, through scratch memory

COPIED = [Copies(a, b) for a, b in itertools.product((False, True), repeat=2)]
PAIRS = [(torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
ODD_SHAPES = [(1, 1, 1), (33, 45, 29), (999, 333, 501), (2001, 1003, 7), (257, 4099, 1030), (1030, 518, 66)]
WITH_LAYOUTS = pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
OF_EACH_LOOP = pytest.mark.parametrize("variant", ["pipelined", "warp_specialized"])


@on_hopper
@WITH_LAYOUTS
@OF_EACH_LOOP
@pytest.mark.parametrize("which", COPIED[1:], ids=str)
def test_copied_operands_give_the_product_on_a_gpu(which, variant, layouts, only, poisoned_rooms):
    for dtype, out_dtype in PAIRS:
        only(each_candidate(variant, out_dtype)[0], plan_of(which))
        for _ in range(2):  # the second by the short way, to other scratch memory
            poisoned_rooms.clear()
            check(1000, 1304, 520, dtype, layouts=layouts, out_dtype=out_dtype, variant=variant)
            assert len(poisoned_rooms) == which.a + which.b
            assert all(room[:, -1].isnan().all() for room in poisoned_rooms)  # their padding


@on_hopper
@WITH_LAYOUTS
@OF_EACH_LOOP
def test_what_tma_cannot_address_goes_through_scratch_memory_on_a_gpu(variant, layouts, only, poisoned_rooms):
    for (dtype, out_dtype), shape in itertools.product(PAIRS, ODD_SHAPES):
        only(each_candidate(variant, out_dtype)[0])
        for _ in range(2):
            check(*shape, dtype, layouts=layouts, out_dtype=out_dtype, variant=variant)
    assert poisoned_rooms


@on_hopper
def test_strides_of_all_kinds_go_through_scratch_memory_on_a_gpu(only, poisoned_rooms):
    only(each_candidate("warp_specialized", torch.float16)[0])
    a, b = matrix(700, 666, torch.float16)[::2, ::3], matrix(444, 900, torch.float16)[::2, 1::2]
    surroundings = poisoned(401, 503, torch.float16)
    inside = surroundings[1:351, 2:452]
    for out in (poisoned(350, 450, torch.float16), poisoned(700, 1350, torch.float16)[::2, ::3], inside):
        persistent_matmul(a, b, out)
        assert error_ratio(out, a, b.T) < 1
    inside.fill_(math.nan)
    assert surroundings.isnan().all()  # nothing beside the result was written
    row = matrix(1, 222, torch.float16).expand(350, 222)
    assert error_ratio(persistent_matmul(row, b), row, b.T) < 1
    assert len(poisoned_rooms) == 3 * 3 + 3


BY_ITSELF = {  # how many rooms a call makes
    "the small operand": ((520, 8200, 8200), 1),
    "whole lines of cache": ((4096, 4096, 4096), 0),
    "odd sizes": ((4001, 2003, 999), 3),
}


@on_hopper
@pytest.mark.parametrize(("shape", "number"), BY_ITSELF.values(), ids=BY_ITSELF)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_by_itself_a_call_copies_what_should_be_on_a_gpu(shape, number, dtype, only, poisoned_rooms):
    only(each_candidate("warp_specialized", torch.float32)[0], copies.plan_copies)
    for out_dtype in (dtype, torch.float32):
        poisoned_rooms.clear()
        check(*shape, dtype, layouts=("row", "column"), out_dtype=out_dtype)
        assert len(poisoned_rooms) == number


@on_hopper
def test_a_small_product_of_odd_sizes_is_left_to_the_plain_body_on_a_gpu(poisoned_rooms):
    check(1021, 1021, 1021, torch.bfloat16)
    assert poisoned_rooms == []
