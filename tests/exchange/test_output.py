"""Files of a conversion: right bytes and checksums, holes, and the same after a kill at any chunk."""

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from shardrt.checkpoint.manifest import BLOCK
from shardrt.exchange import output
from shardrt.exchange.checkpoint import BadCheckpoint
from shardrt.exchange.output import Elements, File, Late, Output, crc_after_zeros
from shardrt.untrusted import Refused, SourceFile


class Held:
    """A tensor in memory, which can fail."""

    def __init__(self, values, fails_at=None):
        self.values, self.fails_at = values.reshape(-1), fails_at
        self.dtype, self.shape = values.dtype, values.shape

    def read_into(self, out, start):
        if self.fails_at is not None and start + out.size > self.fails_at:
            raise Killed
        out[...] = self.values[start : start + out.size]


class Killed(Exception):
    pass


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Many chunks and entries of the journal, of little data."""
    monkeypatch.setattr(output, "CHUNK", 1 << 16)
    monkeypatch.setattr(output, "_SYNCED", 3 << 16)


LARGE = np.random.default_rng(0).normal(size=3 * BLOCK // 4 + 12345).astype(np.float32)
SMALL = np.arange(7, dtype=np.int64)


def files(fails_at=None):
    large, small = Held(LARGE, fails_at), Held(SMALL)
    empty, part = Held(np.zeros(0, np.float32)), Elements(small, 2, 5, small.dtype)
    return [
        File("one", [b"head", Elements.all(small), b"", Elements.all(large), part], "blocks"),
        File(
            "folder/two",
            [
                b"abc",
                Elements.all(empty),
                Elements.all(large, np.dtype(np.float64)),
                Late(lambda sums: b"%08x" % sums["folder/two"].crcs[2], 8),
                b"end" * 40_000,
            ],
            "crc",
        ),
        File("last", [Late(lambda sums: json.dumps(sums["one"].blocks).encode())]),
    ]


ONE = b"head" + SMALL.tobytes() + LARGE.tobytes() + SMALL[2:5].tobytes()
TWO = b"abc" + LARGE.astype(np.float64).tobytes()
TWO += b"%08x" % zlib.crc32(LARGE.astype(np.float64)) + b"end" * 40_000
BLOCKS = [xxh3_128_hexdigest(ONE[start : start + BLOCK]) for start in range(0, len(ONE), BLOCK)]


def assert_right(target):
    assert {path.name for path in target.iterdir()} == {"one", "folder", "last"}
    assert (target / "one").read_bytes() == ONE
    assert (target / "folder" / "two").read_bytes() == TWO
    assert json.loads((target / "last").read_text()) == BLOCKS


def test_files_hold_their_segments_and_the_checksums_of_others(tmp_path):
    seen = []
    Output(tmp_path / "new", {}, progress=lambda *at: seen.append(at)).write(files())
    assert_right(tmp_path / "new")
    assert seen == sorted(seen) and seen[-1][0] >= seen[-1][1] == len(ONE) + len(TWO)
    assert not (tmp_path / ".tmp-new").exists()


@pytest.mark.parametrize("fails_at", [0, 1, 100_000, BLOCK // 4 + 5, LARGE.size // 2, LARGE.size])
def test_what_was_cut_off_goes_on_to_the_same_bytes(tmp_path, fails_at):
    """The first attempts end in the middle of a file, without a word to the journal; a later one is whole."""
    for attempt in (fails_at, fails_at + 50_000):
        if attempt <= LARGE.size - 1:
            with pytest.raises(Killed):
                Output(tmp_path / "new", {"of": "this"}).write(files(attempt))
            assert not (tmp_path / "new").exists()
    Output(tmp_path / "new", {"of": "this"}).write(files())
    assert_right(tmp_path / "new")


def test_what_is_on_the_disk_is_not_read_again(tmp_path):
    with pytest.raises(Killed):
        Output(tmp_path / "new", {}).write(files(LARGE.size - 1))
    begun = Output(tmp_path / "new", {})
    assert begun.resumed > len(ONE) // 2
    reads = []
    again = files()
    for file in again:
        for segment in file.segments:
            if isinstance(segment, Elements) and segment.tensor.values.size == LARGE.size:
                tensor, read = segment.tensor, segment.tensor.read_into
                tensor.read_into = lambda out, start, read=read: (reads.append(start), read(out, start))
    begun.write(again)
    assert_right(tmp_path / "new")
    assert min(reads[:1]) > LARGE.size // 2


def test_another_conversion_is_not_mixed_with_what_is_there(tmp_path):
    with pytest.raises(Killed):
        Output(tmp_path / "new", {"of": "that"}).write(files(LARGE.size - 1))
    with pytest.raises(BadCheckpoint, match="--restart"):
        Output(tmp_path / "new", {"of": "this"})
    Output(tmp_path / "new", {"of": "this"}, restart=True).write(files())
    assert_right(tmp_path / "new")
    with pytest.raises(FileExistsError):
        Output(tmp_path / "new", {"of": "this"})


def test_two_at_a_time_are_one_too_many(tmp_path):
    first = Output(tmp_path / "new", {})
    with pytest.raises(BadCheckpoint, match="another conversion is writing"):
        Output(tmp_path / "new", {})
    first.write(files())


def test_a_damaged_journal_is_one_line(tmp_path):
    with pytest.raises(Killed):
        Output(tmp_path / "new", {}).write(files(LARGE.size - 1))
    journal = tmp_path / ".tmp-new" / output.JOURNAL
    journal.write_text(journal.read_text()[:50])
    with pytest.raises(BadCheckpoint, match="--restart"):
        Output(tmp_path / "new", {})


def assert_has_holes(path):
    """That it takes less than 1 MiB of the disk, where file systems have holes and count blocks."""
    probe = path.with_name("probe")
    with open(probe, "wb") as file:
        file.truncate(32 << 20)
    if os.stat(probe).st_blocks * 512 < 1 << 20 and os.stat(path).st_blocks:
        assert os.stat(path).st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("kind", ["crc", "blocks"])
def test_zeros_are_holes_with_the_checksums_of_zeros(tmp_path, kind):
    count = (3 * BLOCK + (1 << 20) + 5) // 4
    tensors = [Held(np.zeros(count, np.float32)), Held(SMALL), Held(np.zeros(1 << 20, np.float32))]
    seen = {}
    segments = [b"x", *map(Elements.all, tensors), Late(lambda sums: seen.update(sums) or b"")]
    Output(tmp_path / "new", {}).write([File("zeros", segments, kind)])
    path: Path = tmp_path / "new" / "zeros"
    parts = [b"x", *(tensor.values.tobytes() for tensor in tensors)]
    data = b"".join(parts)
    assert path.read_bytes() == data
    blocks = [data[start : start + BLOCK] for start in range(0, len(data), BLOCK)]
    sums = seen["zeros"]
    assert sums.crcs[:4] == ([zlib.crc32(part) for part in parts] if kind == "crc" else [])
    assert sums.blocks == ([xxh3_128_hexdigest(block) for block in blocks] if kind == "blocks" else [])
    assert_has_holes(path)


def test_crc_goes_on_over_zeros_that_are_not_read():
    for count in (0, 1, 7, 8, 4096, 123_457):
        for data in (b"", b"\0", b"abc", bytes(range(256))):
            assert crc_after_zeros(zlib.crc32(data), count) == zlib.crc32(data + bytes(count))


def test_holes_of_a_source_are_not_read(tmp_path, monkeypatch):
    path = tmp_path / "source"
    with open(path, "wb") as file:
        file.write(b"begin")
        file.seek(8 << 20)
        file.write(b"middle")
        file.truncate((24 << 20) + 3)
    read, reads = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *given: reads.append(read(*given)) or reads[-1])
    source, expected = SourceFile(path), path.read_bytes()
    out = np.full(4 << 20, 255, np.uint8)
    for offset in (0, 4 << 20, (8 << 20) - 5, 12 << 20, source.size - out.size):
        out[:] = 255
        source.read_into(out, offset)
        assert out.tobytes() == expected[offset : offset + out.size], offset
    with open(path, "rb") as file:
        if file.seek(1 << 20, os.SEEK_DATA) > 1 << 20:  # this file system has holes
            assert sum(reads) < 3 * out.size
    with pytest.raises(Refused, match="ends before"):
        source.read_into(out, source.size - 5)


def test_a_full_disk_is_an_error_that_names_the_file_and_is_resumed(tmp_path, monkeypatch):
    write, left = os.pwrite, [len(ONE) // 2]

    def full(descriptor, data, position):
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        left[0] -= len(data)
        return write(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left.*tmp-new/one"):
        Output(tmp_path / "new", {}).write(files())
    monkeypatch.setattr(os, "pwrite", write)
    Output(tmp_path / "new", {}).write(files())
    assert_right(tmp_path / "new")
