"""docs/reference.md is what the docstrings say, and every public name has one."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def maker():
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_docstrings_say():
    """In a process of its own: here the models may have been imported under their other name."""
    code = (
        "import sys; sys.path.insert(0, 'docs'); import make_reference; print(make_reference.page(), end='')"
    )
    made = subprocess.run([sys.executable, "-c", code], cwd=DOCS.parent, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert (DOCS / "reference.md").read_text() == made.stdout, "run: python docs/make_reference.py"


def test_every_public_name_says_what_it_is():
    silent = re.findall(r"^\| `(.*)` \|  \|$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert not silent
