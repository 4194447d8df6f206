"""16 bits in storage and on the wire, float32 where it counts."""

from dataclasses import dataclass

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, nn
from shardrt import functional as F
from shardrt.fsdp import MixedPrecisionPolicy, full_parameters, fully_shard
from tests import lab

BF16 = MixedPrecisionPolicy("bfloat16")
X = np.linspace(0, 1, 7, dtype=np.float32)


def rounded(values, dtype="bfloat16"):
    return F.cast(Tensor(np.asarray(values, np.float32)), dtype).data


def seen_in_forward(policy):
    """What a block's weights are inside forward, and the float32 values behind them."""
    model, _ = lab.build(mp_policy=policy)
    seen, block = {}, model.blocks[1]
    forward = block.forward

    def watched(x):
        seen["weight"], seen["input"] = np.array(block.up.weight.data), np.array(x.data)
        return forward(x)

    block.forward = watched
    with shardrt.no_grad():
        model(lab.batches(1)[0][0])
    with full_parameters(model):
        seen["master"] = np.array(block.up.weight.data)
    return seen


@lab.on_ranks(1, 2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_forward_sees_rounded_weights_and_inputs_and_the_masters_stay_float32(dtype):
    seen = seen_in_forward(MixedPrecisionPolicy(dtype))
    assert np.array_equal(seen["weight"], rounded(seen["master"], dtype))
    assert not np.array_equal(seen["weight"], seen["master"])
    assert np.array_equal(seen["input"], rounded(seen["input"], dtype))
    uncast = seen_in_forward(MixedPrecisionPolicy(dtype, cast_forward_inputs=False))["input"]
    assert not np.array_equal(uncast, rounded(uncast, dtype))


@lab.on_ranks(2)
def test_a_16_bit_reduction_rounds_each_rank_once_and_sums_in_float32():
    """All ranks have one batch, so the mean is each rank's gradient rounded, exactly."""
    exact, _ = lab.build(mp_policy=MixedPrecisionPolicy("bfloat16", reduce_dtype="float32"))
    found, _ = lab.build(mp_policy=BF16)
    for model in (exact, found):
        lab.backward(model)
    expected = {name: rounded(gradient) for name, gradient in lab.gradients(exact).items()}
    lab.assert_equal(lab.gradients(found), expected)


@lab.on_ranks(2)
def test_modules_may_be_excepted():
    model, mesh = lab.build(mp_policy=MixedPrecisionPolicy("bfloat16", full_precision=(nn.LayerNorm,)))
    found = {p.name: group.key.param for group in lab.groups_of(model) for p in group.parameters}
    assert {name for name, param in found.items() if param == "float32"} == {"norm.weight", "norm.bias"}
    assert np.isfinite(lab.train(model, mesh).losses).all()


@lab.on_ranks(2)
def test_16_bits_halve_the_traffic():
    def bytes_of_a_step(policy):
        counts = lab.Counts()
        model, _ = lab.build(wrap=counts, mp_policy=policy, reshard_after_forward=True)
        lab.count_step(counts, model, lambda: lab.backward(model))
        return counts.bytes("all_gather", "reduce_scatter")

    gathered, reduced = bytes_of_a_step(None)
    assert bytes_of_a_step(BF16) == [gathered // 2, reduced // 2]
    assert bytes_of_a_step(MixedPrecisionPolicy("bfloat16", "float32")) == [gathered // 2, reduced]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_follows_float32(dtype):
    plain = lab.train_on(2, steps=10).losses
    low = lab.train_on(2, steps=10, mp_policy=MixedPrecisionPolicy(dtype)).losses
    lab.assert_close(low, plain, rtol=3e-2)
    assert low != plain


@dataclass
class Boxed:
    x: Tensor


class TakesABox(nn.Linear):
    def forward(self, boxed):
        self.seen = np.array(boxed.x.data)
        return Boxed(super().forward(boxed.x))


@pytest.mark.parametrize(("param", "output"), [(None, "bfloat16"), (None, None), ("bfloat16", "float32")])
def test_inputs_and_outputs_are_cast_in_dataclasses_as_well(param, output):
    model = fully_shard(TakesABox(7, 7), mp_policy=MixedPrecisionPolicy(param, output_dtype=output))
    found = model(Boxed(Tensor(X)))
    assert type(found) is Boxed and np.array_equal(model.seen, rounded(X) if param else X)
    assert np.array_equal(found.x.data, rounded(found.x.data)) == (output == "bfloat16")
    assert found.x.dtype == np.float32


def test_types_may_be_given_as_numpys():
    assert MixedPrecisionPolicy(np.float16, np.dtype("float32")) == MixedPrecisionPolicy("float16", "float32")
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert MixedPrecisionPolicy(bfloat16) == MixedPrecisionPolicy("bfloat16")


def bare(dtype):
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter((2,), nn.init.Ones(), dtype=dtype)
    fully_shard(model)


def ml_dtype():
    return pytest.importorskip("ml_dtypes").bfloat16


DO = r", but the optimizer updates float32.*param_dtype="
test_types_that_are_refused = lab.refusals(
    (lambda: MixedPrecisionPolicy("half"), ValueError, "param_dtype: unknown dtype 'half'"),
    (lambda: MixedPrecisionPolicy(reduce_dtype="float64"), ValueError, "float64 is not a type of mixed prec"),
    (lambda: MixedPrecisionPolicy(output_dtype=np.int32), ValueError, "output_dtype: unknown dtype 'int32'"),
    (lambda: bare(np.float16), ValueError, f"'scale' is float16{DO}'float16'"),
    (lambda: bare(ml_dtype()), ValueError, f"'scale' is bfloat16{DO}'bfloat16'"),
    (
        lambda: nn.Parameter((2,), nn.init.Zeros(), dtype=np.int64),
        TypeError,
        "requires_grad=True needs a float dtype, got int64",
    ),
)
