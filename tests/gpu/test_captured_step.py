"""A whole training step as a CUDA graph: its replays train with the bits of steps that are not captured."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from models.plans import plan_of
from shardrt import device, nn, optim
from shardrt import functional as F
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.deferred_gradients import DeferredGradients
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from shardrt.parallel import parallelize_module
from shardrt.recompute import checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

CONFIG = {"n_head": 2, "n_embd": 8, "block_size": 4, "vocab_size": 29}
STEPS = 4


def train(
    captured,
    *,
    sharded=True,
    dropout=0.0,
    recompute=False,
    seeded=True,
    optimizer=None,
    clip=True,
    changed=False,
    layers=1,
    communicator="auto",
    reduction="nccl",
    shape=None,
    late=False,
    **settings,
):
    """[(loss, norm)] of STEPS steps, whose learning rates differ, and the parameters at the end.

    captured: the second and the third step are replays of a graph, with tokens in arrays that are filled
    beforehand; an evaluation comes between them, and then the weights are `changed` by hand. shape: ranks
    along the data and along tp. late: gradients of weights are put off.
    """
    names = shape and ("dp_shard", "tp")
    mesh = init_device_mesh("cuda", shape, names, communicator=communicator, reduction=reduction)
    here = device.current()
    shardrt.manual_seed(7)
    model = GPT(GPTConfig(**CONFIG, n_layer=layers, dropout=dropout))
    if shape:
        parallelize_module(model, mesh["tp"], plan_of(model))
        mesh = mesh["dp_shard"]
    for block in model.blocks:
        if recompute:
            checkpoint(block)
        if sharded:
            fully_shard(block, mesh=mesh, **settings)
    if "mp_policy" in settings:
        settings["mp_policy"] = replace(settings["mp_policy"], output_dtype="float32")  # the logits
    if sharded:
        fully_shard(model, mesh=mesh, **settings)
    make = optimizer or (lambda groups: optim.AdamW(groups, lr=1e-2))
    updates = make(optim.decay_groups(model, 0.1))
    rows, time = 2, CONFIG["block_size"]
    tokens, targets = (here.zeros((rows, time), np.int64) for _ in range(2))
    texts = np.random.default_rng(mesh.rank).integers(0, CONFIG["vocab_size"], (STEPS, rows, time + 1))
    texts[:, 0, 2] = -100  # a target that does not count, and not in every row

    def step():
        halves = DeferredGradients() if late else None
        loss = model(tokens, targets)  # in one op with the head
        loss.backward(deferred=halves)
        if late:
            halves.flush()
        norm = nn.utils.clip_grad_norm_on_device_(model.parameters(), 0.5) if clip else loss
        updates.step()
        updates.zero_grad()
        return loss.data, norm.data

    graph, seen = None, []
    for number, text in enumerate(texts):
        if seeded:
            shardrt.manual_seed(7, number)
        for group in updates.param_groups:
            group["lr"] = 1e-2 / (number + 1)
        inputs = np.where(text[:, :-1] < 0, 0, text[:, :-1])
        here.copy(tokens, np.ascontiguousarray(inputs))
        here.copy(targets, np.ascontiguousarray(text[:, 1:]))
        if captured and number in (1, 2):
            graph = graph or here.capture(step)
            graph.replay()
            found = graph.result
        else:
            found = step()
        seen.append([float(x) for x in found])
        if number == 1:
            model.eval()
            with shardrt.no_grad():
                seen.append([float(F.cross_entropy(model(tokens), targets).item()), 0.0])
            model.train()
        for parameter in model.parameters() if changed and number == 1 else ():
            with parameter.writing() as piece:
                piece *= 0.5
    return seen, full_state_dict(model), [int(n) for piece in updates.slices for n in piece.steps]


SGD = partial(optim.SGD, lr=1e-2, momentum=0.9)
BF16 = MixedPrecisionPolicy("bfloat16", "float32", full_precision=(nn.LayerNorm,))
VARIANTS = {
    "not sharded; dropout that is never seeded again": {"sharded": False, "dropout": 0.2, "seeded": False},
    "SHARD_OPT, bfloat16": {"strategy": "SHARD_OPT", "mp_policy": BF16},
    "NO_SHARD, bfloat16, changed by hand": {"strategy": "NO_SHARD", "mp_policy": BF16, "changed": True},
    "FULL_SHARD, bfloat16, changed by hand": {"mp_policy": BF16, "changed": True},
    "FULL_SHARD, gradients of weights put off": {"late": True},
    "SGD; dropout, masks made again": {"optimizer": SGD, "dropout": 0.2, "recompute": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_train_as_steps_that_are_not_captured(gpu, variant):
    (expected,), (found,) = (
        thread.run(1, train, captured, **VARIANTS[variant]) for captured in (False, True)
    )
    assert_same(found, expected)


def assert_same(found, expected):
    """To the bit."""
    assert found[0] == expected[0]
    assert all(np.isfinite(pair).all() for pair in found[0])
    for name, values in (expected[1] or {}).items():
        np.testing.assert_array_equal(found[1][name], values, err_msg=name)
    assert found[2] == expected[2] and set(found[2]) == {STEPS}
