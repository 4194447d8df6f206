"""Hooks: the functions that a user attaches to an event, and handles that remove them."""

import weakref
from collections.abc import Iterator
from itertools import count
from typing import Any

_keys = count()


class Hooks:
    """Hooks of one event, in the order in which they are called."""

    __slots__ = ("_items", "__weakref__")

    def __init__(self) -> None:
        self._items: dict[int, Any] = {}

    def add(self, item: Any, first: bool = False) -> "RemovableHandle":
        """Add a hook at the end, or before all others."""
        key = next(_keys)
        self._items = {key: item} | self._items if first else self._items | {key: item}
        return RemovableHandle(self, key)

    def remove(self, key: int) -> None:
        """Remove the hook with this key, if it is there."""
        self._items = {other: item for other, item in self._items.items() if other != key}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)


class RemovableHandle:
    """Removes a hook, by `remove` or at the end of a with block."""

    def __init__(self, hooks: Hooks | None = None, key: int = -1) -> None:
        self._hooks = weakref.ref(hooks) if hooks is not None else None
        self._key = key

    def remove(self) -> None:
        """Remove the hook. Further calls do nothing."""
        hooks = self._hooks() if self._hooks is not None else None
        if hooks is not None:
            hooks.remove(self._key)

    def __enter__(self) -> "RemovableHandle":
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()
