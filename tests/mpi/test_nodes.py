"""Ranks that are told which node they are on; tests/test_comm.py starts eight for this file alone."""

import warnings

import pytest

from shardrt.comm import create, hierarchical, mpi_world
from shardrt.comm.mpi import MPICommunicator
from tests.mpi.contract import digest

SIZE = mpi_world.of_mpi().size
ONE_HOST = mpi_world.of_mpi().local_size == SIZE


def on_nodes(*nodes):
    """A communicator whose ranks are told which node they are on."""
    root = mpi_world.of_mpi().root
    return hierarchical.create(root.Dup(), nodes[root.rank])


@pytest.mark.skipif(SIZE != 8 or not ONE_HOST, reason="nodes of more than two")
@pytest.mark.parametrize("nodes", [(0,) * 4 + (1,) * 4, (0, 0, 1, 1, 2, 2, 3, 3), (0, 1) * 4])
def test_the_bits_of_sums_are_the_same_on_any_nodes(nodes):
    made, flat = on_nodes(*nodes), create("mpi")
    assert digest(made) == digest(flat)
    made.close()
    flat.close()


@pytest.mark.skipif(SIZE != 3, reason="a node of two and a node of one")
def test_uneven_nodes_fall_back_to_mpi_and_say_why():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = on_nodes(0, 0, 1)
    assert type(made) is MPICommunicator
    assert [str(w.message) for w in caught if "nodes hold [1, 2] ranks" in str(w.message)] or made.rank != 0


@pytest.mark.skipif(SIZE != 2, reason="two nodes of one")
def test_nodes_of_one_rank_need_no_shared_memory():
    assert type(on_nodes(0, 1)) is MPICommunicator
