"""`import shardrt`: what it loads, and how long that takes."""

import pytest

from tests.ranks import python


def _python(code):
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_neither_numba_nor_mpi_nor_what_simulates():
    loaded = set(_python("import shardrt, sys; print(*sys.modules)").split())
    assert "numpy" in loaded
    assert not {"numba", "mpi4py", "matplotlib", "safetensors", "torch"} & loaded
    rooms = "shardrt.simulate", "shardrt.tools", "shardrt.device.simulated", "shardrt.comm.simulated"
    assert not [name for name in loaded if name.startswith((*rooms, "shardrt.kernels.cost"))]


@pytest.mark.serial
def test_import_takes_no_longer_than_a_few_of_numpy():
    code = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
    numpy, ours = (min(float(_python(code.format(name))) for _ in range(5)) for name in ("numpy", "shardrt"))
    assert ours < 5 * numpy, f"import shardrt took {ours:.3f} s, that of NumPy alone {numpy:.3f} s"


def test_the_models_have_one_name_in_a_process():
    _python("from shardrt.models.gpt import GPT, GPTConfig")
    twice = "import models.gpt\ntry: import shardrt.models.gpt\nexcept ImportError as error: print(error)"
    assert "are the same files: import them under one of the two names" in _python(twice)
