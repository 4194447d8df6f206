"""Records: all kinds of files give the same rows, from any place on, in bounded memory; damage is a line."""

import gzip
import json
import random
import shutil
import tracemalloc
from pathlib import Path

import pytest

from shardrt.train.records import BadRecords, records
from shardrt.untrusted import printable
from tests.damage import damaged_bytes, damaged_json
from tests.lab.jobs import tool_refuses
from tests.ranks import python
from tests.train.dataset.make import HERE, ROWS

FILES = ("a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow", "file.arrow", "a.feather")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """ROWS as a file of each kind, in several row groups and batches."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, parquet

    folder = tmp_path_factory.mktemp("records")
    table = pyarrow.Table.from_pylist(ROWS)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    parquet.write_table(table, folder / "a.parquet", row_group_size=15)
    feather.write_feather(table, folder / "a.feather")
    for name, new in (("a.arrow", pyarrow.ipc.new_stream), ("file.arrow", pyarrow.ipc.new_file)):
        with pyarrow.OSFile(str(folder / name), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_reading_goes_on_at_any_place(folder, name):
    assert list(records(folder / name)) == ROWS
    read = records(folder / name, ["text"])
    for number in range(len(ROWS)):
        if number in (1, 14, 15, 39):
            rest = records(folder / name, start=read.place)
            assert list(rest) == ROWS[number:]
            rest.close()
        assert next(read) == {"text": ROWS[number]["text"]}
        if name.endswith("jsonl"):
            assert read.where == f"{folder / name}, line {number + 1}"
        elif "gz" not in name:
            assert read.where == f"{folder / name}, row {number}"
    assert list(records(folder / name, start=read.place)) == []
    read.close()


def test_a_stream_with_dictionaries_goes_on_too(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.array(["a", "b", "a", "c"] * 5).dictionary_encode()
    table, path = pyarrow.table({"text": column}), tmp_path / "a.arrow"
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    read = records(path)
    first = [next(read) for _ in range(16)]
    assert first + list(records(path, start=read.place)) == table.to_pylist()


def test_folders_are_read_in_the_order_of_names_and_by_split(folder, tmp_path):
    names = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-0.parquet")
    for name in (*names, ".cache/train.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "a.parquet", tmp_path / name)
    assert [file.name for file in records(tmp_path).files] == [Path(name).name for name in names[:2]]
    assert list(records(tmp_path)) == 2 * ROWS
    assert list(records(tmp_path, split="test")) == ROWS
    with pytest.raises(BadRecords, match="it has no split 'val'; it has test, train"):
        records(tmp_path, split="val")


def test_a_dataset_of_the_real_library_is_read():
    pytest.importorskip("pyarrow")
    assert list(records(HERE / "saved")) == ROWS
    assert list(records(HERE / "saved", split="test")) == ROWS[:3]
    assert list(records(HERE / "rows.parquet")) == list(records(HERE / "rows.jsonl")) == ROWS


def test_what_the_library_saves_now_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list(ROWS)
    rows.shuffle(seed=1).save_to_disk(tmp_path / "saved", num_shards=3)
    assert list(records(tmp_path / "saved")) == list(rows.shuffle(seed=1))


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_without_pyarrow_one_line_says_what_to_install(monkeypatch, name):
    monkeypatch.setattr("shardrt.train.records.find_spec", lambda name: None)
    with pytest.raises(BadRecords, match=r"pip install 'shardrt\[data\]'"):
        next(records(HERE / name))
    assert next(records(HERE / "rows.jsonl")) == ROWS[0]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_memory_is_bounded_below_the_size_of_a_file(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows, size = 8192, 1 << 14  # 128 MB, in one row group
    table = pyarrow.table({"text": [chr(97 + row % 26) * size for row in range(rows)]})
    found = []
    for part in (table.slice(0, 8), table):
        path = tmp_path / f"{part.num_rows}.{kind}"
        if kind == "parquet":
            parquet.write_table(part, path, row_group_size=rows, compression="zstd", use_dictionary=False)
        else:
            with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, part.schema) as out:
                out.write_table(part, max_chunksize=256)
        done = python("-c", MEASURED, path)
        assert done.returncode == 0, done.stderr
        read, *memory = map(int, done.stdout.split())
        assert read == part.num_rows * size
        found.append(memory)
    small, large = found
    assert large[0] - small[0] < 32 << 20, found  # of the process that asks
    assert large[1] - small[1] < 64 << 20, found  # of the one that reads


def test_lines_are_read_one_at_a_time(tmp_path):
    with open(tmp_path / "a.jsonl", "w") as file:
        file.writelines('{"text": "' + "a" * (1 << 20) + '"}\n' for _ in range(100))
    tracemalloc.start()
    assert sum(len(record["text"]) for record in records(tmp_path / "a.jsonl")) == 100 << 20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


MEASURED = """
import re
import sys
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from shardrt.train.prepare import once
from shardrt.train.records import records
read = records(sys.argv[1], ["text"])
size = sum(len(record["text"]) for record in read)
read.close()
own = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print(size, 1024 * int(own), 1024 * getrusage(RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "file.arrow", "a.feather"])
def test_500_damaged_files_are_read_or_refused_and_none_ends_the_process(folder, tmp_path, name):
    done = python("-c", DAMAGED, folder / name, tmp_path / name, ARROW_DEFAULT_MEMORY_POOL="system")
    assert done.returncode == 0, done.stderr
    whole, refused, memory = map(int, done.stdout.split())
    assert whole and refused > 250 and whole + refused == 500
    assert memory < 3 << 30


