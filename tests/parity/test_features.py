"""Every feature beside PyTorch: losses, gradients and parameters of 10 steps, and a curve of 200.

PyTorch's runs (features_torch.py) are made first, all in one launch of two processes. However many ranks
there are here, the batch is the same, and so are the numbers up to rounding: three ranks, which cut with
padding, where nothing else is said. What changes no bit beside FULL_SHARD (offload, recomputation, updates in
backward, and with each of the features here another strategy) is in tests/fsdp alone.
"""

import os
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, Block
from shardrt.fsdp import MixedPrecisionPolicy, by_class, by_size
from tests import lab
from tests.parity import features, features_shardrt
from tests.parity.features_shardrt import config_of
from tests.parity.job import Job, part
from tests.ranks import mpirun, run_ranks, torch_ranks

pytestmark = pytest.mark.torch

RTOL = 1e-5  # of the norm of each tensor
CURVE = Job(heads=2, width=32, time=32, vocab=256, detailed=False)


@dataclass(frozen=True)
class World:
    """A folder with the jobs, and what PyTorch made of them in all ways."""

    folder: Path

    def train(self, ranks=3, job="job", **settings):
        """shardrt's result, on threads."""
        return run_ranks(ranks, features_shardrt.run, self.folder / f"{job}.npz", **settings)[0]

    def twin(self, name):
        """PyTorch's result."""
        with np.load(self.folder / "torch.npz") as results:
            return part(results, name)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    if find_spec("torch") is None:  # importing it would take longer than many of the tests
        pytest.skip("no PyTorch")
    path = tmp_path_factory.mktemp("features")
    save_job(path / "job.npz")
    save_curve(path / "curve.npz")
    torch_ranks(2, "tests.parity.features_torch", path)
    return World(path)


def save_job(path):
    """Weights, of adapters too, that are nowhere 0 or 1, and tokens that are drawn."""
    generator = np.random.default_rng(0)
    model = GPT(config_of(features.JOB))
    features_shardrt.add_adapters(model)
    weights = {}
    for name, parameter in model.named_parameters():
        center = float("norm" in name and name.endswith("weight"))
        weights[name] = generator.normal(center, 0.1, parameter.shape).astype(np.float32)
    rows = features.ROWS * features.MICRO_BATCHES
    text = generator.integers(0, features.JOB.vocab, (features.STEPS, rows, features.JOB.time + 1))
    features.JOB.save(path, weights, text[:, :, :-1], text[:, :, 1:])


def save_curve(path):
    """Random pieces of the source of Python's standard library."""
    shardrt.manual_seed(0)
    weights = GPT(config_of(CURVE)).state_dict()
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(source.read_bytes() for source in sources), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - CURVE.time, (200, features.ROWS, 1))
    pieces = text[starts + np.arange(CURVE.time + 1)].astype(np.int64)
    CURVE.save(path, weights, pieces[:, :, :-1], pieces[:, :, 1:])


def assert_agrees(ours, theirs, overflows=()):
    """Losses, gradients and parameters at every step.

    overflows: steps whose gradients are infinite or not a number, and not compared.
    """
    assert len(ours["losses"]) == len(theirs["losses"]) == features.STEPS
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=RTOL)
    for kind, skipped in (("gradient", overflows), ("parameter", ())):
        found, expected = (by_step(result, kind, skipped) for result in (ours, theirs))
        lab.assert_near(found, expected, kind, rtol=RTOL)


def by_step(result, kind, skipped):
    """Step -> name -> array."""
    arrays = part(result, kind)
    steps = [step for step in range(features.STEPS) if step not in skipped]
    return {step: {name: values[step] for name, values in arrays.items()} for step in steps}


def assert_adamw_agrees(ours, theirs):
    """As assert_agrees, without the bias of the attention's keys.

    It has no effect on the softmax: its gradient is rounding and nothing else, and Adam makes steps of full
    size of it.
    """
    assert_agrees(without_key_bias(ours), without_key_bias(theirs))


def without_key_bias(result):
    width = features.JOB.width
    return {
        name: np.delete(values, np.s_[width : 2 * width], axis=1) if name.endswith("qkv.bias") else values
        for name, values in result.items()
    }


