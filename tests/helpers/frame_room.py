"""Room for the frames of functions: calls at the end of a chunk of frames map and unmap memory each time.

CPython keeps frames in chunks of 16 KiB. Where a loop stands at the end of one, each call in it gets a new
chunk from the system and gives it back: four fifths of all page faults of a training step in the interpreter.
A frame that needs half a megabyte gets a chunk of one, which has room for all that it calls.
"""

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

MOST_SLOTS = 66_000  # of 8 bytes: a little more than half of the chunk
HERE = threading.local()


def with_room(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function with room for all frames above it. Within such a call on this thread there is room."""
    __tracebackhide__ = True
    if getattr(HERE, "has_room", False):
        return function(*args, **kwargs)
    HERE.has_room = True
    try:
        return _in_a_large_frame(function, *args, **kwargs)
    finally:
        HERE.has_room = False


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    return function(*args, **kwargs)


_in_a_large_frame = FunctionType(_call.__code__.replace(co_stacksize=MOST_SLOTS), globals())
