"""functional/activation.py: errors. The rest is in tests/contracts and test_beside_pytorch.py."""

import numpy as np

from shardrt import functional as F
from tests import lab
from tests.gradcheck import leaf, normal

INTEGERS = np.arange(3)
test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: F.swiglu(normal(2, 3)), r"swiglu: x must be \(..., 2 \* width\), got \(2, 3\)"),
    (lambda: F.gelu(leaf([1.0]), approximate="erf"), "'none' or 'tanh', got 'erf'"),
    (lambda: F.gelu(INTEGERS), TypeError, "gelu: .*got x int64"),
    (lambda: F.silu(INTEGERS), TypeError, "silu: .*got x int64"),
    (lambda: F.relu(INTEGERS), TypeError, "relu: .*got x int64"),
)
