"""That the kernel of GemmAllReduce compiles, spills nothing, and orders its words as the proof asks."""

from __future__ import annotations

import re

import pytest
from compiled import BLACKWELL, CDNA3, HOPPER, REGISTERS, compile_for, resources

from dist_autotune.kernels.gemm_ar import pull

pytestmark = pytest.mark.aot

TYPES = {
    **dict.fromkeys(("table_ptr", "words_table_ptr", "words_ptr", "ticket_ptr", "errors_ptr"), "*i64"),
    **dict.fromkeys(("residual_ptr", "weight_ptr", "out_ptr", "sum_ptr"), "*bf16"),
    **dict.fromkeys(("first", "rows", "m", "chunk", "size_class", "N"), "i32"),
    **dict.fromkeys(("stride_residual", "stride_out", "rank", "patience_ticks"), "i32"),
    "eps": "fp32",
}
ANY_VALUE = ("first", "rows", "m", "chunk", "size_class", "rank", "patience_ticks", "eps")
TARGETS = {"hopper": HOPPER, "blackwell": BLACKWELL, "cdna3": CDNA3}
COLUMNS = 8192


def compile_candidate(config, target=HOPPER, world=8, columns=COLUMNS, **values):
    norm = not config.kwargs["BLOCK_N"]
    constexprs = {
        "WORLD": world,
        "OWNER": False,
        "HAS_RESIDUAL": norm,
        "NORM": norm,
        "ROW": columns if norm else 1,
    }
    return compile_for(
        target,
        pull.add_rows.fn,
        TYPES,
        constexprs | values | config.kwargs,
        any_value=ANY_VALUE,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def usable(columns, *, norm):
    found = pull.prune(pull.GPU_CANDIDATES, {"N": columns}, NORM=norm)
    return [config for config in found if config.kwargs["PER_SM"] == 1]  # it changes the grid alone


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("world", [2, 8])
def test_candidates_fit_the_device(target, world, monkeypatch):
    monkeypatch.setattr(pull, "INTERPRETED", False)
    sums, (norm,) = usable(COLUMNS, norm=False), usable(COLUMNS, norm=True)
    assert len(sums) >= 4
    assert norm.num_warps == 16
    for config in (*sums, norm):
        used = resources(compile_candidate(config, target, world), target)
        assert used["spilled"] == 0, config
        assert used["registers"] * 32 * config.num_warps <= 65536 or target is CDNA3, config
        assert used["registers"] <= REGISTERS[target], config


@pytest.mark.parametrize("columns", [1024, 16384])
def test_rows_of_all_sizes_have_their_norm_without_spills(columns, monkeypatch):
    monkeypatch.setattr(pull, "INTERPRETED", False)
    (norm,) = usable(columns, norm=True)
    used = resources(compile_candidate(norm, columns=columns), HOPPER)
    assert used["spilled"] == 0
    assert used["registers"] * 32 * norm.num_warps <= 65536


@pytest.mark.parametrize("norm", [False, True], ids=["sum", "norm"])
def test_rows_are_read_behind_the_acquire_and_before_the_release(norm):
    (config, *_) = [each for each in pull.GPU_CANDIDATES if norm == (not each.kwargs["BLOCK_N"])]
    compiled = compile_candidate(config, world=2)
    patterns = {
        "ticket": r"atomic_rmw add, relaxed, gpu",
        "publish": r"atomic_rmw exch, release, sys",
        "poll": r"atomic_rmw add, acquire, sys",
        "load": r"tt\.load .*tensor<\d+x!tt\.ptr<bf16>",
        "barrier": r"gpu\.barrier|ttg\.barrier",
        "read": r"atomic_rmw add, release, sys",
    }
    lines = compiled.asm["ttgir"].splitlines()
    order = [name for line in lines for name, pattern in patterns.items() if re.search(pattern, line)]
    first_load, last_load = order.index("load"), len(order) - 1 - order[::-1].index("load")
    assert order[0] == "ticket"
    assert order.index("publish") < order.index("poll") < first_load
    assert order[last_load + 1 : last_load + 3] == ["barrier", "read"]
    assert "poll" in order[last_load + 3 :]


def test_words_have_the_scope_of_those_who_read_them_and_rows_are_loaded_by_sixteen_bytes():
    ptx = compile_candidate(pull.GPU_CANDIDATES[0], world=2).asm["ptx"]
    assert "ld.global.sys.acquire.b64" in ptx
    assert re.search(r"atom\.global\.sys\.release\.exch\.b64", ptx)
    assert re.search(r"(atom|red)\.global\.sys\.release\.add\.u64", ptx)
    assert re.search(r"ld\.global(\.\w+)*\.v4\.b32", ptx)
    assert not re.search(r"ld\.global(\.\w+)*\.b16", ptx)