# -- strategies


@pytest.mark.parametrize(
    ("ranks", "strategy", "twins"),
    [
        (3, "NO_SHARD", ["ddp"]),
        (3, "SHARD_OPT", ["ddp", "zero"]),
        (3, "SHARD_GRAD_OP", ["fsdp2 kept"]),
        *((ranks, "FULL_SHARD", ["fsdp2"]) for ranks in (1, 2, 3, 4)),
        (4, "HYBRID_SHARD", ["fsdp2"]),
        (4, "HYBRID_SHARD_GRAD_OP", ["fsdp2 kept"]),
    ],
)
def test_a_strategy_trains_as_its_twins(world, ranks, strategy, twins):
    ours = world.train(ranks, strategy=strategy, shape=(2, 2) if "HYBRID" in strategy else None)
    for twin in twins:
        assert_agrees(ours, world.twin(twin))


@pytest.mark.mpi
def test_adamw_takes_the_steps_of_torch_on_shards(world):
    """On threads and under mpirun."""
    assert_adamw_agrees(world.train(optimizer="adamw"), world.twin("fsdp2 adamw"))
    program = ["-m", "tests.parity.features_shardrt", str(world.folder / "job.npz")]
    done = mpirun(2, [*program, str(world.folder / "mpi.npz")])
    assert done.returncode == 0, done.stderr
    assert_adamw_agrees(dict(np.load(world.folder / "mpi.npz")), world.twin("fsdp2 adamw"))


@pytest.mark.slow
def test_loss_curves_of_200_steps_on_real_text_differ_by_less_than_a_thousandth(world):
    ours, theirs = world.train(2, "curve", optimizer="adamw")["losses"], world.twin("curve")["losses"]
    assert len(ours) == 200 and theirs[-1] < theirs[0] - 1.5  # it did learn
    assert np.abs(ours - theirs).max() < 1e-3


@pytest.mark.slow
def test_200_steps_in_bfloat16_stay_as_near_to_float32_as_those_of_torch(world):
    exact, theirs = (world.twin(name)["losses"] for name in ("curve", "curve bfloat16"))
    ours = world.train(2, "curve", optimizer="adamw", **in_16_bits("bfloat16", "float32"))["losses"]
    far, allowed = np.linalg.norm(ours - exact), 2 * np.linalg.norm(theirs - exact)
    assert 0 < far <= allowed, f"{far:.1e}, {allowed:.1e}"


# -- accumulation


def test_micro_batches_add_up_as_in_torch_however_they_are_reduced(world):
    each, last = (
        world.train(micro_batches=features.MICRO_BATCHES, reduce_each=reduce_each)
        for reduce_each in (True, False)
    )
    assert_agrees(each, world.twin("reduced each"))
    assert_agrees(last, world.twin("reduced last"))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_agrees(last, world.twin("fsdp2"))  # the other three batches did count


# -- clipping


@pytest.mark.parametrize("norm_type", features.MAX_NORM)
def test_clipping_by_norm_gives_the_norm_and_gradients_of_torch(world, norm_type):
    """The same norms before, well above the allowed one, and the same gradients, which have that norm."""
    ours = world.train(clip=partial(features_shardrt.clip_norm, norm_type=norm_type))
    theirs = world.twin(f"clipped {norm_type}")
    before, allowed = ours["number/clipped"], features.MAX_NORM[norm_type]
    assert len(before) == features.STEPS and before.min() > 2 * allowed
    np.testing.assert_allclose(before, theirs["number/clipped"], rtol=RTOL)
    assert_agrees(ours, theirs)
    pieces = [gradient.reshape(features.STEPS, -1) for gradient in part(ours, "gradient").values()]
    after = np.linalg.norm(np.concatenate(pieces, axis=1), norm_type, axis=1)
    np.testing.assert_allclose(after, allowed, rtol=1e-3)


def test_clipping_by_value_gives_the_gradients_of_torch(world):
    ours, theirs = world.train(clip=features_shardrt.clip_value), world.twin("clipped values")
    assert ours["number/clipped"].min() > 2 * features.CLIP_VALUE
    np.testing.assert_allclose(ours["number/clipped"], theirs["number/clipped"], rtol=RTOL)
    assert max(np.abs(g).max() for g in part(ours, "gradient").values()) <= np.float32(features.CLIP_VALUE)
    assert_agrees(ours, theirs)


