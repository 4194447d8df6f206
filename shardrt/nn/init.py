"""Initial values of parameters. A specification fills any piece of a parameter, and only that piece.

Element i of a parameter is a function of (seed, the parameter's name, i), by a counter-based generator: a
rank makes its shard alone, and the values are bitwise identical at every world size.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shardrt import device
from shardrt.device import Array
from shardrt.nn import elsewhere
from shardrt.nn.extents import Extent


class Initialiser(Protocol):
    """The protocol of a specification; any frozen dataclass with this method will do."""

    def fill(self, out: Array, seed: int, key: int, offset: int) -> None:
        """Write elements [offset, offset + out.size) of the parameter behind `key` into 1-D `out`."""


@runtime_checkable
class InitialiserOfRuns(Protocol):
    """One that knows its values, and gives columns of a matrix at once rather than row by row."""

    def fill_extent(self, out: Array, extent: Extent) -> None:
        """Write the elements `runs` of the parameter, each of several in a separate row, into 1-D `out`."""


@dataclass(frozen=True)
class Normal:
    """Independent normal numbers.

    Raises:
        ValueError: for a negative std.

    Example:
        >>> from shardrt import nn
        >>> layer = nn.Linear(8, 8, init=nn.init.Normal(0.0, 0.02))
        >>> bool(abs(layer.weight.numpy()).max() < 0.2)
        True
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not self.std >= 0:
            raise ValueError(f"Normal: std must not be negative, got {self.std}")

    def fill(self, out: Array, seed: int, key: int, offset: int) -> None:
        """As Initialiser.fill."""
        device.of(out).kernels.philox.normal(out, seed, key, offset, self.mean, self.std)


@dataclass(frozen=True)
class Uniform:
    """Independent numbers, evenly from [low, high).

    Raises:
        ValueError: if low is above high.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"Uniform: low must not be above high, got {self.low} and {self.high}")

    def fill(self, out: Array, seed: int, key: int, offset: int) -> None:
        """As Initialiser.fill."""
        device.of(out).kernels.philox.uniform(out, seed, key, offset)
        out *= self.high - self.low
        out += self.low


@dataclass(frozen=True)
class AsNamed:
    """The initial values by `init` for the parameter of this key, also after a renaming: for copies."""

    init: Initialiser
    key: int

    def fill(self, out: Array, seed: int, key: int, offset: int) -> None:
        """As Initialiser.fill."""
        self.init.fill(out, seed, self.key, offset)


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float

    def fill(self, out: Array, seed: int, key: int, offset: int) -> None:
        """As Initialiser.fill."""
        out.fill(self.value)


@dataclass(frozen=True)
class Zeros:
    """0 everywhere."""

    def fill(self, out: Array, seed: int, key: int, offset: int) -> None:
        """As Initialiser.fill."""
        out.fill(0)


@dataclass(frozen=True)
class Ones:
    """1 everywhere."""

    def fill(self, out: Array, seed: int, key: int, offset: int) -> None:
        """As Initialiser.fill."""
        out.fill(1)


def __getattr__(name: str) -> Any:
    raise elsewhere.missing_from(__name__, name, elsewhere.INIT)
