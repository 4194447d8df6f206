"""The pieces of a model and its optimizer that this rank saves and restores.

They are pieces of parameters, not of flat buffers: a piece covers extents of a parameter (nn/extents.py).
A piece has no units and no padding, so a checkpoint loads into any layout, strategy and number of ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardrt import device
from shardrt.fsdp.options.error_feedback import errors_of
from shardrt.nn.extents import Extents, contiguous
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.placement import PipelinePlacement, owner_of, pipeline_placement_of
from shardrt.nn.ranks import is_leader
from shardrt.optim.low_bit.scales import encoded, key_of
from shardrt.optim.optimizer import Optimizer
from shardrt.optim.slices import BITS, Slice, exact_state, kept_state

Array = Any
PARAMETER = "parameter"  # the kind that is not optimizer state
ERROR = "quantisation_error"  # and a label behind it: what rounding lost of the gradients of a host


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements `part` of a parameter, or of its optimizer state.

    Attributes:
        kind: "parameter", or the name of the state ("m").
        flat: the 1-D array that has them at [start, stop) on this rank, a unit's shard for one.
        trained: the optimizer updates it, so it must be finite.
    """

    kind: str
    parameter: str
    extents: Extents
    flat: Array
    start: int
    stop: int
    trained: bool = False

    @cached_property
    def array(self) -> Array:
        """A 1-D view of the elements on this rank."""
        return self.flat[self.start : self.stop]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of its elements in a file: bfloat16 optimizer state is float32 there."""
        return np.dtype(np.float32) if self._as_bits else self.flat.dtype

    @property
    def _as_bits(self) -> bool:
        return self.kind != PARAMETER and self.flat.dtype == BITS

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays that have it, whole."""
        return (self.flat,)

    def copied(self, copies: Mapping[int, Array]) -> "Piece":
        """The same in copies of its arrays, by their ids."""
        return replace(self, flat=copies[id(self.flat)])

    def clear(self) -> None:
        """Set all elements to 0."""
        self.array.fill(0)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Its elements [start, stop), on the host, in the file's dtype."""
        values = device.of(self.flat).to_numpy(self.array[start:stop])
        return exact_state(values) if self._as_bits else values

    def write(self, start: int, values: np.ndarray) -> None:
        """Set elements from `start` on to values from a file."""
        if self._as_bits:
            values = kept_state(values, BITS)
        target = self.array[start : start + values.size]
        device.of(target).copy(target, values)


def pieces_of(model: Module, optimizer: Optimizer | None, *, saving: bool) -> Iterator[Piece]:
    """The pieces that this rank holds, parameter by parameter, then the buffers; none of them empty.

    Args:
        saving: if several ranks hold copies of a piece, only its owner saves it; of the buffers, only rank
            0's are saved, or those of the first rank of their stage.
    """
    slices = [] if optimizer is None else optimizer.slices
    states = {id(p): (each, group) for each in slices for p, group in each.members}
    first = not saving or is_leader(model)
    for name, parameter in model.named_parameters():
        if id(parameter) in states:
            yield from _errors(name, parameter, saving)
        storage, part = parameter.storage, parameter.extents
        if not part or (saving and not (parameter.counts and owner_of(parameter, first))):
            continue
        held, trained = storage.range_of(parameter), id(parameter) in states
        yield Piece(PARAMETER, name, part, storage.shard, *held, trained)
        if trained:
            piece, group = states[id(parameter)]
            for kind in optimizer.state_names_of(group):
                yield piece_of_state(kind, name, parameter, piece)
    for name, buffer, place in placed_buffers(model):
        if first if place is None or not saving else place.owner and place.is_leader:
            yield Piece(PARAMETER, name, contiguous(0, buffer.size), buffer.reshape(-1), 0, buffer.size)


def _errors(name: str, parameter: Parameter, saving: bool) -> Iterator[Piece]:
    """The error feedback of a parameter's gradient, of any elements of the parameter."""
    found = errors_of(parameter)
    if found is None or (saving and not found.owner):
        return
    kind = f"{ERROR}.{found.label}" if parameter.counts else f"{ERROR}.{found.label}.tied"
    yield Piece(kind, name, parameter.in_whole(found.extents), found.flat, found.start, found.stop, True)


def is_error(kind: str) -> bool:
    """Whether a kind is error feedback, without which training goes on, though not bitwise identically."""
    return kind.startswith(f"{ERROR}.")


def piece_of_state(kind: str, name: str, parameter: Parameter, piece: Slice) -> Piece:
    """The optimizer state `kind` of a parameter."""
    held = piece.state_range(kind, *parameter.storage.range_of(parameter))
    if not encoded(piece, kind):
        return Piece(kind, name, parameter.extents, piece.state[kind], *held, True)
    from shardrt.checkpoint.encoded import EncodedPiece  # which is a Piece

    arrays = piece.state[kind], *held, True, piece.state[key_of(kind)].array
    return EncodedPiece(kind, name, parameter.extents, *arrays)


def placed_buffers(model: Module) -> Iterator[tuple[str, Array, PipelinePlacement | None]]:
    """(name, array, which stages of a pipeline have it) of the buffers of a model."""
    for path, module in model.named_modules():
        for name, array in module._buffers.items():
            yield (f"{path}.{name}" if path else name), array, pipeline_placement_of(module)


def counted(model: Module, optimizer: Optimizer) -> dict[str, tuple[Slice, int]]:
    """Name -> the slice that counts the updates of a parameter, and its position there."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (piece, position)
        for piece in optimizer.slices
        for position, (parameter, _) in enumerate(piece.members)
        if id(parameter) in names
    }


def set_steps(model: Module, optimizer: Optimizer, steps: dict[str, int]) -> None:
    """Set the update count of each parameter, by name; 0 if `steps` lacks it."""
    found: dict[Slice, list[int]] = {piece: piece.steps.tolist() for piece in optimizer.slices}
    for name, (piece, position) in counted(model, optimizer).items():
        found[piece][position] = steps.get(name, 0)
    for piece, own in found.items():
        piece.set_steps(own)
