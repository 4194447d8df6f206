"""Bytes that a rank receives in a step, and sends: counted at the communicators, and by the formula.

The formulas are those of docs/learn/strategies.md, with each unit's padding, and
docs/explanation/tensor_parallel.md; and of a pipeline's stages.
"""

from math import prod

from shardrt import dtypes, nn
from shardrt.comm import CollectiveCounter, Communicator
from shardrt.fsdp import units
from shardrt.nn.parameter_placement import PARTIAL


class Counter:
    """Counts what all communicators of a mesh move; give it to init_device_mesh as `wrap`."""

    def __init__(self) -> None:
        self._made: list[CollectiveCounter] = []

    def __call__(self, communicator: Communicator) -> None:
        self._made.append(CollectiveCounter(communicator))

    @property
    def bytes(self) -> int:
        """Received from other ranks so far; as many were sent, but by the ends of a pipeline."""
        return sum(nbytes for made in self._made for call, nbytes in made.bytes.items() if call != "send")


def expected(model: nn.Module) -> float:
    """Bytes for each rank and step of a model, all of it sharded; one that sends gradients in float32."""
    total = 0.0
    for unit in units(model):
        copies, shards = (1, *unit.settings.mesh.shape)[-2:]
        gathers = 2 if unit.reshard_after_forward else 1
        for group in unit.groups:
            nbytes = 4 * group.layout.total
            gathered = dtypes.storage(group.key.param).itemsize * group.layout.total
            total += (gathers * gathered + nbytes) * (shards - 1) / shards
            total += 2 * nbytes / shards * (copies - 1) / copies
    return total


def expected_of_tensor(model: nn.Module, ranks: int, rows: int, sequence: bool) -> float:
    """Bytes for each rank and step of a language model cut over `ranks`, on `rows` tokens together."""
    part = (ranks - 1) / ranks
    activations = 4 * rows * model.config.n_embd
    passes = 4 * (2 * len(model.blocks) + 1)
    total = passes * part * activations + 8 * (ranks - 1) * rows
    if sequence:
        total += 2 * len(model.blocks) * part * activations  # gathered again
        partial = [p for p in model.parameters() if p.placement is not None and p.placement.kind == PARTIAL]
        total += 2 * part * 4 * sum(prod(parameter.shape) for parameter in partial)
    return total


def expected_of_stage(model: nn.Module, rows: int, *, ends: int) -> float:
    """Bytes for a rank with one stage of a model, and a step of so many rows of its residual stream.

    ends: 1 for the first stage and the last, 2 between; from each a rank gets as much as the stream has.
    Tied parameters are summed by two ranks.
    """
    tied = {id(p): p for p in model.parameters() if p.pipeline is not None and p.pipeline.copies is not None}
    return 4.0 * (ends * rows * model.config.n_embd + sum(prod(p.whole_shape) for p in tied.values()))
