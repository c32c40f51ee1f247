"""The source of AllGatherMoE's warp-specialised kernel, run on the CPU beside late and dead ranks."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import gluon_model
import numpy as np
import pytest
from gluon_machine import Task, machine, now
from gluon_memory import Descriptor, Pointer, Pointers, Tensor
from gluon_model import Deadlock
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("one_core")  # its tasks are threads that take turns

KERNEL = gluon_model.load_kernel_module("moe.specialized_kernel")
OPERANDS = importlib.import_module("kernels_in_the_model.grouped.operands")
PEERS = importlib.import_module("kernels_in_the_model.exchange.peers")
SIGNALS = importlib.import_module("kernels_in_the_model.signals")
BLOCK_M, BLOCK_N, BLOCK_K = 4, 16, 16
TOPK = 2
PAD = 8  # columns between the rows of C


class GatheredRows(Pointer):
    """Of the gather buffer: copies of rows that their task cannot know to be there are errors."""

    scene: Scene

    def __add__(self, step: int | Tensor) -> Pointer | Pointers:
        pointers = RowPointers(self.array, self.offset + step.array)
        pointers.scene = self.scene
        return pointers


class RowPointers(Pointers):
    scene: Scene

    def __add__(self, step: int | Tensor) -> Pointers:
        return self._of_scene(super().__add__(step))

    def __getitem__(self, index: tuple[slice | None, ...]) -> Pointers:
        return self._of_scene(super().__getitem__(index))

    def _of_scene(self, pointers: Pointers) -> Pointers:
        pointers.scene = self.scene
        return pointers

    def may_read(self) -> None:
        scene = self.scene
        for chunk in np.unique(self.offsets // (scene.capacity * scene.k)):
            if chunk != scene.rank and not scene.errors[chunk]:
                arrived = now().acquired.get(scene.flag("ARRIVED", chunk).address, 0)
                assert arrived >= 1, f"chunk {chunk} has not arrived"


@dataclass
class Scene:
    """One call on one rank, its peers, and what is in memory."""

    world: int
    rank: int
    tokens: tuple[int, ...]  # of each rank
    n: int
    k: int
    experts: int
    seed: int
    is_sorted: bool = False
    by_arrival: bool = True
    by_columns: bool = False
    choices: str = "any"  # or "one" expert, "none" at all
    dead: int | None = None
    programs: int = 2
    patience_ticks: int = 1000
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        numbers = np.random.default_rng(self.seed)
        self.capacity = max(self.tokens) + 2
        self.a = numbers.integers(-3, 4, (self.world, self.capacity, self.k)).astype(float)
        self.b = numbers.integers(-3, 4, (self.experts, self.n, self.k)).astype(float)
        self.gather = np.full((self.world, self.capacity, self.k), np.nan)
        self.gather[self.rank] = self.a[self.rank]
        lowest, highest = {"any": (-1, self.experts), "one": (0, 1), "none": (-1, 0)}[self.choices]
        total = sum(self.tokens) * TOPK
        self.ids = numbers.integers(lowest, highest, total)
        self.chunk = np.repeat(np.arange(self.world), np.array(self.tokens) * TOPK)
        begins = np.concatenate([[0], np.cumsum(self.tokens)])[:-1] * TOPK
        self.sources = self.chunk * self.capacity * TOPK + np.arange(total) - begins[self.chunk]
        self.sort()
        self.c = np.full((total, self.n + PAD), -99.0)
        self.flags = np.zeros(PEERS.FLAGS * self.world, dtype=np.int64)
        self.errors = np.zeros(self.world, dtype=np.int64)

    def sort(self) -> None:
        """Sort the choices by expert and stage, and list their blocks."""
        stage = (self.chunk - self.rank) % self.world
        expert = np.where(self.ids < 0, self.experts, self.ids)
        self.rows = np.lexsort((stage, expert))
        blocks = []
        for each in range(self.experts + 1):
            (places,) = np.nonzero(expert[self.rows] == each)
            for begin in range(0, len(places), BLOCK_M):
                block = places[begin : begin + BLOCK_M]
                blocks.append((each, block[0], block[-1] + 1, stage[self.rows[block]].max()))
        if self.by_arrival:
            blocks.sort(key=lambda block: (block[3], block[0]))
        self.blocks = blocks
        self.table = np.array(blocks or [(10**6, 10**6, 10**6, 10**6)], dtype=np.int64)

    def flag(self, row: str, peer: int) -> Pointer:
        return Pointer(self.flags, getattr(PEERS, row) * self.world + peer)

    def arrivals(self) -> list[Callable[[], None]]:
        """Return who pushes chunks to this rank: each peer, in any order, late."""

        stages_of_tokens = (self.chunk - self.rank) % self.world

        def peer_task(peer: int) -> Callable[[], None]:
            def arrive() -> None:
                if peer == self.dead:
                    return
                for _ in range(self.random.choice([0, 10, 100])):
                    now().pause()
                if stages_of_tokens.max(initial=0) < (peer - self.rank) % self.world:  # no tile waits for it
                    now().pause(lambda: all(t.done for t in kernel_tasks() if "/load" not in t.name))
                self.gather[peer] = self.a[peer]
                now().pause()
                ended = all(task.done for task in kernel_tasks())
                assert not ended, f"the kernel ended before rank {peer} had pushed"
                self.flag("ARRIVED", peer).set(1)

            return arrive

        return [peer_task(peer) for peer in range(self.world) if peer != self.rank]

    def wanted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that C should have, and which of them are known."""
        token = self.sources // TOPK % self.capacity
        product = np.einsum("ck,cnk->cn", self.a[self.chunk, token], self.b[np.maximum(self.ids, 0)])
        product[self.ids < 0] = 0
        known = (self.chunk != self.dead) | (self.ids < 0)
        order = self.rows if self.is_sorted else slice(None)
        return product[order], known[order]


