"""Every kernel against tests/contracts, on odd sizes, with poison in and around what it writes, and what else
tests/cuda says of single kernels: launched on the GPU.
"""

import importlib
from pathlib import Path

import pytest

from shardrt.kernels import cuda as kernels

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1] / "cuda"
OPS = [path.stem for path in sorted(Path(kernels.__file__).parent.glob("[a-z]*.py"))]
FILES = ["contracts", *OPS, "norms", "optimizers"]  # of tests


def _class_of(op):
    """The tests of one file as methods of a class, so that files may have tests of one name."""
    module = importlib.import_module(f"tests.cuda.test_{op}")
    tests = {name: staticmethod(test) for name, test in vars(module).items() if name.startswith("test_")}
    return type(f"Test_{op}", (), tests)


for _op in FILES:
    if (TESTS / f"test_{_op}.py").exists():  # products have their own, in test_products.py
        globals()[f"Test_{_op}"] = _class_of(_op)
