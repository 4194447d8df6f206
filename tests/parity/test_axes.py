"""Tensor and sequence parallelism beside PyTorch's parallelize_module: 10 steps, and one rank's."""

import numpy as np
import pytest

from bench.training import model_of
from models.plans import plan_of
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.parallel import parallelize_module
from tests.parallel.meshes import whole_gradients
from tests.parity import tensor
from tests.parity.beside import OPTIMIZERS, begun, of_torch
from tests.parity.job import Notes, part
from tests.parity.test_features import assert_agrees
from tests.ranks import run_ranks

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(folder, what PyTorch made of all jobs)."""
    folder = begun(tmp_path_factory.mktemp("tensor"), tensor.JOBS)
    return folder, of_torch("tensor_torch", folder, tensor.RANKS)


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
    """At 2 and 4 ranks, with and without the sequence cut; PyTorch at 2, its logits whole and cut."""
    folder, theirs = world
    (alone,) = run_ranks(1, train, folder, name, False)
    for ranks in (2, 4):
        for sequence in (False, True):
            ours, *others = run_ranks(ranks, train, folder, name, sequence)
            assert all((other["losses"] == ours["losses"]).all() for other in others)
            assert_agrees(ours, alone)
            for variant in tensor.VARIANTS:
                assert_agrees(ours, part(theirs, f"{name}, {variant}"))
