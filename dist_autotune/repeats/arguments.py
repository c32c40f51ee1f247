"""The arguments of a replayed call: containers are handed to each run as they were; iterators are refused."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import NotRepeatable

_CHANGEABLE = (dict, list, set, deque)
_CONTAINERS = (*_CHANGEABLE, tuple)


class Arguments:
    """The containers among the arguments of a call, with copies of what they hold now.

    thunk: the call; None: it is made once.

    Raises NotRepeatable for an iterator among the arguments, which one run would use up.
    """

    def __init__(self, thunk: Callable[[], Any] | None) -> None:
        self._held: list[tuple[Any, Any]] = []  # a container, and a shallow copy
        if isinstance(thunk, functools.partial):
            refuse_iterators(thunk.func, thunk.args, thunk.keywords)
            given = _containers([*thunk.args, *thunk.keywords.values()])
            self._held = [(each, _copied(each)) for each in given if not isinstance(each, tuple)]

    @property
    def have_changed(self) -> bool:
        return any(_parts(live) != _parts(saved) for live, saved in self._held)

    def restore(self) -> None:
        """Put back the contents of the containers, which stay the same objects."""
        for live, saved in self._held:
            if _parts(live) != _parts(saved):
                live.clear()
                (live.extend if isinstance(live, (list, deque)) else live.update)(saved)


def refuse_iterators(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise NotRepeatable if an argument is an iterator, or in a container."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in given:
        for held in (value, *itertools.chain.from_iterable(map(_held_by, _containers([value])))):
            if hasattr(type(held), "__next__") and not _is_owner(fn, place, value):
                name = getattr(fn, "__qualname__", type(fn).__qualname__)
                raise NotRepeatable(
                    f"{name} was given an iterator as {_named(fn, place)}: a {type(held).__qualname__}. Its "
                    "first run would use it up, and the next ones would find nothing. Give it a list or a "
                    'tensor, take the next item outside, or decorate it with mode="online": one run a call.'
                )


def _is_owner(fn: Callable[..., Any], place: int | str, value: Any) -> bool:
    """Return whether an iterator is the `self` of the method that is tuned: nobody need take its items."""
    method = inspect.getattr_static(type(value), getattr(fn, "__name__", ""), None)
    return place == 0 and getattr(method, "fn", None) is fn


def _named(fn: Callable[..., Any], place: int | str) -> str:
    if isinstance(place, str):
        return f"argument {place!r}"
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # of a builtin
        names = []
    return f"argument {names[place]!r}" if place < len(names) else f"argument number {place + 1}"


def _containers(values: list[Any]) -> Iterator[Any]:
    """Yield the containers among `values`, and those in them, each once."""
    pending, seen = [*values], set[int]()
    while pending:
        value = pending.pop()
        value = value.data if isinstance(value, (UserDict, UserList)) else value
        if isinstance(value, _CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            pending += _held_by(value)
            yield value


def _held_by(value: Any) -> list[Any]:
    value = value.data if isinstance(value, (UserDict, UserList)) else value
    return [*(value.values() if isinstance(value, dict) else value)] if isinstance(value, _CONTAINERS) else []


def _copied(container: Any) -> Any:
    """Return the same items in a plain container: the constructor of a subclass may do more."""
    plain = next(kind for kind in _CHANGEABLE if isinstance(container, kind))
    return plain(container)


def _parts(container: Any) -> list[int]:
    """Return what tells two states of a container apart: the identities of all that it holds."""
    return [*map(id, container), *(map(id, container.values()) if isinstance(container, dict) else ())]
