"""`tunable`: a choice that the host makes, tuned like a config and judged by the time of the whole run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from ..codec import digest
from ..errors import InvalidOption
from ..formatting import escaped
from ..ranks.group import ranks_of
from ..triton_api import identity
from ..triton_api.interception import INTERCEPTION

T = TypeVar("T")
Ranks: TypeAlias = tuple[int, ...]  # global ranks that take the same option; (): each takes its own
MOST_KNOWN = 4096  # choices found without their texts: a program may give other keys or options in each call


class KnownChoices:
    """Settled choices, looked up by their options without making text of these: in less than 1 us."""

    state: ClassVar[object] = object()  # replaced whenever any instance misses a choice or drops some

    def __init__(self) -> None:
        self._places: dict[Any, int] = {}

    def find(self, name: str, options: Sequence[Any], key: tuple[Any, ...], among: Ranks) -> int | None:
        """Return the place of the settled option; None: not known."""
        try:
            return self._places[name, key, among, *_told_apart(options)]
        except (KeyError, TypeError):  # new, or options or a key that cannot be hashed
            KnownChoices.state = object()
            return None

    def add(self, name: str, options: Sequence[Any], key: tuple[Any, ...], among: Ranks, place: int) -> None:
        if len(self._places) >= MOST_KNOWN:
            self.clear()
        with contextlib.suppress(TypeError):
            self._places[name, key, among, *_told_apart(options)] = place

    def clear(self) -> None:
        self._places.clear()
        KnownChoices.state = object()


def _told_apart(options: Sequence[Any]) -> tuple[Any, ...]:
    """Return the options as a key, with their types: 1, 1.0 and True are equal, but different options."""
    return tuple(options), tuple(map(type, options))


@dataclass(frozen=True)
class OptionTexts:
    """The options of a `tunable` as ranks and caches know them."""

    texts: Mapping[str, str]  # by digest, in order
    places: Mapping[str, int]  # among the options, by digest
    set_digest: str  # of all of them, in any order


class Choices:
    """Settled choices of this process, for calls of `tunable` outside a tuned function."""

    def __init__(self) -> None:
        # By name and key, then by the ranks that took it and all options then, by digest; the last one last.
        self._settled: dict[tuple[str, str], dict[tuple[Ranks, frozenset[str]], str]] = {}
        self._known = KnownChoices()

    def remember(
        self,
        name: str,
        key_text: str,
        option: str,
        agreed_by: Ranks,
        *,
        among: Iterable[str] = (),
        replaces: bool = True,
    ) -> None:
        """Keep the digest of a settled option. among: the digests of all options.

        agreed_by: the ranks that took it together; (): one rank chose for itself.
        replaces: also where another option is kept.
        """
        settled, place = self._settled.setdefault((name, key_text), {}), (agreed_by, frozenset(among))
        if place in settled and not replaces:
            return
        settled.pop(place, None)
        settled[place] = option
        self._known.clear()

    def recall(self, name: str, options: Sequence[T], key: tuple[Any, ...], among: Ranks) -> T:
        """Return the option that all of `among` settled last, of these options if they have, or the first."""
        if (place := self._known.find(name, options, key, among)) is None:
            places = option_texts(name, options).places
            text = identity.key_text(key, f"tunable({name!r})")
            settled = self._settled.get((name, text), {}).items()
            usable = [
                (options_then == places.keys(), number, own)
                for number, ((ranks, options_then), own) in enumerate(settled)
                if bool(ranks) == bool(among) and {*among} <= {*ranks}
            ]
            place = places.get(max(usable)[-1], 0) if usable else 0
            self._known.add(name, options, key, among, place)
        return options[place]


CHOICES = Choices()


def tunable(name: str, options: Sequence[T], *, key: tuple[Any, ...] = (), among: Any = None) -> T:
    """Return one of `options` for this run of the tuned function around it.

    Each (name, key) is a context like a kernel with its key; it is tuned after the kernels, by the time
    of the whole run. Outside a tuned function: the settled choice for that key, or the first option.

    among: a process group whose ranks must all take the same option in the same call, as for a choice of how
    they communicate; name, options and key are equal on them. It is tuned only where is_dist=True agrees
    with all of them. Elsewhere they get the option that they settled together, or the first one.

    Raises InvalidOption without a name or options, for an option that JSON cannot represent, and on a rank
    that is no member of `among`.
    """
    if not (isinstance(name, str) and name):
        raise InvalidOption(f"tunable({name!r}): give its name, a string, before the options")
    if not isinstance(key, (tuple, list)):
        raise InvalidOption(f"tunable({name!r}): key={key!r}: give a tuple")
    call, ranks = INTERCEPTION.call_here(), () if among is None else ranks_of(among)
    asked = name if name.isascii() else escaped(name), options, tuple(key), ranks
    option: T = CHOICES.recall(*asked) if call is None else call.launcher.choose(call, *asked)
    return option


class CachedChoice(Generic[T]):
    """Caches the result of a function that calls `tunable`, until an answer of `tunable` may have changed.

    choose: the function; it asks for the same names, options and keys in each call.
    """

    def __init__(self, choose: Callable[[], T]) -> None:
        self._choose = choose
        # `KnownChoices.state` when it was made, who answered, and what the function made of it.
        self._kept: tuple[object, Any, Any] = (None, None, None)

    def __call__(self) -> T:
        call = INTERCEPTION.call_here() if INTERCEPTION.calls else None
        if call is not None and call.is_of_session:
            return self._choose()
        answers, state = CHOICES.recall if call is None else call.launcher.choose, KnownChoices.state
        kept_at, kept_of, kept = self._kept
        if kept_at is state and kept_of == answers:
            made: T = kept
            return made
        made = self._choose()
        if KnownChoices.state is state:
            self._kept = state, answers, made
        return made


def option_texts(name: str, options: Sequence[Any]) -> OptionTexts:
    """Return the options of a `tunable` as text; raises InvalidOption."""
    if isinstance(options, str) or not isinstance(options, Sequence) or not options:
        raise InvalidOption(f"tunable({name!r}): options={options!r}: give a list of at least one option")
    places: dict[str, int] = {}  # by text
    for place, option in enumerate(options):
        try:
            places.setdefault(json.dumps(option, sort_keys=True, allow_nan=False), place)
        except (TypeError, ValueError) as error:
            raise InvalidOption(
                f"tunable({name!r}): option {option!r} is not JSON-representable ({error})"
            ) from None
    texts = {digest(text): text for text in places}
    by_digest = {each: places[text] for each, text in texts.items()}
    return OptionTexts(texts, by_digest, digest("\n".join(sorted(places))))