def kernel_tasks() -> list[Task]:
    return [task for task in machine().tasks if task.program >= 0]


def gather_and_multiply(
    scene: Scene, variant: str = "cooperative", *, buffers: int = 3, store_n: int = 8
) -> None:
    """Run the call to its end and check what it wrote."""
    a_ptr = GatheredRows(scene.gather.reshape(-1))
    a_ptr.scene = scene
    if scene.by_columns:
        matrix, block = scene.b.transpose(0, 2, 1).reshape(-1, scene.n), [BLOCK_K, BLOCK_N]
    else:
        matrix, block = scene.b.reshape(-1, scene.k), [BLOCK_N, BLOCK_K]
    tables = [Pointer(scene.rows), Pointer(scene.sources[scene.rows])]
    ends = np.full(2 * scene.world, len(scene.blocks))
    heights, capacity = 1, 0  # both orders' tables are the same one
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(SIGNALS, "POLLS_PER_ROUND", 64)  # turns are slow
        gluon_model.launch(
            KERNEL.specialized_all_gather_moe,
            scene.programs,
            *(Descriptor(matrix, block), a_ptr, Pointer(scene.c.reshape(-1)), *tables, Pointer(ends)),
            *(Pointer(scene.table.reshape(-1)), Pointer(scene.flags), Pointer(scene.errors)),
            *(
                16,
                scene.n,
                scene.k,
                scene.experts,
                TOPK,
                capacity,
                scene.n + PAD,
                scene.rank,
                scene.patience_ticks,
            ),
            seed=scene.seed,
            beside=scene.arrivals(),
            WORLD=scene.world,
            HEIGHTS=heights,
            BY_COLUMNS=scene.by_columns,
            SORTED=scene.is_sorted,
            VARIANT=variant,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K,
            NUM_BUFFERS=buffers,
            STORE_N=store_n,
            GROUP_M=2,
            BY_ARRIVAL=scene.by_arrival,
        )
    wanted, known = scene.wanted()
    np.testing.assert_array_equal(scene.c[known, : scene.n], wanted[known])
    np.testing.assert_array_equal(scene.c[:, scene.n :], -99.0)
    failed = {peer for peer in range(scene.world) if scene.errors[peer]}
    assert failed == ({scene.dead} if scene.dead is not None else set())


