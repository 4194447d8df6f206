"""Where a parameter's numbers live: the contract, and the plain case of one array per parameter.

A parameter is a name and a shape; its storage holds the values. A plain model has one LocalStorage per
parameter. fully_shard gives the parameters of a unit one common storage, of which this rank holds a
contiguous 1-D piece. The optimizer, clipping and state dicts see only this contract. `extents_of` says which
elements of a parameter a rank has, `owner` whether this rank saves them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import ref

import numpy as np

from shardrt import autograd, device, tape
from shardrt.autograd import WRITTEN, Edge
from shardrt.comm.protocol import Communicator
from shardrt.comm.ranks import Mesh
from shardrt.device import Array
from shardrt.device.protocol import Event
from shardrt.nn.extents import Extents, contiguous, take


class Stored(Protocol):
    """A parameter, as its storage knows it; parameter.py has the class."""

    name: str
    shape: tuple[int, ...]
    size: int
    dtype: np.dtype

    def fill(self, out: Array, extents: Extents, name: str | None = None) -> None: ...


@dataclass(frozen=True)
class Offloaded:
    """Which arrays of a storage live in pinned host memory between uses; the others live on the device.

    step: "device" brings what an update needs to the device, piece by piece; "host" updates with the host's
    kernels, where parameters, gradients and optimizer state all are on the host. directory: host arrays are
    memory-mapped files there, for what is larger than host memory.
    """

    parameters: bool = False
    gradients: bool = False
    optimizer_state: bool = False
    step: str = "device"
    directory: Path | None = None

    @property
    def everything_on_device(self) -> bool:
        """Whether an update needs nothing from the host."""
        return not (self.parameters or self.gradients or self.optimizer_state)


@dataclass(frozen=True, eq=False)
class LowPrecisionCopy:
    """A copy of a storage's shard, as long, each number rounded to `kind`, a 16-bit type."""

    array: Array
    kind: str


