"""The source of GemmReduceScatter's warp-specialised kernel, run on the CPU beside late and dead ranks."""

import functools
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gluon_model
import numpy as np
import pytest
from gluon_machine import machine, now
from gluon_memory import Descriptor, Pointer
from gluon_tiles import BLOCK_M, GIVEN_UP, KINDS, Call, Tile
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("one_core")  # its tasks are threads that take turns

KERNEL = gluon_model.load_kernel_module("gemm_rs.specialized_kernel")
SIGNALS = importlib.import_module("kernels_in_the_model.signals")
STORES = importlib.import_module("kernels_in_the_model.exchange.stores")


@dataclass
class Scene(Call):
    """One call on one rank, its peers and its side stream, and what is in memory."""

    captured: bool = False
    addend: bool = False
    dead: int | None = None  # the peer that neither gives a permit nor pushes
    rows_of: dict[int, int] = field(default_factory=dict)  # peers that push another number of rows
    late: bool = False  # peers push when all that is for them has left
    patience_ticks: int = 10_000
    stores: bool = False  # the kernel stores to the peers
    scaled: bool = False  # rows of A and of the weight have scales, in fp8

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers, slots = np.random.default_rng(self.seed), max(1, self.world - 1)
        self.a = numbers.integers(-3, 4, (self.world * self.m, self.k)).astype(float)
        self.b = numbers.integers(-3, 4, (self.n, self.k)).astype(float)
        self.extra = numbers.integers(-9, 10, (self.world * self.m, self.n)).astype(float)
        self.theirs = numbers.integers(-9, 10, (slots, self.m, self.n)).astype(float)
        self.of_rows = 2.0 ** numbers.integers(-3, 4, self.world * self.m)
        self.of_columns = 2.0 ** numbers.integers(-3, 4, self.n)
        self.partial = np.full((slots * self.capacity, self.n), np.nan)
        self.staged = np.full(slots * self.capacity * self.n, np.nan)
        self.out = np.full((self.m, self.n), np.nan)
        self.counts = np.zeros(self.world + 4, dtype=np.int64)
        self.pushed: dict[int, np.ndarray] = {}  # what has left for each peer
        # Of peers: their memory for other ranks' sums, and their flags.
        self.staged_there = {peer: np.full(self.staged.shape, np.nan) for peer in self.peers()}
        self.flags_there = {peer: np.zeros_like(self.flags) for peer in self.peers()}

    def product(self, chunk: int) -> np.ndarray:
        """Return what is this rank's part of the sums for that one."""
        rows = slice(chunk * self.m, (chunk + 1) * self.m)
        scales = self.of_rows[rows, None] * self.of_columns if self.scaled else 1
        return self.a[rows] @ self.b.T * scales + (self.extra[rows] if self.addend else 0)

    # ---- what goes on beside the kernel, each a task of the machine

    def flag_there(self, row: str, peer: int) -> Pointer:
        return Pointer(self.flags_there[peer], self.flag(row, self.rank).offset)

    def hear(self, peer: int) -> None:
        """Be a peer to whom the kernel stores: keep what is there when it is told of sums."""
        permit, arrived = (self.flag_there(row, peer) for row in ("FREE", "ARRIVED"))
        now().pause(lambda: permit.get() >= 1, f"the permit for {peer}")
        if peer != self.dead:
            now().pause(lambda: arrived.get() >= self.m, f"our sums for {peer}")
            assert self.flag_there("ROWS_SENT", peer).get() == self.m
            first = ((self.rank - peer) % self.world - 1) * self.capacity * self.n
            there = self.staged_there[peer]
            self.pushed[peer] = there[first : first + self.m * self.n].reshape(self.m, self.n).copy()
            assert np.isnan(np.delete(there, slice(first, first + self.m * self.n))).all(), "beside its slot"

    def side_stream(self) -> None:
        """Push each chunk once it is handed over and the peer has given its permit."""
        for slot, peer in enumerate(self.peers()):
            for row in ("FREE", "DONE"):
                now().pause(lambda row=row, peer=peer: self.flag(row, peer).get() >= 1, f"{row} of {peer}")
                self.flag(row, peer).set(0)
            self.push(slot, peer)
        self.leave()

    def leave(self) -> None:
        self.flag("ARRIVED", self.rank).set(1)

    def push(self, slot: int, peer: int) -> None:
        first = slot * self.capacity
        self.pushed[peer] = self.partial[first : first + self.m].copy()

    def permits(self, peers: list[int]) -> list[Callable[[], None]]:
        """Return the peers as they give their permits, late."""
        return [functools.partial(self.raise_late, "FREE", peer, 1) for peer in peers if peer != self.dead]

    def pushes(self) -> list[Callable[[], None]]:
        """Return the peers as they push, in any order, late."""
        return [functools.partial(self.receive, *at) for at in enumerate(self.peers()) if at[1] != self.dead]

    def receive(self, slot: int, peer: int) -> None:
        if self.late:
            now().pause(lambda: len(self.pushed) == self.world - 1, "our sums")
        self.wait_a_while(0, 4, 60)
        first = slot * self.capacity * self.n
        here = slice(first, first + self.m * self.n)
        clocks = machine().published.setdefault(id(self.staged), np.full(self.staged.shape, -1.0))
        self.staged[here], clocks[here] = self.theirs[slot].reshape(-1), np.inf
        rows = self.rows_of.get(peer, self.m)
        self.raise_late("ROWS_SENT", peer, rows)
        ends = [0, *sorted({self.random.randint(1, rows) for _ in range(2)} - {rows}), rows]
        for begin, end in itertools.pairwise(ends):
            self.wait_a_while(0, 4, 60)
            behind = self.m if end == rows else min(end, self.m)  # of too few rows the rest is read, too
            piece = slice(first + begin * self.n, first + behind * self.n)
            clocks[piece] = machine().turns  # who reads must have acquired what follows
            self.raise_late("ARRIVED", peer, end)

    def raise_late(self, row: str, peer: int, value: int) -> None:
        self.wait_a_while(0, 4, 60)
        early = row == "FREE" and not np.isnan(self.staged_there[peer]).all()
        assert not early, f"stored to {peer} before its permit"
        if self.flag(row, peer).get() < GIVEN_UP:
            self.flag(row, peer).set(value)


