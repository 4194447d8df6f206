"""Files of torch.save that lie: zips made by hand, and 500 mutants of whole ones."""

import io
import struct
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import pytest

from shardrt.exchange import torch_zip
from shardrt.exchange.checkpoint import BadCheckpoint
from shardrt.exchange.torch_file import pickled
from shardrt.exchange.torch_zip import TENSOR, open_torch
from shardrt.exchange.unpickle import Called, Global
from tests.exchange.made import whole
from tests.ranks import ROOT

NUMBERS = np.arange(8, dtype=np.float32)
# Where the fields of a zip's directory lie in an entry of it: (offset, struct's format).
FIELDS = {
    "flags": (8, "<H"),
    "method": (10, "<H"),
    "crc": (16, "<I"),
    "packed": (20, "<I"),
    "size": (24, "<I"),
    "name": (28, "<H"),
    "extra": (30, "<H"),
    "header": (42, "<I"),
}


def of(value):
    """A value inside a pickle."""
    return pickled(value)[2:-1]


def tensor(offset=0, shape=(2, 4), strides=(4, 1), size=8, key="0", kind="Float", reference=None):
    """A pickle of one tensor, as torch.save writes it."""
    reference = reference or ("storage", Global(f"torch.{kind}Storage"), key, "cpu", size)
    rest = (offset, shape, strides, False, Called("collections.OrderedDict", ()))
    return b"\x80\x02" + of(Global(TENSOR)) + b"(" + of(reference) + b"Q" + b"".join(map(of, rest)) + b"tR."


def zipped(data=None, entries=None, how=zipfile.ZIP_STORED, folder="archive/"):
    """A zip with a pickle and one storage; entries: others, or these in their place."""
    content = {"data.pkl": tensor() if data is None else data, "data/0": NUMBERS.tobytes()}
    content = {folder + name: value for name, value in content.items()} if entries is None else entries
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", how) as file:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, value in content.items() if isinstance(content, dict) else content:
            file.writestr(zipfile.ZipInfo(name), value, how)
    return out.getvalue()


def with_field(entry, field, value, data=None):
    """With another number in the directory's entry of that number."""
    data, (offset, kind) = bytearray(zipped() if data is None else data), FIELDS[field]
    at = -1
    for _ in range(entry + 1):
        at = data.index(b"PK\1\2", at + 1)
    struct.pack_into(kind, data, at + offset, value)
    return bytes(data)


def with_zip64(size, header):
    """The storage's size and place in an extra field of 64 bits."""
    data = zipped()
    at, end = data.rindex(b"PK\1\2"), data.rindex(b"PK\5\6")
    entry = bytearray(data[at:end]) + struct.pack("<HHQQQ", 1, 24, size, size, header)
    struct.pack_into("<IIHH", entry, 20, 0xFFFFFFFF, 0xFFFFFFFF, 13 - 3 + 4, 28)
    struct.pack_into("<H", entry, 28, len("archive/data/0"))
    struct.pack_into("<I", entry, 42, 0xFFFFFFFF)
    tail = bytearray(data[end:])
    struct.pack_into("<I", tail, 12, struct.unpack_from("<I", tail, 12)[0] + 28)
    return data[:at] + bytes(entry) + bytes(tail)


def with_end64(**fields):
    """With an end of 64 bits in which the fields lie."""
    data = zipped()
    end = data.rindex(b"PK\5\6")
    count, size, begin = struct.unpack_from("<HII", data, end + 10)
    fields = {"count": count, "size": size, "begin": begin, "place": end} | fields
    record = struct.pack("<4sQHHIIQQ", b"PK\6\6", 44, 45, 45, 0, 0, fields["count"], fields["count"])
    record += struct.pack("<QQ", fields["size"], fields["begin"])
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, fields["place"], 1)
    tail = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return data[:end] + record + locator + tail


def two(*folders):
    return [(f"{folder}data.pkl", tensor()) for folder in folders] + [("a/data/0", NUMBERS.tobytes())]


