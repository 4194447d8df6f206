"""SplitModules: FSDP of a model whose modules were split over other axes of the mesh (shardrt.parallel).

A group is sharded over data ranks. Its parameters may be parts of larger ones (cut), and each rank's gradient
may be one term of a sum (partial). Both are axes of the root mesh.
"""

from collections.abc import Iterable
from typing import Any

from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.mesh_layout import MeshLayout, index_in, overlap, size_of, union, without
from shardrt.fsdp.composition import Composition
from shardrt.fsdp.process_groups import Axes, ProcessGroups, ranks_of_cut
from shardrt.nn.module import Module, stages_of
from shardrt.nn.parameter import Parameter
from shardrt.nn.parameter_placement import PARTIAL, SHARD, ParameterPlacement


class SplitModules(Composition):
    """The axes of data and of split modules together have all ranks that train the model."""

    def check_modules(self, modules: list[Module]) -> None:
        for each in modules:
            if stages_of(each):
                raise ValueError("fully_shard: the model has stages; call it on each of them instead")
            absent = next((parameter for parameter in each.parameters() if parameter.absent), None)
            if absent is not None:
                raise ValueError(
                    f"fully_shard: parameter {absent.name!r} is {absent.place.description}; call it on the "
                    "modules of this rank's stages"
                )

    def split_of(self, parameter: Parameter, mesh: DeviceMesh) -> tuple[Axes, Axes, str]:
        place = parameter.place
        tied = parameter.name if place is not None and place.tied else ""
        return *self._axes_of(parameter, mesh), tied

    def _axes_of(self, parameter: Parameter, mesh: DeviceMesh) -> tuple[Axes, Axes]:
        """(axes along which the parameter was split before, axes along which its gradients must be added)."""
        share, place = parameter.placement, parameter.place
        if place is not None and (place.mesh.root is not mesh.root or overlap(place.axes, mesh.axes)):
            raise ValueError(
                f"fully_shard: parameter {parameter.name!r} is {place.description} of {place.mesh!r}; shard "
                f"it along other axes of the same mesh, not {mesh!r}"
            )
        if share is None:
            return (), ()
        # A parameter may be sharded along axes where its gradients are terms of a sum: the reduction adds.
        alike = () if share.kind == PARTIAL else share.axes
        if share.mesh.root is not mesh.root or overlap(alike, mesh.axes):
            raise ValueError(
                f"fully_shard: parameter {parameter.name!r} is on {share.mesh!r} already; shard it along "
                f'other axes of the same mesh, as mesh["dp_shard"], not {mesh!r}'
            )
        partial = without(share.partial, mesh.axes) if share.partial else ()
        return share.axes if share.kind == SHARD else (), partial

    def data_ranks(self, parameters: Iterable[Parameter], mesh: DeviceMesh) -> int:
        shares = [parameter.placement for parameter in parameters if parameter.placement is not None]
        return size_of(union(*(data_of(share, mesh) for share in shares))) if shares else mesh.size

    def terms(self, partial: Axes) -> int:
        return size_of(partial)

    def mesh_of(self, units: list[Any]) -> DeviceMesh:
        across, mesh = _across(units), super().mesh_of(units)
        return mesh.union(across) if across else mesh

    def process_groups(
        self, units: list[Any], mesh: DeviceMesh, cut: str, cut_before: Axes, partial: Axes
    ) -> ProcessGroups:
        across = _across(units)
        if not (across or partial):
            return super().process_groups(units, mesh, cut, cut_before, partial)
        own, held, added, role = ranks_of_cut(mesh, cut)
        if partial:  # outermost, so that the tree of a sum does not depend on how the data ranks are cut
            added = mesh.along(partial, () if added is None else added.axes)
        copies = added.communicator(role) if added is not None and added.size > 1 else None
        if not across:
            sharers, owner = (1, True) if copies is None else (copies.size, copies.rank == 0)
            return ProcessGroups(*own, copies, own[2], held, sharers, owner)
        axes = union(cut_before, () if held is None else held.axes)
        holding = mesh.along(axes) if axes else None
        holders = own[2] if holding is None else holding.communicator("control")
        everyone = mesh.union(across)
        owner = not index_in(without(everyone.axes, axes), mesh.root.rank)
        return ProcessGroups(*own, copies, holders, holding, everyone.size // holders.size, owner)

    def mismatch(self, unit: Any, first: Any) -> str | None:
        own, theirs = unit.settings.mesh, first.settings.mesh
        split = [p.placement for p in unit.parameters if p.placement is not None]
        apart = [share for share in split if share.own_data or share.kind == PARTIAL]
        for share in apart:
            if data_of(share, own) != without(theirs.axes, share.one_loss):
                return f" and {share.mesh!r}"
        return super().mismatch(unit, first) if len(apart) < len(unit.parameters) else None


def data_of(share: ParameterPlacement, mesh: DeviceMesh) -> MeshLayout:
    """The mesh axes along which ranks have different losses that all contribute to a parameter's gradient.

    share: how the parameter's module was split. mesh: the mesh that the parameter is sharded over.
    """
    return without(union(mesh.axes, share.axes) if share.own_data else mesh.axes, share.one_loss)


def _across(units: list[Any]) -> MeshLayout:
    """All axes along which modules of the model were split."""
    shares = [parameter.placement for unit in units for parameter in unit.parameters if parameter.placement]
    return union(*{share.axes for share in shares})
