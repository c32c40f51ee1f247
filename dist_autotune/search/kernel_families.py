"""What all ranks call a kernel: the same on all of them, as it follows from what they announced."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

from ..codec import digest
from .messages import Part, RunReport


def context_name(kernel_id: str, slot: str) -> str:
    """Return the name of a kernel's context, the same on all ranks."""
    return digest(f"{kernel_id}|{slot}")


@dataclass
class _Family:
    """The Autotuners of one function and keys, on all ranks."""

    kernels: list[str] = field(default_factory=list)  # ids, that of the lowest rank first
    siblings: int = 1  # on one rank, at most


class KernelFamilies:
    """Which kernels of different ranks are one."""

    def __init__(self) -> None:
        self.aliases: dict[str, str] = {}  # ids of kernels that go by another id
        self._families: dict[str, _Family] = {}

    def unite(self, merged: RunReport, known: Container[str]) -> tuple[RunReport, dict[str, str]]:
        """Return the report with one name for what is one context, and the new names by the old.

        Where no rank has several Autotuners of a function, those of all ranks are one kernel, though their
        configs may differ. `known`: contexts whose names stand.
        """
        announced = {
            name: part.announcement
            for name, part in sorted(merged.parts.items())
            if part.announcement is not None and part.announcement.family
        }
        for name, each in sorted(announced.items(), key=lambda item: (item[1].rank, item[1].kernel_id)):
            family = self._families.setdefault(each.family, _Family())
            if name in known and each.kernel_id in family.kernels:
                continue
            family.siblings = max(family.siblings, each.siblings)
            if each.kernel_id not in family.kernels:
                family.kernels.append(each.kernel_id)
        for family in self._families.values():
            if family.siblings == 1:
                self.aliases.update(dict.fromkeys(family.kernels[1:], family.kernels[0]))
        names = {
            name: context_name(self.aliases[each.kernel_id], each.slot)
            for name, each in announced.items()
            # On a rank that has both they are two kernels, though they were taken for one before.
            if name not in known and each.kernel_id in self.aliases and each.siblings == 1
        }
        parts: dict[str, Part] = {}
        for name, part in sorted(merged.parts.items()):
            name = names.get(name, name)
            parts[name] = parts[name].merged(part) if name in parts else part
        return replace(merged, parts=parts), names
