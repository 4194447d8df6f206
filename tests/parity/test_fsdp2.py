"""Loss, gradients and parameters of a GPT beside PyTorch FSDP2 (fully_shard, gloo), step by step."""

import os
from pathlib import Path

import numpy as np
import pytest

import shardrt
from bench.peers.launch import launch, one_thread
from models.gpt import GPT
from tests.parity import shardrt_run
from tests.parity.job import Job, part
from tests.ranks import mpirun, run_ranks

pytestmark = pytest.mark.torch

RTOL = 1e-5  # of the norm of each tensor
STEPS = 10


def torch_result(path, ranks):
    """What PyTorch makes of a job, in processes of its own."""
    pytest.importorskip("torch")
    destination = path.with_name(f"torch-{ranks}-{path.name}")
    launch(["-m", "tests.parity.torch_run", str(path), str(destination)], ranks, one_thread(), timeout=240)
    return dict(np.load(destination))


def shardrt_result(path, ranks):
    """What shardrt makes of it, on threads; rank 0's notes."""
    return run_ranks(ranks, shardrt_run.run, path)[0]


def random_job(path, job, seed=0):
    """10 steps from weights that are nowhere 0 or 1, on tokens that are drawn; 4 rows in all."""
    generator = np.random.default_rng(seed)
    model = GPT(shardrt_run.config_of(job))
    weights = {
        name: (("norm" in name and name.endswith("weight")) + generator.normal(0, 0.1, p.shape)).astype(
            np.float32
        )
        for name, p in model.named_parameters()
    }
    text = generator.integers(0, job.vocab, (STEPS, 4, job.time + 1))
    job.save(path, weights, text[:, :, :-1], text[:, :, 1:])
    return path


def relative(ours, theirs):
    """The norm of the difference over the norm."""
    assert ours.shape == theirs.shape
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def assert_steps_agree(ours, theirs, kind):
    """Every tensor of a kind agrees at every step; the message names the worst."""
    ours, theirs = part(ours, kind), part(theirs, kind)
    assert ours.keys() == theirs.keys() and ours
    worst = max(
        (relative(ours[name][step], theirs[name][step]), name, step)
        for name in theirs
        for step in range(STEPS)
    )
    assert worst[0] < RTOL, f"{kind} of {worst[1]} differs by {worst[0]:.1e} at step {worst[2]}"


def without_key_bias(result, width):
    """Parameters without the bias of the attention's keys.

    It has no effect on the softmax: its gradient is rounding and nothing else, and Adam makes steps of full
    size of it.
    """
    return {
        name: np.delete(values, np.s_[width : 2 * width], axis=1) if name.endswith("qkv.bias") else values
        for name, values in result.items()
    }


@pytest.fixture(scope="module", params=[1, 2, 4])
def adamw(request, tmp_path_factory):
    """(shardrt's result, PyTorch's) at a world size."""
    path = random_job(tmp_path_factory.mktemp("adamw") / "job.npz", Job())
    return shardrt_result(path, request.param), torch_result(path, request.param)


def test_losses_of_10_steps_agree(adamw):
    ours, theirs = adamw
    assert len(ours["losses"]) == STEPS
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=RTOL)


def test_gradients_at_each_of_10_steps_agree(adamw):
    assert_steps_agree(*adamw, "gradient")


def test_parameters_after_each_of_10_steps_of_adamw_agree(adamw):
    ours, theirs = (without_key_bias(result, Job().width) for result in adamw)
    assert_steps_agree(ours, theirs, "parameter")


@pytest.fixture(scope="module")
def sgd(tmp_path_factory):
    """(a job, PyTorch's result on 2 ranks)."""
    path = random_job(tmp_path_factory.mktemp("sgd") / "job.npz", Job(optimizer="sgd", lr=0.1))
    return path, torch_result(path, 2)


def test_parameters_after_each_of_10_steps_of_sgd_with_momentum_agree(sgd):
    path, theirs = sgd
    assert_steps_agree(shardrt_result(path, 2), theirs, "parameter")


@pytest.mark.mpi
def test_losses_and_parameters_agree_under_mpirun(sgd, tmp_path):
    path, theirs = sgd
    done = mpirun(2, ["-m", "tests.parity.shardrt_run", str(path), str(tmp_path / "ours.npz")], timeout=120)
    assert done.returncode == 0, done.stderr
    ours = dict(np.load(tmp_path / "ours.npz"))
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=RTOL)
    assert_steps_agree(ours, theirs, "gradient")
    assert_steps_agree(ours, theirs, "parameter")


@pytest.mark.slow
def test_loss_curves_of_200_steps_on_real_text_differ_by_less_than_a_thousandth(tmp_path):
    job = Job(heads=4, width=64, time=64, vocab=256, detailed=False)
    shardrt.manual_seed(0)
    weights = GPT(shardrt_run.config_of(job)).state_dict()
    tokens, targets = stdlib_batches(steps=200, rows=16, time=job.time)
    path = tmp_path / "job.npz"
    job.save(path, weights, tokens, targets)
    # Of PyTorch one rank with the whole batch: two take ten times as long, and 10 steps of them are above.
    ours, theirs = shardrt_result(path, 2)["losses"], torch_result(path, 1)["losses"]
    assert theirs[-1] < theirs[0] - 1.5  # it did learn
    assert np.abs(ours - theirs).max() < 1e-3


def stdlib_batches(steps, rows, time):
    """(tokens, targets) (steps, rows, time): random pieces of the source of Python's standard library."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(source.read_bytes() for source in sources), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - time, (steps, rows, 1))
    pieces = text[starts + np.arange(time + 1)].astype(np.int64)
    return pieces[:, :, :-1], pieces[:, :, 1:]
