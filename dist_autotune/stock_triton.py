"""Winners for stock Triton: `TRITON_CACHE_MANAGER=dist_autotune.stock_triton:TunedCache`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from triton.runtime.cache import FileCacheManager

from . import settings
from .storage.stock_files import stock_files
from .storage.winners import Winners


class TunedCache(FileCacheManager):  # type: ignore[misc]  # Triton's has no types
    """Triton's own cache, in which each kernel finds the winner that was tuned where it runs.

    Winners are those in the user's cache for the number of ranks that torchrun has started, imported bundles
    included. They replace stock Triton's own results; other keys are handled as ever.
    """

    def get_file(self, filename: str) -> str | None:
        """Return the path of a file, None where there is none; it holds the winner, where there is one."""
        path: str | None = super().get_file(filename)
        winner = _winners().get(f"{self.key}/{filename}") if filename.endswith(".autotune.json") else None
        if winner is None or (path is not None and Path(path).read_text() == winner):
            return path
        written: str = self.put(winner, filename, binary=False)
        return written


@functools.cache
def _winners() -> Mapping[str, str]:
    """Return the files of stock Triton, by path in its cache; read once."""
    directory, ranks = settings.cache_directory(), settings.world_size()
    entries = [] if directory is None else Winners(directory).entries()
    return stock_files(each for each in entries if each.key.world_size == ranks)[0]
