"""Prepared launches: all that launches of one compiled kernel share is made once.

They are bare where the launcher is known. While hooks are set they go Triton's own way, as a profiler sees
every launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver

from ..matrices import DESCRIPTORS_KEPT, Block, Matrix, describe
from ..tensors import remember
from .bare import BareLaunch, bare_launch
from .loading import launch, load

PLAIN = frozenset({int, float, bool, type(None)})  # arguments that are no tensors


class PreparedLaunch:
    """Launches one compiled kernel on one grid, on the current stream.

    matrices, blocks: of the descriptors, which are the kernel's first arguments: another launch has matrices
    that lie alike, at other addresses. last: the arguments that are the same in all launches.
    """

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, int, int],
        matrices: Sequence[Matrix],
        blocks: Sequence[Block],
        last: tuple[Any, ...],
    ) -> None:
        self._own_way = compiled[grid]
        self._matrices, self._blocks, self._last = matrices, blocks, last
        self._driver = driver.active
        self._device = self._driver.get_current_device()  # on which the kernel is loaded
        self._bare = bare_launch(compiled, grid, len(matrices), last)
        self._encoded: list[dict[int, Sequence[Any]]] = [{} for _ in matrices]  # descriptors by address

    def __call__(self, addresses: Sequence[int], *middle: Any) -> None:
        """Launch with matrices at these addresses, and with the arguments between them and the last ones."""
        # Addresses: of a tensor the launcher asks the driver whether the device can reach it.
        numbers = [each if each.__class__ in PLAIN else each.data_ptr() for each in middle]
        self.at(addresses, numbers)

    def at(self, addresses: Sequence[int], middle: Sequence[float | None]) -> None:
        """Launch so with tensors that are given by their addresses, too."""
        bare = self._bare
        if bare is None or _are_watched():
            descriptors = [self._describe(*placed) for placed in enumerate(addresses)]
            launch(self._own_way, *descriptors, *middle, *self._last)
            return
        if addresses:
            arguments: list[Any] = []
            for index, address in enumerate(addresses):
                encoded = self._encoded[index].get(address)
                arguments += self._encode(bare, index, address) if encoded is None else encoded
            arguments += middle
        else:
            arguments = middle  # type: ignore[assignment]
        bare.launch(self._driver.get_current_stream(self._device), arguments)

    def _describe(self, index: int, address: int) -> Any:
        return describe(self._matrices[index]._replace(address=address), self._blocks[index])

    def _encode(self, bare: BareLaunch, index: int, address: int) -> Sequence[Any]:
        """Encode a descriptor, which is kept; with more of them than layers have, all are encoded anew."""
        known = self._encoded[index]
        if len(known) >= DESCRIPTORS_KEPT:
            known.clear()
        encoded = known[address] = tuple(bare.expand[index](self._describe(index, address)))
        return encoded


def _are_watched() -> bool:
    """Return whether somebody is to be told of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if enter.__class__ is leave.__class__ is knobs.HookChain:  # else somebody has put a hook in its place
        return bool(enter.calls or leave.calls)
    return any(hook.calls if isinstance(hook, knobs.HookChain) else hook for hook in (enter, leave))


class PlainLaunches:
    """The launches of a kernel that is not tuned; the second one of a kind is prepared."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._of: dict[Hashable, PreparedLaunch] = {}

    def find(self, kind: Hashable) -> PreparedLaunch | None:
        """Return the prepared launch of a kind, if there is one."""
        return self._of.get(kind)

    def launch(
        self,
        kind: Hashable,
        programs: int,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[int],
        constants: dict[str, Any],
        *,
        only_load: bool = False,
    ) -> None:
        """Launch it, or load it; the arguments are in the order of its parameters, which end with constants.

        kind: all that the compiled kernel and its grid depend on.
        """
        prepared = self._of.get(kind)
        if prepared is not None:
            if not only_load:
                prepared.at((), [*[tensor.data_ptr() for tensor in tensors], *numbers])
            return
        grid, constants = (programs, 1, 1), {**constants, **self._options}
        arguments = (*[tensor.detach() for tensor in tensors], *numbers)
        if only_load:
            load(self._kernel, grid, *arguments, **constants)
            return
        compiled = self._kernel[grid](*arguments, **constants)
        if hasattr(compiled, "packed_metadata"):  # the interpreter compiles nothing
            last = tuple(constants[name] for name in self._kernel.arg_names if name in constants)
            remember(self._of, kind, PreparedLaunch(compiled, grid, (), (), last))
