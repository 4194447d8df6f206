"""Every kernel against its CPU twin in float64, on odd sizes, with poison in and around what it writes: the
tests of tests/cuda, launched on the GPU.
"""

import importlib
from pathlib import Path

import pytest

from shardrt.kernels import cuda as kernels

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1] / "cuda"
OPS = [path.stem for path in sorted(Path(kernels.__file__).parent.glob("[a-z]*.py"))]
FILES = [*OPS, "norms", "vision"]  # of tests; "vision" has convolution, batch norm and pooling


def _class_of(op):
    """The tests of one file as methods of a class, so that files may have tests of one name."""
    module = importlib.import_module(f"tests.cuda.test_{op}")
    tests = {name: staticmethod(test) for name, test in vars(module).items() if name.startswith("test_")}
    return type(f"Test_{op}", (), tests)


for _op in FILES:
    if (TESTS / f"test_{_op}.py").exists():  # products have their own, in test_products.py
        globals()[f"Test_{_op}"] = _class_of(_op)
