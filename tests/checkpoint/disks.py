"""A disk of which a test sees each operation."""

from collections.abc import Callable
from typing import Any

from shardrt.checkpoint.disk import Disk


class Watched(Disk):
    """Calls `around(name, operation, args)` in the place of each operation."""

    def __getattribute__(self, name: str) -> Any:
        attribute = object.__getattribute__(self, name)
        if name.startswith("_") or name not in vars(Disk):
            return attribute
        return lambda *args: self.around(name, attribute, args)

    def around(self, name: str, operation: Callable, args: tuple) -> Any:
        """Does the operation, and what a test wants besides."""
        raise NotImplementedError