DAMAGED = """
import random
import re
import sys
from pathlib import Path
from shardrt.train.records_process import limit, parts
from tests.damage import damaged_bytes

limit()
source, path = map(Path, sys.argv[1:])
whole, chosen, counts = source.read_bytes(), random.Random(0), [0, 0]
for number in range(500):
    data = bytearray(whole)
    if number % 4 == 0:
        data = damaged_bytes(whole, chosen)
    elif number % 4 == 1:  # a huge number
        place = chosen.randrange(len(data) - 8)
        huge = (b"\\xff\\xff\\xff\\x7f" * 2, b"\\xff" * 8, b"\\xff" * 7 + b"\\x7f")
        data[place : place + 8] = chosen.choice(huge)
    else:
        for _ in range(chosen.randint(1, 3)):
            data[chosen.randrange(len(data))] = chosen.choice((0, 1, 0x7F, 0x80, 0xFF, chosen.randrange(256)))
    path.write_bytes(data)
    try:
        for _ in parts(str(path), ["text"] if number % 2 else None, 0, 0):
            pass
        counts[0] += 1
    except (ValueError, OSError, MemoryError, NotImplementedError, KeyError, TypeError):
        counts[1] += 1
# Its own, without that of the process that began it, which ru_maxrss has.
own = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print(*counts, 1024 * int(own))
"""


def test_500_damaged_files_of_lines_are_read_or_refused_in_a_line(tmp_path):
    chosen, counts = random.Random(0), [0, 0]
    for number in range(500):
        path = tmp_path / ("a.jsonl.gz" if number % 5 == 0 else "a.jsonl")
        lines = b'{"text": "one"}\n' + damaged_json({"text": "two", "n": [1, {"a": 2}]}, chosen) + b"\n"
        lines = damaged_bytes(lines, chosen) if number % 3 == 0 else lines
        path.write_bytes(damaged_bytes(gzip.compress(lines), chosen) if number % 5 == 0 else lines)
        try:
            list(records(path, ["text"]))
            counts[0] += 1
        except (BadRecords, OSError) as error:
            assert str(path) in str(error) and printable(str(error)) == str(error)
            counts[1] += 1
    assert min(counts) > 50


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("a.parquet", -100, "a.parquet, from row 0: "),
        ("a.arrow", -8, "a.arrow, from row 40: the stream has no end mark: the file was cut"),
        ("file.arrow", 900, "file.arrow, from row 0: "),
        ("a.jsonl.gz", -9, "a.jsonl.gz, after line 40: "),
        ("a.jsonl", -9, "a.jsonl, line 40: "),
    ],
)
def test_a_file_that_was_cut_is_one_line(folder, tmp_path, capsys, name, size, message):
    (tmp_path / name).write_bytes((folder / name).read_bytes()[:size])
    assert message in tool_refuses(capsys, "data", "make", tmp_path / "out.tokens", tmp_path / name)
    assert not (tmp_path / "out.tokens").exists()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("number", "row 0: column 'number' must have strings, got int"),
        ("t", "has no column 't'; its columns are"),
    ],
)
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "file.arrow"])
def test_a_column_that_is_missing_or_no_text_is_one_line(folder, tmp_path, capsys, name, column, message):
    make = ("data", "make", tmp_path / "out.tokens", folder / name, "--column", column)
    assert message in tool_refuses(capsys, *make)


@pytest.mark.parametrize("name", ["../rows.arrow", "/etc/passwd", "..", "", 7, None])
def test_a_state_that_names_files_elsewhere_is_refused(tmp_path, name):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(BadRecords, match="is not the name of a file in it"):
        records(tmp_path)


def test_a_dictionary_that_holds_itself_ends(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (tmp_path / "train").symlink_to(tmp_path)
    with pytest.raises(BadRecords, match="the folder has no file of records"):
        records(tmp_path)


def test_a_process_that_dies_is_one_line(folder):
    read = records(folder)
    next(read)
    with pytest.raises(BadRecords, match="pyarrow crashed on this file"):
        for _ in read:
            if read._process is not None:
                read._process._child.kill()
                read._process._child.wait()
