"""What test_tensor.py and test_pipeline.py share: jobs, weights in files, and what PyTorch makes of them."""

from importlib.util import find_spec

import numpy as np
import pytest

from bench.peers.launch import launch, one_thread
from bench.training import model_of
from shardrt import optim
from tests.parity.tensor import save_weights
from tests.ranks import BACKSTOP

OPTIMIZERS = {"sgd": optim.SGD, "adamw": optim.AdamW}


def begun(folder, jobs):
    """The folder, with weights for each job. Skips tests where there is no PyTorch."""
    if find_spec("torch") is None:
        pytest.skip("no PyTorch")
    for name, job in jobs.items():
        shapes = {key: parameter.shape for key, parameter in model_of(job).named_parameters()}
        save_weights(folder / f"{name}.npz", shapes)
    return folder


def of_torch(module, folder, ranks, file="torch.npz"):
    """The arrays that a program of PyTorch's leaves, from so many processes."""
    launch(["-m", f"tests.parity.{module}", str(folder)], ranks, one_thread(), timeout=BACKSTOP)
    with np.load(folder / file) as arrays:
        return {name: arrays[name] for name in arrays}
