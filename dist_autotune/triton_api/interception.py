"""The calls of tuned functions that are under way, and the dispatcher that launches for them."""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any, Final, TypeAlias

import torch
from triton import knobs
from triton.backends import backends
from triton.runtime import _async_compile
from triton.runtime.autotuner import Autotuner

from .launch import Key

_IS_CAPTURING = torch.cuda.is_current_stream_capturing
_IN_TLS = "dist_autotune"  # torch gives what is stashed under it to the threads of a thread's autograd

Run: TypeAlias = Callable[..., Any]  # an `Autotuner.run`


SESSION: Final = "session"  # threads without a call of their own launch for its run
PROGRAM: Final = "program"  # without a session, they launch for the program that is tuned as a whole


class Interception:
    """The calls under way: at most one session, one program, and any number of settled calls.

    A call stands under the thread that makes it, which alone writes there: no lock.
    """

    def __init__(self) -> None:
        self.session_lock = threading.RLock()  # of the session that has the turn: see `turn.session_turn`
        self.calls: dict[int | str, Any] = {}  # `CallUnderWay` by thread, and under SESSION and PROGRAM
        self._is_installed = False
        self._looked_at: object = None  # what stood at `Autotuner.run` the last time

    # -- the dispatcher ------------------------------------------------------------------------------------

    def install(self, make: Callable[[Run], Run]) -> None:
        """Replace `Autotuner.run` by a dispatcher, once; wrappers that others put around it later stay.

        It is put there again where somebody has restored stock Triton's function, or replaced it by one that
        leads past the dispatcher. make: given the function that stands there, returns the dispatcher.
        """
        top = Autotuner.__dict__["run"]
        if top is self._looked_at:
            return
        if not self._is_installed or _leads_to_dispatcher(top) is False:
            _watch_forks()
            top = make(top)
            top.is_dispatcher = True  # type: ignore[attr-defined]
            Autotuner.run = top
        self._is_installed, self._looked_at = True, top

    # -- whose launch it is --------------------------------------------------------------------------------

    def call_here(self) -> Any:
        """Return the call that this thread launches for; None: it is in none."""
        return self.calls.get(get_ident()) or self.call_of_others()

    def call_of_others(self) -> Any:
        """Return the call that a thread without one of its own launches for; None: none.

        Autograd's threads launch for the call that waits for them, other threads for the run of the session
        under way, else for the program.
        """
        calls = self.calls
        return (calls and (self._call_of_caller() or calls.get(SESSION) or calls.get(PROGRAM))) or None

    def _call_of_caller(self) -> Any:
        """Return the call of the thread that autograd runs on this one for."""
        if torch._C._current_graph_task_id() == -1 or not torch._C._is_key_in_tls(_IN_TLS):
            return None
        return self.calls.get(torch._C._get_obj_in_tls(_IN_TLS))

    def call_around(self) -> Any:
        """Return the call that this thread is in, or that autograd runs on it for; None: it is in none."""
        return (self.calls and (self.calls.get(get_ident()) or self._call_of_caller())) or None

    def is_within(self) -> bool:
        """Return whether this thread is in a call, or autograd runs on it for one."""
        return self.call_around() is not None

    # -- a session's run -----------------------------------------------------------------------------------

    def entered(self, call: Any, *, as_program: bool) -> _Entered:
        """Make a `with` block a run of the session, or of the program."""
        return _Entered(self.calls, call, (PROGRAM,) if as_program else (SESSION, get_ident()))

    def standing_by(self, bystander: Any) -> _Entered:
        """Let it launch for this thread in a `with` block, in which no run is under way."""
        return _Entered(self.calls, bystander, (get_ident(),))

    def restore(self) -> None:
        """Remove the calls of a session's run that a Ctrl-C may have left."""
        if (call := self.calls.get(SESSION)) is not None:
            # The session's own entry is the first to come and the last to go: it tells of the others.
            for key in [key for key, each in self.calls.copy().items() if each is call and key != SESSION]:
                self.calls.pop(key, None)
            self.calls.pop(SESSION, None)


class _Entered:
    # A class: the end of a generator could come when another call is under way.
    def __init__(self, calls: dict[int | str, Any], call: Any, keys: tuple[int | str, ...]) -> None:
        self._calls, self._call, self._keys = calls, call, keys
        self._before = calls.get(keys[-1])  # what launches for the thread between runs
        for key in keys:
            calls[key] = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        for key in reversed(self._keys):
            if self._calls.get(key) is self._call:
                if key == get_ident() and self._before is not None:
                    self._calls[key] = self._before
                else:
                    del self._calls[key]


