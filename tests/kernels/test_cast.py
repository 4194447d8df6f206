"""kernels/cpu/cast.py: bfloat16 against PyTorch and float16 against NumPy, to the bit, nan by being nan."""

import numpy as np
import pytest

from shardrt.kernels import cpu as K

KINDS = ["bfloat16", "float16"]
EVERY = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture(params=[1, 2])
def kernel_threads(request):
    before = K.threads()
    K.set_threads(request.param)
    yield request.param
    K.set_threads(before)


def numbers_of(bits, kind):
    """The reference: the float32 numbers with these bits."""
    if kind == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bits_of(x, kind):
    """The reference: float32 rounded by NumPy or PyTorch."""
    if kind == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    torch = pytest.importorskip("torch")
    return torch.from_numpy(x.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def hard(kind):
    """Every number of the type, the middles between neighbours, one float32 step around all, and chance."""
    values = numbers_of(EVERY, kind)
    with np.errstate(invalid="ignore"):
        middles = (values[:-1].astype(np.float64) + values[1:]) / 2
        exact = np.concatenate([values, middles.astype(np.float32)])
        down, up = np.nextafter(exact, np.float32(-np.inf)), np.nextafter(exact, np.float32(np.inf))
    chance = np.random.default_rng(0).integers(0, 1 << 32, 50_001, np.uint32).view(np.float32)
    ends = np.array([65504, 65519.996, 65520, 65536, 1e38, 3.4e38, 3e-8, 2.9802322e-8, 1e-45], np.float32)
    return np.concatenate([exact, down, up, chance, ends, -ends])


def assert_same(found, expected, nan):
    """Equal bits, except that any bits of a nan will do."""
    assert np.array_equal(found[~nan], expected[~nan])


@pytest.mark.parametrize("kind", KINDS)
def test_unpack_is_exact_for_all_bits(kind, kernel_threads):
    found = np.full(EVERY.size, 7, np.float32)
    K.cast.unpack(EVERY, found, kind)
    expected = numbers_of(EVERY, kind)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert_same(found.view(np.uint32), expected.view(np.uint32), np.isnan(expected))


@pytest.mark.parametrize("kind", KINDS)
def test_pack_rounds_to_nearest_even(kind, kernel_threads):
    x = hard(kind)
    found = np.full(x.size, 7, np.uint16)
    K.cast.pack(x, found, kind)
    assert np.array_equal(np.isnan(numbers_of(found, kind)), np.isnan(x))
    assert_same(found, bits_of(x, kind), np.isnan(x))


@pytest.mark.parametrize("kind", KINDS)
def test_round_to_is_pack_and_unpack(kind, kernel_threads):
    x = hard(kind)
    bits, expected, found = np.empty(x.size, np.uint16), np.empty_like(x), np.full_like(x, 7)
    K.cast.pack(x, bits, kind)
    K.cast.unpack(bits, expected, kind)
    K.cast.round_to(x, found, kind)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    K.cast.round_to(x, x, kind)
    assert np.array_equal(x.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_infinity_sign_and_overflow(kind):
    x = np.array([np.inf, -np.inf, -0.0, 3.4028235e38, -3.4028235e38], np.float32)
    K.cast.round_to(x, x, kind)
    assert x.tolist() == [np.inf, -np.inf, 0, np.inf, -np.inf]
    assert np.signbit(x[2])


def test_what_is_cast_may_be_cut_anywhere():
    x = hard("float16")[:10_007]
    for kind in KINDS:
        whole, cut = np.empty(x.size, np.uint16), np.empty(x.size, np.uint16)
        K.cast.pack(x, whole, kind)
        for start, stop in ((0, 3), (3, 3), (3, 5000), (5000, x.size)):
            K.cast.pack(x[start:stop], cut[start:stop], kind)
        assert np.array_equal(whole, cut)


def test_a_kind_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match="'bfloat16' or 'float16', got 'float8'"):
        K.cast.round_to(np.ones(2, np.float32), np.ones(2, np.float32), "float8")
