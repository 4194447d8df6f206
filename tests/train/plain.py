"""`python -m tests.train.plain`: models.train without what takes longer than the runs of tests do.

(tests/train/test_command.py starts runs that have it.)
"""

import sys
from collections.abc import Callable

from models import train
from shardrt.train import job, metrics


def leave_out(replace: Callable = setattr) -> None:
    """The speed of products, measured by every rank at its start, and the picture at the end."""
    replace(job, "product_flops", lambda: 1e10)
    replace(metrics, "plot_losses", lambda records, path: None)


if __name__ == "__main__":
    leave_out()
    train.main(sys.argv[1:])
