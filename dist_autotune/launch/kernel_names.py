"""The name of each Autotuner's kernel on this rank, and the name by which the peers know it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping

from triton.runtime.autotuner import Autotuner

from ..codec import digest
from ..triton_api import identity
from ..triton_api.identity import family_of


class KernelNames:
    """Names the kernels of the Autotuners launched on this rank.

    A name is `family.configs`, from the second Autotuner with that name on `family.configs#n`. The family
    stands for source and keys. aliases: the names that the ranks have agreed on, by this rank's.
    """

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = aliases
        self._ordinals: weakref.WeakKeyDictionary[Autotuner, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._taken: set[tuple[str, int]] = set()  # by the Autotuners launched in this run
        self._families: dict[str, set[str]] = {}  # -> kernels launched

    def begin_run(self) -> None:
        """Let Autotuners that are made anew for every run take the names of the last run's."""
        self._taken.clear()

    def name_of(self, tuner: Autotuner, *, launches: bool = True) -> str:
        """Return the kernel's name.

        Autotuners that share source and keys differ by their sets of configs, then by the order of first
        launch. One made anew for every call takes the lowest number that no other has taken in this run.
        `launches=False` reserves nothing.
        """
        if tuner in self._ordinals:
            kernel, ordinal = self._ordinals[tuner]
        else:
            family = digest(f"{identity.kernel_identity(tuner).digest}|{','.join(tuner.keys)}")
            identity.tell_apart(tuner.configs)
            candidates = "\n".join(sorted(map(identity.config_digest, tuner.configs)))
            kernel = f"{family}.{digest(candidates)[:8]}"
            ordinal = next(n for n in itertools.count() if (kernel, n) not in self._taken)
            if launches:
                self._families.setdefault(family, set()).add(kernel)
                self._ordinals[tuner] = (kernel, ordinal)
        if launches:
            self.keep(tuner)
        return kernel if ordinal == 0 else f"{kernel}#{ordinal}"

    def keep(self, tuner: Autotuner) -> None:
        """Reserve the name of an Autotuner, if it has one, in this run."""
        if (name := self._ordinals.get(tuner)) is not None:
            self._taken.add(name)

    def name_of_choice(self, name: str, set_digest: str, *, is_joint: bool) -> str:
        """Return the name of a `tunable`, whose options stand for configs."""
        family = digest(f"tunable{' of all ranks' if is_joint else ''}|{name}")
        kernel = f"{family}.{set_digest[:8]}"
        self._families.setdefault(family, set()).add(kernel)
        return kernel

    def alias(self, kernel: str) -> str:
        """Return the name by which peers know a kernel, unless this rank has a kernel of that name itself."""
        alias = self._aliases.get(kernel, kernel)
        return kernel if alias.partition("#")[0] in self.relatives(kernel) else alias

    def relatives(self, kernel: str) -> set[str]:
        """Return the names, without numbers, of its family that this rank has launched."""
        return self._families.get(family_of(kernel), set())
