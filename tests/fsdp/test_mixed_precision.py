"""16 bits in storage and on the wire, float32 where it counts."""

from dataclasses import dataclass

import numpy as np
import pytest

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import CountedCommunicator, init_device_mesh, thread
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, full_parameters, fully_shard, units
from tests.fsdp.nets import Frozen, Net, assert_same_bits, batches, gradients, loss_of, outcome, shard

BF16 = MixedPrecisionPolicy("bfloat16")
STRATEGIES = ["NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD"]


def rounded(values, dtype="bfloat16"):
    return F.cast(shardrt.Tensor(np.asarray(values, np.float32)), dtype).data


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("make", [Net, Frozen])
def test_all_strategies_give_the_same_bits(dtype, make):
    policy = MixedPrecisionPolicy(dtype)
    expected = outcome(4, make, mp_policy=policy)
    for strategy in STRATEGIES:
        assert_same_bits(outcome(4, make, mp_policy=policy, strategy=strategy), expected, strategy)
    for shape in ((2, 2), (4, 1)):
        assert_same_bits(outcome(4, make, mp_policy=policy, mesh_options={"shape": shape}), expected, shape)


def seen_in_forward(policy):
    """What a block's weights are inside forward, and the float32 values behind them."""
    shardrt.manual_seed(3)
    model = Net()
    shard(model, init_device_mesh("auto"), mp_policy=policy)
    seen = {}
    block = model.blocks[1]
    forward = block.forward

    def watched(x):
        seen["weight"], seen["input"] = np.array(block.up.weight.data), np.array(x.data)
        return forward(x)

    block.forward = watched
    with shardrt.no_grad():
        model(batches(1)[0][0])
    with full_parameters(model):
        seen["master"] = np.array(block.up.weight.data)
    return seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_forward_sees_rounded_weights_and_inputs_and_the_masters_stay_float32(ranks, dtype):
    seen = thread.run(ranks, seen_in_forward, MixedPrecisionPolicy(dtype))[0]
    assert np.array_equal(seen["weight"], rounded(seen["master"], dtype))
    assert not np.array_equal(seen["weight"], seen["master"])
    assert np.array_equal(seen["input"], rounded(seen["input"], dtype))


def test_inputs_are_left_alone_if_told():
    seen = thread.run(1, seen_in_forward, MixedPrecisionPolicy("bfloat16", cast_forward_inputs=False))[0]
    assert not np.array_equal(seen["input"], rounded(seen["input"]))


def reduced_gradients(policy, whole):
    shardrt.manual_seed(3)
    model = Net()
    mesh = init_device_mesh("auto")
    shard(model, mesh, mp_policy=policy)
    tokens, targets = batches(1)[0]
    mine = slice(None) if whole else slice(mesh.rank * 12 // mesh.size, (mesh.rank + 1) * 12 // mesh.size)
    loss_of(model, tokens[mine], targets[mine]).backward()
    return gradients(model)


def test_a_16_bit_reduction_rounds_each_rank_once_and_sums_in_float32():
    """All ranks have one batch, so the mean is each rank's gradient rounded, exactly."""
    policy = MixedPrecisionPolicy("bfloat16", reduce_dtype="float32")
    exact = thread.run(2, reduced_gradients, policy, True)[0]
    found = thread.run(2, reduced_gradients, BF16, True)[0]
    for name, gradient in exact.items():
        assert np.array_equal(found[name], rounded(gradient)), name


def test_modules_may_be_excepted():
    policy = MixedPrecisionPolicy("bfloat16", full_precision=(nn.LayerNorm,))

    def kinds():
        model = Net()
        shard(model, init_device_mesh("auto"), mp_policy=policy)
        return {p.name: g.key.param for u in units(model) for g in u.groups for p in g.parameters}

    found = thread.run(2, kinds)[0]
    assert {name for name, param in found.items() if param == "float32"} == {"norm.weight", "norm.bias"}
    expected = outcome(2, mp_policy=policy)
    assert all(np.isfinite(expected[0]))


def traffic(policy):
    """Bytes received in the second step, by collective."""
    made = []

    def counted(communicator):
        made.append(CountedCommunicator(communicator))
        return made[-1]

    model = Net()
    shard(model, init_device_mesh("auto", wrap=counted), mp_policy=policy, reshard_after_forward=True)
    optimizer = optim.AdamW(model.parameters())
    for tokens, targets in batches(2, size=4):
        for communicator in made:
            communicator.reset()
        loss_of(model, tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {call: sum(c.bytes[call] for c in made) for call in ("all_gather", "reduce_scatter")}


def test_16_bits_halve_the_traffic():
    full = thread.run(2, traffic, None)[0]
    assert thread.run(2, traffic, BF16)[0] == {call: nbytes // 2 for call, nbytes in full.items()}
    mixed = thread.run(2, traffic, MixedPrecisionPolicy("bfloat16", reduce_dtype="float32"))[0]
    assert mixed == {"all_gather": full["all_gather"] // 2, "reduce_scatter": full["reduce_scatter"]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_follows_float32(dtype):
    plain = outcome(2, steps=10)[0]
    low = outcome(2, steps=10, mp_policy=MixedPrecisionPolicy(dtype))[0]
    np.testing.assert_allclose(low, plain, rtol=3e-2)
    assert low != plain


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_offload_changes_no_bit_in_16_bits_either(strategy):
    expected = outcome(2, mp_policy=BF16, strategy=strategy)
    found = outcome(2, mp_policy=BF16, strategy=strategy, offload_policy=CPUOffloadPolicy())
    assert_same_bits(found, expected)


def outputs(policy):
    model = fully_shard(nn.Linear(7, 7), mesh=init_device_mesh("auto"), mp_policy=policy)
    y = model(shardrt.Tensor(np.linspace(0, 1, 7, dtype=np.float32)))
    return np.array(y.data)


def test_outputs_are_cast_if_told():
    y = thread.run(1, outputs, MixedPrecisionPolicy(output_dtype="bfloat16"))[0]
    assert np.array_equal(y, rounded(y))
    y = thread.run(1, outputs, MixedPrecisionPolicy())[0]
    assert not np.array_equal(y, rounded(y))


@dataclass
class Boxed:
    x: shardrt.Tensor


class TakesABox(nn.Linear):
    def forward(self, boxed):
        self.seen = np.array(boxed.x.data)
        return Boxed(super().forward(boxed.x))


def test_dataclasses_are_cast_as_well():
    model = TakesABox(7, 7)
    fully_shard(model, mp_policy=MixedPrecisionPolicy("bfloat16", output_dtype="float32"))
    given = Boxed(shardrt.Tensor(np.linspace(0, 1, 7, dtype=np.float32)))
    found = model(given)
    assert np.array_equal(model.seen, rounded(given.x.data))
    assert found.x.dtype == np.float32 and type(found) is Boxed


def test_unknown_types_are_refused():
    with pytest.raises(ValueError, match="param_dtype: unknown dtype 'half'"):
        MixedPrecisionPolicy("half")
    with pytest.raises(ValueError, match="float64 is not a type of mixed precision"):
        MixedPrecisionPolicy(reduce_dtype="float64")
    with pytest.raises(ValueError, match="output_dtype: unknown dtype 'int32'"):
        MixedPrecisionPolicy(output_dtype=np.int32)


def test_types_may_be_given_as_numpys():
    assert MixedPrecisionPolicy(np.float16, np.dtype("float32")) == MixedPrecisionPolicy("float16", "float32")
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert MixedPrecisionPolicy(bfloat16) == MixedPrecisionPolicy("bfloat16")