VARIANTS = pytest.mark.parametrize("variant", ["cooperative", "pingpong"])
EITHER = st.booleans()


@VARIANTS
@settings(max_examples=12)
@given(
    world=st.integers(1, 4),
    tokens=st.lists(st.integers(0, 7), min_size=4, max_size=4),
    sizes=st.tuples(st.sampled_from([8, 16, 24, 40]), st.sampled_from([8, 16, 24, 40]), st.integers(1, 5)),
    orders=st.tuples(EITHER, EITHER, EITHER),
    choices=st.sampled_from(["any", "any", "one", "none"]),
    programs=st.integers(1, 4),
    buffers=st.integers(2, 4),
    store_n=st.sampled_from([8, 16]),
    seed=st.integers(0, 10**6),
)
def test_no_row_is_gathered_before_it_is_here_and_the_sums_are_right(
    variant, world, tokens, sizes, orders, choices, programs, buffers, store_n, seed
):
    n, k, experts = sizes
    is_sorted, by_arrival, by_columns = orders
    scene = Scene(
        *(world, seed % world, tuple(tokens[:world]), n, -(-k // BLOCK_K) * BLOCK_K if by_columns else k),
        *(experts, seed, is_sorted, by_arrival, by_columns, choices),
        programs=programs,
    )
    gather_and_multiply(scene, variant, buffers=buffers, store_n=store_n)


@VARIANTS
@settings(max_examples=5)
@given(world=st.integers(2, 4), is_sorted=EITHER, programs=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_a_peer_that_never_pushes_is_given_up_and_everything_ends(variant, world, is_sorted, programs, seed):
    dead = (seed + 1) % world
    tokens = (5, 3, 4, 6)[:world]
    scene = Scene(world, seed % world, tokens, 24, 24, 3, seed, is_sorted, dead=dead, programs=programs)
    scene.patience_ticks = 1
    gather_and_multiply(scene, variant)
    assert scene.flag("ARRIVED", dead).get() >= SIGNALS.GIVEN_UP


# ---- that the model finds what it is there to find


def fails() -> str:
    """Return the first failure among a few launches in different orders; empty if there is none."""
    for seed in range(12):
        scene = Scene(3, 2, (6, 0, 7), 40, 40, 4, seed, bool(seed % 2))
        try:
            gather_and_multiply(scene, ("cooperative", "pingpong")[seed // 2 % 2])
        except (AssertionError, ZeroDivisionError) as error:
            return "deadlock" if isinstance(error, Deadlock) else str(error)
    return ""


def test_nothing_is_found_in_the_kernel_as_it_is():
    assert fails() == ""


def test_a_wait_for_too_few_chunks_is_found(monkeypatch):
    monkeypatch.setattr(KERNEL.Blocks, "await_rows", lambda self, number, known: known)
    assert "has not arrived" in fails()


def test_rows_that_are_gathered_before_they_are_granted_are_found(monkeypatch):
    def gather(self, step, rows_ptr, left):
        slot = step % self.NUM_BUFFERS
        offs_k = Tensor(np.arange(BLOCK_K))
        a_ptrs = rows_ptr[:, None] + offs_k[None, :]
        OPERANDS.gather_load(self.a_bufs.index(slot), a_ptrs, mask=(offs_k < left)[None, :])
        OPERANDS.async_copy.mbarrier_arrive(self.full.index(slot), increment_count=False)

    monkeypatch.setattr(OPERANDS.GatheredOperands, "gather", gather)
    assert "has not arrived" in fails()


def test_a_missing_fence_is_found(monkeypatch):
    monkeypatch.setattr(OPERANDS, "fence_async_shared", lambda: None)
    assert "need a proxy fence" in fails()


def test_a_kernel_that_does_not_wait_for_all_pushes_is_found(monkeypatch):
    monkeypatch.setattr(KERNEL.Blocks, "loaded", lambda self: None)
    assert "the kernel ended before" in fails()
