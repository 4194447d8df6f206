"""Cross entropy: losses and gradients against the CPU's in float64; ignored rows; in place; odd numbers."""

import numpy as np
import pytest

from shardrt.kernels.cpu import cross_entropy as cpu
from shardrt.kernels.cuda import cross_entropy as cuda
from shardrt.kernels.cuda._launch import STATIC_SHARED
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

SHAPES = [(1, 1), (3, 7), (5, 8), (6, 65), (3, 256), (2, 2051), (2, 4160)]
IGNORE = -100


def kept(element):
    """The type of losses and lse."""
    return dtype_of("float64" if element == "float64" else "float32")


def targets_of(shape):
    """Random ones; the last row is ignored if there are several."""
    targets = np.random.default_rng(shape).integers(0, shape[1], shape[0])
    if shape[0] > 1:
        targets[-1] = IGNORE
    return targets


def exact_forward(logits, targets):
    losses, lse = np.empty(len(targets)), np.empty(len(targets))
    cpu.forward(logits.astype(np.float64), targets, losses, lse, IGNORE)
    return losses, lse


def exact_backward(logits, targets, lse, scale):
    dlogits = np.empty(logits.shape)
    cpu.backward(logits.astype(np.float64), targets, lse.astype(np.float64), dlogits, np.array(scale), IGNORE)
    return dlogits


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_forward(emulated, element, shape, offset):
    with guarded(element) as array:
        logits, targets = array(3 * normal(*shape), offset), targets_of(shape)
        losses, lse = (array(np.full(shape[0], np.nan), dtype=kept(element)) for _ in range(2))
        cuda.forward(logits, targets, losses, lse, IGNORE)
        for found, expected in zip((losses, lse), exact_forward(logits, targets), strict=True):
            if shape[1] > 1:  # else the loss is 0
                assert_close(found, expected)
        assert shape[0] == 1 or losses[-1] == 0


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
def test_backward(emulated, element, shape, inplace, offset):
    with guarded(element) as array:
        logits, targets = array(3 * normal(*shape), offset), targets_of(shape)
        lse = array(exact_forward(logits, targets)[1], dtype=kept(element))
        expected = exact_backward(logits, targets, lse, 0.25)
        dlogits = logits if inplace else array(np.full(shape, np.nan), offset)
        cuda.backward(logits, targets, lse, dlogits, np.array([0.25]), IGNORE)
        if shape[1] > 1:  # else the gradient is 0 but for lse's rounding
            assert_close(dlogits, expected)
        assert shape[0] == 1 or (dlogits[-1] == 0).all()


def test_arrays_of_different_alignment(emulated):
    with guarded("bfloat16") as array:
        logits, targets = array(normal(3, 40)), np.array([0, 39, 7])
        lse = array(exact_forward(logits, targets)[1], dtype=np.float32)
        dlogits = array(np.full((3, 40), np.nan), 1)
        cuda.backward(logits, targets, lse, dlogits, None, IGNORE)
        assert_close(dlogits, exact_backward(logits, targets, lse, 1.0))


@pytest.mark.parametrize("width", [8, 37, 3001])
def test_large_numbers_and_minus_infinity(emulated, width):
    values = normal(4, width)
    values[0] += 1e4
    values[1] -= 1e4
    values[2, 1:] = -np.inf
    values[3, :-1] = -np.inf
    targets = np.array([1, 2, 0, width - 1])
    with guarded("float32") as array:
        logits = array(values)
        losses, lse = array(np.full(4, np.nan)), array(np.full(4, np.nan))
        cuda.forward(logits, targets, losses, lse, IGNORE)
        assert_close(lse, exact_forward(logits, targets)[1])
        np.testing.assert_array_equal(losses[2:], 0)
        cuda.backward(logits, targets, lse, logits, None, IGNORE)
        np.testing.assert_array_equal(logits[2:], 0)


