"""Shared libraries that tests compile: once, and kept in a folder that only this user can write to."""

import atexit
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from shardrt.untrusted import private

HERE = Path(__file__).parent
GXX = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off"]
# For kernels: what they call comes from the libraries of shim.cpp. g++ is done in four fifths of the time.
ALONE = ("-nodefaultlibs", "-nostartfiles")


class DoesNotCompile(AssertionError):
    """What the compiler has against a source."""


def built(folder, name, code, suffix, command, headers="", libraries=(), ending=".so"):
    """The library of `code`, a file of this suffix, in `folder`. headers: text that it depends on besides."""
    key = hashlib.sha256(repr((code, headers, command, libraries)).encode()).hexdigest()[:20]
    target = folder / f"{name}-{key}{ending}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, library = Path(scratch, "source" + suffix), Path(scratch, "library.so")
            source.write_text(code)
            whole = [*command, str(source), "-o", str(library), *libraries]
            done = subprocess.run(whole, capture_output=True, text=True)
            if done.returncode:
                raise DoesNotCompile(f"{name} under {command[0]}:\n{done.stderr[:4000]}")
            os.replace(library, target)  # whole, or not at all: another process may be at it too
    return target


def stand_in(folder, name):
    """The library of fake_NAME.c."""
    source, header = HERE / f"fake_{name}.c", HERE / "fake_numbers.h"
    command = ["cc", "-O3", "-w", "-shared", "-fPIC", f"-I{HERE}"]
    return built(folder, source.stem, source.read_text(), ".c", command, header.read_text(), ["-lm"])


@cache
def head(folder, code, command, headers):
    """Options that put `code`, which includes `headers`, before a source.

    It is compiled once for all sources, for to read it takes g++ longer than most of them do. Where g++ can't
    use that (it compares the options), it reads `code`.
    """
    command = [option for option in command if not option.startswith("-D")]
    compiled = built(folder, "head", code, ".h", [*command, "-x", "c++-header"], headers, ending=".h.gch")
    text = compiled.with_suffix("")
    if not text.exists():
        text.write_text(code)
    return ("-include", str(text))


@cache
def library_folder(path):
    """`path`, made if need be, if only this user can write there, or else a new one: it holds libraries."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # a checkout that can only be read, or something else of that name
        pass
    if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid() and not private(path):
        return path
    other = Path(tempfile.mkdtemp(prefix="shardrt-shim-"))  # nobody can know its name
    atexit.register(shutil.rmtree, other, ignore_errors=True)
    return other
