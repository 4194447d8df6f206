"""docs/reference.md is what the docstrings say, and every public name has one."""

import importlib.util
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def maker():
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_docstrings_say():
    told = "run: python docs/make_reference.py"
    assert (DOCS / "reference.md").read_text() == maker().page(), told


def test_every_public_name_says_what_it_is():
    silent = re.findall(r"^\| `(.*)` \|  \|$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert not silent
