"""Seeded mutants of a valid checkpoint, each converted in one process that must stay as it was.

    python -m tests.exchange.hostile VALID SCRATCH FIRST COUNT TO FROM

For each seed a copy of the folder VALID, which lies on the same file system, is changed in a few places and
converted. The process ends with 1 and
says which seed it was, if a conversion ends in anything but success or one line and code 65, or if it runs a
program, imports a module that a valid conversion does not, or opens a file for writing outside SCRATCH/out.
A reader more needs no code here; `mutate` may get a function for a format's own damage.
"""

import contextlib
import io
import json
import os
import random
import resource
import shutil
import sys
import traceback
from pathlib import Path

from tests.damage import damaged_bytes, damaged_json

MEMORY = 3 << 30  # bytes of address space
HUGE = (1 << 31, 1 << 40, 1 << 62, 1 << 63, 10**30, -1)
OUTSIDE = ("../outside", "/etc/passwd", "..", ".", "a/b", "", "\0", "rank-00000.safetensors/x", "/dev/zero")


def mutate(folder, seed, special=()):
    """Change a folder in one to three places, as the seed says.

    special: functions of (path of a file, random), of a format's own.
    """
    random_ = random.Random(seed)
    for _ in range(random_.randint(1, 3)):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        if not files:
            return
        path = random_.choice(files)
        if path.stat().st_nlink > 1:  # the valid folder has it too
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
        ways = [_bytes, _bytes, _cut, _grown, _replaced, _inside, _inside, _inside, *special, *special]
        random_.choice(ways)(path, random_)


def _bytes(path, random_):
    path.write_bytes(damaged_bytes(path.read_bytes(), random_))


def _cut(path, random_):
    data = path.read_bytes()
    path.write_bytes(data[: random_.randrange(len(data) + 1)])


def _grown(path, random_):
    os.truncate(path, path.stat().st_size + random_.choice((1, 4096, 1 << 22)))


def _replaced(path, random_):
    """By a link, a device, a pipe, a folder, or nothing."""
    path.unlink()
    way = random_.randrange(6)
    if way < 3:
        path.symlink_to(random_.choice(("/dev/zero", "/etc/passwd", path, path.parent, "/dev/null")))
    elif way == 3:
        os.mkfifo(path)
    elif way == 4:
        path.mkdir()


def _inside(path, random_):
    """Of JSON, or of the header of safetensors: values changed; numbers and names as an attacker has them."""
    data = path.read_bytes()
    begin, end = 0, len(data)
    if path.suffix == ".safetensors":
        begin, end = 8, 8 + int.from_bytes(data[:8], "little")
    try:
        value = json.loads(data[begin:end])
        text = damaged_json(value, random_) if random_.random() < 0.5 else _attack(value, random_)
    except (ValueError, RecursionError, IndexError):
        return _bytes(path, random_)
    length = len(text).to_bytes(8, "little") if begin else b""
    path.write_bytes(length + text + data[end:])


def _attack(value, random_):
    text = json.dumps(value)
    way = random_.randrange(5)
    if way == 0:
        return b"[" * 100_000 + text.encode() + b"]" * 100_000
    if way == 1:  # a key twice
        return text.replace("{", "{" + text[1 : text.index(":") + 1] + "0,", 1).encode()
    places = list(_leaves(value))
    holder, key = random_.choice(places)
    old = holder[key]
    holder[key] = random_.choice(HUGE) if isinstance(old, int) else random_.choice(OUTSIDE)
    return json.dumps(value).encode()


def _leaves(value):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        if isinstance(item, dict | list):
            yield from _leaves(item)
        else:
            yield value, key


def signed(path, random_):
    """Of shardrt's manifests: values changed, under a right checksum."""
    from shardrt.checkpoint.manifest import _checksum

    if path.name != "manifest.json":
        return
    try:
        body = json.loads(path.read_bytes())
        body.pop("self", None)
        body = json.loads(damaged_json(body, random_) if random_.random() < 0.5 else _attack(body, random_))
        path.write_text(json.dumps({**body, "self": _checksum(body)}))
    except (ValueError, RecursionError, IndexError, AttributeError, TypeError):
        return


GADGETS = (
    ("os.system", ("touch forged",)),
    ("posix.system", ("touch forged",)),
    ("builtins.eval", ("1",)),
    ("builtins.getattr", ("", "format")),
    ("subprocess.Popen", (("touch", "forged"),)),
    ("torch.serialization.load", ("/etc/passwd",)),
    ("torch.load", ("/etc/passwd",)),
)


