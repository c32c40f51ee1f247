"""That the gather of few rows by mail compiles, fits, and moves each stamped word whole."""

from __future__ import annotations

import re

import pytest
from compiled import BLACKWELL, CDNA3, HOPPER, check_fits, compile_for, order_of

from dist_autotune.kernels.ag_gemm import by_mail

TYPES = {
    **dict.fromkeys(("table_ptr", "mail_ptr", "ticket_ptr", "errors_ptr"), "*i64"),
    **dict.fromkeys(("lost_ptr", "shard_ptr", "gathered_ptr"), "*i32"),
    **dict.fromkeys(
        ("rows", "capacity", "size_class", "length", "rank", "lost_word", "patience_ticks"), "i32"
    ),
}
ANY_VALUE = ("rows", "capacity", "size_class", "rank", "lost_word", "patience_ticks")
MOST_SPILLED = 16  # bytes of a thread, as in `exchange_rows`: ptxas stops at 64 registers


def compile_candidate(config, target=HOPPER, world=8):
    constants = {"WORLD": world, **config.kwargs}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_for(target, by_mail.exchange_shards.fn, TYPES, constants, any_value=ANY_VALUE, **options)


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL, CDNA3], ids=["hopper", "blackwell", "cdna3"])
def test_candidates_fit_the_device(target):
    for config in by_mail.GPU_CANDIDATES if target is HOPPER else by_mail.GPU_CANDIDATES[:1]:
        check_fits(compile_candidate(config, target), target, config, spilled=MOST_SPILLED)


def test_words_are_moved_whole_and_past_the_nearest_cache_and_rows_are_sent_before_any_is_waited_for():
    compiled = compile_candidate(by_mail.GPU_CANDIDATES[0], world=2)
    ptx = compiled.asm["ptx"]
    assert re.search(r"st\.global\.v2\.b64", ptx)
    assert re.search(r"ld\.volatile\.global\.v2\.b64", ptx)
    assert not re.search(r"ld\.volatile\.global(?:\.v\d)?\.b(?:8|16|32)", ptx)
    patterns = {"ticket": r"atomic_rmw add, relaxed, gpu", "lost": r"atomic_rmw or, relaxed, gpu"}
    order = order_of(compiled.asm["ttgir"], patterns)
    assert (order[:2], order[-1]) == (["ticket"] * 2, "ticket")
    assert set(order[2:-1]) == {"lost"}
