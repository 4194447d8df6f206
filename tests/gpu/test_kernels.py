"""Every kernel against its CPU twin in float64, on odd sizes, with poison in and around what it writes: the
tests of tests/cuda, launched on the GPU.
"""

import importlib

import pytest

pytestmark = pytest.mark.gpu

OPS = (
    "activation",
    "adamw",
    "attention",
    "cast",
    "cross_entropy",
    "dropout",
    "elementwise",
    "embedding",
    "layer_norm",
    "philox",
    "reduce",
    "rms_norm",
    "rotary",
    "sgd",
    "softmax",
    "swiglu",
)


def _class_of(op):
    """The tests of one file as methods of a class, so that files may have tests of one name."""
    module = importlib.import_module(f"tests.cuda.test_{op}")
    tests = {name: staticmethod(test) for name, test in vars(module).items() if name.startswith("test_")}
    return type(f"Test_{op}", (), tests)


for _op in OPS:
    globals()[f"Test_{_op}"] = _class_of(_op)
