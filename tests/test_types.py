"""Types: the public names have them all, and programs that use them pass a strict type checker."""

import inspect
import re
from pathlib import Path

import pytest

from tests.ranks import python
from tests.test_reference import PACKAGES, imported, public

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Examples leave out the types of their own functions, as people do; everything else is strict.
HOW = [
    "--strict",
    "--allow-untyped-defs",
    "--allow-incomplete-defs",
    "--allow-untyped-calls",
    "--follow-imports=silent",
]


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


@pytest.mark.slow
def test_programs_that_use_the_library_pass_a_strict_type_checker(tmp_path):
    pytest.importorskip("mypy")
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        if blocks:
            (tmp_path / f"page_{page.stem}.py").write_text("\n".join(blocks))
    for example in (ROOT / "docs" / "examples").glob("*.py"):
        (tmp_path / example.name).write_text(example.read_text())
    done = python("-m", "mypy", *HOW, "--cache-dir", tmp_path / "cache", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
