"""Every public name has a docstring; `make docs` makes pages of them."""

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