@pytest.mark.parametrize("width", [8, 37, 3001])
def test_nan_makes_the_loss_of_its_row_nan_and_no_gradient_of_an_ignored_one(emulated, width):
    values = normal(3, width)
    values[:2, width // 2] = np.nan
    targets = np.array([1, IGNORE, 1])
    with guarded("float32") as array:
        logits, losses, lse = array(values), array(np.zeros(3)), array(np.zeros(3))
        cuda.forward(logits, targets, losses, lse, IGNORE)
        np.testing.assert_array_equal(np.isnan(losses), [True, False, False])
        cuda.backward(logits, targets, lse, logits, None, IGNORE)
        assert np.isnan(logits[0]).all() and (logits[1] == 0).all() and np.isfinite(logits[2]).all()


def test_each_reads_the_logits_in_one_launch(emulated):
    with guarded("float16") as array:
        logits, targets = array(normal(2, 64)), np.array([3, 5])
        losses, lse = (array(np.zeros(2), dtype=np.float32) for _ in range(2))
        cuda.forward(logits, targets, losses, lse, IGNORE)
        cuda.backward(logits, targets, lse, logits, None, IGNORE)
        assert emulated.launches == ["forward", "backward"]


@pytest.mark.parametrize("wrong", [-1, 40, 2**40])
def test_a_target_outside_of_the_vocabulary_makes_its_row_nan_and_reads_nothing(emulated, wrong):
    targets = np.array([3, wrong, IGNORE])
    with guarded("float32") as array:
        logits, losses, lse = array(normal(3, 40)), array(np.zeros(3)), array(np.zeros(3))
        cuda.forward(logits, targets, losses, lse, IGNORE)
        np.testing.assert_array_equal(np.isnan(losses), [False, True, False])
        cuda.backward(logits, targets, lse, logits, None, IGNORE)
        assert np.isfinite(logits[[0, 2]]).all() and np.isnan(logits[1]).all()


def padded(array, values, row):
    """Rows that begin `row` elements apart, with nan between them; and the whole."""
    whole = array(np.full((len(values), row), np.nan))
    whole[:, : values.shape[1]] = values
    return whole[:, : values.shape[1]], whole


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
@pytest.mark.parametrize("row", [64, 67])
def test_rows_may_be_padded(emulated, element, row):
    with guarded(element) as array:
        logits, whole = padded(array, 3 * normal(3, 50), row)
        targets = targets_of(logits.shape)
        losses, lse = (array(np.full(3, np.nan), dtype=kept(element)) for _ in range(2))
        cuda.forward(logits, targets, losses, lse, IGNORE)
        for found, expected in zip((losses, lse), exact_forward(logits, targets), strict=True):
            assert_close(found, expected)
        expected = exact_backward(logits, targets, lse, 0.25)
        elsewhere = array(np.full((3, 50), np.nan))
        for dlogits in (elsewhere, logits):
            cuda.backward(logits, targets, lse, dlogits, np.array(0.25), IGNORE)
            assert_close(dlogits, expected)
        assert np.isnan(whole[:, 50:].astype(np.float64)).all()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("room", [None, 0, 100, 1000], ids=["held", "read again", "in part", "in part, more"])
@pytest.mark.parametrize("padding", [0, 1, 64])
def test_in_place_forward_leaves_the_gradient_but_for_the_scale(
    emulated, monkeypatch, element, shape, room, padding
):
    if room is not None:
        monkeypatch.setattr(emulated, "shared", STATIC_SHARED + room)
    with guarded(element) as array:
        logits, whole = padded(array, 3 * normal(*shape), shape[1] + padding)
        targets = targets_of(shape)
        losses, lse = (array(np.full(shape[0], np.nan), dtype=kept(element)) for _ in range(2))
        expected = exact_forward(logits, targets)
        slope = exact_backward(logits, targets, expected[1], 1.0)
        cuda.forward_in_place(logits, targets, losses, lse, IGNORE)
        cuda.backward_in_place(logits, targets, lse, np.array(0.25), IGNORE)
        assert emulated.launches == ["in_place"]
        if shape[1] > 1:
            assert_close(losses, expected[0])
            assert_close(lse, expected[1])
            assert_close(logits, slope)
        assert shape[0] == 1 or (losses[-1] == 0 and (logits[-1] == 0).all())
        assert np.isnan(whole[:, shape[1] :].astype(np.float64)).all()


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
@pytest.mark.parametrize("room", [None, 0, 1000])
def test_in_place_reads_the_part_of_a_row_that_shared_memory_holds_once(emulated, monkeypatch, element, room):
    if room is not None:
        monkeypatch.setattr(emulated, "shared", STATIC_SHARED + room)
    with guarded(element) as array:
        logits = array(normal(3, 2051))
        targets = np.full(3, 2051)  # no word: each thread reads the logit of a word
        losses, lse = (array(np.zeros(3), dtype=np.float32) for _ in range(2))
        cuda.forward_in_place(logits, targets, losses, lse, IGNORE)
        held = (2 * logits.nbytes - emulated.bytes_read["logits"]) / 3
        if room == 1000:
            assert 1000 - 48 <= held <= 1000  # a row begins and ends anywhere in 16 bytes
        else:
            assert held == (0 if room == 0 else logits[0].nbytes)


def test_in_place_a_wrong_target_and_nan_are_as_otherwise(emulated):
    targets = np.array([3, 40, IGNORE, 1])
    with guarded("float32") as array:
        logits, losses, lse = array(normal(4, 40)), array(np.zeros(4)), array(np.zeros(4))
        logits[2:, 7] = np.nan
        cuda.forward_in_place(logits, targets, losses, lse, IGNORE)
        np.testing.assert_array_equal(np.isnan(losses), [False, True, False, True])
        assert np.isfinite(logits[0]).all() and (logits[2] == 0).all() and np.isnan(logits[[1, 3]]).all()


def test_as_many_threads_as_a_long_row_needs_and_no_more_shared_memory_than_there_is(emulated, monkeypatch):
    """On an H100 a vocabulary of 50257 is held, also in 32 bits, and most of one of 128256 in 16."""
    asked = []
    monkeypatch.setattr(emulated, "launch", lambda *call: asked.append((call[5][-2], call[4], call[6])))
    with guarded("bfloat16") as array:
        targets, losses, lse = np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros(1, np.float32)
        for vocab, dtype in ((2000, None), (50257, None), (50257, np.float32), (128256, None)):
            cuda.forward_in_place(array(np.zeros((1, vocab)), dtype=dtype), targets, losses, lse, IGNORE)
        monkeypatch.setattr(emulated, "shared", 99 << 10)  # of the smallest GPUs
        cuda.forward_in_place(array(np.zeros((1, 128256))), targets, losses, lse, IGNORE)
    assert asked == [
        (2000, 256, 4016),
        (50257, 1024, 100530),
        (50257, 1024, 201044),
        (115952, 1024, (227 << 10) - 512),
        (50416, 1024, (99 << 10) - 512),
    ]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("width", [1, 24, 33])
@pytest.mark.parametrize("factor", [np.array(0.3), np.array(1.0), np.array([0.5, 0.0, 3.0])], ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_scale_rows(emulated, element, width, factor, inplace):
    with guarded(element) as array:
        x = array(normal(3, width))
        out = x if inplace else array(np.full((3, width), np.nan))
        expected = x.astype(np.float64) * (factor[:, None] if factor.ndim else factor)
        cuda.scale_rows(x, factor, out)
        assert_close(out, expected)


def parts_of(vocab):
    """(first, behind the last) of three parts, of which no two are of one size."""
    edges = [0, vocab // 2 + 1, vocab - 1, vocab]
    return list(zip(edges[:-1], edges[1:], strict=True))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", [(3, 7), (6, 65), (2, 2051), (300, 8)])
@pytest.mark.parametrize("padding", [0, 1])
def test_parts_of_a_vocabulary_join_to_the_whole(emulated, element, shape, padding):
    """lse and the gradient of each part, whose targets are mostly elsewhere."""
    values, targets = (3 * normal(*shape)).astype(dtype_of(element)), targets_of(shape)
    with guarded(element) as array:
        pairs = array(np.full((3, 2, shape[0]), np.nan), dtype=kept(element))
        losses, lse = (array(np.full(shape[0], np.nan), dtype=kept(element)) for _ in range(2))
        logits = [padded(array, values[:, a:b], b - a + padding)[0] for a, b in parts_of(shape[1])]
        for part, (first, stop) in enumerate(parts_of(shape[1])):
            cuda.forward_part(logits[part], targets, pairs[part, 1], pairs[part, 0], IGNORE, first, shape[1])
            here = (targets >= first) & (targets < stop)
            chosen = values[np.arange(shape[0]), targets * (targets >= 0)].astype(kept(element))
            np.testing.assert_array_equal(pairs[part, 1][here], chosen[here])
            np.testing.assert_array_equal(pairs[part, 1][~here], 0)
        cuda.join(pairs, targets, losses, lse, IGNORE)
        for found, expected in zip((losses, lse), exact_forward(values, targets), strict=True):
            assert_close(found, expected, 2)
        slopes = exact_backward(values, targets, lse, 0.25)
        for part, (first, stop) in enumerate(parts_of(shape[1])):
            cuda.backward(logits[part], targets, lse, logits[part], np.array(0.25), IGNORE, first)
            assert_close(logits[part], slopes[:, first:stop], 2)
        assert losses[-1] == 0


@pytest.mark.parametrize("level", [0.0, 1e4, -1e4])
def test_a_part_without_a_finite_logit_adds_nothing_and_logits_may_be_large(emulated, level):
    with guarded("float32") as array:
        pairs, targets = array(np.full((2, 2, 2), np.nan)), np.array([1, 41])
        losses, lse, logits = array(np.zeros(2)), array(np.zeros(2)), array(normal(2, 40) + level)
        for part, given in enumerate((logits, array(np.full((2, 40), -np.inf)))):
            cuda.forward_part(given, targets, pairs[part, 1], pairs[part, 0], IGNORE, 40 * part, 80)
        cuda.join(pairs, targets, losses, lse, IGNORE)
        np.testing.assert_array_equal(pairs[1, 0], -np.inf)
        assert_close(lse, exact_forward(logits, np.array([1, 1]))[1])
        assert np.isfinite(losses[0]) and losses[1] == np.inf


@pytest.mark.parametrize("wrong", [-1, 80, 2**40])
def test_a_target_in_no_part_makes_its_row_nan_in_all_of_them(emulated, wrong):
    targets = np.array([3, wrong, IGNORE])
    with guarded("float32") as array:
        pairs, losses, lse = array(np.zeros((2, 2, 3))), array(np.zeros(3)), array(np.zeros(3))
        logits = [array(normal(3, 40, seed=part)) for part in range(2)]
        for part in range(2):
            cuda.forward_part(logits[part], targets, pairs[part, 1], pairs[part, 0], IGNORE, 40 * part, 80)
        cuda.join(pairs, targets, losses, lse, IGNORE)
        np.testing.assert_array_equal(np.isnan(losses), [False, True, False])
        for part in range(2):
            cuda.backward(logits[part], targets, lse, logits[part], None, IGNORE, 40 * part)
            assert np.isnan(logits[part][1]).all() and np.isfinite(logits[part][[0, 2]]).all()
            assert (logits[part][2] == 0).all()
