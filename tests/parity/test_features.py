"""Every feature beside PyTorch: losses, gradients and parameters of 10 steps at 2, 3 and 4 ranks.

PyTorch's runs (features_torch.py) are made first, all in one launch.
"""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from bench.peers.launch import launch, one_thread
from models.gpt import GPT, MLP, Attention, Block
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, by_class, by_predicate, by_size, memory_plan
from shardrt.fsdp import units as units_of
from tests.parity import features, features_shardrt
from tests.parity.job import part
from tests.parity.shardrt_run import config_of
from tests.parity.test_fsdp2 import relative, without_key_bias
from tests.ranks import run_ranks

pytestmark = pytest.mark.torch

RTOL = 1e-5  # of the norm of each tensor


@dataclass(frozen=True)
class World:
    """A number of ranks, the job that they run, and what PyTorch made of it in all ways."""

    ranks: int
    job: Path
    torch: Path

    def train(self, **settings):
        """shardrt's result, on threads."""
        results = run_ranks(self.ranks, features_shardrt.run, self.job, **settings)
        return results[0] | {"losses": np.mean([result["losses"] for result in results], axis=0)}

    def twin(self, name):
        """PyTorch's result."""
        with np.load(self.torch) as results:
            return part(results, name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the job, and PyTorch's results for each number of ranks."""
    pytest.importorskip("torch")
    path = tmp_path_factory.mktemp("features")
    save_job(path / "job.npz")
    program = ["-m", "tests.parity.features_torch", str(path / "job.npz"), str(path)]
    launch(program, max(features.RANKS), one_thread(), timeout=240)
    return path


@pytest.fixture(scope="module", params=features.RANKS, ids="{} ranks".format)
def world(request, folder):
    return World(request.param, folder / "job.npz", folder / f"{request.param}.npz")


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


def worst(ours, theirs, kind, skipped=()):
    """(largest relative difference of a tensor of a kind at a step, which, when)."""
    ours, theirs = part(ours, kind), part(theirs, kind)
    assert ours.keys() == theirs.keys() and ours
    assert {len(values) for values in [*ours.values(), *theirs.values()]} == {features.STEPS}
    found = [
        (relative(ours[name][step], theirs[name][step]), name, step)
        for name in theirs
        for step in range(features.STEPS)
        if step not in skipped
    ]
    return max(found, key=lambda item: (np.isnan(item[0]), item[0]))


def assert_agrees(ours, theirs, overflows=()):
    """Losses, gradients and parameters at every step; the message names the worst.

    overflows: steps whose gradients are infinite or not a number, and not compared.
    """
    assert len(ours["losses"]) == features.STEPS
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=RTOL)
    for kind, skipped in (("gradient", overflows), ("parameter", ())):
        difference, name, step = worst(ours, theirs, kind, skipped)
        assert difference < RTOL, f"{kind} of {name} differs by {difference:.1e} at step {step}"


def assert_adamw_agrees(ours, theirs):
    """As assert_agrees, without the parameters whose gradient is rounding alone."""
    assert_agrees(without_key_biases(ours), without_key_biases(theirs))


def without_key_biases(result):
    kept = without_key_bias(part(result, "parameter"), features.JOB.width)
    return result | {f"parameter/{name}": values for name, values in kept.items()}


# -- strategies


@pytest.mark.parametrize(
    ("strategy", "twin"),
    [
        ("NO_SHARD", "ddp"),
        ("SHARD_OPT", "ddp"),
        ("SHARD_OPT", "zero"),
        ("SHARD_GRAD_OP", "fsdp2 kept"),
        ("FULL_SHARD", "fsdp2"),
    ],
)
def test_a_strategy_trains_as_its_twin(world, strategy, twin):
    assert_agrees(world.train(strategy=strategy), world.twin(twin))


@pytest.mark.parametrize("world", [4], indirect=True)
@pytest.mark.parametrize(
    ("strategy", "twin"), [("HYBRID_SHARD", "hsdp"), ("HYBRID_SHARD_GRAD_OP", "hsdp kept")]
)
def test_a_hybrid_trains_as_fsdp2_on_a_mesh_of_two_axes(world, strategy, twin):
    assert_agrees(world.train(strategy=strategy, shape=(2, 2)), world.twin(twin))


def test_adamw_takes_the_steps_of_torch_on_shards(world):
    assert_adamw_agrees(world.train(optimizer="adamw"), world.twin("fsdp2 adamw"))


# -- accumulation


@pytest.mark.parametrize(
    ("strategy", "last_twin"),
    [("NO_SHARD", "ddp reduced last"), ("SHARD_OPT", "ddp reduced last"), ("FULL_SHARD", "reduced last")],
)
def test_micro_batches_add_up_as_in_torch_however_they_are_reduced(world, strategy, last_twin):
    each, last = (
        world.train(strategy=strategy, micro_batches=features.MICRO_BATCHES, reduce_each=reduce_each)
        for reduce_each in (True, False)
    )
    assert_agrees(each, world.twin("reduced each"))
    assert_agrees(last, world.twin(last_twin))
    assert_agrees(last, each)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_agrees(last, world.twin("fsdp2"))  # the other three batches did count


@pytest.mark.parametrize("world", [4], indirect=True)
def test_a_hybrid_with_no_sync_trains_as_fsdp2(world):
    ours = world.train(shape=(2, 2), micro_batches=features.MICRO_BATCHES, reduce_each=False)
    assert_agrees(ours, world.twin("reduced last"))