def forged(path, random_):
    """Of PyTorch's distributed checkpoints: values of the metadata changed, calls put into it."""
    from shardrt.exchange.formats.dcp import _ALLOWED
    from shardrt.exchange.torch_file import pickled
    from shardrt.exchange.unpickle import Called, unpickle

    if path.name != ".metadata":
        return
    try:
        value = unpickle(path.read_bytes(), path, _ALLOWED)
        places = list(_places(value))
        holder, key = random_.choice(places)
        old, way = holder[key], random_.randrange(8)
        if way == 0:
            gadget = Called(*random_.choice(GADGETS))
            holder[key] = random_.choice(
                (gadget, Called("torch.Size", (gadget,)), Called(gadget.name, (), {}))
            )
        elif way == 1:
            del holder[key]
        elif isinstance(old, int) and not isinstance(old, bool):
            holder[key] = random_.choice((*HUGE, old + 1, old - 1, 0))
        elif isinstance(old, str):
            holder[key] = random_.choice((*OUTSIDE, ".metadata", "__1_0.distcp", "__0_0.distcp"))
        else:
            other, at = random_.choice(places)
            holder[key] = random_.choice((other[at], [], {}, None, (HUGE[2],) * 40))
        path.write_bytes(pickled(value))
    except (ValueError, RecursionError, IndexError, AttributeError, TypeError, OverflowError):
        return


def _places(value):
    """(table or list, key) of all values of a pickle that may be changed."""
    from shardrt.exchange.unpickle import Called

    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Called):
            if isinstance(item.state, tuple):
                item.state = list(item.state)
            todo.append(item.state)
        elif isinstance(item, dict | list):
            for key, child in list(item.items() if isinstance(item, dict) else enumerate(item)):
                if isinstance(child, tuple):
                    item[key] = child = list(child) if len(child) > 9 else child
                yield item, key
                todo += [key, child]


class Watched:
    """What a process may not do while it reads a mutant."""

    def __init__(self, inside):
        self.inside, self.known, self.wrong, self.on = os.path.realpath(inside), set(), [], False
        sys.addaudithook(self)

    def __call__(self, event, arguments):
        if not self.on:
            return
        if event in (
            "subprocess.Popen",
            "os.system",
            "os.exec",
            "os.fork",
            "os.forkpty",
            "os.posix_spawn",
            "exec",
        ):
            self.wrong.append(f"{event} {str(arguments)[:200]}")
        elif event == "import" and arguments[0] not in self.known:
            self.wrong.append(f"import {arguments[0]}")
        elif event == "open" and isinstance(arguments[0], str | bytes) and arguments[2] is not None:
            path, flags = os.fsdecode(arguments[0]), arguments[2]
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                real = os.path.realpath(path)
                if real != self.inside and not real.startswith(self.inside + "/"):
                    self.wrong.append(f"open for writing {path}")


def attempt(words):
    """The fault of a conversion in this process; "" if it is right or refused in one line."""
    from shardrt.__main__ import main

    out, error = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = main(["ckpt", "convert", *words])
    except BaseException:
        return traceback.format_exc()
    text = error.getvalue()
    if code == 0:
        return ""
    if code != 65 or text.count("\n") != 1 or not text.startswith("error: ") or len(text) > 8000:
        return f"code {code}: {text[:2000]!r}"
    return ""


def run(valid, scratch, first, count, to, source, special):
    """Convert mutants; gives the exit code."""
    os.fsync = os.fdatasync = lambda descriptor: None
    os.environ.pop("SHARDRT_DEBUG", None)
    out = scratch / "out"
    out.mkdir()
    watched = Watched(out)
    imported = watched.known
    words = [str(valid), str(out / "valid"), "--to", to, "--from", source]
    if fault := attempt(words) or attempt(
        [*words[:1], str(out / "other"), *words[2:], "--dtype", "bfloat16"]
    ):
        if "hold float32" not in fault:
            say(f"the valid folder: {fault}")
            return 1
    attempt([str(scratch / "absent\x1b"), *words[1:]])  # imports what describes errors
    imported.update(sys.modules)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    refused = 0
    for seed in range(first, first + count):
        mutant = scratch / "mutant"
        shutil.rmtree(mutant, ignore_errors=True)
        shutil.copytree(valid, mutant, copy_function=os.link)
        mutate(mutant, seed, special)
        before = sorted(p.name for p in scratch.iterdir())
        watched.on = True
        fault = attempt([str(mutant), str(out / "new"), *words[2:]])
        watched.on = False
        refused += not (out / "new").exists()
        shutil.rmtree(out)
        out.mkdir()
        if sorted(p.name for p in scratch.iterdir()) != before:
            fault += "it wrote next to its folder"
        if fault or watched.wrong:
            say(f"seed {seed}: {fault} {watched.wrong[:5]}")
            return 1
    say(f"{refused} of {count} refused")
    return 0


def say(text):
    """Print what may have no encoding."""
    print(text.encode("ascii", "backslashreplace").decode())


if __name__ == "__main__":
    valid_, scratch_, first_, count_, to_, source_ = sys.argv[1:]
    special_ = {"shardrt": (signed,), "dcp": (forged, forged)}.get(source_, ())
    sys.exit(run(Path(valid_), Path(scratch_), int(first_), int(count_), to_, source_, special_))
