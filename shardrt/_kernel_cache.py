"""Where Numba keeps compiled kernels. Numba runs these files: a folder that others can write is not used.

Numba reads the variable when it is loaded, so `shardrt/__init__.py` imports this file before that.
"""

import os
import sys
from pathlib import Path

from shardrt.untrusted import printable, private

__all__ = ["wanted"]

_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def wanted(sources: Path) -> tuple[Path, str]:
    """(the folder that Numba would take, "" or why it is not safe).

    It is the one in NUMBA_CACHE_DIR, or else next to the sources, whose owner can change the sources too.
    """
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen), private(Path(chosen))
    folder = sources / "__pycache__"
    return folder, private(folder, sources.stat().st_uid) if os.access(sources, os.W_OK) else ""


def choose(sources: Path) -> None:
    """Have Numba take another folder where the one that it would take is not safe, with a warning."""
    folder, wrong = wanted(sources)
    if not wrong:
        return
    import atexit
    import shutil
    import tempfile
    import warnings

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    other = home / "shardrt" / "numba"
    try:
        other.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = not private(other) and os.access(other, os.W_OK)
    except OSError:
        usable = False
    if not usable:  # kernels are compiled again in every run
        other = Path(tempfile.mkdtemp(prefix="shardrt-numba-"))
        atexit.register(shutil.rmtree, other, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = str(other)
    if "numba" in sys.modules:  # it has read the variable
        sys.modules["numba"].config.CACHE_DIR = str(other)
    if all(os.environ.get(name, "0") == "0" for name in _RANK):
        message = f"compiled kernels are kept in {other}, not in {folder}: {wrong}, who could put code there"
        warnings.warn(printable(message), stacklevel=2)


choose(Path(__file__).parent / "kernels" / "cpu")