LARGE, SECOND = 1 << 47, zipped().index(b"PK\3\4", 4)
READ = {
    "as it is": zipped(),
    "64 bits": with_zip64(32, SECOND),
    "64 bits at the end": with_end64(),
    "a huge count": with_end64(count=1 << 60),
    "names of elsewhere": zipped(folder="../"),
    "an absolute name": zipped(folder="/"),
    "name beyond": with_field(1, "name", 0xFFFF),
    "extra field beyond": with_field(1, "extra", 0xFFFF),
    "64 bits: an end beyond": with_end64(place=1 << 62),
    "a comment": zipped()[:-2] + b"\5\0hello",
    "junk before": b"junk" * 20 + zipped(),
}
PICKLES = {
    "negative offset": (tensor(offset=-1), "no storage, shape or strides"),
    "offset beyond": (tensor(offset=1), "ends outside its storage"),
    "offset overflows": (tensor(offset=1 << 63), "no storage, shape or strides"),
    "offset wraps in bytes": (tensor(offset=(1 << 62) + 1, shape=(), strides=()), "no storage"),
    "offset far": (tensor(offset=LARGE), "ends outside its storage"),
    "empty, far": (tensor(offset=9, shape=(0,), strides=(1,)), "ends outside its storage"),
    "negative strides": (tensor(strides=(-4, -1)), "no storage, shape or strides"),
    "strides overflow": (tensor(strides=(1 << 63, 1)), "no storage, shape or strides"),
    "strides leave": (tensor(strides=(1000, 1)), "only contiguous tensors are read"),
    "strides of zero": (tensor(shape=(1 << 40,), strides=(0,)), "only contiguous tensors are read"),
    "negative shape": (tensor(shape=(-2, -4)), "no storage, shape or strides"),
    "huge shape": (tensor(shape=(LARGE,), strides=(1,)), "ends outside its storage"),
    "shape overflows": (tensor(shape=(LARGE, LARGE), strides=(LARGE, 1)), "ends outside its storage"),
    "65 dimensions": (tensor(shape=(1,) * 65, strides=(1,) * 65), "no storage, shape or strides"),
    "100,000 dimensions": (tensor(shape=(LARGE,) * 100_000, strides=(1,) * 100_000), "no storage"),
    "fewer strides": (tensor(strides=(1,)), "no storage, shape or strides"),
    "true in a shape": (tensor(shape=(True, 8), strides=(8, 1)), "no storage, shape or strides"),
    "half in a shape": (tensor(shape=(2.0, 4)), "no storage, shape or strides"),
    "a list as shape": (tensor(shape=[2, 4]), "no storage, shape or strides"),
    "storage too large": (tensor(size=9), "has 32 bytes, fewer than 9 elements take"),
    "storage of 2**62": (tensor(size=1 << 62), "has 32 bytes, fewer"),
    "negative storage": (tensor(size=-1), "has 32 bytes, fewer"),
    "storage of another type": (tensor(kind="Double"), "has 32 bytes, fewer"),
    "storage of no type": (tensor(kind="No"), "names 'torch.NoStorage'"),
    "storage elsewhere": (tensor(key="../data.pkl"), "no entry 'data/../data.pkl'"),
    "storage that is not there": (tensor(key="1" * 1000), "no entry 'data/111"),
    "storage by number": (tensor(key=0), "a storage of no known type"),
    "reference of four": (tensor(reference=("storage", None, "0", "cpu")), "no storage"),
    "no reference": (tensor(reference="storage"), "no storage"),
    "a command": (of(Global("os.system")) + of(("touch executed",)) + b"R.", "names 'os.system'"),
}
ZIPS = {
    "empty": (b"", "not a zip"),
    "no zip": (b"PK\3\4" * 100, "not a zip"),
    "an empty zip": (zipped(entries={}), "no data.pkl"),
    "no pickle": (zipped(entries={"archive/data/0": b""}), "no data.pkl"),
    "no folder": (zipped(folder=""), "the zip has more than one folder"),
    "two folders": (zipped(entries=two("a/", "b/")), "more than one folder"),
    "an entry twice": (zipped(entries=two("a/", "a/")), "an entry twice"),
    "big-endian": (zipped(entries=[*two("a/"), ("a/byteorder", b"big")]), "only little-endian"),
    "a long order": (zipped(entries=[*two("a/"), ("a/byteorder", b"little" * 9)]), "has 54 bytes"),
    "deflated": (zipped(how=zipfile.ZIP_DEFLATED), "'data.pkl' is compressed or encrypted"),
    "lzma": (zipped(how=zipfile.ZIP_LZMA), "'data.pkl' is compressed or encrypted"),
    "a method of none": (with_field(1, "method", 99), "'data/0' is compressed or encrypted"),
    "encrypted": (with_field(1, "flags", 1), "'data/0' is compressed or encrypted"),
    "another checksum": (with_field(0, "crc", 1), "its checksum differs"),
    "two sizes": (with_field(1, "packed", 16), "has two sizes, 16 and 32 bytes"),
    "overlap": (with_field(1, "header", 0), "not where the zip's directory says"),
    "header in the data": (with_field(1, "header", 40), "not where the zip's directory says"),
    "header beyond": (with_field(1, "header", 1 << 31), "lies outside the zip"),
    "64 bits: size": (with_zip64(1 << 62, SECOND), "lies outside the zip"),
    "64 bits: size of all": (with_zip64((1 << 64) - 1, 0), "not where the zip's directory says"),
    "64 bits: place": (with_zip64(32, (1 << 64) - 40), "lies outside the zip"),
    "64 bits: a directory of 2**60": (with_end64(size=1 << 60), "not a file of torch.save"),
    "64 bits: a directory beyond": (with_end64(begin=1 << 62), "lies outside the zip"),
}


