"""Every schedule, and no pipeline at all, give the same bits; on any mesh they train as one rank."""

from functools import partial

import numpy as np
import pytest

from shardrt import nn, optim
from shardrt.fsdp import MixedPrecisionPolicy, check_replicas
from shardrt.parallel.schedules import SCHEDULES
from tests import lab
from tests.parallel import piped
from tests.parallel.piped import trained, update

LLAMA, GPT = (partial(make, n_layer=6) for make in (piped.llama, piped.gpt))  # eight pieces
JOBS = [(name, ranks) for name in SCHEDULES for ranks in (2, 4)]
JOBS[JOBS.index(("DualPipeV", 4))] = ("ZBVZeroBubble", 1)  # DualPipeV takes eight micro-batches there


@pytest.mark.parametrize(("schedule", "ranks"), JOBS)
def test_every_schedule_has_the_bits_of_no_pipeline(schedule, ranks):
    expected = trained((1, 1, 1), None, make=LLAMA, sharded=False)
    lab.assert_equal(trained((ranks, 1, 1), schedule, make=LLAMA, sharded=False), expected)


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_beside_sharding(schedule):
    lab.assert_equal(trained((2, 1, 2), schedule, make=LLAMA), trained((1, 1, 2), None, make=LLAMA))


@pytest.mark.parametrize(("schedule", "sequence"), [("1F1B", True), ("ZB-H1", False)])
def test_three_axes(schedule, sequence):
    how = {"make": LLAMA, "sequence": sequence}
    lab.assert_equal(trained((2, 1, 2, 2), schedule, **how), trained((1, 1, 2, 2), "GPipe", **how))


def test_tied_weights_are_one():
    how = {"make": GPT, "sharded": False}
    first = trained((2, 1, 1), "1F1B", **how)
    for schedule in ("GPipe", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        lab.assert_equal(trained((2, 1, 1), schedule, **how), first)
    lab.assert_equal(trained((4, 1, 1), "ZB-H1", **how), first)
    alone = trained((1, 1, 1), None, **how)
    for what in ("losses", "norms"):
        np.testing.assert_allclose(first[what], alone[what], rtol=1e-6)


# -- beside what else there is: tests/fsdp/test_pairs.py has what only moves things, and hybrids


def frozen_stage(number):
    def freeze(model):
        parts = (
            (model.embedding, *list(model.blocks)[:1]),
            (*list(model.blocks)[1:], model.norm, model.head),
        )
        for module in parts[number]:
            for parameter in module.parameters():
                parameter.requires_grad = False

    return freeze


def freeze_some(model):
    for parameter in (*model.blocks[0].parameters(), model.norm.weight):
        parameter.requires_grad = False


def adapters(model):
    nn.add_lora(model, 2, targets=("*.qkv", "*.down"))


def check(model, optimizer, scaler):
    norm = update(model, optimizer, scaler)
    check_replicas(model, optimizer)
    return norm


def overflow_once(model, optimizer, scaler):
    """In one stage alone, in the first step."""
    weight = model.blocks[1].mlp.down.weight
    if scaler.get_scale() == 2.0**10 and not weight.absent:
        weight.grad[...] = np.inf
    scaler.step(optimizer)
    scaler.update()


def unclipped(model, optimizer, scaler):
    optimizer.step()


def in_backward(parameters, **how):
    return optim.AdamW(parameters, in_backward=True, **how)


NUMBERS = {
    "bf16": {"mp_policy": MixedPrecisionPolicy("bfloat16")},
    "bf16, reduced in fp32": {"mp_policy": MixedPrecisionPolicy("bfloat16", "float32")},
    "fp16": {"mp_policy": MixedPrecisionPolicy("float16"), "scale": 2.0**10},
    "fp16 that overflows": {
        "mp_policy": MixedPrecisionPolicy("float16"),
        "scale": 2.0**10,
        "update": overflow_once,
        "steps": 3,
    },
    "no units": {"sharded": False},
    "first stage frozen": {"first": frozen_stage(0)},
    "last stage frozen": {"first": frozen_stage(1)},
    "frozen": {"first": freeze_some},
    "adapters": {"first": adapters},
    "in backward": {"update": unclipped, "optimizer": in_backward},
    "replicas": {"strategy": "NO_SHARD", "update": check},
}


CASES = [(name, "ZBVZeroBubble") for name in NUMBERS]  # two stages on a rank, and late weight gradients
CASES += [(f"{place} stage frozen", "ZB-H1") for place in ("first", "last")]  # all that a rank has


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_it_trains_as_in_one_piece(name, schedule):
    how = NUMBERS[name]
    shards = 1 if name == "no units" else 2
    lab.assert_equal(trained((2, 1, shards), schedule, **how), trained((1, 1, shards), None, **how))
