"""Two axes at once: as processes and as threads, beside one rank."""

import numpy as np
import pytest

from tests import lab
from tests.parallel.meshes import MESHES, train


@pytest.mark.mpi
def test_four_processes_have_the_bits_of_four_threads_and_train_as_one_rank(tmp_path):
    name, steps = "dp 2, tp 2", 3
    lab.printed(4, "-m", "tests.parallel.meshes", "gpt", name, str(steps), str(tmp_path / "found"))
    processes = dict(np.load(tmp_path / "found.npz"))
    threads = lab.first(4, train, "gpt", MESHES[name], steps)
    alone = lab.first(1, train, "gpt", MESHES["1"], steps)
    assert processes.keys() == threads.keys() == alone.keys()
    lab.assert_equal(processes, threads)
    losses = threads["losses"]
    assert losses.shape == (4, steps) and (losses[::2] == losses[1::2]).all()  # the same along tp
    np.testing.assert_allclose(losses.mean(0), alone["losses"][0], rtol=1e-5)
    kept = [name for name in alone if name != "losses" and not name.endswith("qkv.bias")]
    lab.assert_near({name: threads[name] for name in kept}, {name: alone[name] for name in kept}, rtol=1e-5)
