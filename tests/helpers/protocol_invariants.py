"""What must hold at every exchange and after every call, whatever the ranks of a random program do.

`Witness` looks on at each exchange, when all ranks have posted and none has gone on; `check_endings`
compares how the calls ended.
"""

from collections import Counter

from random_programs import Kernel, Program, having, true_winner, viable_blocks
from triton.runtime.errors import OutOfResources
from virtual_ranks import Gone, VirtualAgreement
from virtual_tuners import FUNCTIONS, Boom, Ending, VirtualRank

from dist_autotune.errors import AgreementTimeout, NoValidConfig, PeerFailed, RankMismatch, TuningError
from dist_autotune.search.budget import RUNS_ALLOWED, SearchedContexts
from dist_autotune.search.messages import InPlaceReport, Opening, RunReport, decode
from dist_autotune.search.orders import ContextOrder
from dist_autotune.search.reports import values_of
from dist_autotune.search.search import SESSION_STATE
from dist_autotune.search.state import ADMISSION_RUNS


class Witness:
    """Checks what has been published and how many runs were made, at each exchange; counts what it sees."""

    def __init__(self, program: Program, counts: Counter[str]) -> None:
        self.program = program
        self.counts = counts
        self.ranks: list[VirtualRank] = []
        self._statuses: dict[str, str] = {}
        self._runs_at_open: list[int] = []

    def look(self, sequence: int, payloads: list[bytes], agreements: list[VirtualAgreement]) -> None:
        if not all(data[:1] > b"\x80" for data in payloads):
            return  # no report: whether something was changed in place, or which call asks
        told = [decode(data) for data in payloads]
        kinds = {type(payload) for payload in told}
        self.counts["exchanges"] += 1
        self.counts["sessions"] += kinds == {Opening}
        self.counts["runs"] += kinds == {RunReport}
        if all(payload.facts.get("retune") != "True" for payload in told):  # or all start anew
            self._check_states()
        if kinds == {InPlaceReport}:
            return
        if kinds == {Opening} and SESSION_STATE not in told[0].facts:
            self.counts["captures"] += 1  # of a run that replays judge
            return
        if kinds == {Opening}:
            states = set(values_of(dict(enumerate(told)), SESSION_STATE))
            goes_on = len(states) == 1 and states != {""}  # with the session that a failed run has left
            self._runs_at_open = [rank.runs - self._known_runs(rank) * goes_on for rank in self.ranks]
        if kinds == {RunReport}:
            self._check_runs()

    @staticmethod
    def _known_runs(rank: VirtualRank) -> int:
        return 0 if rank.state is None else rank.state.orders.runs

    # -- the state -----------------------------------------------------------------------------------------

    def _check_states(self) -> None:
        """Check what the deciding rank has published: the others apply the same orders."""
        assert self.ranks[0].state is not None
        contexts = self.ranks[0].state.orders.contexts
        for context in contexts.values():
            self._check_context(context)
        self._statuses = {name: context.status for name, context in contexts.items()}

    def _check_context(self, context: ContextOrder) -> None:
        usable = set(range(len(context.digests))) - context.banned.keys()
        assert usable, "a context goes on without a candidate"
        standing = context.result
        for what, index in (("winner", standing.winner), ("planned", context.planned)):
            assert index in usable or index < 0, f"{what} of {context.title} is banned"
        assert context.incumbent in usable, f"the incumbent of {context.title} is banned"
        digest = context.digests[context.incumbent]
        if context.settled:
            for rank in self.ranks:
                known = None if rank.state is None else rank.state.registry.by_name.get(context.name)
                if known is not None and known.announced:
                    assert digest in known.texts, f"{context.title}: the winner is no candidate of all"
        if context.status and self._statuses.get(context.name) == "":
            self.counts[context.status] += 1

    def _check_runs(self) -> None:
        """A session ends within what its options and its contexts allow."""
        assert self.ranks[0].state is not None
        assert self.ranks[0].state.search is not None
        tuning, options = self.ranks[0].state.search.state, self.program.options
        made = tuning.runs + 1  # with the one that is being told
        since = {rank.runs - before for rank, before in zip(self.ranks, self._runs_at_open, strict=True)}
        raises = self.program.events_of("raise") or _stock_failures(self.program)
        if len(self.ranks) > 1 or not raises:  # alone, a session goes on unasked
            assert since == {made}, f"ranks have made {since} runs of this session, {made} are known"
        if options["max_runs"] is not None:
            assert made <= options["max_runs"], f"{made} runs, {options['max_runs']} allowed"
        elif options["mode"] == "replay":
            searched = SearchedContexts(tuning.rules, tuning.contexts.values())
            bound = RUNS_ALLOWED * (ADMISSION_RUNS + searched.planned_runs)
            assert made <= bound, f"{made} runs of a session that plans at most {bound}"


# ---- how calls end


def check_endings(program: Program, ranks: list[VirtualRank], counts: Counter[str]) -> None:
    """Compare the ranks' calls, one after another."""
    failed: dict[int, BaseException] = {}  # how each rank failed last
    for call in range(program.calls):
        endings = {rank.agreement.rank: r[call] for rank in ranks if len(r := rank.endings) > call}
        now = {rank: ending.error for rank, ending in endings.items() if ending.error is not None}
        failed = failed | now if program.options["mode"] == "online" else now  # told at the next exchange
        if len(endings) < len(ranks):
            counts["calls after a departure"] += 1
        _check_call(program, call, endings, failed, counts)


