"""Carrier: brings a stage's output to the next stage, on another rank by a link, or on this rank."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardrt import device, pytree
from shardrt.autograd import Variable, is_grad_enabled
from shardrt.comm.links import Links
from shardrt.nn.module import Module
from shardrt.parallel.table import Link, Table
from shardrt.tensor import Tensor

Array = Any
Arrays = tuple[Array | None, ...]


class Carrier:
    """Values that pass between stages of one rank's pipeline: kind "F", and back: "B".

    A message is known by kind, the stage that sends it, and the micro-batch. Its arrays have the shapes that
    all messages of its `key` have.

    Args:
        kept: TableStats.kept, if the table's own actions send. Without it, each message is kept until
            `finish`.
    """

    def __init__(
        self, links: Links, table: Table, rank: int, kept: Mapping[Link, Sequence[int]] | None = None
    ) -> None:
        self._links, self._table, self._rank = links, table, rank
        self._kept = {link: iter(counts) for link, counts in (kept or {}).items()}
        self._here: dict[tuple[str, int, int], tuple[Arrays, Any]] = {}  # between two stages of this rank

    def send(
        self, kind: str, stage: int, micro_batch: int, arrays: Arrays, key: Hashable, form: Any = None
    ) -> None:
        """Send from `stage` to the next one, or of kind "B" to the one before.

        Args:
            form: see `flat`.
        """
        to = self._table.rank_of(stage + STEP[kind])
        if to == self._rank:
            self._here[kind, stage, micro_batch] = arrays, form
        else:
            label, keep = action_label(kind, stage, micro_batch), self._keep(Link(self._rank, to, kind))
            self._links.send(kind, to, arrays, key=(kind, stage, key), tag=label, about=form, keep=keep)

    def _keep(self, link: Link) -> int | None:
        return next(self._kept[link]) if link in self._kept else None

    def expect(self, kind: str, stage: int, micro_batch: int, key: Hashable) -> None:
        """That message of `stage` will be received here, after those that are expected already."""
        source = self._table.rank_of(stage)
        if source != self._rank:
            label = action_label(kind, stage, micro_batch)
            self._links.expect(kind, source, key=(kind, stage, key), tag=label)

    def receive(self, kind: str, stage: int, micro_batch: int) -> tuple[Arrays, Any]:
        """The values that `stage` has sent, and their form. The caller owns the arrays.

        They are copies: the next message takes the slot of the link, and backward needs the arrays later.
        """
        source = self._table.rank_of(stage)
        if source == self._rank:
            return self._here.pop((kind, stage, micro_batch))
        received = self._links.receive(kind, source, tag=action_label(kind, stage, micro_batch))
        arrays, form = tuple(map(_copy, received.arrays)), received.about
        received.free()
        return arrays, form

    def finish(self) -> None:
        """Let compute wait until all sent messages are delivered."""
        self._links.finish()


STEP = {"F": 1, "B": -1}  # from the stage that sends a message to the one that receives it


def action_label(kind: str, stage: int, micro_batch: int) -> str:
    """For messages and traces."""
    return f"{kind}{'' if micro_batch < 0 else micro_batch} of stage {stage}"


def _copy(array: Array | None) -> Array | None:
    if array is None:
        return None
    here = device.current()
    own = here.empty(array.shape, array.dtype)
    here.copy(own, array)
    return own


def flat(output: Any, stage: str) -> tuple[list[Tensor], Any]:
    """(the tensors that a stage gives, how they lie in it: as JSON has it, for `nested`).

    The tensors may lie in tuples, lists and dicts of strings, with None among them.

    Raises:
        TypeError: for others.
    """
    if output is None:
        return [], None
    if isinstance(output, Tensor):
        return [output], "tensor"
    items = output.values() if type(output) is dict else output
    named = type(output) is not dict or all(isinstance(key, str) for key in output)
    if type(output) not in (tuple, list, dict) or not named:
        raise TypeError(
            f"{stage} gives {type(output).__name__} to the next; it can be a tensor, or tuples, lists and "
            "dicts of strings that hold tensors"
        )
    below = [flat(item, stage) for item in items]
    forms = [form for _, form in below]
    form = dict(zip(output, forms, strict=True)) if type(output) is dict else forms
    return [tensor for tensors, _ in below for tensor in tensors], [type(output).__name__, form]


def nested(tensors: Iterator[Tensor], form: Any) -> Any:
    """A stage's output, rebuilt from its tensors in order."""
    if form is None:
        return None
    if form == "tensor":
        return next(tensors)
    kind, items = form
    if kind == "dict":
        return {key: nested(tensors, item) for key, item in items.items()}
    return {"tuple": tuple, "list": list}[kind](nested(tensors, item) for item in items)


def key_of(model: Module, batch: Any, kind: str = "step") -> Hashable:
    """Tells apart the messages of different micro-batches: by shapes, and whether it is for training.

    Args:
        kind: of what is run, where batches of the same shapes may be used otherwise.
    """
    return kind, is_grad_enabled(), model.training, shapes_of(batch)


def shapes_of(tree: Any) -> Hashable:
    """Shapes and types of the arrays and tensors in a micro-batch, however deep."""
    found: list[tuple] = []

    def seen(array: Any) -> Any:
        found.append((tuple(array.shape), str(array.dtype)))
        return array

    pytree.replaced(tree, seen, (Variable, np.ndarray, *_device_arrays()))
    return tuple(found)


def _device_arrays() -> Iterable[type]:
    return (type(device.current().empty((0,), np.float32)),)
