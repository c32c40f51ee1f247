"""Which kernel an Autotuner is: its identity on this rank, and the one by which its peers know it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping

from triton.runtime.autotuner import Autotuner

from ..codec import digest
from ..combinations import drawn
from ..triton_api import identity
from ..triton_api.identity import family_of


class KernelNames:
    """The identities of the Autotuners launched on this rank; see "kernel" in the vocabulary.

    A name is `family.configs`, or `family.configs#n` from the second of its kind on: the family stands for
    source and keys. aliases: what the ranks have agreed to call a kernel instead.
    """

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = aliases
        self._ordinals: weakref.WeakKeyDictionary[Autotuner, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._taken: set[tuple[str, int]] = set()  # by the Autotuners launched in this run
        self._families: dict[str, set[str]] = {}  # -> kernels launched

    def begin_run(self) -> None:
        """Let Autotuners that are made anew for every run take the names of the last ones."""
        self._taken.clear()

    def name_of(self, tuner: Autotuner, *, launches: bool = True) -> str:
        """Return the kernel's identity.

        Autotuners that share source and keys are told apart by their sets of configs, then by the order of
        first launch. One made anew for every call takes the lowest order that no other has taken in this run.
        `launches=False` takes nothing.
        """
        if tuner in self._ordinals:
            kernel, ordinal = self._ordinals[tuner]
        else:
            family = digest(f"{identity.kernel_identity(tuner).digest}|{','.join(tuner.keys)}")
            identity.tell_apart(configs := drawn(tuner.configs))
            candidates = "\n".join(sorted(map(identity.config_digest, configs)))
            kernel = f"{family}.{digest(candidates)[:8]}"
            ordinal = next(n for n in itertools.count() if (kernel, n) not in self._taken)
            if launches:
                self._families.setdefault(family, set()).add(kernel)
                self._ordinals[tuner] = (kernel, ordinal)
        if launches:
            self.keep(tuner)
        return kernel if ordinal == 0 else f"{kernel}#{ordinal}"

    def keep(self, tuner: Autotuner) -> None:
        """Reserve the name of an Autotuner in this run, if it has one: no new one takes it."""
        if (name := self._ordinals.get(tuner)) is not None:
            self._taken.add(name)

    def name_of_choice(self, name: str, set_digest: str, *, is_joint: bool) -> str:
        """Return the identity of a `tunable`: its options are to it what configs are to a kernel."""
        family = digest(f"tunable{' of all ranks' if is_joint else ''}|{name}")
        kernel = f"{family}.{set_digest[:8]}"
        self._families.setdefault(family, set()).add(kernel)
        return kernel

    def alias(self, kernel: str) -> str:
        """Return the name by which peers know a kernel, unless this rank has a kernel of that name itself."""
        alias = self._aliases.get(kernel, kernel)
        return kernel if alias.partition("#")[0] in self.relatives(kernel) else alias

    def relatives(self, kernel: str) -> set[str]:
        """Return the kernels of its family that this rank has launched, without those of the same name."""
        return self._families.get(family_of(kernel), set())
