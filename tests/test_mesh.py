"""comm/mesh.py: sub-meshes by name, axes made of others, and sharding over a part of the ranks."""

import numpy as np
import pytest

from shardrt import optim
from shardrt.comm import init_device_mesh, mesh_layout, thread
from shardrt.fsdp import fully_shard, units
from tests import lab
from tests.ranks import run_ranks

AXES = ("pp", "dp", "tp")


def met(mesh, role="control"):
    """The ranks that a mesh's communicator joins, in its order."""
    comm = mesh.communicator(role)
    members = np.zeros(comm.size, np.int64)
    members[comm.rank] = mesh.root.rank
    comm.all_gather(members, stream=mesh.device.current_stream)
    assert (comm.rank, comm.size) == (mesh.rank, mesh.size)
    return members.tolist()


@pytest.fixture(scope="module")
def cube():
    """Of each of 8 ranks on (2, 2, 2): what its sub-meshes are, as the ranks that met there."""

    def body():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=AXES)
        pair, turned = mesh["pp", "tp"], mesh["tp", "pp"]
        facts = {
            **{name: met(mesh[name]) for name in AXES},
            "pair": met(pair),
            "turned": met(turned),
            "inner": met(pair["tp"]),
            "flat": met(mesh.flat("dp", "tp")),
        }
        same = [
            mesh["dp"] is mesh["dp"],
            mesh["pp", "tp"] is pair,
            pair["tp"] is mesh["tp"],
            mesh[AXES] is mesh,
            mesh.flat("dp", "tp") is mesh.flat("dp", "tp"),
            mesh.flat("dp") is mesh["dp"],
            mesh.communicator("gather", "tp") is mesh["tp"].communicator("gather"),
            mesh["dp"].stream("gather") is mesh.stream("gather"),
            mesh["dp"].root is mesh,
        ]
        sizes = [mesh.size_of("dp"), pair.size_of("tp"), mesh.rank_of("pp"), mesh.rank_of("tp")]
        names = [pair.mesh_dim_names, mesh.flat("dp", "tp").mesh_dim_names]
        return facts, same, sizes, names

    return run_ranks(8, body)


def test_sub_meshes_are_the_slices_of_the_array_of_ranks(cube):
    ranks = np.arange(8).reshape(2, 2, 2)
    for rank, (facts, *_) in enumerate(cube):
        p, d, t = np.argwhere(ranks == rank)[0]
        assert facts["pp"] == ranks[:, d, t].tolist()
        assert facts["dp"] == ranks[p, :, t].tolist()
        assert facts["tp"] == facts["inner"] == ranks[p, d].tolist()
        assert facts["pair"] == ranks[:, d].ravel().tolist()
        assert facts["turned"] == ranks[:, d].T.ravel().tolist()


