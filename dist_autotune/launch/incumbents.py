"""Launches that belong to no run: with the tuned config, else the first that works, never benchmarked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


class IncumbentLauncher:
    """Launches on threads without a call, between runs of a session, and where there is no GPU driver."""

    passes_single, function = True, None

    def launch(self, call: CallUnderWay, launch: Launch, failed: Mapping[str, str] = NONE_FAILED) -> Any:
        """Launch the kernel once; raises NotTuned in the strict mode for a key without a result."""
        reasons: dict[str, str] = {}
        for config in self._configs(launch):
            try:
                launch.run_pre_hook(config)
                return launch.run(config)
            except Exception as error:
                reason = config_failure(error, launch.kwargs.get("grid"), config.pre_hook)
                if reason is None:
                    raise
                reasons[identity.config_digest(config)] = f"{config_label(str(config))}: {reason}"
        raise NoValidConfig(f"{launch}: all {len(reasons)} configs failed. {'. '.join(reasons.values())}")

    def choose(self, call: CallUnderWay, name: str, options: Sequence[Any], key: Key, among: Ranks) -> Any:
        """Return the settled option of a `tunable`, or the first."""
        return CHOICES.recall(name, options, key, among)

    def failure(self, call: CallUnderWay, launch: Launch, config: Any, error: Exception) -> dict[str, str]:
        return {}

    @staticmethod
    def _configs(launch: Launch) -> Iterator[Any]:
        """Yield the configs in the order to launch them; the later ones where those before have failed."""
        key, tuner = launch.key(), launch.tuner
        known = [tuner.cache[key]] if key in tuner.cache else []
        for call in list(INTERCEPTION.calls.values()):
            if (of_tuner := call.settled.get(id(tuner))) is not None and key in of_tuner.by_key:
                known.append(of_tuner.by_key[key][0])
        yield from known
        if not known and INTERCEPTION.calls and settings.run_mode() == "strict":
            text = f"{launch} has no result, and DIST_AUTOTUNE_MODE=strict launches nothing untuned"
            raise NotTuned(
                f"{text}. Tune it once with DIST_AUTOTUNE_MODE=tune.", tuner.base_fn.__name__, str(key)
            )
        tried = {identity.config_digest(config) for config in known}
        yield from (config for digest, config in launch.candidates().items() if digest not in tried)
