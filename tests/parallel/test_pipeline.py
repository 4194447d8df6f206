"""Every schedule, and no pipeline at all, give the same bits; on any mesh they train as one rank."""

from contextlib import nullcontext
from functools import cache, partial

import numpy as np
import pytest

from shardrt import optim
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard, no_sync, set_gradient_divide_factor
from shardrt.parallel import Pipeline, parallelize_module
from tests import lab
from tests.parallel.nets import TIME, VOCAB, make, plan_of

STEPS, MICRO_BATCHES, ROWS, LAYERS = 2, 4, 8, 6
STAGES = {  # per rank
    "GPipe": 1,
    "1F1B": 1,
    "ZB-H1": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


def inputs_of(batch):
    tokens, targets = batch
    return {"tokens": tokens, "targets": targets, "reduction": "sum"}


def loss_of(loss, batch):
    return loss * (1 / (ROWS * TIME))


def batches_of(step, data):
    rows = np.random.default_rng(step).integers(0, VOCAB, (ROWS, TIME + 1))
    rows = np.split(rows, data.size)[data.rank]
    return [(part[:, :-1], part[:, 1:]) for part in np.split(rows, MICRO_BATCHES)]


def alone(kind, shards, **changes):
    """Accumulated over the same micro-batches, on one rank or several that are sharded."""
    mesh = init_device_mesh("cpu")
    model = make(kind, n_layer=LAYERS, **changes)
    if shards:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        set_gradient_divide_factor(model, 1.0)

    def step(batches):
        losses = []
        for number, batch in enumerate(batches, start=1):
            with no_sync(model) if shards and number < len(batches) else nullcontext():
                loss = loss_of(model(**inputs_of(batch)), batch)
                loss.backward()
            losses.append(loss.item())
        return losses

    return learn(model, step, mesh)


def piped(kind, axes, schedule, sequence=False, **changes):
    """axes: pp, dp_shard, tp."""
    mesh = init_device_mesh("cpu", axes, ("pp", "dp_shard", "tp"))
    model = make(kind, n_layer=LAYERS, **changes)
    if axes[2] > 1:
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
    pipeline = Pipeline(
        model, mesh["pp"], schedule=schedule, micro_batches=MICRO_BATCHES, stages_per_rank=STAGES[schedule]
    )
    if axes[1] > 1:
        for stage in pipeline.stages:
            for module in (*stage.blocks, stage):
                fully_shard(module, mesh=mesh["dp_shard"])
            set_gradient_divide_factor(stage, 1.0)

    def step(batches):
        losses = []

        def loss(output, batch):
            found = loss_of(output, batch)
            losses.append(found.item())
            return found

        pipeline.step(loss, batches, inputs=inputs_of)
        return losses

    return learn(model, step, mesh["dp_shard"])


def learn(model, step, data):
    adamw = partial(optim.AdamW, lr=1e-2)
    return lab.learn(model, lambda n: step(batches_of(n, data)), steps=STEPS, optimizer=adamw, whole=None)


@cache
def trained(function, ranks, *args, **changes):
    """Rank 0's weights, all ranks' norms, and losses of the ranks that have them."""
    found = thread.run(ranks, function, *args, **changes)
    losses = [message["losses"] for message in found if any(message["losses"])]
    norms = [message["norms"] for message in found]
    assert norms == [norms[0]] * len(norms)
    return losses, norms[0], found[0]["final"]


JOBS = [(name, ranks) for name in STAGES for ranks in (1, 2, 4)]
JOBS.remove(("DualPipeV", 4))  # it takes eight micro-batches


@pytest.mark.parametrize(("schedule", "ranks"), JOBS)
def test_every_schedule_has_the_bits_of_no_pipeline(schedule, ranks):
    expected = trained(alone, 1, "llama", False, tied=False)
    lab.assert_equal(trained(piped, ranks, "llama", (ranks, 1, 1), schedule, tied=False), expected)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "Interleaved1F1B", "DualPipeV"])
def test_beside_sharding(schedule):
    expected = trained(alone, 2, "llama", True, tied=False)
    found = trained(piped, 4, "llama", (2, 2, 1), schedule, tied=False)
    lab.assert_equal(found, expected)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "ZBVZeroBubble"])
def test_three_axes(schedule, sequence):
    one_stage = trained(piped, 4, "llama", (1, 2, 2), "GPipe", sequence, tied=False)
    lab.assert_equal(trained(piped, 8, "llama", (2, 2, 2), schedule, sequence, tied=False), one_stage)


def test_tied_weights_are_one():
    first = trained(piped, 2, "gpt", (2, 1, 1), "1F1B")
    for schedule in ("GPipe", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        lab.assert_equal(trained(piped, 2, "gpt", (2, 1, 1), schedule), first)
    lab.assert_equal(trained(piped, 4, "gpt", (4, 1, 1), "ZB-H1"), first)
    losses, norms, final = trained(alone, 1, "gpt", False)
    np.testing.assert_allclose(first[0], losses, rtol=1e-6)
    np.testing.assert_allclose(first[1], norms, rtol=1e-6)
