"""SplitModules: FSDP of a model whose modules were split over other axes of the mesh (shardrt.parallel).

A group is sharded over data ranks. Its parameters may be parts of larger ones (split_axes), and each rank's
gradient may be one term of a sum (partial). Both are axes of the root mesh.
"""

from collections.abc import Iterable
from typing import Any

from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.mesh_layout import MeshLayout, index_in, overlap, size_of, union, without
from shardrt.fsdp.composition import REMEDY, Composition
from shardrt.fsdp.process_groups import ProcessGroups, communicators_of
from shardrt.nn.module import Module, stages_of
from shardrt.nn.parameter import Parameter
from shardrt.nn.parameter_placement import ParameterPlacement


class SplitModules(Composition):
    """The axes of data and of split modules together have all ranks that train the model."""

    def check(self, modules: list[Module], mesh: DeviceMesh) -> None:
        for name in mesh.mesh_dim_names or ():
            if name in ("pp", "tp", "ep"):
                raise ValueError(
                    f"fully_shard: along {name!r} of {mesh!r}, ranks have other parts of the model, whose "
                    f"gradients must not be summed; {REMEDY}"
                )
        for each in modules:
            if stages_of(each):
                raise ValueError(
                    "fully_shard: the model has pipeline stages; call it on each of stages_of(model) instead"
                )
            absent = next((parameter for parameter in each.parameters() if parameter.absent), None)
            if absent is not None:
                raise ValueError(
                    f"fully_shard: parameter {absent.name!r} has no values here: it is "
                    f"{absent.pipeline.description}; call it on the modules of this rank's stages"
                )

    def split_of(self, parameter: Parameter, mesh: DeviceMesh) -> tuple[MeshLayout, MeshLayout, str]:
        place = parameter.pipeline
        tied = parameter.name if place is not None and place.tied else ""
        return *self._axes_of(parameter, mesh), tied

    def _axes_of(self, parameter: Parameter, mesh: DeviceMesh) -> tuple[MeshLayout, MeshLayout]:
        """(axes along which the parameter was split before, axes along which its gradients must be added)."""
        placement, place = parameter.placement, parameter.pipeline
        if place is not None and (place.mesh.root is not mesh.root or overlap(place.axes, mesh.axes)):
            raise ValueError(
                f"fully_shard: parameter {parameter.name!r} is {place.description} of {place.mesh!r}; shard "
                f"it along other axes of the same mesh, not {mesh!r}"
            )
        if placement is None:
            return (), ()
        if placement.mesh.root is not mesh.root or overlap(placement.fixed_axes, mesh.axes):
            raise ValueError(
                f"fully_shard: parameter {parameter.name!r} is on {placement.mesh!r} already; shard it along "
                f'other axes of the same mesh, as mesh["dp_shard"], not {mesh!r}'
            )
        partial = without(placement.partial, mesh.axes) if placement.partial else ()
        return placement.cut_axes, partial

    def data_ranks(self, parameters: Iterable[Parameter], mesh: DeviceMesh) -> int:
        placements = [parameter.placement for parameter in parameters if parameter.placement is not None]
        if not placements:
            return mesh.size
        return size_of(union(*(data_of(placement, mesh) for placement in placements)))

    def terms(self, partial: MeshLayout) -> int:
        return size_of(partial)

    def mesh_of(self, units: list[Any]) -> DeviceMesh:
        across, mesh = _across(units), super().mesh_of(units)
        return mesh.union(across) if across else mesh

    def process_groups(
        self, units: list[Any], mesh: DeviceMesh, shard_over: str, split_axes: MeshLayout, partial: MeshLayout
    ) -> ProcessGroups:
        across = _across(units)
        if not (across or partial):
            return super().process_groups(units, mesh, shard_over, split_axes, partial)
        communicators, shard_mesh, added, role = communicators_of(mesh, shard_over)
        if partial:  # outermost, so that the tree of a sum does not depend on how the data ranks are cut
            added = mesh.along(partial, () if added is None else added.axes)
        replicate = added.communicator(role) if added is not None and added.size > 1 else None
        if not across:
            replicas, owner = (1, True) if replicate is None else (replicate.size, replicate.rank == 0)
            return ProcessGroups(*communicators, replicate, communicators[2], shard_mesh, replicas, owner)
        axes = union(split_axes, () if shard_mesh is None else shard_mesh.axes)
        whole_mesh = mesh.along(axes) if axes else None
        whole = communicators[2] if whole_mesh is None else whole_mesh.communicator("control")
        everyone = mesh.union(across)
        owner = not index_in(without(everyone.axes, axes), mesh.root.rank)
        return ProcessGroups(*communicators, replicate, whole, whole_mesh, everyone.size // whole.size, owner)

    def mismatch(self, unit: Any, first: Any) -> str | None:
        mesh, others = unit.settings.mesh, first.settings.mesh
        split = [p.placement for p in unit.parameters if p.placement is not None]
        apart = [placement for placement in split if placement.summed_apart]
        for placement in apart:
            if data_of(placement, mesh) != without(others.axes, placement.one_loss):
                return f" and {placement.mesh!r}"
        return super().mismatch(unit, first) if len(apart) < len(unit.parameters) else None


def data_of(placement: ParameterPlacement, mesh: DeviceMesh) -> MeshLayout:
    """The mesh axes along which ranks have different losses that all contribute to a parameter's gradient.

    Args:
        placement: how the parameter's module was split.
        mesh: the mesh that the parameter is sharded over.
    """
    return without(union(mesh.axes, placement.axes) if placement.own_data else mesh.axes, placement.one_loss)


def _across(units: list[Any]) -> MeshLayout:
    """All axes along which modules of the model were split."""
    parameters = (parameter for unit in units for parameter in unit.parameters)
    return union(*{parameter.placement.axes for parameter in parameters if parameter.placement})
