"""Where a parameter's numbers live: the contract, and the plain case of one array per parameter.

A parameter is a name and a shape; its storage holds the values. A plain model has one LocalStorage per
parameter. fully_shard gives the parameters of a unit one common storage, of which this rank holds a
contiguous 1-D piece. The optimizer, clipping and state dicts see only this contract.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from shardrt import device, random
from shardrt.autograd import WRITTEN, Edge
from shardrt.comm.protocol import Communicator

if TYPE_CHECKING:
    from shardrt.nn.parameter import Parameter

Array = Any


class Storage(ABC):
    """Values and gradient of one or more parameters, as flat 1-D arrays of what this rank holds.

    `communicator` joins the ranks that hold the rest; None where this rank holds everything.
    """

    communicator: Communicator | None = None

    @property
    @abstractmethod
    def shard(self) -> Array:
        """The values that this rank holds: 1-D, in memory order, updated in place by the optimizer."""

    @property
    @abstractmethod
    def gradient(self) -> Array | None:
        """The gradient of `shard`, or None if there is none since the last zero_grad."""

    @abstractmethod
    def range_of(self, parameter: "Parameter") -> tuple[int, int, int]:
        """(start, stop, first): shard[start:stop] holds the elements of the parameter from `first` on."""

    @abstractmethod
    def full(self, parameter: "Parameter") -> Array:
        """All values of the parameter in its shape. Raises RuntimeError, naming it, while it is sharded."""

    @abstractmethod
    def edge(self, parameter: "Parameter") -> Edge:
        """Where the gradient of the parameter goes on the tape."""

    @abstractmethod
    def gradient_target(self, parameter: "Parameter") -> tuple[Array, bool, Any]:
        """As Variable.gradient_target."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the gradient."""


class LocalStorage(Storage):
    """One parameter, whole, in an array of its own; filled with initial values when first asked for."""

    def __init__(self, parameter: "Parameter") -> None:
        self._array: Array | None = None
        self._gradient: Array | None = None
        self._parameter = parameter

    @property
    def materialised(self) -> bool:
        """Whether the array exists yet."""
        return self._array is not None

    def array(self) -> Array:
        """The values in the parameter's shape, made now if they don't exist yet."""
        if self._array is None:
            parameter = self._parameter
            array = device.current().empty(parameter.shape, parameter.dtype)
            parameter.init.fill(array.reshape(-1), parameter.seed, random.name_key(parameter.name), 0)
            self._array = array
        return self._array

    @property
    def shard(self) -> Array:
        return self.array().reshape(-1)

    @property
    def gradient(self) -> Array | None:
        return None if self._gradient is None else self._gradient.reshape(-1)

    def range_of(self, parameter: "Parameter") -> tuple[int, int, int]:
        return 0, parameter.size, 0

    def full(self, parameter: "Parameter") -> Array:
        return self.array()

    def edge(self, parameter: "Parameter") -> Edge:
        return Edge(None, 0, parameter)

    def gradient_target(self, parameter: "Parameter") -> tuple[Array, bool, Any]:
        accumulate = self._gradient is not None
        if not accumulate:
            self._gradient = device.current().empty(parameter.shape, parameter.dtype)
        return self._gradient, accumulate, WRITTEN

    def zero_grad(self) -> None:
        self._gradient = None
