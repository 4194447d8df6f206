"""Which ranks of a run's mesh have other parts of the batch, and which compute one part together.

The axes have the names that Recipe.axes gives them. A mesh without names has parts of the batch alone.
"""

from shardrt.comm.mesh import DeviceMesh

DATA = ("diloco", "dp_replicate", "dp_shard")


def data_of(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that have other parts of the batch than this rank; `mesh` itself where all have.

    Collective at the first time.
    """
    names = tuple(name for name in mesh.mesh_dim_names or () if name in DATA)
    return mesh[names] if names else mesh


def shards_of(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks over which a model is sharded: those of data_of, and those with parts of their sequences.

    Its axis before the last, if there are two, is that of copies. Collective at the first time.
    """
    names = mesh.mesh_dim_names or ()
    if "diloco" in names:  # no other axis is allowed next to it
        return mesh["dp_shard"]
    if "cp" not in names:
        return data_of(mesh)
    if "dp_replicate" not in names:
        return mesh.flat("dp_shard", "cp")
    each = mesh.size_of("dp_shard") * mesh.size_of("cp")
    return mesh.fold("dp_shard_cp", each, over=("dp_replicate", "dp_shard", "cp"), rest="dp_replicate")


def trained_together(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of data_of whose gradients are averaged in each step: with DiLoCo, those of this host.

    Collective at the first time.
    """
    return shards_of(mesh) if "diloco" in (mesh.mesh_dim_names or ()) else data_of(mesh)


def folded(mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """All ranks that have other tokens than this one, as axes "efsdp" and "ep": neighbours along the latter.

    Collective at the first time.

    Raises:
        ValueError: where `ep` splits an axis.
    """
    names = mesh.mesh_dim_names
    return mesh.fold("ep", ep, over=names and tuple(name for name in names if name != "pp"))


def counts(mesh: DeviceMesh, *, but: str = "") -> bool:
    """Whether sums over all ranks count this rank's result for its part of the batch.

    Of the ranks that compute one part together, one does; but all that have other parts of its sequences do.

    Args:
        but: an axis along which only one rank has a result.
    """
    along = zip(mesh.mesh_dim_names or (), mesh.coordinate, strict=False)
    return not any(place for name, place in along if name not in (*DATA, "cp", but))
