"""What a training loop asks of what it trains: the seam between a loop and text, images or anything else.

The loop owns ranks, sharding, optimizer, checkpoints and reports. A task owns data, model, loss and figures;
it is made on every rank, alike but for the rank, and holds no state that a step number does not tell.
"""

from collections.abc import Iterator
from typing import Any, Protocol

from shardrt.nn.module import Module
from shardrt.tensor import Tensor


class Task(Protocol):
    """One thing to train, as one rank sees it. Batches are what the task says, cut by it alone."""

    def facts(self) -> dict[str, Any]:
        """What all ranks must agree on and the log keeps: the source of the data, how much, its hash."""

    def model(self) -> Module:
        """A new model. Nothing of it is in memory yet."""

    def units(self, model: Module) -> list[Module]:
        """The parts of the model that become units of fully_shard, in the order in which they run."""

    def batches(self, first: int, stop: int) -> Iterator[Any]:
        """This rank's batch of every step in [first, stop), made ahead in a thread."""

    def parts(self, batch: Any, count: int) -> list[Any]:
        """A batch as `count` micro-batches of one size."""

    def loss(self, model: Module, batch: Any) -> Tensor:
        """A part's share of the mean loss of the whole step: summed over parts and ranks it is that."""

    def evaluate(self, model: Module, limit: int | None) -> dict[str, tuple[float, float]]:
        """Name of a figure -> (sum, count) on this rank, on held-out data: all of it, or `limit` batches.

        The figure is the sum of sums over ranks by that of counts. Collective, in evaluation without a tape.
        """
