"""What there is beside pipelines works with them: to the bits of the same model in one piece, accumulated."""

import numpy as np
import pytest

from shardrt import nn, optim
from shardrt.fsdp import MixedPrecisionPolicy, check_replicas, set_find_unused_parameters
from shardrt.nn.utils import clip_grad_value_
from tests import lab
from tests.parallel import nets
from tests.parallel.piped import trained, update

MOVES = nets.MOVES | {
    "kept": {"reshard_after_forward": False},
    "prefetch 2": {"prefetch": 2},
    "SHARD_OPT": {"strategy": "SHARD_OPT"},
}


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_things_changes_no_bit(name, schedule):
    lab.assert_equal(trained((2, 1, 2), schedule, **MOVES[name]), trained((1, 1, 2), None))


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP"])
def test_hybrids_have_the_bits_of_one_piece(strategy):
    lab.assert_equal(
        trained((2, 2, 2), "ZB-H1", strategy=strategy), trained((1, 2, 2), None, strategy=strategy)
    )


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


def clip_values(model, optimizer, scaler):
    clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()


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
    "ignored": {"ignored": True, "update": unclipped},
    "unused": {"prepare": set_find_unused_parameters},
    "clip value": {"update": clip_values},
    "in backward": {"update": unclipped, "optimizer": in_backward},
    "Lion": {"optimizer": optim.Lion},
    "SGD": {"optimizer": optim.SGD},
    "replicas": {"strategy": "NO_SHARD", "update": check},
}


@pytest.mark.parametrize("schedule", ["ZB-H1", "Interleaved1F1B"])
@pytest.mark.parametrize("name", NUMBERS)
def test_it_trains_as_in_one_piece(name, schedule):
    how = NUMBERS[name]
    shards = 1 if name == "no units" else 2
    lab.assert_equal(trained((2, 1, shards), schedule, **how), trained((1, 1, shards), None, **how))
