"""Three axes at once on eight ranks: as processes and as threads, beside one rank."""

import numpy as np
import pytest

from tests import lab
from tests.parallel.meshes import MESHES, STAGED, train

STEPS = 10


def both(meshes, name, path):
    """What ranks that are processes, and ranks that are threads, find on a mesh."""
    ranks = meshes[name].ranks
    lab.printed(ranks, "-m", "tests.parallel.meshes", "gpt", name, str(STEPS), str(path))
    threads = lab.first(ranks, train, "gpt", meshes[name], STEPS)
    return dict(np.load(f"{path}.npz")), threads


@pytest.mark.mpi
def test_eight_processes_have_the_bits_of_eight_threads_and_train_as_one_rank(tmp_path):
    processes, threads = both(MESHES, "copies 2, dp 2, tp 2", tmp_path / "found")
    alone = lab.first(1, train, "gpt", MESHES["1"], STEPS)
    assert processes.keys() == threads.keys() == alone.keys()
    lab.assert_equal(processes, threads)
    losses = threads["losses"]
    assert losses.shape == (8, STEPS) and (losses[::2] == losses[1::2]).all()  # the same along tp
    np.testing.assert_allclose(losses.mean(0), alone["losses"][0], rtol=1e-5)
    kept = [name for name in alone if name != "losses" and not name.endswith("qkv.bias")]
    lab.assert_near({name: threads[name] for name in kept}, {name: alone[name] for name in kept}, rtol=1e-5)


@pytest.mark.mpi
def test_stages_on_four_processes_have_the_bits_of_four_threads(tmp_path):
    processes, threads = both(STAGED, "pp 2, dp 2", tmp_path / "found")
    lab.assert_equal(processes, threads)
    assert (threads["losses"][:2] == 0).all() and (threads["losses"][2:] > 0).all()
