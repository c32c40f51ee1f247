"""The objects that Python knows, found without harm to other threads.

While one of them builds a tuple from an iterator, a second reference to it makes CPython raise SystemError
there (bpo-15108), and what `gc.get_objects` returns refers to all tuples. An instance refers to its class.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any


def instances(kinds: Collection[type]) -> list[Any]:
    """Return the objects whose type is one of `kinds`, but for those that `gc.freeze` has hidden."""
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]
