"""The source of AllGatherGemm's warp-specialised kernel, run on the CPU beside late and dead ranks."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gluon_model
import numpy as np
import pytest
import torch
from gluon_machine import Task, machine, now
from gluon_memory import Descriptor, Pointer
from gluon_tiles import BLOCK_K, BLOCK_M, GIVEN_UP, KINDS, Call, Tile
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_autotune.kernels.epilogues import NO_ACTIVATION, Epilogue, sums_of_a_result

pytestmark = pytest.mark.usefixtures("one_core", "narrow_tiles")  # its tasks are threads that take turns

KERNEL = gluon_model.load_kernel_module("ag_gemm.specialized_kernel")
SIGNALS = importlib.import_module("kernels_in_the_model.signals")


class GatherBuffer(Descriptor):
    """Raises when rows are loaded that this task cannot know to be there, and whose rank is not given up."""

    scene: "Scene"

    def may_load(self, coord: list[int]) -> None:
        chunk, row = divmod(coord[0], self.scene.capacity)
        end = row + self.block_type.shape[0]
        assert end <= self.scene.m, "rows behind the chunk's last one are loaded"
        if chunk != self.scene.rank and not self.scene.errors[chunk]:
            seen = now().visible.get(self.scene.flag("ARRIVED", chunk).address, 0)
            assert end <= seen, f"row {row} of chunk {chunk} has not arrived"


@dataclass
class Scene(Call):
    """One call on one rank, its peers, and what is in memory."""

    dead: int | None = None
    rows_of_dead: int = 0  # so many come before it stops
    programs: int = 2
    patience_ticks: int = 10_000
    pieces: tuple[int, ...] = (1, 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = np.random.default_rng(self.seed)
        self.a = numbers.integers(-3, 4, (self.world, self.m, self.k)).astype(float)
        self.b = numbers.integers(-3, 4, (self.n, self.k)).astype(float)
        self.gather = np.full((self.world * self.capacity, self.k), np.nan)
        self.scales = 2.0 ** numbers.integers(-3, 4, (self.world, self.m))  # of rows in fp8, and behind them
        self.gathered_scales = np.full((self.world * self.capacity, KERNEL.scaled_pitch(self.k) // 4), np.nan)
        self.put(self.rank, 0, self.m)

    def put(self, chunk: int, start: int, end: int) -> None:
        first = chunk * self.capacity
        self.gather[first + start : first + end] = self.a[chunk, start:end]
        self.gathered_scales[first + start : first + end, 0] = self.scales[chunk, start:end]

    # ---- what the peers and the copy engines do, each a task of the machine

    def arrivals(self) -> list[Callable[[], None]]:
        """Return who puts chunks where they belong: each peer, in pieces, late; and our own pushes."""

        late = functools.partial(self.wait_a_while, 0, 4, 24)

        def peer_task(peer: int) -> Callable[[], None]:
            def arrive() -> None:
                rows = self.m if peer != self.dead else self.rows_of_dead
                self.flag("ROWS_SENT", peer).set(self.m)
                done = 0
                while done < rows:
                    late()
                    end = min(rows, done + self.random.choice([*self.pieces, self.m]))
                    self.put(peer, done, end)
                    now().pause()
                    if self.flag("ARRIVED", peer).get() < GIVEN_UP:
                        self.flag("ARRIVED", peer).set(end)
                    done = end

            return arrive

        def push() -> None:
            late()
            if self.dead is not None:
                now().pause(lambda: self.flag("FREE", self.dead).get() >= 1)
            elif self.random.random() < 0.5:  # when only load warps are left, which have loaded all
                now().pause(lambda: all(t.done for t in kernel_tasks() if "/load" not in t.name))
            assert not all(task.done for task in kernel_tasks()), "the kernel ended before our chunk had left"
            self.flag("ARRIVED", self.rank).set(1)

        return [*map(peer_task, self.peers()), *([push] if self.world > 1 else [])]


def kernel_tasks() -> list[Task]:
    return [task for task in machine().tasks if task.program >= 0]


def gather_and_multiply(
    scene: Scene,
    variant: str = "cooperative",
    *,
    bias: np.ndarray | None = None,
    activation: str = NO_ACTIVATION,
    column_scales: np.ndarray | None = None,
    **of_tile: Any,
) -> None:
    """Run the call to its end and check what it wrote; column_scales: in fp8."""
    tile = Tile(variant, **of_tile)
    (block_m, _, words_k), width = tile.blocks, tile.width
    is_fp8, sums = column_scales is not None, sums_of_a_result(activation)
    itemsize = 1 if is_fp8 else 2
    a_desc = GatherBuffer(scene.gather, [block_m, words_k * 2 // itemsize], itemsize)
    a_desc.scene = scene
    c = np.full((scene.world * scene.m, scene.n // sums), -99.0)
    c_desc = Descriptor(c, [block_m, tile.store[0] // sums])
    tiles_m = -(-scene.m // block_m)
    launch = functools.partial(
        gluon_model.launch,
        KERNEL.specialized_all_gather_gemm,
        scene.programs,
        a_desc,
        *tile.of_weight(scene.b, itemsize),
        c_desc,
        Pointer(scene.flags),
        Pointer(scene.errors),
        Pointer(scene.gathered_scales.reshape(-1)) if is_fp8 else None,
        Pointer(column_scales) if is_fp8 else None,
        None if bias is None else Pointer(bias),
        *(scene.world * scene.m, scene.n, scene.k, scene.capacity, scene.rank, scene.patience_ticks),
        scene.m,  # its class
        seed=scene.seed,
        beside=scene.arrivals(),
        WORLD=scene.world,
        DTYPE="fp8e4nv" if is_fp8 else "bf16",
        ACTIVATION=activation,
        **tile.constants(),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(SIGNALS, "POLLS_PER_ROUND", 64)  # turns are slow
        launch()
    product = c.reshape(scene.world, scene.m, scene.n // sums)
    alive = [chunk for chunk in range(scene.world) if chunk != scene.dead]
    wanted = scene.a[alive] @ scene.b.T
    if is_fp8:
        wanted = wanted * scene.scales[alive][:, :, None] * column_scales
    wanted = wanted + (0 if bias is None else bias)
    if activation == NO_ACTIVATION:
        np.testing.assert_array_equal(product[alive], wanted)
    else:
        wanted = Epilogue(activation=activation).of(torch.from_numpy(wanted)).numpy()
        np.testing.assert_allclose(product[alive], wanted, rtol=1e-6, atol=1e-6)
    # What the last tiles share with those before them is stored twice, with the same values; nothing else.
    rows, columns = np.ones((scene.m, 1), dtype=int), np.ones((1, scene.n), dtype=int)
    rows[scene.m - block_m : (tiles_m - 1) * block_m] = 2
    columns[:, max(scene.n - width, 0) : (-(-scene.n // width) - 1) * width] = 2
    columns = columns[:, ::sums]
    writes = c_desc.writes.reshape(scene.world, scene.m, scene.n // sums)
    np.testing.assert_array_equal(writes, np.broadcast_to(rows * columns, writes.shape))
    failed = {chunk for chunk in range(scene.world) if scene.errors[chunk]}
    assert failed == ({scene.dead} if scene.dead is not None else set())


@KINDS
@settings(max_examples=5)
@given(
    world=st.integers(1, 4),
    sizes=st.tuples(st.integers(BLOCK_M, 11), st.integers(2, 17), st.integers(1, 5)),
    programs=st.integers(1, 4),
    buffers=st.integers(2, 4),
    store=st.sampled_from([(4, 1), (4, 2), (8, 1)]),
    by_columns=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_no_row_is_read_before_it_is_here_and_the_sums_are_right(
    variant, tensor_memory, world, sizes, programs, seed, **of_tiles
):
    scene = Scene(world, seed % world, *sizes, programs=programs, seed=seed)
    gather_and_multiply(scene, variant, tensor_memory=tensor_memory, **of_tiles)


@KINDS
@pytest.mark.parametrize("ending", ["bias", "gelu", "swiglu", "fp8"])
def test_each_piece_meets_the_ending_of_its_rows_and_columns(variant, tensor_memory, ending):
    """Scales of rows come with these, late; gates meet their ups."""
    for seed, (n, store) in enumerate([(16, (4, 1)), (19, (4, 2)), (3, (8, 1))]):
        of_tiles: dict[str, Any] = {"store": store}
        if ending == "swiglu":
            n, block_n, extra_n = ((48, 16, 0), (80, 32, 16), (16, 32, 0))[seed]
            of_tiles = {"extra_n": 0 if tensor_memory else extra_n, "store": (16, 1)}
            of_tiles["blocks"] = (BLOCK_M, block_n, BLOCK_K)
        numbers = np.random.default_rng(seed)
        given: dict[str, Any] = {"bias": numbers.integers(-9, 10, n).astype(float)}
        if ending == "fp8":
            given["column_scales"] = 2.0 ** numbers.integers(-3, 4, n)
        elif ending != "bias":
            given["activation"] = ending
        scene = Scene(3, seed, 9, n, 7, programs=2, seed=seed)
        gather_and_multiply(scene, variant, tensor_memory=tensor_memory, **given, **of_tiles)


@KINDS
@settings(max_examples=4)
@given(
    world=st.integers(2, 4),
    m=st.integers(BLOCK_M, 11),
    rows_of_dead=st.integers(0, 10),
    programs=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_a_peer_that_stops_is_given_up_and_everything_ends(
    variant, tensor_memory, world, m, rows_of_dead, programs, seed
):
    rank = seed % world
    dead = {"dead": (rank + 1) % world, "rows_of_dead": min(rows_of_dead, m - 1), "patience_ticks": 1}
    scene = Scene(world, rank, m, 14, 3, seed=seed, programs=programs, **dead)
    gather_and_multiply(scene, variant, tensor_memory=tensor_memory)


@pytest.mark.parametrize(("variant", "warps"), [("cooperative", 8), ("pingpong", 4)])
def test_tiles_of_any_width_wait_for_their_rows(variant, warps):
    of_tiles = {"blocks": (128, 64, 64), "extra_n": 16, "joined": True, "store": (16, 1), "warps": warps}
    scene = Scene(2, 1, 131, 170, 70, seed=1, pieces=(40, 90))
    gather_and_multiply(scene, variant, **of_tiles)


# ---- that the model finds what it is there to find


def fails() -> str:
    scenes = functools.partial(Scene, 3, 1, 11, 20, 5, pieces=(1,) * 9)
    return gluon_model.first_failure(lambda seed: gather_and_multiply(scenes(seed=seed)), 12)


WAIT = KERNEL.wait_for_rows


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(lambda chunk, rows, *rest: rows, id="none"),
        pytest.param(lambda chunk, rows, *rest: WAIT(chunk, max(rows - 1, 1), *rest), id="a-row-less"),
        pytest.param(lambda *args: WAIT(*args[:-1], False), id="no-fence"),
    ],
)
def test_a_wait_that_does_not_cover_the_load_is_found(monkeypatch, wait):
    monkeypatch.setattr(KERNEL, "wait_for_rows", wait)
    assert "has not arrived" in fails()


def test_a_poll_that_acquires_nothing_is_found(monkeypatch):
    gluon_model.poll_without_acquiring(monkeypatch)
    assert "has not arrived" in fails()
