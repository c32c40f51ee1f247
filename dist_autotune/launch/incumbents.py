"""Launches that belong to no run: with the tuned config, else the first that works, never benchmarked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import settings
from ..compilation.config_failures import config_failure
from ..errors import NotTuned, NoValidConfig
from ..formatting import config_label
from ..triton_api import identity
from ..triton_api.interception import INTERCEPTION
from ..triton_api.launch import Key, Launch
from .rank_context import NONE_FAILED
from .tunable import CHOICES, Ranks

if TYPE_CHECKING:
    from .fast_path import CallUnderWay


def launch_first_working(
    launch: Launch, choose: Callable[[Mapping[str, str]], Any], failed: Mapping[str, str] = NONE_FAILED
) -> Any:
    """Launch the kernel once, with the first config that does not fail.

    choose: returns the config to launch, given those that have failed in this launch, with reasons.
    """
    while True:
        config = choose(failed)
        try:
            launch.run_pre_hook(config)
            return launch.run(config)
        except Exception as error:
            reason = config_failure(error, launch.kwargs.get("grid"), config.pre_hook)
            if reason is None:
                raise
            failed = {**failed, identity.config_digest(config): reason}


class IncumbentLauncher:
    """Launches on threads without a call, between runs of a session, and where there is no GPU driver."""

    passes_single, function = True, None

    def launch(self, call: CallUnderWay, launch: Launch, failed: Mapping[str, str] = NONE_FAILED) -> Any:
        """Launch the kernel once; raises NotTuned in the strict mode for a key without a result."""

        def choose(failed: Mapping[str, str]) -> Any:
            for config in self._configs(launch):
                if identity.config_digest(config) not in failed:
                    return config
            texts = {digest: config_label(str(config)) for digest, config in launch.candidates().items()}
            reasons = ". ".join(f"{texts.get(digest, digest)}: {why}" for digest, why in failed.items())
            raise NoValidConfig(f"{launch}: all {len(failed)} configs failed. {reasons}")

        return launch_first_working(launch, choose)

    def choose(self, call: CallUnderWay, name: str, options: Sequence[Any], key: Key, among: Ranks) -> Any:
        """Return the settled option of a `tunable`, or the first."""
        return CHOICES.recall(name, options, key, among)

    def failure(self, call: CallUnderWay, launch: Launch, config: Any, error: Exception) -> dict[str, str]:
        return {}

    @staticmethod
    def _configs(launch: Launch) -> Iterator[Any]:
        """Yield the configs in the order of trying, winners of searches first."""
        key, tuner = launch.key(), launch.tuner
        known = [tuner.cache[key]] if key in tuner.cache else []
        for call in list(INTERCEPTION.calls.values()):
            if (of_tuner := call.settled.get(id(tuner))) is not None and key in of_tuner.by_key:
                known.append(of_tuner.by_key[key][0])
        yield from known
        if not known and INTERCEPTION.calls and settings.run_mode() == "strict":
            text = f"{launch} has no result, and DIST_AUTOTUNE_MODE=strict launches nothing untuned"
            raise NotTuned(f"{text}. Tune it once with DIST_AUTOTUNE_MODE=tune.")
        yield from launch.candidates().values()
