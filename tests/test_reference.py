"""Every public name has a docstring, and types for what goes in and out; `make docs` makes pages of them."""

import importlib
import inspect

import pytest

PACKAGES = [
    "shardrt",
    "shardrt.functional",
    "shardrt.functional.collective",
    "shardrt.functional.vocabulary",
    "shardrt.nn",
    "shardrt.nn.init",
    "shardrt.nn.utils",
    "shardrt.optim",
    "shardrt.fsdp",
    "shardrt.parallel",
    "shardrt.comm",
    "shardrt.checkpoint",
    "shardrt.recompute",
    "shardrt.activation_offload",
    "shardrt.models.gpt",
    "shardrt.models.llama",
    "shardrt.models.vit",
    "shardrt.models.regnet",
    "shardrt.models.plans",
    "shardrt.models.hub",
    "shardrt.models.sampling",
]


def imported(package):
    """The models have one name in a process, and all other tests import them as `models`."""
    return importlib.import_module(package.replace("shardrt.models", "models"))


def public(module):
    """The names in __all__, or what the module itself defines; packages left out."""
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
    return [name for name in names if not inspect.ismodule(getattr(module, name))]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_docstring(package):
    module = imported(package)
    values = {name: getattr(module, name) for name in public(module)}
    assert values
    assert not [name for name, value in values.items() if callable(value) and not inspect.getdoc(value)]


def _callables():
    """(name, function) for every public function and method."""
    for package in PACKAGES:
        module = imported(package)
        for name in public(module):
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{package}.{name}", value
            elif inspect.isclass(value):
                for method, function in inspect.getmembers(value, inspect.isfunction):
                    if function.__module__.startswith(("shardrt", "models")) and (
                        method == "__init__" or method[0] != "_"
                    ):
                        yield f"{package}.{name}.{method}", function


def test_every_public_function_has_types_for_all_that_goes_in_and_out():
    untyped = set()
    for name, function in _callables():
        parameters = inspect.signature(inspect.unwrap(function)).parameters
        needed = {p for p in parameters if p != "self"} | {"return"}
        if missing := needed - inspect.unwrap(function).__annotations__.keys():
            untyped.add(f"{name}: {', '.join(sorted(missing))}")
    assert not untyped
