"""AdamW8bit and Lion8bit: the update, what they keep, and the same bits wherever shards are cut."""

from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest

from shardrt import device, optim
from shardrt.checkpoint import CheckpointManager, get_optimizer_state_dict, set_optimizer_state_dict
from shardrt.checkpoint.encoded import EncodedPiece
from shardrt.comm import init_device_mesh
from shardrt.fsdp import layout, memory_plan
from shardrt.kernels.cpu import _blockwise, adamw, adamw8bit, blockwise, lion, lion8bit
from shardrt.nn.extents import contiguous
from shardrt.optim.low_bit import AdamW8bit, Lion8bit
from shardrt.optim.low_bit.scales import BLOCK, BYTES
from tests import lab

ADAMW = partial(AdamW8bit, lr=1e-2, weight_decay=0.1)
LION = partial(Lion8bit, lr=1e-3, weight_decay=0.1)


def spread(count, signed, seed=0):
    """Numbers over seven decades."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(count) * 10 ** random.uniform(-5, 2, count)
    return np.float32(values if signed else values**2)


def encoded(values, signed):
    codes, scales = np.empty(values.size, np.uint8), np.empty(-(-values.size // BLOCK), np.uint16)
    blockwise.quantize(values, codes, scales, signed)
    return codes, scales


def decoded(codes, scales, signed):
    values = np.empty(codes.size, np.float32)
    blockwise.dequantize(codes, scales, values, signed)
    return values


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_bitsandbytes(signed):
    """The file has create_dynamic_map(False) and (True) of bitsandbytes 0.50.2, by np.save(np.stack(...))."""
    expected = np.load(Path(__file__).parent / "dynamic_maps.npy")[int(signed)]
    np.testing.assert_array_equal(_blockwise.dynamic_map(signed), expected)


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_becomes_the_nearest_of_the_map(signed):
    values = spread(10007, signed)
    codes, scales = encoded(values, signed)
    numbers = _blockwise.dynamic_map(signed).astype(np.float64)
    scale = np.repeat((scales.astype(np.uint32) << 16).view(np.float32), BLOCK)[: values.size]
    off = np.abs(numbers[codes] * scale - values)
    best = np.abs(numbers[None] * scale[:, None] - values[:, None]).min(1)
    at_end = np.maximum.reduceat(np.abs(values), np.arange(0, values.size, BLOCK)).repeat(BLOCK)
    inside = (np.abs(values) < at_end[: values.size]) & (codes > 1)  # an end, and never 0, come first
    assert inside.mean() > 0.4
    np.testing.assert_allclose(off[inside], best[inside], rtol=1e-5)
    assert (off / scale).max() < 0.008  # half of the widest step, or of one of bfloat16


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_right_at_every_boundary(signed):
    """Numbers around each middle, and the smallest there are; the first of a block makes its scale 1."""
    numbers = _blockwise.dynamic_map(signed)
    middles = (numbers[:-1] + numbers[1:]) / np.float32(2)
    near = (middles.view(np.int32) + np.arange(-2, 3)[:, None]).astype(np.int32).view(np.float32)
    values = np.concatenate([near.ravel(), numbers, np.float32([0, 1e-45, 1e-39, 1.2e-38, 1e-7])])
    values = np.concatenate([values, -values] if signed else [values])
    values = np.resize(values[values > numbers[0]], (values.size // 15 + 1, 15))
    blocks = np.column_stack([np.ones(len(values), np.float32), values])
    codes, scales = encoded(blocks.ravel(), signed)
    expected = np.searchsorted(middles, blocks)  # of two as near, the lower one
    if not signed:
        expected[blocks > 0] = np.maximum(expected[blocks > 0], 1)
    np.testing.assert_array_equal(scales, 0x3F80)
    np.testing.assert_array_equal(codes.reshape(blocks.shape), expected)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_right_where_scales_are_rounded_or_very_small(signed):
    """Against a division and a search; scales below 2**-126 have less than 8 bits, below 2**-134 none."""
    numbers, (random, count) = _blockwise.dynamic_map(signed), (np.random.default_rng(3), 4096)
    middles = (numbers[:-1] + numbers[1:]) / np.float32(2)
    for size in (1.0, 1e30, 1e-30, 1e-37, 1e-39, 1e-42):
        x = (random.standard_normal(count) * 10 ** random.uniform(-6, 0, count) * size).astype(np.float32)
        x = (x if signed else np.abs(x)).reshape(-1, BLOCK)
        codes, scales = encoded(x.ravel(), signed)
        scale = (scales.astype(np.uint32) << 16).view(np.float32)[:, None]
        sizes = np.where(x < 0, x / (numbers[0] if signed else np.float32(1)), x)
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = np.where(scale > 0, np.searchsorted(middles, x / scale), 0)
        ends = (sizes == sizes.max(1, keepdims=True)) & (sizes > 0)
        expected = np.where(ends, np.where(x > 0, 255, 0), expected)
        expected = expected if signed else np.where(x > 0, np.maximum(expected, 1), expected)
        np.testing.assert_array_equal(codes.reshape(x.shape), expected)


@pytest.mark.parametrize("signed", [True, False])
def test_decoded_numbers_are_encoded_as_they_were(signed):
    codes, scales = encoded(spread(10007, signed), signed)
    lab.assert_equal(encoded(decoded(codes, scales, signed), signed), (codes, scales))


def test_zeros_stay_zero_and_what_is_not_finite_shows():
    assert not decoded(np.zeros(32, np.uint8), np.zeros(2, np.uint16), True).any()
    assert not decoded(*encoded(np.zeros(32, np.float32), True), True).any()
    values = np.ones(48, np.float32)
    values[3], values[17] = np.nan, np.inf
    assert np.isnan(decoded(*encoded(values, True), True)).tolist() == [True] * 32 + [False] * 16


def test_a_second_moment_is_never_rounded_to_zero():
    values = np.full(16, 1e-12, np.float32)
    values[0] = 1
    assert (decoded(*encoded(values, False), False) > 0).all()


RANGES = [(0, 500), (512, 1001)]
SETTINGS = {
    AdamW8bit: (adamw.step, adamw8bit.step, (0.999, 1e-2, 2.0, 0.9, 0.999, 1e-8), [True, False]),
    Lion8bit: (lion.step, lion8bit.step, (0.999, 1e-3, 0.9, 0.99), [True]),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_step_is_that_of_float32_on_decoded_moments(kind):
    exact, low, settings, signs = SETTINGS[kind]
    ranges = np.array([(*place, *settings) for place in RANGES])
    param, grad = spread(1001, True), spread(1001, True, 1)
    moments = [encoded(spread(1001, sign, 2), sign) for sign in signs]
    whole = [decoded(*pair, sign) for pair, sign in zip(moments, signs, strict=True)]
    found, expected = param.copy(), param.copy()
    low(found, grad, *(array for pair in moments for array in pair), ranges)
    exact(expected, grad, *whole, ranges)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for pair, values, sign in zip(moments, whole, signs, strict=True):
        for start, stop in RANGES:
            codes, scales = encoded(values[start:stop], sign)
            # the compiler may fuse other multiply-adds, so a last bit may end in another code
            assert np.mean(pair[0][start:stop] != codes) < 0.01
            assert np.mean(pair[1][start // BLOCK : -(-stop // BLOCK)] != scales) < 0.05


def test_ranges_inside_blocks_are_refused():
    types = (32, np.float32), (32, np.float32), (32, np.uint8), (2, np.uint16)
    with pytest.raises(ValueError, match="must begin at a multiple of 16, got 8"):
        lion8bit.step(*(np.zeros(*each) for each in types), np.array([[8, 32, 1.0, 1e-3, 0.9, 0.99]]))


def test_layouts_cut_no_block():
    assert layout.ALIGNMENT % BLOCK == 0


def weights_after(ranks, optimizer, **settings):
    return lab.train_on(ranks, steps=4, optimizer=optimizer, **settings)


@pytest.mark.parametrize("optimizer", [ADAMW, LION], ids=["AdamW8bit", "Lion8bit"])
@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP"])
def test_how_shards_are_cut_changes_no_bit(optimizer, strategy):
    found, expected = weights_after(2, optimizer, strategy=strategy), weights_after(2, optimizer)
    lab.assert_equal((found.losses, found.weights), (expected.losses, expected.weights))


def with_given_gradients(optimizer, folder=None, **settings):
    """Moments and weights after steps with gradients that depend on no rank."""
    model, mesh = lab.build(**settings)
    own = optimizer(model.parameters())
    for number in range(3):
        lab.backward(model, None, lab.batches(4)[number])
        lab.give_gradients(model)
        lab.update(own)
    return moments(model, own)


def moments(model, optimizer):
    device.current().wait_here()
    state = get_optimizer_state_dict(model, optimizer).get("state", {})  # which rank 0 has
    return {(name, kind): values for name, entry in state.items() for kind, values in entry.items()}


@pytest.mark.parametrize("optimizer", [ADAMW, LION], ids=["AdamW8bit", "Lion8bit"])
def test_equal_gradients_give_equal_bits_on_any_number_of_ranks(optimizer):
    found = [lab.first(ranks, with_given_gradients, optimizer) for ranks in (1, 2, 4)]
    assert any(kind == "exp_avg" and values.dtype == np.float32 for (_, kind), values in found[0].items())
    lab.assert_equal(found[1:], found[:1] * 2)


def test_the_memory_plan_knows_to_the_byte():
    model, _ = lab.build()
    plan = memory_plan(model, optimizer_states=2 * BYTES / 4)
    optimizer = ADAMW(model.parameters())
    states = sum(array.nbytes for piece in optimizer.slices for array in piece.state.values())
    assert plan.device["optimizer state"] == states


def through_files(folder):
    """The moments that were saved, and what came of them by each way."""
    model, optimizer = made(ADAMW)
    for number in range(2):
        lab.backward(model, None, lab.batches(4)[number])
        lab.update(optimizer)
    at_step(folder / "low", model, optimizer).save(1)
    saved = get_optimizer_state_dict(model, optimizer)
    found = [moments(model, optimizer)]
    at_step(folder / "low", *(other := made(ADAMW, strategy="SHARD_OPT"))).restore()
    found.append(moments(*other))
    at_step(folder / "low", *(exact := made(lab.adamw))).restore()  # where they are float32, and back
    at_step(folder / "exact", *exact).save(1)
    at_step(folder / "exact", *(again := made(ADAMW))).restore()
    found.append(moments(*again))
    model, optimizer = made(ADAMW)
    set_optimizer_state_dict(model, optimizer, saved, broadcast_from_rank0=True)
    return [*found, moments(model, optimizer)]


def test_a_block_that_is_read_in_parts_is_encoded_as_a_whole():
    """As another cut of a matrix gives it: runs that end inside blocks, in any order."""
    values, found = spread(150, True), []
    for runs in ([(0, 150)], [(90, 150), (0, 7), (7, 41), (41, 90)]):
        codes, scales = np.zeros(176, np.uint8), np.zeros(11, np.uint16)
        piece = EncodedPiece("m", "weight", contiguous(0, 150), codes, 16, 166, True, scales)
        for start, stop in runs:
            piece.write(start, values[start:stop])
        found.append((codes, scales))
        np.testing.assert_array_equal(piece.read(13, 99), decoded(codes, scales, True)[29:115])
    lab.assert_equal(*found)


def made(optimizer, **settings):
    model, _ = lab.build(**settings)
    return model, optimizer(model.parameters())


def at_step(folder, model, optimizer):
    return CheckpointManager(folder, model, optimizer, init_device_mesh("auto"))


def restored(folder):
    model, optimizer = made(ADAMW)
    at_step(folder, model, optimizer).restore()
    return moments(model, optimizer)


def test_checkpoints_and_state_dicts_keep_every_bit_on_any_number_of_ranks(tmp_path):
    saved, *others = lab.first(2, through_files, tmp_path)
    lab.assert_equal(others, [saved] * 3)
    for ranks in (1, 4):
        lab.assert_equal(lab.first(ranks, restored, tmp_path / "low"), saved)


def test_update_during_backward_has_the_same_bits():
    early, late = (weights_after(2, partial(ADAMW, in_backward=flag)) for flag in (True, False))
    lab.assert_equal(early.weights, late.weights)


EXACT = {ADAMW: lab.adamw, LION: partial(optim.Lion, lr=1e-3, weight_decay=0.1)}


@cache
def losses(optimizer):
    return lab.train_on(1, steps=60, optimizer=optimizer).losses


@pytest.mark.parametrize("low", EXACT, ids=["AdamW8bit", "Lion8bit"])
def test_training_reaches_the_loss_of_float32(low):
    """Within 1 % after 60 steps."""
    exact = losses(EXACT[low])
    assert exact[-1] < 0.9 * exact[0]
    assert abs(losses(low)[-1] / exact[-1] - 1) < 0.01


test_exp_avg_dtype_is_refused = lab.refusals(
    (
        lambda: made(partial(AdamW8bit, exp_avg_dtype="bfloat16")),
        ValueError,
        "AdamW8bit: exp_avg_dtype is for optim.AdamW",
    )
)
