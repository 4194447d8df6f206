"""Parameter: a tensor with a name whose values may be made late, sharded, gathered and released.

Constructing one allocates nothing. Its values are a function of (seed, name, element index), so whoever
needs a piece of them, the whole array or one rank's shard, makes just that piece.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from shardrt import autograd, device, dtypes, random
from shardrt.autograd import Edge
from shardrt.comm.protocol import Communicator
from shardrt.comm.ranks import Mesh
from shardrt.hooks import Hooks, RemovableHandle
from shardrt.nn.init import AsNamed, Initialiser, InitialiserOfRuns
from shardrt.nn.placement import PipelinePlacement
from shardrt.nn.runs import Part, spans, take
from shardrt.nn.share import CUT, Share
from shardrt.nn.storage import Absent, LocalStorage, Storage, read_only
from shardrt.tensor import Tensor

Array = Any


class Named(Protocol):
    """The module that a parameter is in, as the parameter knows it."""

    name: str


class Parameter(Tensor):
    """A trainable tensor of a Module.

    shape: its shape. init: what its values start as (nn.init), needed. requires_grad: False freezes it.
    dtype: float32, or float64; integers and booleans where it is frozen. Raises TypeError or ValueError for
    what is no shape, TypeError for what is no rule of nn.init and for integers that require a gradient.

    `data` is the whole array; while the parameter is sharded, reading or writing it raises a RuntimeError
    that names it, but in the forward of its unit it can be read. `shard` and `grad` are what this rank holds:
    the piece of a sharded parameter as a 1-D array, the whole array of a plain one. What other ranks may read
    is read-only (NumPy's ValueError); a shard is written inside `with parameter.writing()`. The first use of
    a sharded model, be it only the reading of a `shard`, makes the shards of all its units and is collective:
    let every rank come to it.
    """

    __slots__ = (
        *("init", "seed", "storage", "dtype", "share", "place", "in_parts", "float8"),
        *("_shape", "_owner", "_attribute", "_hooks", "_words"),
    )
    changed_in_place = True

    def __init__(
        self,
        shape: tuple[int, ...],
        init: Initialiser | None = None,
        *,
        requires_grad: bool = True,
        dtype: Any = np.float32,
    ) -> None:
        self._shape = _checked(shape)
        self.init = _rule(init)
        self.seed = random.initial_seed()
        self.dtype = np.dtype(dtype)
        if requires_grad and not dtypes.floating(self.dtype):
            raise TypeError(f"Parameter: requires_grad=True needs floats, dtype is {self.dtype}")
        self.requires_grad = requires_grad
        self.node = None
        self.index = 0
        self.share: Share | None = None  # what `shape` is of a larger whole, if it is cut; see take_share
        self.place: PipelinePlacement | None = None  # which ranks of a pipeline have it; see take_place
        self.in_parts: Any = None  # how products with it are made, where not at once; functional/in_parts.py
        self.float8 = False  # whether linear layers multiply by it in float8; MixedPrecisionPolicy says so
        self._words: Any = None
        self._owner: weakref.ref[Named] | None = None
        self._attribute = ""
        self._hooks: Hooks | None = None
        self.storage: Storage = LocalStorage(self)

    def belongs_to(self, module: Named, attribute: str) -> None:
        """Take the name `attribute` in `module`, unless there is a name already (a tied parameter's)."""
        if self._owner is None or self._owner() is None:
            self._owner, self._attribute = weakref.ref(module), attribute

    def leaves(self, module: Named, attribute: str) -> None:
        """Give up the name `attribute` in `module`, if that is its name."""
        if self._owner is not None and self._owner() is module and self._attribute == attribute:
            self._owner, self._attribute = None, ""

    @property
    def name(self) -> str:
        """The path from the outermost module: "blocks.0.norm1.weight"; "" before it is in a module."""
        owner = self._owner() if self._owner is not None else None
        above = "" if owner is None else owner.name
        return f"{above}.{self._attribute}" if above else self._attribute

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Its shape with the parts that other ranks have, where the module that it is in is cut."""
        return self._shape if self.share is None else self.share.whole

    @property
    def words(self) -> Any:
        """How rows of a vocabulary that is cut, or could be, are looked up and make logits; else None."""
        return self._words if self.share is None else self.share.words

    @words.setter
    def words(self, words: Any) -> None:
        self._words = words

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        return int(np.prod(self._shape))

    @property
    def value_dtype(self) -> np.dtype:
        return self.storage.value_dtype(self)

    @property
    def data(self) -> Array:
        """The whole array. RuntimeError, with the parameter's name, while it is sharded."""
        return self.storage.full(self)

    @data.setter
    def data(self, values: Any) -> None:
        self.storage.assign(self, values)

    def value(self) -> Array:
        """For ops that take arrays, not handles: a copy where the storage lends its memory only for a while.

        Such an op may save the array, or a view of it, beyond the time for which the unit is gathered.
        """
        return self.data if isinstance(self.storage, LocalStorage) else self.lent().copy()

    def lent(self) -> Array:
        return self.storage.lent(self)

    @property
    def gathered_as_bits(self) -> bool:
        """Whether `lent_bits` gives bits, where it can be asked: while its unit is gathered."""
        return self.storage.gathers_bits

    def lent_bits(self) -> Array:
        return self.storage.lent_bits(self)

    def detach(self) -> Tensor:
        """Its values without its past: a copy where it is sharded, as `value`."""
        return Tensor(self.value())

    @property
    def part(self) -> Part:
        """Which elements this rank holds, of `whole_shape` in memory order: where those of `shard` belong."""
        return self.in_whole(self.storage.part_of(self))

    def in_whole(self, part: Part) -> Part:
        """Some elements, counted in `shape`, as elements of the whole."""
        return part if self.share is None else self.share.in_whole(part)

    def take_share(self, share: Share) -> None:
        """Be what `share` says of the parameter as it was: `shape` is this rank's from now on.

        Before its values are made, and once; what all ranks have alike may still be cut. Raises ValueError,
        naming it, for a second cut, RuntimeError where there are values, or it is sharded.
        """
        described = f"parameter {self.name!r}"
        if self.place is not None:
            raise RuntimeError(
                f"{described} is {self.place.description}; call parallelize_module before pipeline_stages"
            )
        known = self.share
        if known is not None and (known.kind == CUT or not (share.own_data or share.mesh is known.mesh)):
            raise ValueError(f"{described} is cut already, {self.share.whole} into {self.share.shape}")
        if not isinstance(self.storage, LocalStorage):
            raise RuntimeError(f"{described} is sharded already; call parallelize_module before fully_shard")
        if self.storage.materialised:
            raise RuntimeError(
                f"{described} has values already; call parallelize_module before the model is used or loaded"
            )
        if self.storage.owned:
            raise RuntimeError(f"{described} has an optimizer already; call parallelize_module before")
        self.share, self._shape = share, share.shape
        self.storage.take_share(share)

    def take_place(self, place: PipelinePlacement) -> None:
        """Be where `place` says from now on: on other ranks without values. Once.

        Raises RuntimeError, naming it, where it is sharded or has an optimizer.
        """
        if not isinstance(self.storage, LocalStorage) or self.storage.owned:
            done = "has an optimizer" if isinstance(self.storage, LocalStorage) else "is sharded"
            raise RuntimeError(
                f"parameter {self.name!r} {done} already; call pipeline_stages before fully_shard and before "
                "the optimizer is made"
            )
        self.place = place
        if not place.here:
            self.storage = Absent(self)

    @property
    def absent(self) -> bool:
        """Whether it is used by stages of other ranks alone, and has no values here."""
        return isinstance(self.storage, Absent)

    @property
    def counts(self) -> bool:
        """Whether this rank's stages are where it is counted: not if it is absent, or a copy."""
        return self.place is None or self.place.owner

    @property
    def updated(self) -> bool:
        """Whether optimizers on this rank update it: not if it is absent, or a twin."""
        return self.place is None or (self.place.here and not self.place.twin)

    @property
    def shard(self) -> Array:
        """What this rank holds of it: a 1-D view (possibly empty) of its storage, to be read."""
        start, stop = self.storage.range_of(self)
        piece = self.storage.shard[start:stop]
        return piece if isinstance(self.storage, LocalStorage) else read_only(piece)

    @contextmanager
    def writing(self) -> Iterator[Array]:
        """Lend `shard` to be written inside a with block: an update of one's own, an average of weights.

        Collective: every rank comes here for the same parameters, also where its piece is empty, because a
        slower rank may still read the values as they are. The next forward sees what was written.
        """
        start, stop = self.storage.range_of(self)
        self.storage.before_write()
        try:
            yield self.storage.shard[start:stop]
        finally:
            self.storage.modified()

    @property
    def grad(self) -> Array | None:
        """The gradient of what this rank holds: in the parameter's shape if that is all of it, else 1-D."""
        gradient = self.storage.complete_gradient()
        if gradient is None or not self.storage.has_gradient(self):
            return None
        start, stop = self.storage.range_of(self)
        piece = gradient[start:stop]
        return piece.reshape(self._shape) if isinstance(self.storage, LocalStorage) else piece

    @grad.setter
    def grad(self, value: None) -> None:
        if value is not None:
            raise TypeError(
                f"parameter {self.name!r}: grad can be set to None only; to change a gradient write to "
                "`parameter.grad[...]`"
            )
        if not isinstance(self.storage, LocalStorage):
            raise RuntimeError(
                f"parameter {self.name!r} is sharded, and a unit's gradients are forgotten together: use "
                "optimizer.zero_grad() or model.zero_grad()"
            )
        self.storage.zero_grad()

    def fill(self, out: Array, part: Part, name: str | None = None) -> None:
        """Write what the elements `part`, counted in `shape`, start as, under this name or another one.

        out: 1-D.
        """
        part = self.in_whole(part)
        if isinstance(self.init, InitialiserOfRuns):
            stop = 0
            for runs in part:
                start, stop = stop, stop + runs.size
                self.init.fill_runs(out[start:stop], runs)
            return
        key = random.name_key(self.name if name is None else name)
        for place, first, length in spans(part):
            self.init.fill(out[place : place + length], self.seed, key, first)

    def load(self, values: Any) -> None:
        """Set this rank's piece, if it has one, from the whole array `values`.

        Raises ValueError, naming the parameter, if the shape differs.
        """
        if tuple(values.shape) != self.whole_shape:
            raise ValueError(
                f"parameter {self.name!r} has shape {self.whole_shape}, the values {tuple(values.shape)}"
            )
        if self.absent:
            return
        start, stop = self.storage.range_of(self)
        shard = self.storage.shard[start:stop]
        piece = np.ascontiguousarray(take(self.part, np.asarray(values)))
        device.of(shard).copy(shard, piece.astype(shard.dtype, copy=False))
        self.storage.modified()

    def __deepcopy__(self, memo: dict) -> "Parameter":
        """One with equal values, not made yet if these are not, and without a gradient.

        Raises TypeError, naming it, for a sharded parameter.
        """
        if self.place is not None:
            raise TypeError(f"parameter {self.name!r} is {self.place.description}, and can't be copied")
        if not isinstance(self.storage, LocalStorage):
            raise TypeError(f"parameter {self.name!r} is sharded and can't be copied; see full_state_dict")
        if self.share is not None:
            raise TypeError(f"parameter {self.name!r} is on {self.share.mesh!r} and can't be copied")
        if not self.storage.materialised and not isinstance(self.init, AsNamed):
            self.init = AsNamed(self.init, random.name_key(self.name))
        twin = Parameter(self._shape, self.init, requires_grad=self.requires_grad, dtype=self.dtype)
        twin.seed, twin.in_parts, twin.words = self.seed, self.in_parts, self.words
        if self.storage.materialised:
            twin.storage = LocalStorage(twin, self.data.copy())
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: int) -> Any:
        raise TypeError(
            f"parameter {self.name!r} can't be pickled; shardrt.checkpoint has save and load for weights"
        )

    def edge(self) -> Edge:
        return self.storage.edge(self)

    def _gradient_target(self) -> tuple[Array, bool, Any]:
        self._call_hooks_at_end()
        return self.storage.gradient_target(self)

    def _put_rows(self, fill: autograd.Fill) -> Any:
        self._call_hooks_at_end()
        return self.storage.put_rows(self, fill)

    def _call_hooks_at_end(self) -> None:
        if self._hooks and autograd.running() is not None:
            autograd.running().at_end(self._call_hooks, hook=True)

    def register_hook(self, hook: Any) -> RemovableHandle:
        """Raises RuntimeError: the whole gradient of a parameter is never there as one array of its own."""
        raise RuntimeError(
            f"parameter {self.name!r}: register_hook is for the results of ops; the gradient of a parameter "
            "is added up in its place: use register_post_accumulate_grad_hook"
        )

    def register_post_accumulate_grad_hook(self, hook: Callable[["Parameter"], None]) -> RemovableHandle:
        """Call hook(parameter) at the end of each backward that has added to `parameter.grad`.

        That is this rank's part, reduced over the ranks: the hook may read and change it. Under no_sync, and
        with set_world_invariant before the last micro-batch of a step, it is not called, since nothing is
        complete. A rank whose backward did not come to the parameter does not call it either. With an
        optimizer that updates in backward the update has been.
        """
        self._hooks = self._hooks or Hooks()
        return self._hooks.add(hook)

    def _call_hooks(self) -> None:
        if self.storage.reduced and self.storage.has_gradient(self):
            with autograd.no_grad():
                for hook in self._hooks:
                    hook(self)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, shape={self._shape}, dtype={self.dtype.name})"