INTERCEPTION = Interception()
_OF_THREAD = threading.local()


class _Stashed:
    """An object that torch holds for a thread, until the thread's last Python code takes it back.

    Left to torch it would be freed after `join()`, by a thread that waits for the GIL: a process that ends
    meanwhile aborts ("terminate called without an active exception").
    """

    _remove: Callable[[str], None] | None = None

    def __init__(self) -> None:
        name = get_ident()
        # torch 2.11 keeps the object without counting it, and would read freed memory. An int a thread stays.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(name))
        torch._C._stash_obj_in_tls(_IN_TLS, name)
        # When the interpreter ends, this may outlive the globals, and be deleted by another thread.
        self._key, self._thread, self._here = _IN_TLS, name, get_ident
        self._remove = getattr(torch._C, "_remove_obj_from_tls", None)

    def __del__(self) -> None:
        if self._remove is not None and self._here() == self._thread:
            self._remove(self._key)


def propagate_to_autograd() -> None:
    """Let autograd's threads find the calls of this thread."""
    if not hasattr(_OF_THREAD, "stashed"):
        _OF_THREAD.stashed = _Stashed()


_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()


def fork_safe_lock() -> Any:
    """Return an RLock that a forked child finds free, whichever thread of its parent holds it."""
    _watch_forks()
    _LOCKS.add(lock := threading.RLock())
    return lock


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    INTERCEPTION.calls.clear()
    INTERCEPTION.session_lock = threading.RLock()
    for lock in _LOCKS:
        lock._at_fork_reinit()


def _leads_to_dispatcher(run: Any, depth: int = 4) -> bool | None:
    """Return whether a function ends up in a dispatcher; False: past it, in stock Triton; None: not known.

    Follows its wrapped function, its closure, its defaults and the globals that it names.
    """
    if getattr(run, "is_dispatcher", False):
        return True
    if getattr(getattr(run, "__code__", None), "co_filename", "") == inspect.getsourcefile(Autotuner):
        return False
    found = {_leads_to_dispatcher(each, depth - 1) for each in _referred_to(run)} if depth else set()
    return True if True in found else False if False in found else None


def _referred_to(run: Any) -> Iterator[Any]:
    run = getattr(run, "func", run)  # of a partial
    if (wrapped := getattr(run, "__wrapped__", None)) is not None:
        yield wrapped
    if isinstance(run, types.FunctionType):
        cells = [cell.cell_contents for cell in run.__closure__ or () if cell != types.CellType()]
        named = [run.__globals__.get(name) for name in run.__code__.co_names]
        values = (*cells, *(run.__defaults__ or ()), *named)
        yield from (value for value in values if isinstance(value, types.FunctionType))


def is_tuning() -> bool:
    """Return whether a launch may be a trial now: fast launch paths are for False only."""
    if not INTERCEPTION.calls:
        return False
    call = INTERCEPTION.call_here()
    return call is not None and bool(call.tunes)


def settled_config(tuner: Autotuner, key: Key) -> Any:
    """Return the config that a launch of this key takes now without a search; None: the tuner is to be asked.

    In a call of a tuned function it is that function's settled config, elsewhere that in `Autotuner.cache`,
    which one of several functions has left there.
    """
    call = INTERCEPTION.call_here() if INTERCEPTION.calls else None
    if call is None:
        return tuner.configs[0] if len(tuner.configs) == 1 else tuner.cache.get(key)
    known = call.settled.get(id(tuner))  # without keys that are on trial
    if known is None or (known.configs and known.configs != tuner.configs):
        return None
    config, _ = known.only or known.by_key.get(key, (None, None))
    return config


def has_driver() -> bool:
    """Return whether Triton finds a GPU, without which stock benchmarking raises."""
    return any(backend.driver.is_active() for backend in backends.values())


def is_interpreted() -> bool:
    return bool(knobs.runtime.interpret)


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_capturing() -> bool:
    """Return whether the current stream is being captured into a CUDA graph."""
    predicate = torch.cuda.is_current_stream_capturing
    # Torch's own raises where there is no CUDA; another one, put there to pretend a capture, is believed.
    return (predicate is not _IS_CAPTURING or torch.cuda.is_initialized()) and predicate()


def is_async_compiling() -> bool:
    return _async_compile.active_mode.get() is not None