def refused(path, message):
    with pytest.raises(BadCheckpoint) as error:
        open_torch(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ") and text.count(str(path)) == 1 and message in text
    assert "\n" not in text and len(text) < 4000


@pytest.mark.parametrize("name", READ)
def test_what_is_odd_and_harmless_is_read(name, tmp_path):
    (tmp_path / "a.pt").write_bytes(READ[name])
    assert np.array_equal(whole(open_torch(tmp_path / "a.pt")), NUMBERS.reshape(2, 4))


@pytest.mark.parametrize("name", PICKLES)
def test_a_tensor_that_leaves_its_storage_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, message = PICKLES[name]
    (tmp_path / "a.pt").write_bytes(zipped(data))
    refused(tmp_path / "a.pt", message)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("name", ZIPS)
def test_a_zip_that_lies_is_refused(name, tmp_path):
    data, message = ZIPS[name]
    (tmp_path / "a.pt").write_bytes(data)
    refused(tmp_path / "a.pt", message)


def test_a_pickle_and_a_directory_have_limits(tmp_path, monkeypatch):
    (tmp_path / "a.pt").write_bytes(zipped())
    monkeypatch.setattr(torch_zip, "LARGEST_PICKLE", 100)
    refused(tmp_path / "a.pt", "data.pkl has ")
    monkeypatch.setattr(torch_zip, "LARGEST_DIRECTORY", 100)
    refused(tmp_path / "a.pt", "its list of entries has ")


MUTANTS = """
import encodings.cp437, random, resource, sys, zipfile
from pathlib import Path
from shardrt.exchange.checkpoint import BadCheckpoint
from shardrt.exchange.torch_zip import open_torch
from tests.damage import damaged_bytes
from tests.exchange.test_hostile_zips import FIELDS, shape_of, with_field, zipped
from tests.exchange.test_torch_zip import FIXTURE

path, events = Path(sys.argv[1]) / "a.pt", []
whole = FIXTURE.read_bytes()
with zipfile.ZipFile(FIXTURE) as file:
    content = {entry.filename: file.read(entry) for entry in file.infolist()}
pickle = next(name for name in content if name.endswith("/data.pkl"))
kept = shape_of(open_torch(FIXTURE))
refused, read = 0, {"damaged": 0, "cut": 0, "field": 0, "pickle": 0}
names = {"exec", "import", "os.system", "subprocess.Popen", "os.fork"}
sys.addaudithook(lambda event, args: events.append((event, args)) if event in names else None)
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for seed in range(600):
    random_, way = random.Random(seed), list(read)[seed % 4]
    if way == "damaged":
        data = damaged_bytes(whole, random_)
    elif way == "cut":
        data = whole[: random_.randrange(len(whole))]
    elif way == "field":
        field = random_.choice(list(FIELDS))
        value = random_.choice((0, 1, 64, random_.randrange(7000), 0x7FFF, 0xFFFF))
        data = with_field(random_.randrange(len(content)), field, value, whole)
    else:  # under a right checksum
        data = zipped(entries={**content, pickle: damaged_bytes(content[pickle], random_)})
    path.write_bytes(data)
    try:
        found = shape_of(open_torch(path))
    except BadCheckpoint as error:
        text = str(error)
        assert text.startswith(f"{path}: ") and "\\n" not in text and len(text) < 4000, (seed, text)
        refused += 1
        continue
    read[way] += 1
    assert way == "pickle" or found == kept, (seed, way)
assert not events, events[:3]
print(refused)
print(read, file=sys.stderr)
"""


def shape_of(value):
    """A value without the numbers of its tensors, which are all read."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(shape_of, value))
    if hasattr(value, "read_into"):
        array = whole(value)
        return array.dtype.name, array.shape
    return value


def test_600_mutants_are_refused_in_a_line_or_have_the_same_tensors(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MUTANTS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert 300 < int(done.stdout) < 600
