"""No damage goes unseen, and no file, however made, does harm."""

import json
import random
import shutil
import time
import tracemalloc
from itertools import starmap

import numpy as np
import pytest

from shardrt import nn, optim
from shardrt.checkpoint import CheckpointManager, Damaged, read_manifest, verify
from shardrt.checkpoint.manifest import BLOCK, Manifest, SavedFile, SavedParameter, SavedPiece, _checksum
from shardrt.comm import init_device_mesh, thread
from shardrt.nn.extents import Extent

FLIPS, MADE_UP = 300, 1000


class Large(nn.Module):
    """More than one block of values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((1024, 1100), nn.init.Normal())
        self.bias = nn.Parameter((7,), nn.init.Normal())


def save(root):
    model = Large()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    CheckpointManager(root, model, optimizer, init_device_mesh("auto")).save(1, {"config": {"lr": 0.1}})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint with a file of two blocks."""
    root = tmp_path_factory.mktemp("damage") / "c"
    thread.run(1, save, root)
    path = root / "step-00000001"
    assert (path / "rank-00000.safetensors").stat().st_size > BLOCK
    return path


def test_every_flipped_bit_is_found_and_the_file_named(saved):
    files = sorted(saved.iterdir())
    sizes = [file.stat().st_size for file in files]
    chooser = random.Random(0)
    for _ in range(FLIPS // 100):  # all files take part, the small ones too
        for file, size in zip(files, sizes, strict=True):
            for _ in range(100 // len(files)):
                flip(file, chooser.randrange(size), chooser.randrange(8))
    assert verify(saved).step == 1


def flip(file, place, bit):
    """Flip a bit, look, and flip it back."""
    with open(file, "r+b") as opened:
        opened.seek(place)
        before = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([before ^ 1 << bit]))
        opened.flush()
        try:
            with pytest.raises(Damaged) as error:
                verify(file.parent)
            assert str(file) in str(error.value)
        finally:
            opened.seek(place)
            opened.write(bytes([before]))


def restored(path):
    model = Large()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    CheckpointManager(path.parent, model, optimizer, init_device_mesh("auto")).restore(path)


def test_what_is_damaged_is_named_with_its_tensor(saved, tmp_path):
    copy = shutil.copytree(saved, tmp_path / "c" / saved.name)
    file = copy / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # the last bytes are the momentum of the bias
    file.write_bytes(data)
    with pytest.raises(
        RuntimeError, match=r"rank-00000.safetensors: bytes 8388608 to \d+ of momentum 'weight' are"
    ):
        thread.run(1, restored, copy)


@pytest.mark.parametrize("change", ["truncated", "longer", "missing", "a link", "a folder", "swapped"])
def test_files_that_are_not_as_saved(saved, tmp_path, change):
    copy = shutil.copytree(saved, tmp_path / "c" / saved.name)
    file, other = copy / "rank-00000.safetensors", tmp_path / "other"
    data = file.read_bytes()
    file.unlink()
    if change == "truncated":
        file.write_bytes(data[:-1])
    elif change == "longer":
        file.write_bytes(data + b"\0")
    elif change == "a link":
        other.write_bytes(data)
        file.symlink_to(other)
    elif change == "a folder":
        file.mkdir()
    elif change == "swapped":
        file.write_bytes(data[BLOCK:] + data[:BLOCK])
    with pytest.raises(Damaged, match="rank-00000.safetensors"):
        verify(copy)


def body(saved):
    return json.loads((saved / "manifest.json").read_bytes())


def write(path, content):
    """A manifest whose own checksum is right, whatever stands in it."""
    content.pop("self", None)
    path.write_text(json.dumps({**content, "self": _checksum(content)}))


WRONG = {
    "another format": lambda b: b.update(format=3),
    "a step below 0": lambda b: b.update(step=-1),
    "a step that is true": lambda b: b.update(step=True),
    "a huge step": lambda b: b.update(step=10**30),
    "files that are no list": lambda b: b.update(files={"a": 1}),
    "a file elsewhere": lambda b: b["files"][0].__setitem__(0, "../../etc/passwd"),
    "a file named ..": lambda b: b["files"][0].__setitem__(0, ".."),
    "a file without a name": lambda b: b["files"][0].__setitem__(0, ""),
    "a file twice": lambda b: b["files"].append(b["files"][0]),
    "a negative size": lambda b: b["files"][0].__setitem__(1, -1),
    "an enormous size": lambda b: b["files"][0].__setitem__(1, 1 << 61),
    "a checksum too many": lambda b: b["files"][0][2].append("00"),
    "a negative dimension": lambda b: b["parameters"]["bias"][0].__setitem__(0, -7),
    "an enormous shape": lambda b: b["parameters"]["bias"].__setitem__(0, [1 << 40, 1 << 40]),
    "a shape of many dimensions": lambda b: b["parameters"]["bias"].__setitem__(0, [1] * 1000),
    "an unknown type": lambda b: b["parameters"]["bias"].__setitem__(1, "F8"),
    "a parameter too many": lambda b: b["parameters"].update(more=[[3], "F32"]),
    "a parameter too few": lambda b: b["parameters"].pop("bias"),
    "a piece before its file": lambda b: b["pieces"][0].__setitem__(5, -4),
    "a piece behind its file": lambda b: b["pieces"][0].__setitem__(5, 1 << 40),
    "a piece of no file": lambda b: b["pieces"][0].__setitem__(0, 7),
    "a piece of nothing": lambda b: b["pieces"][0].__setitem__(4, 0),
    "a piece twice": lambda b: b["pieces"].append(b["pieces"][0]),
    "a piece too few": lambda b: b["pieces"].pop(0),
    "a gap": lambda b: b["pieces"][0].__setitem__(3, 1),
    "runs of no elements": lambda b: b["pieces"][0].extend([0, 4]),
    "runs that lie in one another": lambda b: b["pieces"][0].extend([b["pieces"][0][4], 1]),
    "runs of another number of elements": lambda b: b["pieces"][0].extend([b["pieces"][0][4] + 1, 1 << 20]),
    "runs beyond their parameter": lambda b: b["pieces"][0].extend([1, 1 << 20]),
    "runs with a length alone": lambda b: b["pieces"][0].append(1),
    "pieces that are no rows": lambda b: b.update(pieces=[3]),
    "steps that are no numbers": lambda b: b.update(steps={"bias": 1.5}),
    "moments of one without its number": lambda b: b["steps"].pop("bias"),
    "a number of updates of nothing": lambda b: b["steps"].update(more=1),
    "nothing": lambda b: b.clear(),
    "an extra that is a string": lambda b: b.update(extra="abc"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_manifest_that_is_wrong_is_refused_even_with_the_right_checksum(saved, tmp_path, wrong):
    copy = shutil.copytree(saved, tmp_path / "c" / saved.name)
    content = body(saved)
    WRONG[wrong](content)
    write(copy / "manifest.json", content)
    with pytest.raises(Damaged, match=r"manifest.json: |rank-00000.safetensors: it has"):
        verify(copy)


TEXTS = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xef\xbb\xbf{}",
    b"\xff\xfe",
    b'{"self": 1, "self": 2}',
    b'{"step": NaN, "self": ""}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"9" * 5000,
]


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_what_is_no_manifest_is_refused(tmp_path, number):
    (tmp_path / "manifest.json").write_bytes(TEXTS[number])
    with pytest.raises(Damaged, match="manifest.json: "):
        read_manifest(tmp_path)


def test_made_up_manifests_cost_neither_time_nor_memory(saved, tmp_path):
    chooser, content = random.Random(1), body(saved)
    text, whole, refused, seconds = json.dumps(content), read_manifest(saved), 0, 0.0
    tracemalloc.start()
    try:
        began = time.process_time()
        Manifest.parse(text.encode(), tmp_path)
        sound = time.process_time() - began
        for _ in range(MADE_UP):
            data = made_up(chooser, text)
            tracemalloc.reset_peak()
            began = time.process_time()
            try:
                found = Manifest.parse(data, tmp_path)
            except Damaged:
                refused += 1
            else:
                assert found == whole, data  # a space more or less
            seconds += time.process_time() - began
            assert tracemalloc.get_traced_memory()[1] < len(data) + (64 << 20)
    finally:
        tracemalloc.stop()
    assert refused > 0.9 * MADE_UP
    assert seconds < 5 * MADE_UP * sound


def made_up(chooser, text):
    """The manifest with something in it replaced: a value by a strange one, or text by other text."""
    if chooser.random() < 0.5:
        start = chooser.randrange(len(text))
        other = chooser.choice(["", "}", "]", "-", "9" * 400, '"', "null", "\0"])
        return (text[:start] + other + text[start + 1 :]).encode()
    content = json.loads(text)
    del content["self"]
    place, key = content, chooser.choice(["files", "format", "parameters", "pieces", "steps"])
    while isinstance(place[key], list | dict) and place[key] and chooser.random() < 0.8:
        place = place[key]
        key = chooser.choice(sorted(place)) if isinstance(place, dict) else chooser.randrange(len(place))
    place[key] = chooser.choice([-1, 1 << 62, 1.5, "..", "x" * 5000, None, [[]], True, [1 << 61] * 40])
    own = "0" * 32 if chooser.random() < 0.1 else _checksum(content)
    return json.dumps({**content, "self": own}).encode()


class Counted(Extent):
    """Counts how often anything of any of them is read."""

    reads = 0

    def __getattribute__(self, name):
        Counted.reads += 1
        return super().__getattribute__(name)


def manifest_of(pieces, shape):
    """One of a parameter in these pieces."""
    saved = tuple(SavedPiece(0, "parameter", "wide", runs, 0) for runs in pieces)
    return Manifest(1, (SavedFile("file", 64, ()),), {"wide": SavedParameter(shape, "F32")}, saved, {}, {})


def reads_to_check(count):
    """Of as many columns of two elements, which lie next to each other."""
    manifest = manifest_of([Counted(i, 1, count, 2) for i in range(count)], (2, count))
    Counted.reads = 0
    manifest._check()
    return Counted.reads


def test_a_check_of_twice_as_many_columns_takes_twice_as_long():
    assert 0 < reads_to_check(1000) <= 2.1 * reads_to_check(500)


@pytest.mark.parametrize(
    "pieces, fault",
    [
        ([(0, 1, 4, 2), (1, 1, 4, 2), (1, 2, 4, 2)], "element 1 lies in 2 of the pieces of 'wide'"),
        ([(1, 2, 4, 2), (3, 1, 4, 2), (6, 2, 2, 1)], "element 0 lies in 0 of the pieces of 'wide'"),
        ([(0, 1, 3, 2), (1, 2, 4, 2), (6, 2, 2, 1)], "are runs of several strides"),
    ],
)
def test_pieces_that_make_no_whole_are_refused(pieces, fault):
    manifest_of(starmap(Extent, [(0, 1, 4, 2), (2, 2, 4, 2), (1, 1, 4, 2)]), (2, 4))._check()
    with pytest.raises(Damaged, match=fault):
        manifest_of(starmap(Extent, pieces), (2, 4))._check()


def test_a_manifest_holds_what_was_put_in(saved):
    manifest = read_manifest(saved)
    assert manifest.extra == {"config": {"lr": 0.1}}
    assert Manifest.parse(manifest.dump(), saved) == manifest
    assert np.prod(manifest.parameters["weight"].shape) == manifest.parameters["weight"].size
