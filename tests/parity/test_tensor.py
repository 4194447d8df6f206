"""Tensor and sequence parallelism beside PyTorch's parallelize_module: 10 steps, and one rank's."""

from importlib.util import find_spec

import numpy as np
import pytest

from bench.peers.launch import launch, one_thread
from bench.training import model_of
from models.plans import plan_of
from shardrt import optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.parallel import parallelize_module
from tests.parallel.meshes import whole_gradients
from tests.parity import tensor
from tests.parity.job import Notes, part
from tests.parity.test_features import assert_agrees
from tests.ranks import run_ranks

pytestmark = pytest.mark.torch

OPTIMIZERS = {"sgd": optim.SGD, "adamw": optim.AdamW}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(folder, ranks -> what PyTorch made of all jobs on so many)."""
    if find_spec("torch") is None:
        pytest.skip("no PyTorch")
    folder = tmp_path_factory.mktemp("tensor")
    for name, job in tensor.JOBS.items():
        shapes = {key: parameter.shape for key, parameter in model_of(job).named_parameters()}
        tensor.save_weights(folder / f"{name}.npz", shapes)
    theirs = {}
    for ranks in (2, 4):
        launch(["-m", "tests.parity.tensor_torch", str(folder)], ranks, one_thread(), timeout=240)
        with np.load(folder / f"torch-{ranks}.npz") as file:
            theirs[ranks] = {name: file[name] for name in file}
    return folder, theirs


def train(folder, name, sequence):
    """A rank's notes; those of rank 0 have the whole parameters."""
    mesh = init_device_mesh("cpu")
    job, kind = tensor.JOBS[name], tensor.OPTIMIZER[name]
    model = model_of(job)
    parallelize_module(model, mesh, plan_of(model, sequence_parallel=sequence))
    model.load_state_dict(dict(np.load(folder / f"{name}.npz")))
    optimizer = OPTIMIZERS[kind](model.parameters(), **tensor.OPTIMIZERS[kind])
    notes = Notes()
    for step in range(tensor.STEPS):
        loss = model(*job.batch_of(step, 0))
        loss.backward()
        notes.losses.append(loss.item())
        notes.add("gradient", whole_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
        notes.add("parameter", full_state_dict(model))
    return notes.result()


@pytest.mark.parametrize("name", tensor.JOBS)
def test_it_trains_as_pytorch_and_as_one_rank(world, name):
    """At 2 and 4 ranks, with and without the sequence cut; PyTorch with the loss of whole and cut logits."""
    folder, theirs = world
    (alone,) = run_ranks(1, train, folder, name, False)
    for ranks in (2, 4):
        for sequence in (False, True):
            ours, *others = run_ranks(ranks, train, folder, name, sequence)
            assert all((other["losses"] == ours["losses"]).all() for other in others)
            assert_agrees(ours, alone)
            there = ranks if (name, "tp") in tensor.twins(ranks) else 2
            for variant in tensor.VARIANTS:
                assert_agrees(ours, part(theirs[there], f"{name}, {variant}"))
