"""AdamW(exp_avg_dtype="bfloat16"): the first moment in half the bytes, wherever it is, however it is cut."""

from functools import partial

import numpy as np
import pytest

from shardrt import device, optim
from shardrt.checkpoint import CheckpointManager, get_optimizer_state_dict, set_optimizer_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import CPUOffloadPolicy, memory_plan
from shardrt.kernels.cpu import adamw, cast
from tests import lab

LOW = partial(optim.AdamW, lr=1e-2, weight_decay=0.1, exp_avg_dtype="bfloat16")
EXACT = lab.adamw


def rounded(values):
    out = np.empty(values.size, np.float32)
    cast.round_to(values, out, "bfloat16")
    return out


def test_the_update_is_that_of_float32_but_for_what_is_kept_of_the_first_moment():
    random = np.random.default_rng(0)
    param, grad, m = (random.standard_normal(1000).astype(np.float32) for _ in range(3))
    m, v, bits = rounded(m), m * m, np.empty(1000, np.uint16)
    cast.pack(m, bits, "bfloat16")
    low = [param.copy(), grad, bits, v.copy()]
    exact = [param.copy(), grad, m.copy(), v.copy()]
    ranges = np.array([[3, 997, 0.999, 1e-2, 2.0, 0.9, 0.999, 1e-8]])
    adamw.step(*low, ranges)
    adamw.step(*exact, ranges)
    np.testing.assert_array_equal(low[0], exact[0])
    np.testing.assert_array_equal(low[3], exact[3])
    kept = np.empty(1000, np.float32)
    cast.unpack(bits, kept, "bfloat16")
    np.testing.assert_array_equal(kept, rounded(exact[2]))


def test_neither_moment_stalls_where_a_step_changes_it_by_less_than_bfloat16_tells():
    """The gradients become a tenth of what they were: 1 - beta2 is a quarter of a step of bfloat16."""
    param, grad, v = (np.ones(16, np.float32) for _ in range(3))
    m = np.full(16, 0x3F80, np.uint16)  # 1.0
    grad *= 0.1
    for _ in range(4000):
        adamw.step(param, grad, m, v, np.array([[0, 16, 1.0, 1e-4, 1.0, 0.9, 0.999, 1e-8]]))
    moment = np.empty(16, np.float32)
    cast.unpack(m, moment, "bfloat16")
    np.testing.assert_allclose(moment, 0.1, rtol=0.03)  # half a step of 2**-8, by 1 / (1 - beta1)
    np.testing.assert_allclose(v, 0.01 + 0.99 * 0.999**4000, rtol=1e-3)


def test_training_reaches_the_loss_of_float32():
    """Within 1 % after 60 steps, and within 2 % at every one on the way."""
    exact, low = (lab.train_on(1, steps=60, optimizer=make).losses for make in (EXACT, LOW))
    assert exact[-1] < 0.8 * exact[0]
    assert abs(low[-1] / exact[-1] - 1) < 0.01
    np.testing.assert_allclose(low, exact, rtol=0.02)


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "NO_SHARD"},
        {"offload_policy": CPUOffloadPolicy()},
        {"offload_policy": CPUOffloadPolicy(step="host")},
        {"offload_policy": CPUOffloadPolicy(), "optimizer": partial(LOW, in_backward=True)},
    ],
    ids=["NO_SHARD", "offload", "on the host", "in backward"],
)
def test_where_states_are_changes_no_bit(settings):
    found, expected = lab.train_on(2, **({"optimizer": LOW} | settings)), lab.train_on(2, optimizer=LOW)
    lab.assert_equal((found.losses, found.weights), (expected.losses, expected.weights))


def made(optimizer=LOW, **settings):
    model, _ = lab.build(**settings)
    return model, optimizer(model.parameters())


def step(model, optimizer, number):
    lab.backward(model, None, lab.batches(4)[number])
    lab.update(optimizer)


@pytest.mark.parametrize("policy", [None, CPUOffloadPolicy()], ids=["device", "host"])
def test_the_memory_plan_knows_to_the_byte(policy):
    model, _ = made(offload_policy=policy)
    plan = memory_plan(model, optimizer_states=1.5)
    optimizer = LOW(model.parameters())
    states = sum(array.nbytes for piece in optimizer.slices for array in piece.state.values())
    assert (plan.device if policy is None else plan.host)["optimizer state"] == states
    kinds = {(name, array.dtype) for piece in optimizer.slices for name, array in piece.state.items()}
    assert kinds == {("m", np.dtype(np.uint16)), ("v", np.dtype(np.float32))}
    assert plan.device.get("staging of the optimizer", 0) == (
        0 if policy is None else optimizer.updates.staging_bytes
    )


def moments(model, optimizer):
    device.current().wait_here()
    state = get_optimizer_state_dict(model, optimizer).get("state", {})  # which rank 0 has
    return {(name, kind): values for name, entry in state.items() for kind, values in entry.items()}


def through_files(folder):
    """The moments that were saved, and what came of them by each way: on two ranks."""
    model, optimizer = made()
    for number in range(2):
        step(model, optimizer, number)
    at_step(folder / "low", model, optimizer).save(1)
    saved = get_optimizer_state_dict(model, optimizer)
    found = [moments(model, optimizer)]
    at_step(folder / "low", *(other := made(strategy="SHARD_OPT"))).restore()
    found.append(moments(*other))
    at_step(folder / "low", *(exact := made(EXACT))).restore()  # where they are float32, and back
    at_step(folder / "exact", *exact).save(1)
    at_step(folder / "exact", *(again := made())).restore()
    found.append(moments(*again))
    model, optimizer = made()
    set_optimizer_state_dict(model, optimizer, saved, broadcast_from_rank0=True)
    return [*found, moments(model, optimizer)]


def at_step(folder, model, optimizer):
    return CheckpointManager(folder, model, optimizer, init_device_mesh("auto"))


def test_checkpoints_and_state_dicts_keep_every_bit(tmp_path):
    saved, *others = lab.first(2, through_files, tmp_path)
    assert any(kind == "exp_avg" and values.dtype == np.float32 for (_, kind), values in saved.items())
    lab.assert_equal(others, [saved] * 3)


test_another_type_is_refused = lab.refusals(
    (
        lambda: optim.AdamW(lab.Net().parameters(), exp_avg_dtype="float16"),
        ValueError,
        "exp_avg_dtype must be 'float32' or 'bfloat16', got 'float16'",
    )
)