def _checked(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple | list) or not all(isinstance(n, int | np.integer) for n in shape):
        raise TypeError(
            f"Parameter: shape must be a tuple of integers, got {type(shape).__name__}: values come from "
            "`init`, or are set afterwards, `parameter.data = values`"
        )
    if not shape or min(shape) < 0:
        raise ValueError(f"Parameter: shape needs at least one dimension, each >= 0; got {tuple(shape)}")
    return tuple(int(n) for n in shape)


def _rule(init: Any) -> Initialiser:
    if isinstance(init, type | np.ndarray) or not hasattr(init, "fill"):
        given = f"the class {init.__name__}: call it" if isinstance(init, type) else repr(init)
        raise TypeError(f"Parameter: init must be a rule, such as nn.init.Normal(0.0, 0.02), got {given}")
    return init


def parameters_in(given: Any, wanted_by: str) -> list[Parameter]:
    """`given`, one Parameter or an iterable of them, as a list. TypeError, from `wanted_by`, for others."""
    alone = isinstance(given, Parameter) or not isinstance(given, Iterable)
    found = [given] if alone else list(given)
    for one in found:
        if not isinstance(one, Parameter):
            kind = type(one).__name__
            raise TypeError(f"{wanted_by}: wants Parameters, such as model.parameters(), got {kind}")
    return found


def pipeline_of(parameters: Iterable[Parameter]) -> Mesh | None:
    """PipelinePlacement.mesh, of a model with stages; None for other parameters."""
    return next((p.place.mesh for p in parameters if p.place is not None), None)


def along_pipeline(parameters: Iterable[Parameter]) -> Communicator | None:
    """PipelinePlacement.control, of a model with stages; None for other parameters."""
    mesh = pipeline_of(parameters)
    return None if mesh is None else mesh.communicator("control")
