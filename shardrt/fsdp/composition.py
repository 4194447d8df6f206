"""Composition: how FSDP goes together with modules that were split over ranks before. By default, none was.

options/split_modules.py has the composition with tensor, context and expert parallelism. `active` names
the present one.
"""

from collections.abc import Iterable
from typing import Any

from shardrt.comm.mesh_layout import MeshLayout
from shardrt.comm.ranks import Mesh
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter

REMEDY = 'take mesh["dp_shard"] or mesh["dp_replicate", "dp_shard"]'  # for messages


class Composition:
    """Of a model without split modules: all of its ranks are data ranks."""

    def check(self, modules: list[Module], mesh: Mesh) -> None:
        """Raise ValueError if this rank can't shard one of these modules over `mesh`."""

    def split_of(self, parameter: Parameter, mesh: Mesh) -> tuple[MeshLayout, MeshLayout, str]:
        """GroupKey's `split_axes`, `partial` and `tied` of a parameter that is sharded over `mesh`."""
        return (), (), ""

    def data_ranks(self, parameters: Iterable[Parameter], mesh: Mesh) -> int:
        """Number of ranks whose losses contribute to a gradient of these parameters."""
        return mesh.size

    def terms(self, partial: MeshLayout) -> int:
        """Number of ranks along the axes where each rank's gradient is one term of a sum."""
        return 1

    def mesh_of(self, units: list[Any]) -> Mesh:
        """The mesh of all ranks that train the model."""
        return units[0].settings.mesh

    def process_groups(
        self, units: list[Any], mesh: Mesh, shard_over: str, split_axes: MeshLayout, partial: MeshLayout
    ) -> ProcessGroups:
        """The process groups of groups of `units` that are sharded alike. Collective."""
        return ProcessGroups.of(mesh, shard_over)

    def mismatch(self, unit: Any, first: Any) -> str | None:
        """Whether gradients of `unit` are summed over other ranks than those of `first`.

        Returns None if the ranks are the same, else text about the unit's mesh for the error message.
        """
        mesh, others = unit.settings.mesh, first.settings.mesh
        alike = mesh is others or sorted(mesh.ranks.ravel()) == sorted(others.ranks.ravel())
        return None if alike or not unit.parameters else ""


active = Composition()
