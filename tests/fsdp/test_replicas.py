"""Ranks that hold copies of a shard are compared, and the one that differs is named."""

import numpy as np
import pytest

from shardrt.comm import init_device_mesh, objects, thread
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ReplicasDiffer, check_replicas, fully_shard
from shardrt.fsdp.strategy import ShardingStrategy
from tests import lab


def flip(array, element, bit=30):
    """Flip one bit of a float32."""
    words = array.view(np.uint32)
    words[element] ^= np.uint32(1 << bit)


def trained(net=lab.Net, **settings):
    model, mesh = lab.build(net, **settings)
    made = []
    lab.train(model, mesh, steps=2, optimizer=lambda p: made.append(lab.adamw(p)) or made[-1])
    return mesh, model, made[0]


def checked(where, **settings):
    """What a check says after a bit was flipped `where`: (rank, kind, parameter), or None."""
    mesh, model, optimizer = trained(**settings)
    check_replicas(model, optimizer)
    if where is not None and mesh.rank == where[0]:
        parameter = dict(model.named_parameters())[where[2]]
        start, _ = parameter.storage.range_of(parameter)
        piece = next(piece for piece in optimizer.slices if piece.storage is parameter.storage)
        flip(parameter.storage.shard if where[1] == "parameter" else piece.state[where[1]], start)
    try:
        check_replicas(model, optimizer)
    except ReplicasDiffer as error:
        return str(error)


def test_the_one_that_differs_of_several_is_named():
    found = thread.run(3, checked, (1, "parameter", "blocks.1.up.weight"), strategy="NO_SHARD")
    expected = "copies of parameter 'blocks.1.up.weight' differ between rank 1 and ranks 0, 2, "
    assert found == [expected + "but must be bitwise identical"] * 3


def test_of_a_hybrid_only_those_that_hold_the_same_shard_are_compared():
    found = thread.run(4, checked, (3, "v", "blocks.2.down.weight"), strategy="HYBRID_SHARD")
    expected = "copies of the optimizer's 'v' of parameter 'blocks.2.down.weight' differ between "
    assert len(set(found)) == 1 and found[0].startswith(expected)
    assert "rank 1 and rank 3" in found[0]


SOUND = {
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "bfloat16": {"strategy": "NO_SHARD", "mp_policy": MixedPrecisionPolicy("bfloat16")},
    "frozen": {"strategy": "NO_SHARD", "net": lab.Frozen},
    "on the host": {"strategy": "HYBRID_SHARD", "shape": (2, 1), "offload_policy": CPUOffloadPolicy()},
    "SHARD_OPT": {"strategy": "SHARD_OPT"},
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_copies_are_equal(name):
    assert thread.run(2, checked, None, **SOUND[name]) == [None, None]


@lab.on_ranks(2)
def test_without_copies_no_rank_waits_for_another():
    mesh, model, optimizer = trained(strategy="FULL_SHARD")
    if mesh.rank == 0:
        check_replicas(model, optimizer)


@lab.on_ranks(2)
def test_units_with_copies_beside_units_without():
    mesh, model = init_device_mesh("auto"), lab.seeded()
    fully_shard(model.blocks[0], mesh=mesh, strategy=ShardingStrategy.NO_SHARD)
    fully_shard(model, mesh=mesh)
    check_replicas(model)
    if mesh.rank == 1:
        bias = dict(model.named_parameters())["blocks.0.up.bias"]
        flip(bias.storage.shard, bias.storage.range_of(bias)[0] + 3)
    with pytest.raises(ReplicasDiffer, match=r"'blocks.0.up.bias' differ between rank 0 and rank 1"):
        check_replicas(model)


def test_ranks_exchange_a_few_bytes_however_large_the_model(monkeypatch):
    def sizes(blocks):
        """Of the messages of both ranks in a check."""
        sent, original = [], objects.all_gather_object

        def rank():
            model, mesh = lab.build(lambda: lab.Net(blocks), strategy="NO_SHARD")
            optimizer = lab.adamw(model.parameters())
            if mesh.rank == 0:  # the patch is of both: ranks are threads
                noted = lambda *args: sent.append(len(str(args[1]))) or original(*args)  # noqa: E731
                monkeypatch.setattr(objects, "all_gather_object", noted)
            mesh.communicator("control").barrier(stream=mesh.device.current_stream)
            check_replicas(model, optimizer)
            mesh.communicator("control").barrier(stream=mesh.device.current_stream)

        thread.run(2, rank)
        monkeypatch.undo()
        return sent

    few, many = sizes(2), sizes(9)
    assert few == many and len(few) == 2 and max(few) < 100  # one call of each rank
