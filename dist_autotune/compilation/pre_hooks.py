"""What a config's `pre_hook` makes of a launch's arguments, found out without calling it in this process.

The hooks of a context run one after another in a forked child, each on stand-ins of its own, and without a
file or a socket: what they count, log or zero is gone with the child. The child tells what they changed; this
process makes the same changes to copies, and compiles for those and for the tensors themselves.

What a hook raises on stand-ins says nothing about the launch, OutOfResources and its like included: only a
launch's own hook bans a config. A hook that ends well has seen no stand-in differ from the original, so what
the compiler says of the outcome holds, if the hook does the same for the same arguments every time, in any
process.
"""

from __future__ import annotations

import base64
import json
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from triton.runtime.autotuner import Autotuner

from ..formatting import counted
from ..triton_api import interception
from .process import CompilerChild, Ending
from .stand_ins import StandIns, exchanged, holders, with_changes

LIMIT_S = 20.0  # for all hooks of a context; they take milliseconds
REASON_CHARACTERS = 200
_POLL_S = 1e-3
_OF_A_HOOK = {  # instead of what is said of a compiler
    "the compiler ended its process": "it ended the process",
    "the compiler was": "it was",
    "the compiler's process": "its process",
    "did not compile": "it did not end",
}

Launch = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


@dataclass(frozen=True)
class Rehearsal:
    """What the hooks of some configs would do."""

    launches: Mapping[str, Launch] = field(default_factory=dict)  # as the hook leaves them, by digest
    left_out: Mapping[str, str] = field(default_factory=dict)  # why that is not known, by digest

    @property
    def remark(self) -> str:
        """Say what is left out; empty: nothing."""
        if not self.left_out:
            return ""
        why = next(iter(self.left_out.values()))
        candidates = counted(len(self.left_out), "candidate")
        return f"{candidates} left to the first launch, not knowing what pre_hook does: {why}"


def rehearse(
    tuner: Autotuner,
    configs: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit_s: float,
) -> Rehearsal:
    """Find out what the hooks of `configs` do to a launch; `limit_s` is the longest that may take.

    The tensors of `Rehearsal.launches` are those of the launch; nothing that is the caller's is changed.
    """
    if not configs:
        return Rehearsal()
    told, why_none = _told_by_child(tuner, configs, args, kwargs, min(limit_s, LIMIT_S))
    old = holders(args, kwargs)
    launches: dict[str, Launch] = {}
    left_out: dict[str, str] = {}
    for digest in configs:
        pickled, reason = told.get(digest, ("", why_none))
        if not pickled:
            left_out[digest] = reason
            continue
        new = with_changes(old, pickle.loads(base64.b64decode(pickled)))
        launches[digest] = exchanged(args, new), {name: exchanged(v, new) for name, v in kwargs.items()}
    return Rehearsal(launches, left_out)


def _told_by_child(
    tuner: Autotuner,
    configs: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    limit_s: float,
) -> tuple[dict[str, tuple[str, str]], str]:
    """Return by digest the pickled changes or the reason why there are none; and why digests are missing."""
    if limit_s <= 0:
        return {}, "no child may be started"
    try:
        child = CompilerChild(lambda: _rehearse_all(tuner, configs, args, kwargs), limit_s, is_cut_off=True)
    except OSError as error:
        return {}, f"no child ({error.strerror})"
    try:
        while (ending := child.poll()) is None:
            time.sleep(_POLL_S)
    finally:
        child.close()
    if ending.result:
        return {digest: tuple(told) for digest, told in json.loads(ending.result).items()}, ""
    return {}, _why_silent(ending)


def _why_silent(ending: Ending) -> str:
    reason = ending.reason or "it told nothing"
    for words, of_a_hook in _OF_A_HOOK.items():
        reason = reason.replace(words, of_a_hook)
    return reason


# ---- in the child


def _rehearse_all(
    tuner: Autotuner, configs: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    told = {digest: _rehearse_one(tuner, config, args, kwargs) for digest, config in configs.items()}
    return json.dumps(told)


def _rehearse_one(
    tuner: Autotuner, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, str]:
    try:
        stand_ins = StandIns(args, kwargs)
        config.pre_hook(interception.hook_arguments(tuner, config, stand_ins.args, stand_ins.kwargs))
        pickled = stand_ins.changes()
        pickle.loads(pickled)  # what fails here would fail in the rank
    except BaseException as error:  # SystemExit too: the next hook is to have its turn
        return "", f"{type(error).__name__}: {error}".partition("\n")[0][:REASON_CHARACTERS]
    return base64.b64encode(pickled).decode(), ""
