"""Tensor and sequence parallelism and pipelines beside PyTorch's, in 10 steps on two ranks.

PyTorch has parallelize_module, torch.distributed.pipelining, and one process that accumulates. tests/parallel
has other numbers of ranks, beside one.
"""

from importlib.util import find_spec

import numpy as np
import pytest

from bench.training import model_of, piped
from models.plans import plan_of
from shardrt import optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.parallel import Pipeline, parallelize_module
from tests import lab
from tests.parallel.meshes import whole_gradients
from tests.parity import axes
from tests.parity.features import OPTIMIZERS, STEPS
from tests.parity.job import Notes, part
from tests.parity.test_features import assert_agrees
from tests.ranks import run_ranks, torch_ranks

pytestmark = pytest.mark.torch

KINDS = {"sgd": optim.SGD, "adamw": optim.AdamW}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(folder with weights for each job, what PyTorch made of all)."""
    if find_spec("torch") is None:
        pytest.skip("no PyTorch")
    folder = tmp_path_factory.mktemp("axes")
    for name, job in axes.JOBS.items():
        shapes = {key: parameter.shape for key, parameter in model_of(job).named_parameters()}
        axes.save_weights(folder / f"{name}.npz", shapes)
    torch_ranks(axes.RANKS, "tests.parity.axes_torch", folder)
    with np.load(folder / "torch.npz") as arrays:
        return folder, {name: arrays[name] for name in arrays}


def train(folder, name, make):
    """A rank's notes. make(model): (what gives the loss of a batch after its backward, gradients, values)."""
    model, kind = model_of(axes.JOBS[name]), axes.OPTIMIZER[name]
    backward, gradients, values = make(model)
    model.load_state_dict(dict(np.load(folder / f"{name}.npz")))
    optimizer, notes = KINDS[kind](model.parameters(), **OPTIMIZERS[kind]), Notes()
    for step in range(STEPS):
        notes.losses.append(backward(*axes.JOBS[name].batch_of(step, 0)))
        notes.add("gradient", gradients(model))
        lab.update(optimizer)
        notes.add("parameter", values(model))
    return notes.result()


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_modules_that_are_cut_train_as_those_of_pytorch(world, name, sequence):
    def cut(model):
        parallelize_module(model, init_device_mesh("cpu"), plan_of(model, sequence_parallel=sequence))

        def backward(inputs, targets):
            loss = model(inputs, targets)
            loss.backward()
            return loss.item()

        return backward, whole_gradients, full_state_dict

    folder, theirs = world
    ours, other = run_ranks(axes.RANKS, train, folder, name, cut)
    assert (other["losses"] == ours["losses"]).all()
    for variant in axes.TENSOR:
        assert_agrees(ours, part(theirs, f"{name}, {variant}"))


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("name", axes.JOBS)
def test_pipelines_train_as_those_of_pytorch(world, name, schedule):
    def staged(model):
        mesh = init_device_mesh("cpu", (axes.RANKS,), ("pp",))
        made = Pipeline(model, mesh["pp"], schedule=schedule, micro_batches=axes.MICRO_BATCHES)

        def backward(inputs, targets):
            return sum(loss.item() for loss in piped(made, inputs, targets))

        def own(kind):
            return lambda model: {
                key: getattr(p, kind) for key, p in model.named_parameters() if not p.absent
            }

        return backward, own("grad"), own("data")

    folder, theirs = world
    first, last = run_ranks(axes.RANKS, train, folder, name, staged)
    both = first.keys() & last.keys() - {"losses"}
    assert all((first[key] == last[key]).all() for key in both)
    assert len(both) == (0 if name == "vit" else 2)  # gradient and values of the tied embedding
    for variant in (axes.ALONE, axes.PIPELINE):
        expected = part(theirs, f"{name}, {variant}")
        assert expected.keys() == {**first, **last}.keys()
        assert_agrees({**first, **last}, expected)
