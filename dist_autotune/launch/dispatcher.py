"""Launches kernels with the config planned for the run under way; `fast_path` launches settled ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..compilation import preflight
from ..compilation.compiler import Compiler
from ..compilation.config_failures import config_failure, is_out_of_memory
from ..formatting import config_label
from ..search.messages import MIXED
from ..storage.crash_guard import CrashGuard
from ..timing.clock import Clock
from ..triton_api import footprint, identity, interception
from ..triton_api.footprint import RecordedGrid
from ..triton_api.launch import Key, Launch, kernel_of, load_kernel
from .fast_path import CallUnderWay, Settled
from .incumbents import launch_first_working
from .rank_context import NONE_FAILED, Binding, RankContext, Stage
from .registry import Registry
from .results import Results
from .tunable import CHOICES, KnownChoices, Ranks, option_texts
from .written_tensors import WrittenTensors

NO_CONFIG_OF_LAUNCH = "it is none of the configs that this launch may have"


class Dispatcher:
    """Launches the kernels of one tuned function on this rank, from any thread.

    compiling: entered while this rank compiles, so that its peers wait on. note: writes a line of the log.
    written: copies the tensors that launches change.
    """

    def __init__(
        self,
        registry: Registry,
        clock: Clock,
        guard: CrashGuard,
        compiling: Callable[[], AbstractContextManager[None]],
        note: Callable[[str], None],
        written: WrittenTensors,
    ) -> None:
        # Of a session: from `begin_run` until `Session` has applied its report, or it has failed.
        self.run_under_way: CallUnderWay | None = None
        self._last_run: CallUnderWay | None = None
        self.function = registry.known.function
        # One rank leaves a kernel with one config to stock Triton: no peer can have more.
        self.passes_single = self.function.is_alone
        self._model = CallUnderWay(self, tunes=False)  # settled calls are copies of it
        self._model_apart: CallUnderWay | None = None  # runs apart, which have one plan, are copies of it
        # What runs of a session launch at once: keys of which they report nothing; all keys of runs apart.
        self._fixed: Settled = {}
        self._fixed_apart: Settled = {}
        # By context and form, a launch to compile candidates for; dropped at the end of the run.
        self.to_preflight: dict[RankContext, dict[Any, tuple[Binding, Launch]]] = {}
        self.announced: dict[str, None] = {}  # lines about operations of the runs, each once
        self._failed: dict[tuple[str, str], str] = {}  # settled launches: (context, candidate) -> reason
        self._known_choices = KnownChoices()
        self._registry, self._clock, self._guard = registry, clock, guard
        self._compiling, self._note, self._written = compiling, note, written
        self._results = Results(registry.known)
        self._lock = registry.lock

    # -- the launch ----------------------------------------------------------------------------------------

    def launch(self, call: CallUnderWay, launch: Launch, failed: Mapping[str, str] = NONE_FAILED) -> Any:
        """Launch the kernel once, as `Autotuner.run` would, with the config that this run plans for it.

        failed: candidates that have failed in this launch, with reasons.
        """
        if launch.kwargs.get("warmup"):
            binding = self._known_binding(launch)
            return launch.run(binding.configs[binding.rank_context.stand_in(binding.configs)])
        if call.repeats:
            return self._repeat(call, launch)
        if self._takes_incumbents(call) or interception.is_async_compiling():
            return self._launch_incumbent(call, launch, failed)
        binding = self._binding(call, launch)
        call.keep(launch)
        candidate = self._candidate(call, binding, failed)
        while True:
            self._check_tuned(binding.rank_context, candidate)
            config = binding.configs[candidate]
            try:
                result = self._launch(call, launch, binding, candidate)
                self._keep_form(call, launch, binding, result)
                if not failed and self._is_fixed(call, binding.rank_context, candidate):
                    call.add(launch.tuner, binding.key, config)
                if (order := binding.rank_context.order) is not None:
                    self._results.add_late(order, binding)
                return result
            except Exception as error:
                if not (found := self.failure(call, launch, config, error)):
                    raise
                failed = {**failed, **found}
            candidate = binding.rank_context.chosen(binding, failed)

    def choose(self, call: CallUnderWay, name: str, options: Sequence[Any], key: Key, among: Ranks) -> Any:
        """Return the option that this run plans for a `tunable`; `among`: the ranks that share it."""
        if among and not {*among} <= {*self.function.group.ranks}:
            return CHOICES.recall(name, options, key, among)
        is_of_session = self.run_under_way is call
        known = None if is_of_session else self._known_choices.find(name, options, key, among)
        if known is not None:
            return options[known]
        texts = option_texts(name, options)
        with self._lock:
            context = self._registry.choice(name, key, options, texts, is_joint=bool(among))
        takes_incumbent = self._takes_incumbents(call) and not call.repeats
        candidate = context.stand_in() if takes_incumbent else self._candidate(call, context.bindings[0])
        self._check_tuned(context, candidate)
        place = texts.places[candidate]
        if not takes_incumbent:
            context.run.ran[candidate] = None
            context.run.count += 1
            if self._is_settled(call, context) and not is_of_session:
                self._known_choices.add(name, options, key, among, place)
        return options[place]  # of this call: an earlier one may have given equal ones of other types

    def _is_beside_session(self, call: CallUnderWay) -> bool:
        """Return whether another thread is tuning; then this call registers no new contexts."""
        return self.run_under_way is not None and self.run_under_way is not call

    def _takes_incumbents(self, call: CallUnderWay) -> bool:
        """Return whether launches of this call take incumbents now and admit no context."""
        return self._is_beside_session(call) or interception.is_capturing()

    def _is_fixed(self, call: CallUnderWay, context: RankContext, candidate: str) -> bool:
        """Return whether further launches of this call take this candidate, and report nothing."""
        if not (call.is_of_session and self.function.options.mode == "online"):
            return self._is_settled(call, context)
        # Online nothing is copied before a launch. A capture takes the incumbent, whatever the run compares.
        order, is_apart = context.order, not call.tunes and self._model_apart is not None
        # Another candidate stands in, or the launch of a thread has lasted beyond the run that planned it.
        if order is None or not order.planned == order.incumbent == order.index_of(candidate):
            return False
        if order.next_launch.waiting:  # for the time of an earlier run
            return is_apart or not context.is_to_preflight
        return is_apart or (context.stage is Stage.SETTLED and order.result.is_final)

    def _is_settled(self, call: CallUnderWay, context: RankContext) -> bool:
        """Return whether later calls take the same config, from the fast path."""
        return not call.tunes and (context.stage is Stage.SETTLED or not self.function.tunes)

    def _candidate(
        self, call: CallUnderWay, binding: Binding, failed: Mapping[str, str] = NONE_FAILED
    ) -> str:
        context = binding.rank_context
        candidate = context.chosen(binding, failed)
        if not call.tunes and context.stage is not Stage.SETTLED:
            with self._lock:  # other threads may launch in this call
                call.new = call.new or set()
                call.new.add(context)
        return candidate

    def _launch(self, call: CallUnderWay, launch: Launch, binding: Binding, candidate: str) -> Any:
        context, config = binding.rank_context, binding.configs[candidate]
        run = context.run  # read once: a session of another thread may begin one meanwhile
        is_trial = call.tunes and run.count == 0 and context.tries(candidate)
        is_later = candidate == context.later_candidate  # no part of the trial
        with self._guard.launching(context.name, candidate) if is_trial else contextlib.nullcontext():
            launch.run_pre_hook(config)
            loaded = self._ensure_loaded(call, launch, binding, candidate) if call.tunes else None
            if call.tunes and context.measures and not is_later:
                grid = RecordedGrid(launch.kwargs.get("grid"))
                if callable(launch.kwargs.get("grid")):
                    launch = Launch(launch.tuner, launch.args, {**launch.kwargs, "grid": grid})
                mark = context.samples.start()
                result = launch.run(config)
                context.samples.stop(mark)
                self._keep_share(context, candidate, grid.programs, kernel_of(result))
                state = context.compile
                if loaded is not None and kernel_of(result) not in (None, loaded) and not state.is_varied:
                    state.is_varied = True
                    run.ran[MIXED] = None  # the interval may hold a compilation: the run does not count
            else:
                result = launch.run(config)
            if not is_later:
                run.ran[candidate] = None
            run.count += 1
        return result

    @staticmethod
    def _keep_share(context: RankContext, candidate: str, programs: int, kernel: Any) -> None:
        """Keep the share of the device that a launch of a compiled kernel takes."""
        if kernel is None or (device := preflight.current_device()) < 0:
            return
        share = footprint.share(programs, kernel, footprint.device_properties(device))
        context.shares[candidate] = max(context.shares.get(candidate, 0), share)

    def _ensure_loaded(self, call: CallUnderWay, launch: Launch, binding: Binding, candidate: str) -> Any:
        """Compile and load a candidate before its first launch, so that no timed interval holds that.

        Return the kernel that is expected to run; None under the interpreter.
        """
        device, context = preflight.current_device(), binding.rank_context
        loaded = binding.loaded.get((candidate, device))
        if device < 0 or (loaded is not None and not context.checks_form):
            return loaded
        call.is_compiling = True
        try:
            with self._compiling():
                kernel = launch.compile(binding.configs[candidate])
                load_kernel(kernel)
        finally:
            call.is_compiling = False
        context.compile.is_varied |= loaded is not None and kernel is not loaded
        binding.loaded[candidate, device] = kernel
        return kernel

    def _keep_form(self, call: CallUnderWay, launch: Launch, binding: Binding, result: Any) -> None:
        """Keep a launch until the end of the run if candidates must be compiled for its form."""
        context = binding.rank_context
        is_wanted = call.tunes and context.is_to_preflight and not interception.is_interpreted()
        if is_wanted and context.compile.keep_form(form := kernel_of(result)):
            self.to_preflight.setdefault(context, {})[form] = binding, launch

    def failure(self, call: CallUnderWay, launch: Launch, config: Any, error: Exception) -> dict[str, str]:
        """Return {candidate: reason} for a launch that failed; {}: the error is the user's.

        In a run of a session the candidate is banned, and the run's report tells the peers. In a settled call
        it is not: the agreed config stays, and another one replaces it in this launch alone.
        """
        reason = config_failure(error, launch.kwargs.get("grid"), config.pre_hook)
        context = self._binding(call, launch).rank_context
        candidate = identity.config_digest(config)
        if reason is None or candidate not in context.texts:
            return {}
        call.settled.clear()
        with self._lock:  # threads may launch it at once; its replacement has not failed
            if not call.tunes or (context.stage is Stage.SETTLED and is_out_of_memory(error)):
                if self._failed.setdefault((context.name, candidate), reason) is reason:  # the first one
                    what = f"{context.title}: {config_label(context.texts[candidate])}"
                    self._note(f"{what} failed in a settled launch, another stands in: {reason}")
            else:
                context.bans.setdefault(candidate, reason)
                if context.run.choice in (candidate, None):
                    context.run.choice = context.stand_in()
        return {candidate: reason}

    def _repeat(self, call: CallUnderWay, launch: Launch) -> Any:
        """Launch the config of the last run again; where it fails now, ban it and launch another one."""
        binding, failed = self._known_binding(launch), dict[str, str]()
        while True:
            context = binding.rank_context
            config = binding.configs[context.chosen(binding, {**context.bans, **failed})]
            try:
                launch.run_pre_hook(config)
                return launch.run(config)
            except Exception as error:
                if not (found := self.failure(call, launch, config, error)):
                    raise
                failed |= found

    def _launch_incumbent(self, call: CallUnderWay, launch: Launch, failed: Mapping[str, str]) -> Any:
        """Launch the incumbent without admitting a context; another config where it fails, in this launch."""
        binding = self._known_binding(launch)
        if not interception.is_capturing():
            call.keep(launch)

        def choose(failed: Mapping[str, str]) -> Any:
            candidate = binding.rank_context.stand_in(binding.configs, failed)
            self._check_tuned(binding.rank_context, candidate)
            return binding.configs[candidate]

        return launch_first_working(launch, choose, failed)

    def _known_binding(self, launch: Launch) -> Binding:
        """Return the binding of a launch; a new one is not admitted."""
        if (binding := self._registry.find(launch)) is not None:
            return binding
        with self._lock:  # `Launch.candidates` sets the Autotuner's `nargs`
            return self._registry.binding_of(launch)

    def _check_tuned(self, context: RankContext, candidate: str) -> None:
        """Raise NotTuned in the strict mode unless the candidate is the tuned one."""
        if self.function.is_strict and candidate != (winner := context.tuned):
            about, kernel_id = context.identity, self._registry.names.alias(context.identity.kernel)
            failed = self._failed.get((context.name, winner or ""), NO_CONFIG_OF_LAUNCH)
            failure = context.bans.get(winner or "", failed)
            raise self._registry.known.not_tuned(about, kernel_id, winner or "", failure)

    def _binding(self, call: CallUnderWay, launch: Launch) -> Binding:
        """Return the binding of a launch; admit a new one."""
        if (binding := self._registry.find(launch)) is not None:
            self._registry.names.keep(launch.tuner)
            return binding
        with self._lock:
            if (binding := self._registry.find(launch)) is None:
                if self._is_beside_session(call):  # it has begun a run meanwhile
                    return self._registry.binding_of(launch)
                for known in call.launched():
                    self._registry.names.keep(known)
                binding = self._registry.admit(launch)
            return binding

    # -- one run -------------------------------------------------------------------------------------------

    def settled_call(self) -> CallUnderWay:
        """Return a call without trials; see [Note: settled calls take no lock]."""
        names = self._registry.names
        if self.run_under_way is None and self._registry.has_news:
            with self._lock:
                if self.run_under_way is None:  # no session has begun one meanwhile
                    self._begin_anew()
        names.begin_run()
        return self._model.another()

    def report_all(self) -> None:
        """Let the session's next run choose and report all that it launches."""
        self._fixed, self._fixed_apart, self._model_apart = {}, {}, None

    def choose_anew(self, names: Iterable[str]) -> None:
        """Let the session's next runs choose the configs of these contexts anew."""
        for name in names:
            context = self._registry.by_name.get(name)
            for binding in [] if context is None else context.bindings:
                for fixed in (self._fixed, self._fixed_apart):
                    if (known := fixed.get(id(binding.tuner()))) is not None:
                        known.by_key.pop(binding.key, None)

    def begin_run(self, *, tunes: bool, reports_all: bool = False) -> CallUnderWay:
        """Begin a run of a session. tunes: launches may be trials. reports_all: also of settled keys."""
        self._registry.names.begin_run()
        with self._lock:
            self._begin_anew()
            self._model_apart = None
            self._registry.has_news = True  # to the settled call after it
            call = CallUnderWay(self, tunes=tunes, written=self._written)
            self.run_under_way = self._last_run = call
            call.announced = self.announced
            call.settled = {} if reports_all else self._fixed
        if tunes and hasattr(self._clock, "prepare"):  # of `EventClock`: before a kernel may wait for a peer
            self._clock.prepare()
        return call

    def begin_apart(self) -> CallUnderWay:
        """Begin a run without a trial: kernels that earlier ones launched are launched at once."""
        if self._model_apart is None:
            self.begin_run(tunes=False)
            self._model_apart = CallUnderWay(self, tunes=False, written=self._written)
            self._model_apart.settled = self._fixed_apart
        self._registry.names.begin_run()
        self.run_under_way = self._last_run = call = self._model_apart.another()
        call.announced = self.announced
        return call

    def launched(self) -> list[str]:
        """Return the launches of the last run, see `Registry.launched`; else what it launched at once."""
        at_once = [] if self._last_run is None else self._last_run.launched()
        names = dict.fromkeys(f"{tuner.base_fn.__name__} with a settled config" for tuner in at_once)
        return self._registry.launched() or [*names]

    def _begin_anew(self) -> None:
        """Reset the choices of all contexts; settled calls under way keep theirs."""
        self._model = CallUnderWay(self, tunes=False)
        self._known_choices.clear()
        self._registry.begin_run()

    def abandon_run(self) -> None:
        """Drop the measurements of the run under way: it raised."""
        for context, launches in self.to_preflight.items():
            context.compile.forms = context.compile.forms.difference(launches)
        self.to_preflight.clear()
        self.report_all()  # the peers may not know what this run has launched first
        self._registry.abandon_run()

    def preflight(self, compiler: Compiler) -> None:
        """Let `compiler` compile the candidates that contexts may try next, for the run's forms of launch.

        A form that comes while others are compiled needs the same candidates as they.
        """
        launches, self.to_preflight = self.to_preflight, {}
        for context, by_form in launches.items():
            state = context.compile
            wanted = {*state.asked} if state.left else context.wanted_candidates
            for binding, launch in by_form.values():
                if configs := {c: config for c, config in binding.configs.items() if c in wanted}:
                    compiler.want(context, launch, configs)
            state.asked = state.asked.union(wanted, filter(None, [context.run.choice]))
