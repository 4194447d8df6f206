"""Public names have docstrings, and the examples in docstrings run."""

import doctest
import inspect
from importlib import import_module

import pytest

from shardrt import random

PUBLIC = (  # modules whose __all__ users read
    "shardrt",
    *(f"shardrt.{room}" for room in ("checkpoint", "comm", "device", "fsdp", "functional", "nn", "nn.utils")),
    *(f"shardrt.{room}" for room in ("optim", "parallel", "random", "recompute", "activation_offload")),
)
ENOUGH = 40  # examples


def public():
    """{full name: object} of the functions and classes that the modules export."""
    found = {}
    for name in PUBLIC:
        module = import_module(name)
        for each in module.__all__:
            thing = getattr(module, each)
            if inspect.isroutine(thing) or inspect.isclass(thing):
                found[f"{name}.{each}"] = thing
    rules = import_module("shardrt.nn.init")
    return found | {"shardrt.nn.init.Normal": rules.Normal, "shardrt.nn.init.Uniform": rules.Uniform}


def examples():
    """A doctest for each public function, class and method with an example."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {
        test.docstring: test
        for name, thing in public().items()
        for test in finder.find(thing, name, globs={})
        if test.examples
    }
    return list(found.values())


def test_every_public_name_has_a_docstring():
    assert not [name for name, thing in public().items() if not (inspect.getdoc(thing) or "").strip()]


@pytest.fixture
def seed_kept():
    seed = random.initial_seed()
    yield
    random.manual_seed(seed)


def test_the_examples_of_docstrings_run(seed_kept):
    tests = examples()
    runner = doctest.DocTestRunner(verbose=False)
    report = []
    for test in tests:
        runner.run(test, out=report.append)
    assert not runner.summarize(verbose=False).failed, "".join(report)
    assert len(tests) >= ENOUGH, [test.name for test in tests]
