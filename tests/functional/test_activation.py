"""functional/activation.py: far from zero, at zero, errors. The rest is in test_beside_pytorch.py."""

import numpy as np
import pytest

from shardrt import functional as F
from tests.gradcheck import leaf, normal


def test_relu_has_gradient_zero_at_zero():
    x = leaf([0.0, -0.0])
    F.relu(x).sum().backward()
    assert x.grad.tolist() == [0, 0]


def test_swiglu_far_from_zero_and_of_an_odd_width():
    x = np.array([[-1e4, 1e4, 2.0, 3.0]], np.float32)
    np.testing.assert_allclose(F.swiglu(x).data, [[0, 3e4]], atol=1e-30)
    with pytest.raises(ValueError, match=r"swiglu: x must be \(..., 2 \* width\), got \(2, 3\)"):
        F.swiglu(normal(2, 3))


def test_another_approximation_is_an_error():
    with pytest.raises(ValueError, match="'none' or 'tanh', got 'erf'"):
        F.gelu(leaf([1.0]), approximate="erf")


def test_integers_are_an_error():
    for op in (F.gelu, F.silu, F.relu):
        with pytest.raises(TypeError, match="got x int64"):
            op(np.arange(3))
