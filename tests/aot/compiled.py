"""Compile a kernel for a GPU that is not there, and read what came out."""

import contextlib
import fcntl
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from gpu_cases import covering
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dist_autotune.kernels.compat import GluonASTSource

HOPPER, BLACKWELL, CDNA3, CDNA4 = (
    GPUTarget("cuda", 90, 32),
    GPUTarget("cuda", 100, 32),
    GPUTarget("hip", "gfx942", 64),
    GPUTarget("hip", "gfx950", 64),
)
SHARED_BYTES = {HOPPER: 232448, BLACKWELL: 232448, CDNA3: 65536, CDNA4: 163840}  # the most of one block
LOCKS: Path | None = None  # where workers of pytest-xdist wait for what another one compiles
REGISTERS = {HOPPER: 255, BLACKWELL: 255, CDNA3: 512, CDNA4: 512}  # of a thread


def compile_for(
    target: GPUTarget,
    kernel: Any,
    types: dict[str, str],
    constexprs: dict[str, Any],
    *,
    any_value: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Return the compiled kernel; arguments not in `any_value` are taken to be multiples of 16."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = [name for name in types if name not in any_value]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source_of = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_of(kernel, signature, constexprs=constexprs, attrs=attributes)
    with _alone(repr((source.hash(), target, options))):
        return triton.compile(source, target=target, options=options)


@contextlib.contextmanager
def _alone(kernel: str) -> Iterator[None]:
    if LOCKS is None:
        yield
        return
    # No lock that has a `__del__`: see `nothing_unloads` of conftest.
    with (LOCKS / f"{hashlib.sha256(kernel.encode()).hexdigest()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiled_on(target: GPUTarget, configs: list[triton.Config], kind: str = "TMA") -> list[triton.Config]:
    """Return the configs that are compiled for a target: it costs seconds.

    On Hopper they have all values of all, depths and an order apart, which change no code. Elsewhere they are
    the largest tiles of each kind.
    """
    if target is HOPPER:
        return covering(configs, without=("GROUP_M", "NUM_BUFFERS", "STORE_BUFFERS"))
    kinds: dict[Any, list[triton.Config]] = {}
    for config in sorted(configs, key=lambda each: -each.kwargs["BLOCK_M"] * each.kwargs["BLOCK_N"]):
        kinds.setdefault(config.all_kwargs()[kind], []).append(config)
    return [largest for largest, *_ in kinds.values()]


def resources(compiled: Any, target: GPUTarget) -> dict[str, int]:
    """Return a thread's registers, its spilled bytes (NVIDIA) or registers (AMD), a block's shared memory."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        count = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in AMD_COUNTS}
        registers, spilled = count["vgpr_count"], count["vgpr_spill_count"] + count["sgpr_spill_count"]
    else:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "kernel.cubin")
            path.write_bytes(compiled.asm["cubin"])
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        count = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
        registers, spilled = count["REG"], count["STACK"] + count["LOCAL"]
    return {"registers": registers, "spilled": spilled, "shared_bytes": compiled.metadata.shared}


def check_fits(compiled: Any, target: GPUTarget, what: Any = "", *, spilled: int = 0) -> dict[str, int]:
    """Fail unless a kernel fits the device, with so many bytes spilled at most; return what it uses."""
    used = resources(compiled, target)
    assert used["spilled"] <= spilled, what
    assert used["registers"] <= REGISTERS[target], what
    assert used["shared_bytes"] <= SHARED_BYTES[target], what
    return used


AMD_COUNTS = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")

EVENTS = {
    "loop": r"scf\.for",
    "poll": r"atomic_rmw|atomic_cas|elementwise_inline_asm.*acquire",
    "fence": r"elementwise_inline_asm.*fence\.proxy\.async\.global",
    "load": r"async_tma_copy_global_to_local|async_copy_global_to_local|buffer_load|tt\.load .*tensor<",
    "multiply": r"warp_group_dot |tc_gen5_mma |tt\.dot ",
}


def events(ttgir: str) -> list[tuple[int, str]]:
    """Return (depth, name) of each loop, poll, fence, load of a tile and multiplication, in program order."""
    found = []
    for line in ttgir.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        found += [(depth, name) for name, pattern in EVENTS.items() if re.search(pattern, line)][:1]
    return found


def order_of(ttgir: str, patterns: dict[str, str]) -> list[str]:
    """Return in program order the names of the patterns that lines match."""
    return [name for line in ttgir.splitlines() for name, each in patterns.items() if re.search(each, line)]


def early_load(ttgir: str) -> str | None:
    """Return why a load of a tile may run before the poll that guards it; None if none can.

    The kernel is expected to be a loop over tiles that polls and then runs its K loop. What the pipeliner
    could do wrong: start the loads in front of the loop over tiles, above the poll, or at the end of the
    loop's body for the next tile; or meet the poll inside the K loop, whose loads run ahead of it.
    """
    order = events(ttgir)
    names = [name for _, name in order]
    if not {"loop", "poll", "load", "multiply"} <= set(names):
        return f"not the kernel that was expected: {sorted(set(names))}"
    start = names.index("loop")
    if "load" in names[:start]:
        return "a load stands in front of the tile loop"
    depth = order[start][0]
    body = list(_inside(order[start + 1 :], depth))
    inner = [name for _, name in body]
    if "poll" not in inner[: inner.index("load")]:
        return "a load stands above the first poll of the tile loop"
    last_poll = len(inner) - 1 - inner[::-1].index("poll")
    if last_poll > inner.index("load"):
        return "a poll stands behind a load, inside the K loop or after it"
    k_loop = max(index for index, (_, name) in enumerate(body) if name == "loop")
    after = [name for at, name in body[k_loop + 1 :] if at <= body[k_loop][0]]
    return "a load stands behind the K loop, for the next tile" if "load" in after else None


def _inside(order: list[tuple[int, str]], depth: int):
    for at, name in order:
        if at <= depth:
            return
        yield at, name
