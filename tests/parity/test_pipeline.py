"""Pipelines beside PyTorch: one process that accumulates, and torch.distributed.pipelining; 10 steps."""

import numpy as np
import pytest

from bench.training import model_of, piped
from shardrt.comm import init_device_mesh
from shardrt.parallel.pipeline import Pipeline
from tests.parity import pipeline
from tests.parity.beside import OPTIMIZERS, begun, of_torch
from tests.parity.job import Notes, part
from tests.parity.test_features import assert_agrees
from tests.ranks import run_ranks

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(folder, what PyTorch made of all jobs)."""
    folder = begun(tmp_path_factory.mktemp("pipeline"), pipeline.JOBS)
    return folder, of_torch("pipeline_torch", folder, pipeline.RANKS)


def train(folder, name, schedule):
    """A rank's notes, of what its stage has."""
    mesh = init_device_mesh("cpu", (pipeline.RANKS,), ("pp",))
    job, kind = pipeline.JOBS[name], pipeline.OPTIMIZER[name]
    model = model_of(job)
    made = Pipeline(model, mesh["pp"], schedule=schedule, micro_batches=pipeline.MICRO_BATCHES)
    model.load_state_dict(dict(np.load(folder / f"{name}.npz")))
    optimizer = OPTIMIZERS[kind](model.parameters(), **pipeline.OPTIMIZERS[kind])
    own = {key: p for key, p in model.named_parameters() if not p.absent}
    notes = Notes()
    for step in range(pipeline.STEPS):
        losses = piped(made, *job.batch_of(step, 0))
        notes.losses.append(sum(loss.item() for loss in losses))
        notes.add("gradient", {key: p.grad for key, p in own.items()})
        optimizer.step()
        optimizer.zero_grad()
        notes.add("parameter", {key: p.data for key, p in own.items()})
    return notes.result()


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("name", pipeline.JOBS)
def test_it_trains_as_pytorch(world, name, schedule):
    folder, theirs = world
    first, last = run_ranks(pipeline.RANKS, train, folder, name, schedule)
    both = first.keys() & last.keys() - {"losses"}
    assert all((first[key] == last[key]).all() for key in both)
    assert len(both) == (0 if name == "vit" else 2)  # gradient and values of the tied embedding
    for variant in (pipeline.ACCUMULATED, *pipeline.STAGES):
        expected = part(theirs, f"{name}, {variant}")
        assert expected.keys() == {**first, **last}.keys()
        assert_agrees({**first, **last}, expected)
