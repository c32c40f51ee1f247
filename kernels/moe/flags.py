"""Encoding of the choices that ranks announce, and the codes of their failures."""

from __future__ import annotations

import triton.language as tl

# ROWS_SENT is a rank's tokens * TOPK_SPAN + topk.
TOPK_SPAN = tl.constexpr(64)
MOST_CHOICES = 63  # of a token
MOST_TOKENS = 2**24 - 1  # of a rank: ROWS_SENT stays below GIVEN_UP

# The kinds of failure records.
NOT_TOLD = tl.constexpr(1)
NOT_PUSHED = tl.constexpr(2)
OTHER_TOKENS = tl.constexpr(3)
OTHER_TOPK = tl.constexpr(4)
NO_EXPERT = tl.constexpr(5)
NOT_COMPUTED = tl.constexpr(6)
GIVEN_OTHERS = tl.constexpr(7)