class Storage(ABC):
    """Values and gradient of one or more parameters, as flat 1-D arrays of what this rank holds.

    `communicator` joins the ranks that hold the rest, for what hosts tell each other; None where this rank
    holds everything. `whole_mesh` is the mesh of these ranks, if there is one. `offloaded` says which arrays
    live on the host. `on_gradient`, if an optimizer has set it, is called when backward has issued the last
    work on the gradient; the gradient is there when `gradient_ready` is reached.
    """

    communicator: Communicator | None = None
    whole_mesh: Mesh | None = None
    low_precision_copy: LowPrecisionCopy | None = None  # what it keeps of the shard in 16 bits, if it does
    gathers_bits = False  # what `lent_bits` gives
    everyone: Communicator | None = None  # joins all ranks that train with this one, once there is a shard
    offloaded = Offloaded()
    on_gradient: Callable[[], None] | None = None
    gradient_ready: Event | None = None
    owners: Sequence[tuple[ref, set[int]]] = ()  # optimizers that update it, and which parameters, by id
    absent = False  # other ranks have the values (nn/placement.py)
    ignored = False  # fully_shard leaves it whole, and no unit reduces its gradient
    exact_norm = False  # norms of the gradient are computed in integers
    writes = 0  # how often the shard was written
    applied = False  # an update in backward has used the gradient: the optimizer sets it, zero_grad ends it

    def owner(self, first: bool) -> bool:
        """Whether this rank saves what it holds: of the ranks that hold an element, one does.

        first: whether this rank is the model's leader, which saves what every rank holds.
        """
        return first

    @property
    def owned(self) -> bool:
        """Whether an optimizer that is alive updates this."""
        return any(owner() is not None for owner, _ in self.owners)

    def refuse_applied(self, call: str) -> None:
        """Raise RuntimeError if an update during backward has used the gradient that `call` would change."""
        if self.applied:
            raise RuntimeError(
                f"{call}: the optimizer has in_backward=True and has applied these gradients already; "
                "make it with in_backward=False to change gradients before the update"
            )

    def new_state(self, name: str, dtype: Any = None) -> Array:
        """Zeros as long as `shard`, for one array of optimizer state, on the host if `offloaded` says so.

        dtype: the shard's if not given.
        """
        here = device.current()
        array = here.buffer(self.shard.size, self.shard.dtype if dtype is None else dtype)
        return here.set_tag(array, "optimizer state")

    def before_write(self) -> None:  # noqa: B027 (most storages are read by this rank alone)
        """The shard is about to be written, on every rank: wait until no other rank reads it. Collective."""

    def modified(self, copy_too: bool = False) -> None:
        """The shard has been written, on every rank: by an optimizer or a load. Copies of it are stale.

        copy_too: the same elements of `low_precision_copy`, if there is one, have been written as well.
        """
        self.writes += 1

    def may_write_copy(self) -> bool:
        """Whether an update may write `low_precision_copy`: it exists, and no backward will read it."""
        return self.low_precision_copy is not None

    @property
    def reduced(self) -> bool:
        """Whether `gradient` is complete when backward ends: nothing waits for a later reduction."""
        return True

    @property
    @abstractmethod
    def shard(self) -> Array:
        """The values that this rank holds: 1-D, in memory order, updated in place by the optimizer."""

    @property
    @abstractmethod
    def gradient(self) -> Array | None:
        """The gradient of `shard`, or None if there is none since the last zero_grad."""

    def refuse_incomplete(self, parameters: Iterable[Stored]) -> None:
        """Raise RuntimeError, outside of backward, if a deferred call will add to one of these gradients."""
        if autograd.running() is None:
            for hook in tape.before_read:
                hook(parameters)

    def complete_gradient(self) -> Array | None:
        """`gradient`, for work that is issued from now on; if it is on the host, for the host to read now."""
        gradient = self.gradient
        if gradient is not None and self.gradient_ready is not None:
            device.of(gradient).current_stream.wait(self.gradient_ready)  # backward may still be reducing it
        return gradient

    def has_gradient(self, parameter: Stored) -> bool:
        """Whether the parameter has a gradient since the last zero_grad: the same on every rank.

        An optimizer leaves a parameter without one alone: no decay, no update, no count. It asks when
        backward has issued the last work on the gradients of this storage.
        """
        return self.gradient is not None

    @abstractmethod
    def range_of(self, parameter: Stored) -> tuple[int, int]:
        """(start, stop): shard[start:stop] holds what this rank has of the parameter."""

    @abstractmethod
    def extents_of(self, parameter: Stored) -> Extents:
        """Which elements of the parameter those are, in their order."""

    @abstractmethod
    def full(self, parameter: Stored) -> Array:
        """All values of the parameter in its shape. Raises RuntimeError, naming it, while it is sharded."""

    def lent(self, parameter: Stored) -> Array:
        """As `full`, for an op that reads it now and keeps nothing."""
        return self.full(parameter)

    def lent_bits(self, parameter: Stored) -> Array:
        """As `lent`, but the bits (uint16) where the values have 16 and are stored so."""
        return self.lent(parameter)

    def value_dtype(self, parameter: Stored) -> Any:
        """The dtype of what `full` gives."""
        return parameter.dtype

    def assign(self, parameter: Stored, values: Any) -> None:
        """Set all values of the parameter. Raises RuntimeError, naming it, where that can't be done."""
        self.full(parameter)[...] = values

    @abstractmethod
    def edge(self, parameter: Stored) -> Edge:
        """Where the gradient of the parameter goes on the tape."""

    @abstractmethod
    def gradient_target(self, parameter: Stored) -> tuple[Array, bool, Any]:
        """As Variable.gradient_target."""

    def put_rows(self, parameter: Stored, fill: autograd.Fill) -> Any:
        """As Variable.put_rows."""
        target, accumulate, token = self.gradient_target(parameter)
        fill(0, len(target), target, accumulate)
        return token

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget the gradient."""


class LocalStorage(Storage):
    """One parameter, whole, in an array of its own; filled with initial values when first asked for."""

    def __init__(self, parameter: Stored, array: Array | None = None) -> None:
        self._array = array
        self._made_as: str | None = None  # the name that the values were made for
        self._gradient: Array | None = None
        self._parameter = parameter

    @property
    def materialised(self) -> bool:
        """Whether the array exists yet."""
        return self._array is not None

    def array(self) -> Array:
        """The values in the parameter's shape, made now if they don't exist yet."""
        if self._array is None:
            self._made_as = self._parameter.name
            self._array = self._initial(self._made_as)
        return self._array

    def give(self, extents: Extents, out: Array) -> None:
        """Write the values of these elements into 1-D `out`; the others need not be made for it."""
        if self._array is None:
            self._parameter.fill(out, extents)
        else:
            out[...] = take(extents, self._array)

    def _initial(self, name: str) -> Array:
        parameter = self._parameter
        here = device.current()
        owner = name.rpartition(".")[0]
        array = here.set_tag(here.empty(parameter.shape, parameter.dtype), "parameters", owner)
        parameter.fill(array.reshape(-1), self.extents_of(parameter), name)
        return array

    def made_under(self) -> str | None:
        """The name whose values these still are, where the parameter has another one, with other values."""
        name = self._parameter.name
        if self._made_as in (None, name) or not np.array_equal(self._array, self._initial(self._made_as)):
            return None
        return None if np.array_equal(self._array, self._initial(name)) else self._made_as

    @property
    def shard(self) -> Array:
        return self.array().reshape(-1)

    @property
    def gradient(self) -> Array | None:
        self.refuse_incomplete([self._parameter])
        return None if self._gradient is None else self._gradient.reshape(-1)

    def range_of(self, parameter: Stored) -> tuple[int, int]:
        return 0, parameter.size

    def extents_of(self, parameter: Stored) -> Extents:
        return contiguous(0, parameter.size)

    def full(self, parameter: Stored) -> Array:
        return self.array()

    def edge(self, parameter: Stored) -> Edge:
        return Edge(None, 0, parameter)

    def gradient_target(self, parameter: Stored) -> tuple[Array, bool, Any]:
        accumulate = self._gradient is not None
        if not accumulate:
            self._gradient = device.current().empty(parameter.shape, parameter.dtype)
        return self._gradient, accumulate, WRITTEN

    def zero_grad(self) -> None:
        self._gradient = None


def read_only(array: Array) -> Array:
    """A view that can't be written to, if this kind of array supports that: NumPy's does."""
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array
