"""The flags by which ranks tell each other how far they are, see `push`, and the kinds of failure records.

A rank has int32 [FLAGS, WORLD] of them in symmetric memory. Column p is about rank p, which writes it unless
noted.
"""

from __future__ import annotations

import triton.language as tl

# FREE to DONE go up and down once in a call.
FREE = tl.constexpr(0)  # the permit: 1 while this rank may write its slot on p
ROWS_SENT = tl.constexpr(1)  # above 0 once p has announced its push: its rows, or its choices of experts
ARRIVED = tl.constexpr(2)  # above 0 once p's rows are here; of chunks and sums, how many of them are
# ARRIVED of this rank itself: 1 once its chunk, or sums, are with all peers; its side stream writes it.
DONE = tl.constexpr(3)  # 1 once this rank's sums for p are complete; this rank's kernel writes it
# Of this rank itself: 1 from when the caller's stream comes to an eager call until all its pushes have left.
FORKED = DONE
# 4 and 5: the values of ROWS_SENT and ARRIVED after a call: 0, or far ahead where p is given up. This rank's
# kernel writes both.
AFTER = tl.constexpr(4)
GIVEN = tl.constexpr(6)  # with ROWS_SENT: digest of the tokens of all ranks as p's caller gave them
FLAGS = 7

# What a failure record says about a peer; over experts there are others.
NOT_COME = tl.constexpr(0)  # to the call
NOT_PUSHED = tl.constexpr(1)  # its rows, or its sums; where they are read from its memory: not offered
OTHER_ROWS = tl.constexpr(2)  # than this rank
NOT_SENT = tl.constexpr(3)  # about this rank itself: its chunk, or sums, are not with all peers
NO_PERMIT = tl.constexpr(4)  # to write its memory
NO_MAIL = tl.constexpr(5)
NOT_READ = tl.constexpr(6)  # the rows of this rank
