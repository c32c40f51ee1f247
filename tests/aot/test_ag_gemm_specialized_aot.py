"""AllGatherGemm's warp-specialised kernel, compiled for GPUs that are not here, and the path to a launch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compiled import BLACKWELL, HOPPER, events, resources
from launch_path import launching
from specialized_kernels import GATHER, TARGETS, candidate

from dist_autotune.kernels.ag_gemm import specialized
from dist_autotune.kernels.ag_gemm.call import GatherCall
from dist_autotune.kernels.epilogues import Epilogue
from dist_autotune.kernels.gemm.configs import blocks_of, box_of
from dist_autotune.kernels.gemm.roles import LOADER_REGISTERS

pytestmark = pytest.mark.aot

BLACKWELL_S = candidate(GATHER, "cooperative", (128, 256, 64), 4)
PINGPONG = candidate(GATHER, "pingpong", (128, 128, 64), 4)
SMALL = candidate(GATHER, "pingpong", (64, 128, 64), 4)


def load_partition(ttgir: str) -> str:
    """Return the text of the partition that loads."""
    partitions = re.split(r"^\s*(?:default|partition\d+\()", ttgir, flags=re.MULTILINE)
    (found,) = [text for text in partitions if "async_tma_copy_global_to_local" in text]
    return found


def loads_of_a_step(kwargs: dict[str, Any]) -> int:
    """Return how many there are: of A and of B, and for tiles of any width of each box in each slot."""
    of_b = [columns for columns in (kwargs["BLOCK_N"], kwargs["EXTRA_N"]) if columns]
    if kwargs["JOINED"]:
        return 1 + kwargs["NUM_BUFFERS"] * sum(columns // box_of(columns) for columns in of_b)
    return 1 + len(of_b)


@TARGETS
def test_the_load_warp_polls_and_fences_in_the_loop_over_tiles_before_it_loads(target):
    for config, compiled in GATHER.compiled_for(target):
        partition = load_partition(compiled.asm["ttgir"])
        before, tiles = partition.split("scf.while", 1)
        assert [name for _, name in events(before) if name != "loop"] == [], config
        names = [name for _, name in events(tiles) if name != "loop"]
        assert names[:3] == ["poll", "poll", "fence"], config
        loads = loads_of_a_step(config.kwargs)
        first = names.index("load")
        assert names.count("load") == loads, config
        assert names[first : first + loads] == ["load"] * loads, config
        assert "fence" not in names[first:], config  # behind the loads: it parts from the peers


@TARGETS
def test_nobody_else_polls(target):
    for config, compiled in GATHER.compiled_for(target):
        ttgir = compiled.asm["ttgir"]
        assert ttgir.count("atomic_rmw") == load_partition(ttgir).count("atomic_rmw") > 0, config


@TARGETS
def test_a_poll_is_a_load_and_the_machine_code_has_its_fence(target):
    for config, compiled in GATHER.compiled_for(target):
        ptx, sass = compiled.asm["ptx"], compiled.asm["sass"]
        assert "ld.global.sys.acquire" in ptx, config
        assert "vote.sync.any" in ptx, config  # on the time, in the load warp; the others never come
        assert "barrier.cta.red" not in ptx, config
        assert not re.search(r"atom\.\S*add", ptx), config
        assert "fence.proxy.async.global" in ptx, config
        assert sass.index("LDG.E.STRONG.SYS") < sass.index("FENCE.VIEW.ASYNC.G") < sass.index("UTMALDG"), (
            config
        )


@TARGETS
def test_the_load_warp_lives_on_the_registers_that_it_keeps(target):
    for config, compiled in GATHER.compiled_for(target):
        parts = re.split(r"USETMAXREG", compiled.asm["sass"])
        (loading,) = [part for part in parts if "UTMALDG" in part]
        assert max(map(int, re.findall(r"\bR(\d+)\b", loading))) < LOADER_REGISTERS.value, config


@pytest.mark.parametrize(
    ("target", "config"), [(HOPPER, PINGPONG), (BLACKWELL, BLACKWELL_S)], ids=["hopper", "blackwell"]
)
def test_a_trace_costs_nothing_where_it_is_off_and_fits_where_it_is_on(target, config):
    # A wait has its own way to read the clock, into `now`.
    stamp = r"mov\.u64 \s*%\w+, %globaltimer"
    assert not re.search(stamp, GATHER.compile(config, target).asm["ptx"])
    traced = GATHER.compile(config, target, TRACE=True)
    consumers = 2 if config.kwargs["VARIANT"] == "pingpong" else 1
    assert len(re.findall(stamp, traced.asm["ptx"])) == 2 + consumers
    assert resources(traced, target)["spilled"] == 0


# ---- the launch path, on a device that compiles and does not run


WORLD, ROWS, CAPACITY, N, K = 2, 192, 256, 512, 128


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    with launching(monkeypatch, specialized, specialized.tuned, [SMALL], blocks_of) as made:
        yield made


def tensors(n: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((2 * WORLD - 1, CAPACITY, K), (n, K), (WORLD * ROWS, n))
    return tuple(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)


def a_call(**changes: Any) -> GatherCall:
    values: dict[str, Any] = {
        "rows": ROWS,
        "rank": 1,
        "world_size": WORLD,
        "slots": 2 * WORLD - 1,
        "capacity": CAPACITY,
        "epoch": 1,
        "base": 0,
        "pushed": 0,
        "patience_ticks": 99,
        "programs": 132,
        "flags": torch.zeros(6, WORLD, dtype=torch.int32),
        "errors": torch.zeros(WORLD, dtype=torch.int64),
    }
    return GatherCall(**{**values, **changes})


@pytest.fixture
def ask_no_tuner(monkeypatch: pytest.MonkeyPatch) -> Any:
    def forbid() -> None:
        run = lambda *args, **kwargs: pytest.fail("the tuner was asked")  # noqa: E731
        monkeypatch.setattr(type(specialized.tuned), "run", run)

    return forbid


def launch(gather: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, call: GatherCall) -> None:
    specialized.SpecializedConsumer(gather, weight, out).launch(gather, weight, out, call)


def test_a_settled_launch_is_the_first_one_again_with_the_numbers_of_its_own_call(device, ask_no_tuner):
    operands, call = tensors(), a_call()
    launch(*operands, call)
    ask_no_tuner()
    launch(*operands, call)
    later = a_call(epoch=7, base=6 * ROWS, pushed=1, flags=call.flags, errors=call.errors)
    launch(*operands, later)
    first, second, third = (each.arguments for each in device.launches)
    assert first == second
    names = specialized.tuned.arg_names
    changed = {name: new for name, new, old in zip(names, third, first, strict=True) if new != old}
    assert changed == {"epoch": 7, "base": 6 * ROWS, "pushed": 1}
    tiles = WORLD * (ROWS // 64) * (N // 128)
    assert [launched.grid for launched in device.launches] == [(tiles, 1, 1)] * 3


def test_a_weight_by_columns_is_described_as_its_rows_lie_and_is_another_kernel(device):
    gather, weight, out = tensors()
    across = torch.zeros(K, N, dtype=torch.bfloat16).T
    for each in (weight, across, across):
        launch(gather, each, out, a_call())
    at = specialized.tuned.arg_names.index("TRANS_B")
    assert [launched.arguments[at] for launched in device.launches] == [True, False, False]
    of_b = [launched.arguments[1][1:7] for launched in device.launches]  # shape, strides, block
    by_columns = (K, N, N, 1, 64, 128)
    assert of_b == [(N, K, K, 1, 128, 64), by_columns, by_columns]
    tiles = WORLD * (ROWS // 64) * (N // 128)
    assert [launched.grid[0] for launched in device.launches] == [tiles] * 3


def test_a_trace_is_another_kernel_with_the_same_tuning(device):
    operands = tensors()
    launch(*operands, a_call())
    trace = torch.zeros(24, specialized.WORDS_PER_TILE, dtype=torch.int64)
    for _ in range(2):
        launch(*operands, a_call(trace=trace))
    at = specialized.tuned.arg_names.index("TRACE")
    assert [launched.arguments[at] for launched in device.launches] == [False, True, True]
    assert [launched.arguments[6] for launched in device.launches[1:]] == [trace.data_ptr()] * 2


def test_calls_that_differ_in_their_epilogue_alone_share_no_choice_and_no_launch(device):
    operands, bias = tensors(), torch.zeros(N, dtype=torch.bfloat16)
    endings = [Epilogue(), Epilogue(bias), Epilogue(bias.float()), Epilogue(activation="gelu")]
    for epilogue in endings:
        for _ in range(2):  # asked of the tuner, then the short way
            launch(*operands, a_call(epilogue=epilogue))
    assert len({settled.key for settled in specialized._SETTLED._of.values()}) == len(endings)
    at = [specialized.tuned.arg_names.index(name) for name in ("bias_ptr", "ACTIVATION")]
    seen = [tuple(launched.arguments[place] for place in at) for launched in device.launches]
    wanted = [(e.bias.data_ptr() if e.bias is not None else None, e.activation or "none") for e in endings]
    assert seen == [each for each in wanted for _ in range(2)]


def test_there_is_room_for_the_trace_of_every_tile_of_every_config():
    room = specialized.empty_trace(torch.empty(WORLD * ROWS, N, dtype=torch.bfloat16), WORLD)
    assert room.shape == (WORLD * (ROWS // 64) * (N // 128), specialized.WORDS_PER_TILE)
    assert (room == -1).all()


# ---- what the family takes


def as_it_is(gather, weight, out):
    return gather, weight, out


TAKES = {  # capability, rows, what is changed of the tensors, whether it can run
    "no GPU": (0, ROWS, as_it_is, False),
    "Hopper": (9, ROWS, as_it_is, True),
    "the lowest tile": (9, 64, as_it_is, True),
    "below a tile": (9, 63, as_it_is, False),
    "below one of Blackwell": (10, 127, as_it_is, False),
    "rows of out that are no multiple of 16 bytes apart": (9, ROWS, lambda *_: tensors(N + 4), False),
    "out at an odd address": (
        *(9, ROWS),
        lambda a, b, out: (a, b, torch.zeros(out.numel() + 1, dtype=out.dtype)[1:].view_as(out)),
        False,
    ),
    "an expanded weight": (9, ROWS, lambda a, b, out: (a, b[:1].expand(N, K), out), False),
    "one column": (9, ROWS, lambda a, b, out: (a, b[:1], out[:, :1]), False),
}


@pytest.mark.parametrize(("major", "rows", "change", "expected"), TAKES.values(), ids=TAKES)
def test_it_takes_calls_on_its_devices_whose_rows_tma_can_address(major, rows, change, expected, monkeypatch):
    if major:
        monkeypatch.setattr(specialized, "capability", lambda device: major)
    assert specialized.can_run(*change(*tensors()), rows) is expected
