"""What tests of the CPU's kernels share."""

import pytest

from shardrt.kernels import cpu as K


@pytest.fixture(params=[1, 2])
def kernel_threads(request):
    before = K.threads()
    K.set_threads(request.param)
    yield request.param
    K.set_threads(before)