def launch(scene: Scene, variant: str, beside: list[Callable[[], None]], **options: Any) -> None:
    """Run one launch of the kernel to its end; `first`, `chunks` and the tiles are options."""
    programs, first = options.pop("programs", 2), options.pop("first", 0)
    chunks, tile = options.pop("chunks", scene.world), Tile(variant, **options)
    (block_m, _, words_k), itemsize = tile.blocks, 1 if scene.scaled else 2
    gluon_model.launch(
        KERNEL.specialized_gemm_reduce_scatter,
        programs,
        Descriptor(scene.a, [block_m, words_k * 2 // itemsize], itemsize),
        *tile.of_weight(scene.b, itemsize),
        *(Descriptor(each, [block_m, tile.store[0]]) for each in (scene.out, scene.partial)),
        None,  # the table, in whose place `reduce_scatter` puts what it leads to
        *map(Pointer, (scene.staged, scene.flags, scene.counts, scene.errors)),
        Pointer(scene.extra.reshape(-1)) if scene.addend else None,
        *(Pointer(each) if scene.scaled else None for each in (scene.of_rows, scene.of_columns)),
        *(scene.world * scene.m, scene.n, scene.k, scene.capacity),
        *(first, chunks, scene.rank, scene.patience_ticks),
        scene.m,  # its class
        seed=scene.seed,
        haste=(None, 0.05, 0.9)[scene.seed % 3],
        beside=beside,
        WORLD=scene.world,
        STORES=scene.stores,
        DTYPE="fp8e4nv" if scene.scaled else "bf16",
        **tile.constants(),
    )


def reduce_scatter(scene: Scene, variant: str = "cooperative", **options: Any) -> None:
    """Run a call, eager or captured, to its end and check what it wrote, pushed and left behind."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(SIGNALS, "POLLS_PER_ROUND", 64)  # turns are slow
        if scene.stores:
            there = lambda flag, peer, *_: Pointer(scene.flags_there[peer], flag * scene.world + scene.rank)  # noqa: E731
            monkeypatch.setattr(STORES, "_flag_there", there)
            monkeypatch.setattr(KERNEL, "memory_of", lambda peer, *_: Pointer(scene.staged_there[peer]))
            heard = [functools.partial(scene.hear, peer) for peer in scene.peers()]
            launch(scene, variant, [*scene.permits(scene.peers()), *scene.pushes(), *heard], **options)
        elif scene.captured:
            for step, peer in enumerate(scene.peers()):
                launch(scene, variant, scene.permits([peer]), first=step, chunks=1, **options)
                scene.push(step, peer)
            beside = [*scene.pushes(), scene.leave]
            launch(scene, variant, beside, first=scene.world - 1, chunks=1, **options)
        else:
            beside = [*scene.permits(scene.peers()), *scene.pushes(), scene.side_stream]
            launch(scene, variant, beside, **options)
    check(scene)


def check(scene: Scene) -> None:
    for peer in scene.peers():
        if scene.stores and peer == scene.dead:
            continue
        np.testing.assert_array_equal(scene.pushed[peer], scene.product(peer), err_msg=f"pushed to {peer}")
    failed = {peer for peer in range(scene.world) if scene.errors[peer]}
    assert failed == ({scene.dead} if scene.dead is not None else set(scene.rows_of))
    if scene.dead is None:
        sums = scene.product(scene.rank) + scene.theirs[: scene.world - 1].sum(axis=0)
        np.testing.assert_array_equal(scene.out, sums)
    assert not scene.counts.any()
    slots = scene.partial.reshape(-1, scene.capacity, scene.n)
    assert np.isnan(slots[:, scene.m :]).all(), "rows behind a chunk's last one are written"
    for peer in scene.peers():
        value = scene.flag("FREE", peer).get()
        assert value >= GIVEN_UP if peer == scene.dead else value == 0, f"the permit of {peer}: {value}"


CALLS = pytest.mark.parametrize(
    "way", [{}, {"captured": True}, {"stores": True}], ids=["eager", "captured", "by stores"]
)


@KINDS
@CALLS
@settings(max_examples=6)
@given(
    world=st.integers(1, 4),
    sizes=st.tuples(st.integers(BLOCK_M, 11), st.integers(2, 19), st.integers(1, 9)),
    programs=st.integers(1, 4),
    buffers=st.integers(2, 4),
    store=st.sampled_from([(4, 1), (4, 2), (8, 1)]),
    addend=st.booleans(),
    by_columns=st.booleans(),
    late=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_every_chunk_is_complete_when_it_leaves_and_the_sums_are_right(
    variant, tensor_memory, way, world, sizes, programs, buffers, store, addend, by_columns, late, seed
):
    scene = Scene(world, seed % world, *sizes, seed=seed, addend=addend, late=late, **way)
    options = {"programs": programs, "buffers": buffers, "store": store, "by_columns": by_columns}
    reduce_scatter(scene, variant, tensor_memory=tensor_memory, **options)


@pytest.mark.parametrize("variant", ["cooperative", "pingpong"])
@CALLS
def test_in_fp8_a_product_meets_its_scales_before_it_is_added_or_leaves(variant, way):
    for seed, (n, store) in enumerate([(16, (4, 1)), (19, (4, 2)), (3, (8, 1))]):
        scene = Scene(3, seed, 9, n, 7, seed=seed, scaled=True, addend=seed == 1, **way)
        reduce_scatter(scene, variant, store=store)


@KINDS
@CALLS
def test_a_peer_that_does_not_come_is_given_up_and_everything_ends(variant, tensor_memory, way):
    for seed in range(3):
        scene = Scene(3, 1, 9, 14, 3, seed=seed, dead=(2, 0, 2)[seed], patience_ticks=4, **way)
        reduce_scatter(scene, variant, tensor_memory=tensor_memory)


def test_who_hands_over_the_last_chunk_does_not_undo_that_its_peer_is_given_up():
    scene = Scene(2, 1, 11, 4, 9, seed=161877, dead=0, patience_ticks=4, stores=True)
    reduce_scatter(scene, programs=2, buffers=2, store=(8, 1))


@KINDS
def test_a_program_that_begins_late_waits_for_no_permit_that_has_been_taken(
    variant, tensor_memory, monkeypatch
):
    kernel = KERNEL.specialized_gemm_reduce_scatter
    scene = Scene(3, 1, 11, 20, 5, seed=3, stores=True, patience_ticks=4)

    def late(*args, **options):
        if now().program > 0:
            now().pause(lambda: len(scene.pushed) > 0, "the sums of a peer")
        kernel(*args, **options)

    monkeypatch.setattr(KERNEL, "specialized_gemm_reduce_scatter", late)
    reduce_scatter(scene, variant, tensor_memory=tensor_memory, programs=3, buffers=2)


def test_a_peer_with_other_rows_is_recorded():
    scene = Scene(3, 0, 9, 14, 3, seed=5, rows_of={2: 7})
    reduce_scatter(scene)
    assert scene.errors[2] & 0xFFFFFFFF == 7


@pytest.mark.parametrize(("variant", "warps"), [("cooperative", 8), ("pingpong", 4)])
def test_a_tile_of_any_width_is_added_up(variant, warps):
    options = {"blocks": (128, 64, 64), "extra_n": 16, "joined": True, "store": (32, 1), "warps": warps}
    reduce_scatter(Scene(3, 1, 131, 170, 70, seed=1, addend=True), variant, **options)


# ---- that the model finds what it is there to find


def fails(*, stores: bool = False, seeds: int = 12) -> str:
    scenes = functools.partial(Scene, 3, 1, 11, 20, 5, late=True, stores=stores)
    options = {"programs": 3, "buffers": 2}
    return gluon_model.first_failure(lambda seed: reduce_scatter(scenes(seed=seed), **options), seeds)


def test_a_count_of_what_has_only_been_read_is_found(monkeypatch):
    monkeypatch.setattr(KERNEL, "complete_stores", lambda: gluon_model.instructions.store_wait(0))
    assert "pushed to" in fails()


def test_a_wait_that_acquires_nothing_is_found(monkeypatch):
    gluon_model.poll_without_acquiring(monkeypatch)
    assert "before it is known to be there" in fails()


def test_a_store_without_the_peer_s_permit_is_found(monkeypatch):
    assert fails(stores=True, seeds=2) == ""
    monkeypatch.setattr(KERNEL, "wait_for_all", lambda *_: None)
    assert "before its permit" in fails(stores=True)


def test_a_count_before_the_stores_of_the_tile_is_found(monkeypatch):
    monkeypatch.setattr(KERNEL.ScatteredChunks, "stored_before", lambda *_: None)
    monkeypatch.setattr(KERNEL, "ring_phase", lambda *_: 1)  # which an mbarrier has ended before it began
    assert "pushed to" in fails(stores=True)