def test_axes_are_made_one(cube):
    for rank, (facts, *_) in enumerate(cube):
        assert facts["flat"] == np.arange(8).reshape(2, 4)[rank // 4].tolist()


def test_a_sub_mesh_is_one_object_and_shares_communicators_and_streams(cube):
    for rank, (_, same, sizes, names) in enumerate(cube):
        assert all(same), same
        assert sizes == [2, 2, rank // 4, rank % 2]
        assert names == [("pp", "tp"), ("dp_tp",)]


def ones(*names):
    """A mesh of one rank."""
    return init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)


test_what_is_no_part_is_refused = lab.refusals(
    (
        lambda: ones("dp_shard", "tp")["cp"],
        r"'cp' is not an axis of DeviceMesh\('cpu', .*, rank 0 of 1\)$",
    ),
    (
        lambda: ones("dp_shard", "tp")["dp_shard"]["tp"],
        r"'tp' is not an axis of .*; its root .* has this axis",
    ),
    (
        lambda: init_device_mesh("cpu", (1, 1))["dp_shard", "tp"],
        r"is not an axis of .*no names: pass mesh_dim_names",
    ),
    (lambda: ones("a")["a", "a"], "must be one axis or several"),
    (lambda: ones("a")[()], "must be one axis or several"),
    (lambda: ones("a").fold("a2", 2, over="a"), "fold: 'a2' has size 2, which does not divide the 1 ranks"),
    (lambda: ones("dp").fold("ep", 1, rest="ep"), "'ep' and the rest of .* must have different names"),
)


# Folds


def folded(shape, names, over, size):
    """Of each rank: who meets along the fold's axes, along these and others, and where it is but for them."""

    def body():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fold = mesh.fold("ep", size, over=over)
        ep, rest = fold["ep"].axes, fold["efsdp"].axes
        tp = mesh["tp"].axes if "tp" in names else ()
        return {
            "ep": met(fold["ep"]),
            "efsdp": met(fold["efsdp"]),
            "again": (mesh.along(ep).ranks.ravel().tolist(), mesh.along(rest).ranks.ravel().tolist()),
            "both": met(mesh.along(mesh_layout.union(ep, rest))),
            "ep, tp": sorted(mesh.along(mesh_layout.union(ep, tp)).ranks.ravel().tolist()),
            "efsdp outside ep": mesh.along(rest, ep).ranks.ravel().tolist(),
            "ep outside efsdp": mesh.along(ep, rest).ranks.ravel().tolist(),
            "but": (mesh.index_except(ep), mesh.index_except(rest, tp)),
            "same": mesh.fold("ep", size, over=over)["ep"] is fold["ep"] and fold["ep"].root is mesh,
            "meet": [mesh_layout.overlap(ep, mesh[name].axes) for name in names],
            "names": mesh.names_of(ep) + mesh.names_of(rest),
        }

    return run_ranks(int(np.prod(shape)), body)


@pytest.mark.parametrize("size", [2, 4])
def test_three_axes_are_folded_at_any_place(size):
    """Against the arrays of ranks themselves; 4 are two whole axes."""
    names = ("dp", "cp", "tp")
    ranks = np.arange(8).reshape(8 // size, size)
    for rank, message in enumerate(folded((2, 2, 2), names, names, size)):
        row, column = np.argwhere(ranks == rank)[0]
        assert message["ep"] == ranks[row].tolist() and message["efsdp"] == ranks[:, column].tolist()
        assert message["again"] == (message["ep"], message["efsdp"])
        assert message["both"] == list(range(8)) and message["same"]
        assert message["efsdp outside ep"] == list(range(8))
        assert message["ep outside efsdp"] == ranks.T.ravel().tolist()
        assert message["meet"] == [False, size == 4, True]
        assert message["ep, tp"] == ranks[row].tolist()  # tp lies inside
        assert message["but"] == (row, column // 2)


def test_stages_make_slices_of_folds_without_each_other(monkeypatch):
    """Experts of one stage, say, where the other has none."""
    monkeypatch.setattr(thread, "_PATIENCE", 2.0)

    def body():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp_shard"))
        fold = mesh.fold("ep", 2, over=("dp_shard",))
        mesh.allow_divergence(mesh["pp"].axes)
        return met(mesh.along(fold["ep"].axes)) if mesh.rank_of("pp") else None

    assert run_ranks(8, body) == [None] * 4 + [[4, 5]] * 2 + [[6, 7]] * 2


def test_a_fold_of_an_axis_that_others_lie_inside():
    """Parts of dp beside a tp that stays whole."""
    ranks = np.arange(8).reshape(2, 2, 2)  # efsdp, ep, tp
    for rank, message in enumerate(folded((4, 2), ("dp_shard", "tp"), ("dp_shard",), 2)):
        e, p, t = np.argwhere(ranks == rank)[0]
        assert message["ep"] == ranks[e, :, t].tolist() and message["efsdp"] == ranks[:, p, t].tolist()
        assert message["ep, tp"] == ranks[e].ravel().tolist()
        assert message["but"] == (e * 2 + t, p) and message["meet"] == [True, False]
        assert message["names"] == ["ep", "efsdp"]


def fold_of_24(size, *over):
    init_device_mesh("cpu", (4, 3, 2), mesh_dim_names=("dp", "cp", "tp")).fold("ep", size, over=over)


test_a_fold_that_cannot_be_is_refused = lab.refusals(
    (lambda: fold_of_24(3, "dp"), "'ep' has size 3, which does not divide the 4 ranks of .'dp',"),
    (lambda: fold_of_24(2, "pp"), "'pp' is not an axis of DeviceMesh"),
    (lambda: fold_of_24(2, "dp", "tp"), r"the axes of .*'dp', 'tp'.* must be neighbours in .*'cp'"),
    (
        lambda: fold_of_24(2, "cp", "dp"),
        r"the axes of .*'cp', 'dp'.* must be neighbours in .*, in their order",
    ),
    (
        lambda: fold_of_24(3, "cp", "tp"),
        r"3 ranks along 'ep' split an axis of .*'cp'.*take a size that is made of whole axes",
    ),
    ranks=24,
)


# fully_shard


def weights_after(model, mesh):
    return lab.train(model, mesh, steps=2).weights


def test_a_model_on_an_axis_is_that_of_as_many_ranks():
    """Two models on two ranks each, in one job; rank 0 of each has the weights."""

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
        return weights_after(lab.shard(lab.seeded(), mesh), mesh)

    expected = lab.train_on(2, steps=2).weights
    lab.assert_equal(run_ranks(4, body), [expected, {}, expected, {}])


def test_units_may_have_other_axes_of_the_same_ranks():
    """Blocks in a hybrid, the rest over all ranks: the bits of four ranks with one strategy."""

    def body():
        mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), lab.seeded()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return weights_after(fully_shard(model, mesh=mesh.flat()), mesh)

    lab.assert_equal(lab.first(4, body), lab.train_on(4, steps=2).weights)


@lab.on_ranks(4)
def test_a_unit_on_fewer_ranks_than_the_others_is_refused():
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), lab.Net()
    fully_shard(model.blocks[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="unit blocks.0 is on .*'shard'.*take axes"):
        optim.SGD(model.parameters(), lr=0.1)


# Axes whose names say what is done along them

DATA = ("dp_replicate", "dp_shard")


def test_names_say_what_is_copied_and_what_is_cut():
    def strategy(*names):
        return units(fully_shard(lab.Block(), mesh=ones(*names)))[0].settings.strategy.name

    assert strategy(*DATA) == "HYBRID_SHARD"
    assert strategy("dp_replicate") == "NO_SHARD"
    assert strategy("dp_shard") == strategy("any") == "FULL_SHARD"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (AXES, r'one axis or two.*mesh\["dp_shard"\] or mesh\["dp_replicate", "dp_shard"\]'),
        (("tp",), "along 'tp' of .*other parts of the model.*take mesh"),
        (("dp_shard", "tp"), "along 'tp' of .*other parts of the model.*take mesh"),
        (("efsdp", "ep"), "along 'ep' of"),
        (("dp_shard", "dp_replicate"), "the first axis of .* must be .dp_replicate."),
    ],
)
def test_axes_along_which_nothing_may_be_cut_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        fully_shard(lab.Block(), mesh=ones(*names))
