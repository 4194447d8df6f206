"""config.json of Hugging Face, read with suspicion."""

from pathlib import Path
from typing import Any


class Settings:
    """A table of config.json, read with suspicion: errors name the file and the setting."""

    def __init__(self, path: Path, table: dict[str, Any]) -> None:
        self._path, self._table = path, table
        self.layers_at_most = 0

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands; `default` where it is absent or null."""
        value = self._table.get(name)
        return default if value is None else value

    def kept(self) -> dict[str, Any]:
        """All of the table, as it stands."""
        return dict(self._table)

    def one_of(self, name: str, *choices: Any, default: Any = None) -> Any:
        """A value that is one of `choices`."""
        value = self.get(name, default)
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            wanted = ", ".join(map(repr, choices))
            raise ValueError(f"{self._path}: {name} = {value!r} is not supported; supported: {wanted}")
        return value

    def require(self, name: str, wanted: Any) -> None:
        """What is there must be `wanted`."""
        value = self.get(name, wanted)
        if value != wanted:
            raise ValueError(f"{self._path}: {name} = {value!r} is not supported, only {wanted!r} is")

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self.get(name, default)
        if type(value) is not int or not least <= value < 2**31:
            raise ValueError(f"{self._path}: {name} must be an integer of at least {least}, got {value!r}")
        return value

    def window(self, name: str, unsaid: int | None) -> int:
        """How many tokens a token sees; 0: all, as null says. `unsaid` where the file says nothing."""
        if self._table.get(name, unsaid) is None:
            return 0
        return self.size(name, unsaid)

    def choices(self, name: str, count: int, *choices: str) -> tuple[str, ...]:
        """A list of `count` of these; () where it is absent or null."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) != count or not all(v in choices for v in value):
            wanted = " or ".join(map(repr, choices))
            got = f"{len(value)} values" if isinstance(value, list) else repr(value)
            raise ValueError(f"{self._path}: {name} must be a list of {count} times {wanted}, got {got}")
        return tuple(value)

    def side(self, name: str, default: int) -> int:
        """Of a square: an integer of at least 1, or two that are the same."""
        value = self.get(name, default)
        sides = value if isinstance(value, list) else [value]
        if len(sides) not in (1, 2) or sides[0] != sides[-1]:
            raise ValueError(f"{self._path}: {name} = {value!r} is not supported; it must be square")
        return Settings(self._path, {name: sides[0]}).size(name)

    def layers(self, name: str, each: int = 1) -> int:
        """A number of layers, or of experts in `each` layers, for which there can be tensors.

        Nothing is made for more.
        """
        value = self.size(name)
        if value * each > self.layers_at_most:
            raise ValueError(
                f"{self._path}: {name} = {value}, but the files have only {self.layers_at_most} tensors"
            )
        return value

    def flag(self, name: str) -> bool:
        """True or False, which it is where nothing is said."""
        return self.one_of(name, False, True, default=False)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not abs(value) < 1e300:  # integers have no largest one
            raise ValueError(f"{self._path}: {name} must be a number, got {value!r}")
        return float(value)

    def epsilon(self, name: str, default: float) -> float:
        """What a norm adds to a variance: above 0 and below 1."""
        value = self.number(name, default)
        if not 0 < value < 1:
            raise ValueError(f"{self._path}: {name} must be above 0 and below 1, got {value!r}")
        return value

    def table(self, name: str) -> "Settings":
        """A table inside; an empty one where there is none."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ValueError(f"{self._path}: {name} must be an object, got {value!r}")
        return Settings(self._path, value)

    def __len__(self) -> int:
        return len(self._table)
