"""The interface between the training loop (loop.py) and its task: text, images or anything else.

The loop owns ranks, sharding, optimizer, checkpoints and reports. A task owns data, model, loss and figures.
Every rank builds the same task. It is stateless: a sample depends only on its number.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from shardrt.comm.mesh import DeviceMesh
from shardrt.nn.public import Module
from shardrt.parallel.styles import Style
from shardrt.tensor import Tensor
from shardrt.train.metrics import RunLog


class Task(Protocol):
    """One thing to train. Sample n of a run is the same one at every batch size and number of ranks."""

    unit: str  # the unit of a sample's size, for rates: "token", "image"
    per_sample: int  # how many of these

    def facts(self) -> dict[str, Any]:
        """Facts that all ranks must share and the log keeps: the source of the data, how much, its hash."""

    def introduction(self) -> list[str]:
        """Lines for the reader: the model and the data."""

    def model(self, mesh: DeviceMesh) -> Module:
        """A new model.

        Nothing of it is in memory yet.

        Args:
            mesh: the ranks that have other parts of a batch.
        """

    def plan(self, model: Module, *, sequence: bool) -> Mapping[str, Style]:
        """How parallelize_module splits the model; sequence: activations too. ValueError if it can't be."""

    def units(self, model: Module) -> list[Module]:
        """The parts of the model that become units of fully_shard, in the order in which they run."""

    def ends(self, model: Module) -> list[list[Module]]:
        """Modules before and after the units, where the two share no parameter; [] if it is short."""

    def flops(self, model: Module) -> float:
        """Operations of the matmuls of a sample, forward and backward; 0: not known."""

    def batch(self, samples: range) -> Any:
        """Training samples by their numbers, from a separate thread."""

    def part(self, batch: Any, mesh: DeviceMesh) -> Any:
        """The slice of a batch on a rank of `mesh`, of one axis, where sequences lie on its ranks."""

    def count(self, samples: range) -> int:
        """The number by which the summed loss of these samples is divided for the mean. Reads no sample."""

    def inputs(self, batch: Any) -> Mapping[str, Any]:
        """The model's arguments for a batch, to train or to measure: arguments of forward by name."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        """The loss of a batch, summed, from the model's output."""

    def held_out(self, count: int, limit: int | None, rank: int, size: int) -> Iterator[Any]:
        """This rank's batches of `count` held-out samples: of all samples, or `limit` spread over them.

        Every rank gets equally many, since the forward of a sharded model is collective; none: no evaluation.
        """

    def held_out_samples(self, limit: int | None) -> int:
        """How many held-out samples there are, or `limit` if that is less."""

    def measure(self, output: Any, batch: Any) -> dict[str, tuple[float, float]]:
        """Name of a figure -> (sum, count) over a held-out batch, from the model's output: sum / count."""

    def evaluation(self, figures: dict[str, float]) -> dict[str, float]:
        """The figures over all ranks, with those that follow from them, "held_out_loss" among them."""

    def preview(self, model: Module, run: RunLog) -> None:
        """Show the reader what the model can do after the first evaluation of a run. Collective."""

    def close(self, model: Module, run: RunLog) -> dict[str, Any]:
        """Use the trained model at the end; gives a record for the log. Collective."""
