"""Products by group: what each group's own layer gives, and zeros behind the last."""

import numpy as np
import pytest

from shardrt.kernels.cpu import grouped as cpu
from shardrt.kernels.cuda import grouped as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, guarded, normal

COUNTS = {"some": (3, 0, 1, 6), "one": (0, 0, 10, 0), "none": (0, 0, 0, 0), "all but the last": (4, 4, 4, 0)}


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products(emulated, element, counts):
    rows = 12
    with guarded(element) as array:
        x, dy, weight = array(normal(rows, 5)), array(normal(rows, 7)), array(normal(4, 7, 5))
        wide = [a.astype(np.float64) for a in (x, dy, weight)]
        y, dx = array(np.full((rows, 7), np.nan)), array(np.full((rows, 5), np.nan))
        expected, slopes = np.zeros((rows, 7)), np.zeros((rows, 5))
        cuda.forward(x, weight, counts, y)
        cpu.forward(wide[0], wide[2], counts, expected)
        assert_close(y, expected)
        cuda.backward_input(dy, weight, counts, dx)
        cpu.backward_input(wide[1], wide[2], counts, slopes)
        assert_close(dx, slopes)
        for accumulate in (False, True):
            dweight = array(normal(4, 7, 5, seed=1) if accumulate else np.full((4, 7, 5), np.nan))
            total = dweight.astype(np.float64)
            cuda.backward_weight(x, dy, counts, dweight, accumulate)
            cpu.backward_weight(wide[0], wide[1], counts, total, accumulate)
            assert_close(dweight, total)
