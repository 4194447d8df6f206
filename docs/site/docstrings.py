"""Lets mkdocstrings read the section `Example:` of docstrings, which it knows as `Examples:` alone."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section of each docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