# -- partly trained models


@pytest.mark.parametrize("frozen", features.FROZEN)
def test_frozen_parameters_stay_and_the_others_train_as_torch(world, frozen):
    patterns = features.FROZEN[frozen]
    ours = world.train(prepare=partial(features_shardrt.freeze, patterns=patterns))
    assert_agrees(ours, world.twin(f"frozen {frozen}"))
    assert_only_these_change(ours, lambda name: not features.picked(name, patterns))


def test_lora_trains_as_the_same_adapters_written_by_hand(world):
    ours = world.train(prepare=features_shardrt.add_adapters)
    assert_agrees(ours, world.twin("lora"))
    assert_only_these_change(ours, lambda name: ".lora_" in name)


def assert_only_these_change(result, changes):
    """At every step: these parameters are new and have gradients, the others are the same bits."""
    trained = part(result, "gradient").keys()
    for name, values in part(result, "parameter").items():
        assert (name in trained) == changes(name), name
        same = [np.array_equal(*pair) for pair in pairwise(values)]
        assert not any(same) if changes(name) else all(same), name


# -- units


@pytest.mark.parametrize("wrapped", [None, by_size(4000)], ids=["one unit", "4 k"])
def test_units_of_other_sizes_train_as_blocks_do(world, wrapped):
    assert_agrees(world.train(wrapped=wrapped), world.twin("fsdp2"))


# -- mixed precision: 16 bits are not the same bits; how far from float32 is PyTorch, and how far are we?


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_bfloat16_is_as_near_to_float32_as_that_of_torch(world, reduce_dtype):
    ours = world.train(**in_16_bits("bfloat16", reduce_dtype))
    assert_as_near(ours, world.twin(f"bfloat16 {reduce_dtype}"), world.twin("fsdp2"))


@pytest.mark.parametrize("reduce_dtype", ["float32", "float16"])
def test_float16_with_a_scaler_is_as_near_to_float32_as_that_of_torch(world, reduce_dtype):
    ours = world.train(scaled=True, **in_16_bits("float16", reduce_dtype))
    theirs = world.twin(f"float16 {reduce_dtype}")
    assert_as_near(ours, theirs, world.twin("float32 scaled"))
    assert ours["number/scale"].tolist() == theirs["number/scale"].tolist()


def test_a_scaler_skips_and_scales_as_that_of_torch(world):
    ours, theirs = world.train(scaled=True), world.twin("float32 scaled")
    scales = ours["number/scale"].tolist()
    assert scales == theirs["number/scale"].tolist() and len(set(scales)) > 1
    assert_agrees(ours, theirs, overflows=[features.OVERFLOW])
    for values in part(ours, "parameter").values():  # what overflowed on one rank changed nothing on any
        assert np.array_equal(values[features.OVERFLOW], values[features.OVERFLOW - 1])


def in_16_bits(param_dtype, reduce_dtype):
    """Settings of shardrt: blocks hand on what they compute, the logits are float32."""
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
    return {
        "wrapped": by_class(Block, mp_policy=policy),
        "mp_policy": replace(policy, output_dtype="float32"),
    }


def assert_as_near(ours, theirs, exact):
    """Losses and final parameters are at most twice as far from the exact ones as PyTorch's are.

    And not as near as float32 would be: 16 bits were in use.
    """
    theirs = distances(theirs, exact)
    for kind, found in distances(ours, exact).items():
        assert theirs[kind] / 100 < found <= 2 * theirs[kind], f"{kind}: {found:.1e}, {theirs[kind]:.1e}"


def distances(result, exact):
    """The norms of the differences of all losses and of all final parameters."""
    assert len(result["losses"]) == features.STEPS
    final = {name: values[-1].astype(np.float64) for name, values in part(exact, "parameter").items()}
    found = {name: values[-1] for name, values in part(result, "parameter").items()}
    return {
        "losses": np.linalg.norm(result["losses"] - exact["losses"]),
        "parameters": np.linalg.norm([np.linalg.norm(found[name] - final[name]) for name in final]),
    }