# -- clipping


@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
@pytest.mark.parametrize("norm_type", features.MAX_NORM)
def test_clipping_by_norm_gives_the_norm_and_gradients_of_torch(world, norm_type, strategy):
    clip = partial(features_shardrt.clip_norm, norm_type=norm_type)
    ours = world.train(clip=clip, strategy=strategy)
    assert_clipped_alike(ours, world.twin(f"clipped {norm_type}"), norm_type)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_clipping_of_a_hybrid_gives_the_norm_and_gradients_of_torch(world):
    ours = world.train(clip=partial(features_shardrt.clip_norm, norm_type=2.0), shape=(2, 2))
    assert_clipped_alike(ours, world.twin("clipped 2.0"), 2.0)


def assert_clipped_alike(ours, theirs, norm_type):
    """The same norms before, well above the allowed one, and the same gradients, which have that norm."""
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


# -- memory: offload, recomputation, updates in backward

PLACES = [places for places in product([False, True], repeat=3) if any(places)]


@pytest.mark.parametrize("places", PLACES, ids=str)
def test_offload_of_any_part_trains_as_torch(world, places):
    on_host = []
    ours = world.train(
        offload_policy=CPUOffloadPolicy(*places), watch=lambda model: on_host.append(memory_plan(model).host)
    )
    assert [len(host) for host in on_host] == [sum(places)] * world.ranks
    assert_agrees(ours, world.twin("fsdp2"))
    assert_agrees(ours, world.twin("fsdp2 offloaded"))


@pytest.mark.parametrize("step", ["device", "host"])
@pytest.mark.parametrize("files", [False, True], ids=["memory", "files"])
def test_offload_of_everything_trains_as_torch_with_adamw(world, step, files, tmp_path):
    policy = CPUOffloadPolicy(step=step, directory=tmp_path if files else None)
    ours = world.train(optimizer="adamw", offload_policy=policy)
    assert_adamw_agrees(ours, world.twin("fsdp2 adamw"))


def test_activation_offload_trains_as_save_on_cpu(world):
    ours = world.train(prepare=features_shardrt.offload_blocks)
    assert_agrees(ours, world.twin("activations offloaded"))


@pytest.mark.parametrize("policy", ["full", "matmul"])
def test_recomputation_trains_as_torch_checkpoint(world, policy):
    ours = world.train(prepare=partial(features_shardrt.recompute_blocks, policy=policy))
    assert_agrees(ours, world.twin(f"recomputed {policy}"))


@pytest.mark.parametrize(
    ("optimizer", "twin", "assert_as_twin"),
    [("sgd", "fsdp2", assert_agrees), ("adamw", "fsdp2 adamw", assert_adamw_agrees)],
    ids=["sgd", "adamw"],
)
def test_updates_in_backward_train_as_torch(world, optimizer, twin, assert_as_twin):
    ours = world.train(optimizer=optimizer, in_backward=True, clip=comes_too_late)
    assert_as_twin(ours, world.twin(twin))


def comes_too_late(model):
    """Clipping, after the updates: the proof that they were made in backward."""
    with pytest.raises(RuntimeError, match="in_backward=True and has applied these gradients already"):
        features_shardrt.clip_norm(model, 2.0)
    return 0.0


# -- partly trained models


@pytest.mark.parametrize("strategy", ["SHARD_OPT", "FULL_SHARD"])
@pytest.mark.parametrize("frozen", features.FROZEN)
def test_frozen_parameters_stay_and_the_others_train_as_torch(world, frozen, strategy):
    patterns = features.FROZEN[frozen]
    ours = world.train(strategy=strategy, prepare=partial(features_shardrt.freeze, patterns=patterns))
    assert_agrees(ours, world.twin(f"frozen {frozen}"))
    assert_only_these_change(ours, lambda name: not features.picked(name, patterns))


@pytest.mark.parametrize("strategy", ["SHARD_OPT", "FULL_SHARD"])
def test_lora_trains_as_the_same_adapters_written_by_hand(world, strategy):
    ours = world.train(strategy=strategy, prepare=features_shardrt.add_adapters)
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


@pytest.mark.parametrize(
    ("wrapped", "twin", "units"),
    [
        (None, "fsdp2 one unit", 1),
        (by_class(Block), "fsdp2", 3),
        (by_class(Attention, MLP), "fsdp2 halves", 5),
        (by_size(4000), "fsdp2 halves", 7),
        (by_size(12_000), "fsdp2", 3),
        (by_predicate(lambda path, module: path == "blocks.1"), "fsdp2", 2),
    ],
    ids=["one unit", "blocks", "halves", "4 k", "12 k", "one block"],
)
def test_units_of_any_kind_train_as_those_of_torch(world, wrapped, twin, units):
    counts = []
    ours = world.train(wrapped=wrapped, watch=lambda model: counts.append(len(units_of(model))))
    assert counts == [units] * world.ranks
    assert_agrees(ours, world.twin(twin))


# -- mixed precision: 16 bits are not the same bits; how far from float32 is PyTorch, and how far are we?


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
def test_bfloat16_is_as_near_to_float32_as_that_of_torch(world, reduce_dtype, strategy):
    ours = world.train(strategy=strategy, **in_16_bits("bfloat16", reduce_dtype))
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