def _check_call(
    program: Program,
    call: int,
    endings: dict[int, Ending],
    failed: dict[int, BaseException],
    counts: Counter[str],
) -> None:
    errors = {rank: ending.error for rank, ending in endings.items() if ending.error is not None}
    for error in errors.values():
        counts[type(error).__name__] += 1
    faults = {event.kind: event.rank for event in program.faults()}
    if any(isinstance(error, Gone) for error in errors.values()):
        counts["departures"] += 1
    if program.options["watch"] and not program.events_of("cached"):
        without = {
            f"{FUNCTIONS[kernel.function].__name__}[{n}]"
            for kernel, n in program.contexts()
            if not viable_blocks(kernel, n)
        }
        for rank in [rank for rank, ending in endings.items() if not ending.is_of_session]:
            error = errors.pop(rank, None)  # a failure in a settled call is a rank's own
            # Or none of a context's configs works on every rank, which the ranks' last run has told.
            has_none = isinstance(error, NoValidConfig) and str(error).partition(":")[0] in without
            is_stock = isinstance(error, OutOfResources) and bool(_stock_failures(program))
            is_allowed = error is None or isinstance(error, Boom) or has_none or is_stock
            assert is_allowed, f"rank {rank}, a settled call: {error!r}"
            counts["settled calls that raised"] += error is not None
    elif errors:
        return
    endings = {rank: ending for rank, ending in endings.items() if ending.error is errors.get(rank)}
    # From then on ranks may make the same runs in other calls: some wait in the opening of a session while
    # the others are in settled calls, which wait for nobody.
    have_parted = any(event.at <= call for event in program.events if event.kind == "retune some")
    if not errors:
        if not have_parted:
            _check_agreement(endings)
        return
    if have_parted:
        assert all(isinstance(error, (TuningError, Boom, Gone)) for error in errors.values()), errors
        return
    own = {rank for rank, error in errors.items() if isinstance(error, Boom)}
    culprits = {event.rank for event in program.faults() if event.kind in ("leave", "late")}
    # Where a rank does not come to an opening that all have agreed on, its peers go on without a session.
    is_alike = all(rank in errors for rank, ending in endings.items() if ending.is_of_session)
    assert is_alike or errors.keys() <= culprits, f"call {call} ends well on some ranks only: {errors}"
    for rank, error in errors.items():
        if isinstance(error, AgreementTimeout):
            assert set(error.missing_ranks) <= culprits, f"rank {rank} gives up who is there: {error}"
        elif isinstance(error, PeerFailed):
            peer = failed.get(error.rank)
            assert not isinstance(peer, PeerFailed | None), f"rank {rank}: {error}"
            assert type(peer).__name__ in error.error
        elif isinstance(error, OutOfResources):
            assert _stock_failures(program), f"rank {rank} ends with {error!r}"
            counts["errors of stock launches"] += 1
        elif not isinstance(error, (Boom, Gone)):
            assert isinstance(error, TuningError), f"rank {rank} ends with {error!r}"
            assert _is_expected(program, call, error), f"rank {rank} ends with {error!r}"
    others = {
        rank: error for rank, error in errors.items() if rank not in own and not isinstance(error, Gone)
    }
    if not own and not faults and any(isinstance(error, NoValidConfig) for error in others.values()):
        assert all(isinstance(error, NoValidConfig) for error in others.values()), f"not alike: {others}"


def _is_expected(program: Program, call: int, error: TuningError) -> bool:
    if isinstance(error, NoValidConfig):
        return True
    if isinstance(error, RankMismatch):
        return any(event.at <= call for event in program.events if event.kind in ("retune some",))
    return program.search in ("stubborn", "raising", "endless") and "search=" in str(error)


def _check_agreement(endings: dict[int, Ending]) -> None:
    if not endings:
        return  # every rank has left
    first = next(iter(endings.values()))
    for rank, ending in endings.items():
        assert ending.runs == first.runs, f"rank {rank} made {ending.runs} runs, rank 0 {first.runs}"
        assert ending.is_settled == first.is_settled


def _stock_kernels(program: Program) -> list[Kernel]:
    """Return the kernels that pass straight through to stock Triton: of one rank, with one config."""
    return [kernel for kernel in program.kernels if program.world_size == len(kernel.candidates[0]) == 1]


def _stock_failures(program: Program) -> list[Kernel]:
    """Return those whose only config fails in each launch: the error reaches the caller."""
    return [kernel for kernel in _stock_kernels(program) if (0, kernel.candidates[0][0]) in kernel.failures]


def check_winners(program: Program, endings: list[Ending], counts: Counter[str]) -> None:
    """Check the first call of a plain program against the winners that follow from its script."""
    if any(isinstance(ending.error, NoValidConfig) for ending in endings):
        assert any(not viable_blocks(kernel, n) for kernel, n in program.contexts()), (
            "a config works everywhere"
        )
        counts["programs without a config"] += 1
        return
    if any(isinstance(ending.error, OutOfResources) for ending in endings):
        return  # of a stock launch: `_check_call` has seen it
    functions = Counter(kernel.function for kernel in program.kernels)
    for kernel, n in program.contexts():
        if functions[kernel.function] > 1:
            continue  # Autotuners of one function with different configs are kernels of their own
        if kernel in _stock_kernels(program):
            assert (kernel.function, n) not in endings[0].winners, "a kernel with one config has a context"
            counts["passed straight through"] += 1
            continue
        expected = true_winner(kernel, n)
        for rank in having(kernel, n):
            block = endings[rank].winners[kernel.function, n]
            assert block == expected, f"kernel {kernel.function} [{n}], rank {rank}: {block}, not {expected}"
        counts["winners known beforehand"] += 1
