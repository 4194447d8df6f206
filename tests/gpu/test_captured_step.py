"""A whole training step as a CUDA graph: its replays train with the bits of steps that are not captured."""

from functools import partial

import numpy as np
import pytest

import shardrt
from shardrt import device, nn, optim
from shardrt import functional as F
from shardrt.checkpoint import full_state_dict
from shardrt.comm import thread
from shardrt.deferred_gradients import DeferredGradients
from shardrt.recompute import checkpoint
from tests import lab
from tests.cuda import small_gpt

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

STEPS = 4


def train(
    captured, *, make=small_gpt.made, seeded=True, optimizer=None, changed=False, late=False, **settings
):
    """[(loss, norm)] of STEPS steps, whose learning rates differ, and the parameters at the end.

    captured: the second and the third step are replays of a graph, with tokens in arrays that are filled
    beforehand; an evaluation comes between them, and then the weights are `changed` by hand. late: gradients
    of weights are put off. make: gives (mesh, model).
    """
    mesh, model = make("cuda", **settings)
    here, rows, time = device.current(), 2, model.config.block_size
    optimizer = optimizer or (lambda groups: optim.AdamW(groups, lr=1e-2))
    updates = optimizer(optim.decay_groups(model, 0.1))
    tokens, targets = (here.zeros((rows, time), np.int64) for _ in range(2))
    texts = np.random.default_rng(mesh.rank).integers(0, 29, (STEPS, rows, time + 1))
    texts[:, 0, 2] = -100  # a target that does not count, and not in every row

    def step():
        halves = DeferredGradients() if late else None
        loss = model(tokens, targets)  # in one op with the head
        loss.backward(deferred=halves)
        if late:
            halves.flush()
        norm = nn.utils.clip_grad_norm_on_device_(model.parameters(), 0.5)
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
BF16 = small_gpt.VARIANTS["bfloat16"]
VARIANTS = {
    "not sharded; dropout that is never seeded again": {"sharded": False, "dropout": 0.2, "seeded": False},
    "SHARD_OPT, bfloat16": {"strategy": "SHARD_OPT", **BF16},
    "NO_SHARD, bfloat16, changed by hand": {"strategy": "NO_SHARD", "changed": True, **BF16},
    "FULL_SHARD, bfloat16, changed by hand": {"changed": True, **BF16},
    "FULL_SHARD, gradients of weights put off": {"late": True},
    "SGD; dropout, masks made again": {"optimizer": SGD, "dropout": 0.2, "prepare": checkpoint},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_train_as_steps_that_are_not_captured(gpu, variant):
    expected, found = (thread.run(1, train, captured, **VARIANTS[variant]) for captured in (False, True))
    assert_same(found, expected)


def assert_same(found, expected):
    """To the bit, and there was something: finite numbers, and as many updates as steps."""
    lab.assert_equal(found, expected)
    for seen, _, updates in found:
        assert np.isfinite(seen).all() and set(updates) == {STEPS}
