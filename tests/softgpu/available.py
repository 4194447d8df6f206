"""Whether the GPU emulator can be had here. Imports nothing of it."""

import importlib.util
import shutil


def missing() -> str:
    """What it needs and is not here; "" if nothing."""
    if importlib.util.find_spec("cupy_backends") is None:
        return "no CuPy"
    return next((f"no {name}" for name in ("cc", "g++") if shutil.which(name) is None), "")
