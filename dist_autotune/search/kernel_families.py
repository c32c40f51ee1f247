"""The shared names of kernels: equal on all ranks, as they follow from the announcements."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from ..codec import digest
from .context import Context
from .expectation.fields import TimesByKey
from .messages import Announcement


def context_name(kernel_id: str, key: str) -> str:
    """Return the name of a kernel's context, the same on all ranks."""
    return digest(f"{kernel_id}|{key}")


class KernelFamilies:
    """Which kernels of different ranks are one."""

    def __init__(self) -> None:
        self.aliases: dict[str, str] = {}  # ids of kernels that go by another id
        self._kernels: dict[str, list[str]] = {}  # by family: ids, that of the lowest rank first
        self._siblings: dict[str, int] = {}  # by family: on one rank, at most

    def unite(self, announced: Mapping[str, Announcement], known: Container[str]) -> dict[str, str]:
        """Return new names for announced contexts, by the old ones: one name for each context.

        Where no rank has several Autotuners of a function, those of all ranks are one kernel, though their
        configs may differ. `known`: contexts whose names stand.
        """
        announced = {name: each for name, each in announced.items() if each.family}
        for name, each in sorted(announced.items(), key=lambda item: (item[1].rank, item[1].kernel_id)):
            kernels = self._kernels.setdefault(each.family, [])
            if name in known and each.kernel_id in kernels:
                continue
            self._siblings[each.family] = max(self._siblings.get(each.family, 1), each.siblings)
            if each.kernel_id not in kernels:
                kernels.append(each.kernel_id)
        for family, kernels in self._kernels.items():
            if self._siblings[family] == 1:
                self.aliases.update(dict.fromkeys(kernels[1:], kernels[0]))
        return {
            name: context_name(self.aliases[each.kernel_id], each.key)
            for name, each in announced.items()
            # On a rank that has both they are two kernels, though they were taken for one before.
            if name not in known and each.kernel_id in self.aliases and each.siblings == 1
        }

    def times_so_far(self, contexts: Iterable[Context], kernel_id: str) -> TimesByKey:
        """Return the agreed times of a kernel's launches, by key and config, so far."""
        aliases = self.aliases
        kernel_id = aliases.get(kernel_id, kernel_id)
        return {
            context.key: context.ms_by_text()
            for context in contexts
            if aliases.get(context.kernel_id, context.kernel_id) == kernel_id
            and (context.launch_ms or context.is_tuned_by_launches)
        }
