"""`tunable`: a choice that the host makes, tuned like a config and judged by the time of the whole run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import identity
from .errors import InvalidOption
from .intercept import INTERCEPTION

T = TypeVar("T")


class Choices:
    """Settled choices of this process, for calls of `tunable` outside a tuned function."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], Any] = {}

    def remember(self, name: str, key_text: str, option: Any) -> None:
        self._by_name[name, key_text] = option

    def recall(self, name: str, key_text: str, options: Sequence[T]) -> T:
        known = self._by_name.get((name, key_text), options[0])
        return known if known in options else options[0]


CHOICES = Choices()


def tunable(name: str, options: Sequence[T], *, key: tuple[Any, ...] = ()) -> T:
    """Return one of `options` for this run of the tuned function around it.

    Each (name, key) is a context like a kernel with its key; it is tuned after the kernels, by the time
    of the whole run. Outside a tuned function: the settled choice for that key, or the first option.

    Raises InvalidOption when there are no options, or one that JSON cannot represent.
    """
    if not options:
        raise InvalidOption(f"tunable({name!r}): give at least one option")
    texts = [_text(name, option) for option in options]
    key_text = identity.key_text(tuple(key))
    if INTERCEPTION.chooser is None:
        return CHOICES.recall(name, key_text, options)
    choose: Callable[..., T] = INTERCEPTION.chooser
    return choose(name, tuple(key), key_text, dict(zip(texts, options, strict=True)))


def _text(name: str, option: Any) -> str:
    try:
        return json.dumps(option, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidOption(
            f"tunable({name!r}): option {option!r} is not JSON-representable ({error})"
        ) from None
