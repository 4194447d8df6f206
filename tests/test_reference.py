"""Every public name has a docstring; `make docs` makes pages of them."""

import importlib
import inspect

import pytest

NAMES = "functional functional.collective functional.vocabulary nn nn.init nn.utils optim fsdp parallel comm"
NAMES += " checkpoint recompute activation_offload"
NAMES += " models.gpt models.llama models.vit models.regnet models.plans models.hub models.generate"
PACKAGES = ["shardrt", *(f"shardrt.{name}" for name in NAMES.split())]


def imported(package):
    """The models have one name in a process, and all other tests import them as `models`."""
    return importlib.import_module(package.replace("shardrt.models", "models"))


def public(module):
    """What it exports, or else its own names without an underscore."""
    own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_docstring(package):
    module = imported(package)
    names = public(module)
    assert names
    documented = [n for n in names if callable(getattr(module, n))]
    assert not [name for name in documented if not inspect.getdoc(getattr(module, name))]
