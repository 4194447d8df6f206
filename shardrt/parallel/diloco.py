"""DiLoCo: hosts train apart and average what they learned every `sync_every` steps.

Each host runs FSDP over its own ranks. Every rank also keeps the outer parameters of its shard and their
momentum. In an outer step, the ranks with equal places on their hosts average the outer gradient: the last
outer parameters minus the current ones. SGD with Nesterov momentum then updates the outer parameters.
(Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023; Douillard et al.,
Streaming DiLoCo with overlapping communication, 2025. Arguments have torchft's names.)
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shardrt import device
from shardrt.comm.mesh import DeviceMesh
from shardrt.nn.module import Module
from shardrt.nn.storage import Storage
from shardrt.optim.optimizer import Optimizer
from shardrt.optim.slices import Member, Slice
from shardrt.parallel.outer_exchange import HubExchange, MeshExchange, QuantisedRows, elements, message_bytes

__all__ = ["DiLoCo", "check_diloco", "outer_bytes", "strided_fragments"]

Array = Any
Block = TypeVar("Block")
OUTER, MOMENTUM, GRADIENT = "outer_parameter", "outer_momentum", "outer_gradient"


class DiLoCo:
    """The outer optimizer of a model whose hosts have an inner `optimizer` each.

    Call `step(done)` on all ranks after each inner step. Give the DiLoCo object to CheckpointManager in place
    of the optimizer, with a folder for each host: a checkpoint then has the outer parameters and momentum.
    Buffers stay each host's own: running statistics of BatchNorm, and the biases of routers.

    Args:
        optimizer: the inner optimizer, over the ranks of this host.
        hosts: the axis of the hosts: the ranks with this rank's place on each host; or a HubExchange.
        model_fragments: for each fragment its modules, in the order of outer steps. None: one fragment. The
            first also has the parameters that are in no other.
        sync_every: inner steps from one outer step of a fragment to its next.
        warmup_steps: inner steps at the beginning in which `warmup_every` replaces `sync_every`: hosts move
            apart fastest when the model is new.
        lr: of the outer SGD.
        momentum: of the outer SGD.
        nesterov: look ahead along the momentum, as the paper does.
        fragment_sync_delay: inner steps between the start of an exchange and the use of its result.
        fragment_update_alpha: weight of this host's parameters in the mix that replaces them; 0 takes the
            outer parameters alone.
        should_quantize: send outer gradients in 4 bits, with a scale for each 32 elements.

    Raises:
        ValueError: for settings that do not fit together, offloaded parameters, or other than float32.

    Example:
        mesh = init_device_mesh("auto", (hosts, ranks), mesh_dim_names=("diloco", "dp_shard"))
        fsdp.fully_shard(model, mesh=mesh["dp_shard"])
        outer = DiLoCo(optim.AdamW(model.parameters(), lr=1e-3), mesh["diloco"], sync_every=50)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        hosts: DeviceMesh | HubExchange,
        model_fragments: Sequence[Sequence[Module]] | None = None,
        *,
        sync_every: int,
        warmup_steps: int = 0,
        warmup_every: int = 10,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        should_quantize: bool = False,
    ) -> None:
        count = 1 if model_fragments is None else len(model_fragments)
        check_diloco(sync_every, count, lr, momentum, fragment_sync_delay, fragment_update_alpha)
        check_warmup(warmup_steps, warmup_every, count, fragment_sync_delay)
        self.optimizer = optimizer
        self.exchange = MeshExchange(hosts) if isinstance(hosts, DeviceMesh) else hosts
        self._schedule = Schedule(sync_every // count, warmup_steps, max(1, warmup_every // count))
        self._delay, self._alpha = fragment_sync_delay, fragment_update_alpha
        self._outer = lr, momentum, nesterov
        optimizer.take_in()
        for piece in optimizer.slices:
            _check_storage(piece)
        self.fragments = [
            Fragment(pieces, self.exchange, quantize=should_quantize, keep=self._delay > 0)
            for pieces in _by_fragment(optimizer.slices, model_fragments or [[]])
        ]

    def step(self, done: int, *, present: bool = True) -> int:
        """The outer work that is due after inner step `done`, counted from 1. Collective.

        Args:
            present: False leaves this host out of an exchange that begins now: its steps since the last one
                are dropped, and it takes the outer parameters. All ranks of a host say the same.

        Returns:
            The number of the outer step that ended without this host, else 0.
        """
        if number := self._schedule.number(done + self._delay):
            self._fragment(number).begin(number, present)
        number = self._schedule.number(done)
        if not number:
            return 0
        took_part = self._fragment(number).finish(*self._outer, self._alpha)
        self.exchange.after_step(number, self._state())
        return 0 if took_part else number

    @property
    def took_part(self) -> bool:
        """Whether this host took part in the exchange that is under way; for `resume`."""
        return all(fragment.took_part() for fragment in self.fragments if fragment.under_way)

    def resume(self, done: int, *, took_part: bool = True) -> None:
        """After `restore`, which gave step `done`: note the exchange that was under way then."""
        for fragment in self.fragments:
            fragment.under_way = False
        number = self._schedule.passed(done) + 1
        if self._schedule.step(number) - self._delay <= done:
            self._fragment(number).resume(took_part)

    def join(self, done: int) -> tuple[int, bool]:
        """Meet the other hosts at a hub, after step `done`. Collective.

        Returns:
            The step that all hosts should begin after, and whether this host is behind: `catch_up` is due.
        """
        message = max(fragment.message_bytes for fragment in self.fragments)
        state = sum(array.nbytes for array in self._state())
        first, last = self.exchange.join(message, state, self._layout(), done)
        return first, last > self._schedule.passed(done)

    def catch_up(self, root: int = 0) -> int:
        """Take the outer state of another host, and its parameters; gives the inner step it belongs to.

        For a host that restarts from an older checkpoint, from none, or after a LeftBehind. With a hub, the
        state is that after its next round; else it is that of host `root`, on all hosts, and the step 0.
        Collective.
        """
        for fragment in self.fragments:
            fragment.drop()
        number = self.exchange.take_from(root, self._state())
        self.take_outer()
        return self._schedule.step(number)

    def take_outer(self) -> None:
        """Give this host the outer parameters: the result of a run. Its steps since the exchange are lost."""
        for fragment in self.fragments:
            for piece in fragment.pieces:
                piece.take(piece.outer[OUTER])

    def _layout(self) -> str:
        """The settings, and what each fragment's buffer has."""
        parts = [
            [(parameter.name, parameter.whole_shape, parameter.extents) for parameter, _ in piece.members]
            for fragment in self.fragments
            for piece in fragment.pieces
        ]
        return repr((self._schedule, self._delay, self._alpha, self._outer, len(self.fragments), parts))

    def _state(self) -> list[Array]:
        return [
            array
            for fragment in self.fragments
            for piece in fragment.pieces
            for array in piece.outer.values()
        ]

    def _fragment(self, number: int) -> "Fragment":
        return self.fragments[(number - 1) % len(self.fragments)]

    # what a checkpoint reads

    @property
    def state_names(self) -> dict[str, str]:
        """Names of the state arrays: the inner optimizer's, and the outer ones."""
        return self.optimizer.state_names | self._outer_names

    def state_names_of(self, group: int) -> dict[str, str]:
        """Those that the parameters of a group have."""
        return self.optimizer.state_names_of(group) | self._outer_names

    @property
    def _outer_names(self) -> dict[str, str]:
        return {name: name for name in (OUTER, MOMENTUM, *([GRADIENT] if self._delay else []))}

    @property
    def slices(self) -> list["OuterSlice"]:
        """The inner optimizer's slices, with the outer state; exchanges under way have ended."""
        return [piece for fragment in self.fragments for piece in fragment.saved()]

    @property
    def param_groups(self) -> list[dict]:
        """The inner optimizer's."""
        return self.optimizer.param_groups

    def take_in(self, also: Collection[int] = ()) -> None:
        """Do nothing: parameters that are frozen when this is made stay out of outer steps."""


class Schedule(NamedTuple):
    """Maps inner steps to outer steps, which are numbered from 1."""

    every: int
    warmup_steps: int
    warmup_every: int

    def passed(self, step: int) -> int:
        """How many outer steps there are up to inner step `step`."""
        after = max(0, step - self.warmup_steps) // self.every
        return min(step, self.warmup_steps) // self.warmup_every + after

    def step(self, number: int) -> int:
        """The inner step of an outer step."""
        after = max(0, number - self.warmup_steps // self.warmup_every)
        return (number - after) * self.warmup_every + after * self.every

    def number(self, step: int) -> int:
        """The outer step after inner step `step`; 0 if there is none."""
        number = self.passed(step)
        return number if self.step(number) == step else 0


class OuterSlice:
    """An inner optimizer's slice with the outer state next to its own."""

    def __init__(self, inner: Slice, start: int) -> None:
        here, size = device.current(), inner.storage.shard.size
        self.inner, self.storage = inner, inner.storage
        self.range = slice(start, start + size)  # in the fragment's flat buffer
        self.outer = {name: inner.storage.new_state(name) for name in (OUTER, MOMENTUM)}
        here.copy(self.outer[OUTER], inner.storage.shard)
        self.state = inner.state | self.outer

    @property
    def members(self) -> list[Member]:
        """The inner slice's."""
        return self.inner.members

    @property
    def steps(self) -> np.ndarray:
        """The inner slice's."""
        return self.inner.steps

    def state_range(self, kind: str, start: int, stop: int) -> tuple[int, int]:
        """As the inner slice's."""
        return self.inner.state_range(kind, start, stop)

    def as_shard(self, kind: str) -> Array:
        """As the inner slice's."""
        return self.inner.as_shard(kind) if kind in self.inner.state else self.state[kind]

    def set_steps(self, steps: Iterable[int]) -> None:
        """As the inner slice's."""
        self.inner.set_steps(steps)

    def update(self, gradient: Array, lr: float, momentum: float, nesterov: bool, alpha: float) -> None:
        """SGD on the outer parameters; the shard becomes `alpha` times its own plus the rest of the outer."""
        outer, velocity, shard = self.outer[OUTER], self.outer[MOMENTUM], self.storage.shard
        velocity *= momentum
        velocity += gradient
        outer -= lr * (gradient + momentum * velocity if nesterov else velocity)
        self.take(outer if alpha == 0 else alpha * shard + (1 - alpha) * outer)

    def take(self, values: Array) -> None:
        """Set the shard."""
        self.storage.before_write()
        device.current().copy(self.storage.shard, values)
        self.storage.modified()


class Fragment:
    """Slices that hosts exchange together, in one flat buffer.

    The element after the last counts the hosts that take part.

    Args:
        quantize: exchange 4 bits for each element.
        keep: a checkpoint has the outer gradient.
    """

    def __init__(
        self, pieces: list[Slice], exchange: MeshExchange | HubExchange, *, quantize: bool, keep: bool
    ) -> None:
        here = device.current()
        starts = np.cumsum([0, *(piece.storage.shard.size for piece in pieces)]).tolist()
        self.pieces = [OuterSlice(piece, start) for piece, start in zip(pieces, starts, strict=False)]
        self._exchange = exchange
        self.message_bytes = message_bytes(starts[-1], quantize)
        empty = here.zeros(elements(starts[-1], quantize), np.float32)
        self._buffer = here.set_tag(empty, "optimizer state")
        if keep:
            for piece in self.pieces:
                piece.state[GRADIENT] = self._buffer[piece.range]
        self._codes = QuantisedRows(exchange.hosts, self._buffer.size) if quantize else None
        self._event = here.new_event()
        self._present = True
        self._exchanging = False  # the exchange may still write the buffer
        self.under_way = False  # begun, and not finished

    def begin(self, number: int, present: bool) -> None:
        """Begin to sum this rank's outer gradient over the hosts; zeros if this host is not `present`."""
        self._present = present
        for piece in self.pieces:
            into = self._buffer[piece.range]
            into[...] = piece.outer[OUTER]
            into -= piece.storage.shard
        if not present:
            self._buffer[...] = 0
        self._buffer[-1] = present
        ready = device.current().new_event()
        device.current().current_stream.record(ready)
        self._exchange.stream.wait(ready)  # the buffer is written
        self._exchange.sum(number, self._buffer, self._codes)
        self._exchange.stream.record(self._event)
        self._exchanging = self.under_way = True

    def wait(self) -> None:
        """Make the buffer the mean over the hosts that took part; zeros without any."""
        if not self._exchanging:
            return
        self._exchanging = False
        device.current().current_stream.wait(self._event)  # the sum is there
        self._present = self._exchange.took_part(self._present)
        self._buffer[:-1] /= max(1.0, float(self._buffer[-1]))

    def finish(self, lr: float, momentum: float, nesterov: bool, alpha: float) -> bool:
        """Update the outer parameters by the mean, and this host's; gives whether it took part."""
        if not self.under_way:
            return True
        self.wait()
        self.under_way = False
        for piece in self.pieces:
            gradient = self._buffer[piece.range]
            piece.update(gradient, lr, momentum, nesterov, alpha if self._present else 0.0)
        return self._present

    def took_part(self) -> bool:
        """Whether the mean has this host's outer gradient. Waits for an exchange under way."""
        self.wait()
        return self._present

    def resume(self, took_part: bool) -> None:
        """An exchange is under way, and its mean is in the buffer."""
        self.under_way, self._present = True, took_part

    def drop(self) -> None:
        """Forget an exchange under way."""
        self.wait()
        self.under_way = False

    def saved(self) -> list[OuterSlice]:
        """The slices for a checkpoint, after an exchange under way has ended."""
        self.wait()
        return self.pieces


def strided_fragments(blocks: Sequence[Block], count: int) -> list[list[Block]]:
    """Blocks in `count` fragments with every count-th block each: the paper's strided pattern.

    Raises:
        ValueError: if there are fewer blocks than fragments.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.parallel import strided_fragments
        >>> [len(each) for each in strided_fragments([nn.Linear(2, 2) for _ in range(5)], 2)]
        [3, 2]
    """
    if not 1 <= count <= len(blocks):
        raise ValueError(f"strided_fragments: count must be from 1 to the {len(blocks)} blocks, got {count}")
    return [list(blocks[first::count]) for first in range(count)]


def outer_bytes(shard: int, hosts: int, fragments: int, should_quantize: bool) -> int:
    """Bytes that DiLoCo keeps on a rank's device: outer parameters, momentum, gradient, and codes.

    Args:
        shard: bytes of the float32 shards that the inner optimizer updates.

    Returns:
        The exact number; for codes of several fragments, with a block more for each fragment but one.
    """
    count, more = shard // 4, fragments - 1
    least = 1 if should_quantize else 0  # elements of a fragment that add most to these
    buffer = 4 * (elements(count, should_quantize) + more * elements(least, should_quantize))
    if not should_quantize:
        return 2 * shard + buffer
    codes = message_bytes(count, quantize=True) + more * message_bytes(least, quantize=True)
    return 2 * shard + buffer + hosts * codes


def check_diloco(
    sync_every: int, fragments: int, lr: float, momentum: float, delay: int, alpha: float
) -> None:
    """Raise ValueError unless these settings of DiLoCo fit together."""
    if sync_every < 1 or fragments < 1 or sync_every % fragments:
        raise ValueError(
            f"DiLoCo: sync_every must be a positive multiple of the {fragments} fragments, got {sync_every}"
        )
    if not 0 <= delay < sync_every // fragments:
        raise ValueError(
            "DiLoCo: fragment_sync_delay must be from 0 to below sync_every over the number of fragments, "
            f"{sync_every // fragments}, got {delay}"
        )
    if not 0 <= alpha < 1:
        raise ValueError(f"DiLoCo: fragment_update_alpha must be in [0, 1), got {alpha}")
    if not (0 < lr < float("inf") and 0 <= momentum < 1):
        raise ValueError(
            f"DiLoCo: the outer lr must be positive and the momentum in [0, 1), got {lr} and {momentum}"
        )


def check_warmup(steps: int, every: int, fragments: int, delay: int) -> None:
    """Raise ValueError unless these settings of DiLoCo fit together."""
    if steps < 0 or every < 1 or (steps and (every % fragments or steps % every)):
        raise ValueError(
            f"DiLoCo: warmup_every must be a multiple of the {fragments} fragments and divide warmup_steps, "
            f"got {every} and {steps}"
        )
    if steps and delay >= every // fragments:
        raise ValueError(
            "DiLoCo: fragment_sync_delay must be below warmup_every over the number of fragments, "
            f"{every // fragments}, got {delay}"
        )


def _check_storage(piece: Slice) -> None:
    if piece.storage.shard.dtype != np.float32:
        raise ValueError(f"DiLoCo: parameter {piece.name!r} is {piece.storage.shard.dtype}, not float32")
    if not piece.storage.offloaded.everything_on_device:
        raise ValueError(f"DiLoCo: parameter {piece.name!r} is offloaded; leave the offload_policy out")


def _by_fragment(slices: list[Slice], fragments: Sequence[Sequence[Module]]) -> list[list[Slice]]:
    """The slices of each fragment; slices without a fragment are in the first.

    Raises:
        ValueError: if a unit has parameters of two fragments.
    """
    number: dict[Storage, int] = {}
    for index, modules in enumerate(fragments):
        for parameter in (each for module in modules for each in module.parameters()):
            if number.setdefault(parameter.storage, index) != index:
                raise ValueError(
                    f"DiLoCo: parameter {parameter.name!r} is in one unit with parameters of another fragment"
                )
    found: list[list[Slice]] = [[] for _ in fragments]
    for piece in slices:
        found[number.get(piece.storage, 0)].append(piece)
    return found
