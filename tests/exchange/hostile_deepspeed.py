"""Mutants of a folder of DeepSpeed's: files as torch.save writes them, whose pickles lie.

    python -m tests.exchange.hostile_deepspeed VALID SCRATCH FIRST COUNT

As hostile.py, which has the rest: a value of a pickle is changed, dropped, or is a call that runs a program;
files of ranks are missing, doubled, or of another rank; `latest` names what is outside of the folder.
"""

import encodings.cp437  # noqa: F401  zipfile decodes names of entries with it
import shutil
import sys
import zipfile
from copy import deepcopy
from pathlib import Path

from shardrt.exchange.checkpoint import BadCheckpoint
from shardrt.exchange.formats.deepspeed import _CLASSES
from shardrt.exchange.torch_file import _Pickle
from shardrt.exchange.torch_zip import open_torch
from shardrt.exchange.unpickle import Called
from tests.exchange.hostile import GADGETS, HUGE, OUTSIDE, run
from tests.exchange.made import Held, whole

NAMES = ("", "../x", "a" * 5000, "scale", "embed.weight", "\x1b[2J", "\ud800", 7, None)


def rewritten(path, change):
    """Change what torch.save has written, in place; the tensors' values stay."""
    value = open_torch(path, _CLASSES)
    change(value)
    writer = _Pickle()
    data = writer.dump(value)
    held = [whole(tensor).tobytes() for tensor in writer.tensors]
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("archive/data.pkl", data)
        for number, storage in enumerate(held):
            zipped.writestr(f"archive/data/{number}", storage)


def forged(path, random_):
    """A value of a pickle is another."""
    if path.suffix != ".pt":
        return latest(path, random_)

    def change(value):
        places = list(_places(value))
        holder, key = random_.choice(places)
        old, way = holder[key], random_.randrange(10)
        if way == 0:
            gadget = Called(*random_.choice(GADGETS))
            holder[key] = random_.choice((gadget, [gadget], Called("torch.Size", (gadget,))))
        elif way == 1:
            del holder[key]
        elif way == 2 and isinstance(holder, dict):
            holder[random_.choice(NAMES)] = holder.pop(key)
        elif isinstance(old, int | float):
            holder[key] = random_.choice((*HUGE, old + 1, old - 1, 0, float("nan"), float("inf"), True))
        elif hasattr(old, "read_into"):
            values = whole(old).reshape(-1)
            holder[key] = Held(random_.choice((values[:-1], values[:0], values.astype("f8"), values[None])))
        elif isinstance(old, str):
            holder[key] = random_.choice((*OUTSIDE, *NAMES))
        else:
            other, at = random_.choice(places)
            holder[key] = random_.choice((deepcopy(other[at]), [], {}, None, (HUGE[2],) * 40, [[[[]]]]))

    try:
        rewritten(path, change)
    except (BadCheckpoint, OSError, TypeError):  # damaged before, or no pickle has that
        return None


def ranks(path, random_):
    """Files of other ranks, or of none."""
    if path.suffix != ".pt":
        return latest(path, random_)
    files = sorted(path.parent.glob("*.pt"))
    way = random_.randrange(4)
    if way == 0:
        path.unlink()
    elif way == 1:
        path.rename(path.with_name(path.name.replace("rank_0", "rank_00").replace("rank_1", "rank_9")))
    elif way == 2:
        shutil.copy(path, path.with_name(path.name.replace("rank_1", "rank_2").replace("rank_0", "rank_2")))
    elif (other := random_.choice(files)) != path and other.is_file():
        shutil.copy(other, path)
    return None


def latest(path, random_):
    """The name of another folder."""
    path.write_bytes(random_.choice((*OUTSIDE, "x" * 5000, "global_step3\n../x")).encode())


def _places(value):
    """(table or list, key) of all values that may be changed. Tuples become lists."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, Called):
            todo.append(item.state)
        elif isinstance(item, dict | list):
            for key, child in list(item.items() if isinstance(item, dict) else enumerate(item)):
                if isinstance(child, tuple):
                    item[key] = child = list(child)
                yield item, key
                todo.append(child)


if __name__ == "__main__":
    valid_, scratch_, first_, count_ = sys.argv[1:]
    special_ = (forged,) * 6 + (ranks,)
    sys.exit(run(Path(valid_), Path(scratch_), int(first_), int(count_), "shardrt", "deepspeed", special_))
