"""Data of the continued runs, as dcp_run.py has them."""

import numpy as np


def tokens(step):
    """Two rows of 17 tokens, without a random generator."""
    row, column = np.indices((2, 17))
    return (11 * step + 7 * row + 3 * column * column + column * step) % 64
