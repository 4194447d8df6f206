"""The process in which pyarrow reads Parquet and Arrow files; records.py starts it, and asks for parts.

A damaged file can make that library crash, or take all memory. Here that ends this process alone, within
limits that it sets itself. Rows are answered as JSON. Imports nothing of shardrt, which would take longer.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # its folder is not on the path, and must not be: it has names like trace
    sys.path.append(str(Path(__file__).parent))
    from tokenizer_process import receive, send

    sys.path.pop()
else:
    from shardrt.train.tokenizer_process import receive, send

MEMORY = 2 << 30  # bytes that it may have
SECONDS = 120  # of processor time for one answer
_ANSWER = 4 << 20  # bytes of rows in an answer, about
_BATCH = 8 << 20  # bytes that are decoded together, about
_ROWS = 4096  # at most, of either
_NESTED = 64  # levels of a schema
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream
_STRING, _ITEMS = 16 << 20, 1 << 20  # of a Parquet footer


def main() -> None:
    """Answer what comes on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the library prints is no answer
    limit()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    rows: Iterator[tuple[dict[str, Any], bytes]] = iter(())
    while (request := receive(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # then SIGPROF, the end
        wanted = json.loads(request)
        try:
            if wanted["do"] == "open":
                rows = parts(wanted["path"], wanted["columns"], wanted["at"], wanted["skip"])
            answer, more = next(rows, ({"end": True}, b""))
        except MemoryError:
            answer, more = {"error": f"it needs more than {MEMORY >> 20} MB of memory"}, b""
        except Exception as error:
            answer, more = {"error": str(error)[:2000] or type(error).__name__}, b""
        send(answers, json.dumps(answer).encode())
        send(answers, more)
        answers.flush()


def limit() -> None:
    """Let this process have no more than MEMORY, and leave no core file."""
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_DATA, MEMORY)):
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def parts(path: str, columns: list[str] | None, at: int, skip: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Rows of a file, some at a time: where they are, and a line of JSON for each.

    Args:
        columns: all if None.
        at: where to begin: a row group, a record batch of a file, or the byte of a batch in a stream.
        skip: rows that are left out there.

    Raises:
        ValueError: for a file that can't be used.
        OSError: if it can't be read.
    """
    with open(path, "rb") as file:
        magic = file.read(6)
        size = os.fstat(file.fileno()).st_size
    if magic[:4] == b"PAR1":
        batches = _parquet(path, columns, at)
    elif magic == b"ARROW1":
        batches = _arrow_file(path, columns, at)
    else:
        batches = _arrow_stream(path, columns, at, size)
    done = 0  # rows of the present place
    for place, part, batch in batches:
        if place != at:
            at, done, skip = place, 0, 0
        first = max(0, min(batch.num_rows, skip - done))
        step = _together(batch.nbytes, batch.num_rows, _ANSWER)
        for start in range(first, batch.num_rows, step):
            found = batch.slice(start, step).to_pylist()
            text = "\n".join(json.dumps(row, default=_plain) for row in found)
            yield {"at": at, "skip": done + start, "rows": len(found), "part": part}, text.encode()
        done += batch.num_rows


def _parquet(path: str, columns: list[str] | None, at: int) -> Iterator[tuple[int, float, Any]]:
    from pyarrow import parquet

    limits = {"thrift_string_size_limit": _STRING, "thrift_container_size_limit": _ITEMS}
    limits |= {"schema_depth_limit": _NESTED, "page_checksum_verification": True}
    # Without pre_buffer and with buffer_size a row group is read page by page.
    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20, **limits) as file:
        _check(columns, file.schema_arrow)
        groups = file.metadata.num_row_groups
        for group in range(at, groups):
            about = file.metadata.row_group(group)
            rows = _together(about.total_byte_size, about.num_rows, _BATCH)
            how = {"row_groups": [group], "columns": columns, "use_threads": False, "batch_size": rows}
            seen = 0
            for batch in file.iter_batches(**how):
                batch.validate(full=True)
                seen += batch.num_rows
                yield group, (group + seen / about.num_rows) / groups, batch
            if seen != about.num_rows:
                raise ValueError(f"row group {group} has {seen} rows, but the footer says {about.num_rows}")


def _arrow_file(path: str, columns: list[str] | None, at: int) -> Iterator[tuple[int, float, Any]]:
    import pyarrow

    with pyarrow.OSFile(path) as file, pyarrow.ipc.open_file(file) as reader:
        _check(columns, reader.schema)
        for number in range(at, reader.num_record_batches):
            batch = reader.get_batch(number)
            yield number, number / reader.num_record_batches, _chosen(batch, columns)


def _arrow_stream(
    path: str, columns: list[str] | None, at: int, size: int
) -> Iterator[tuple[int, float, Any]]:
    import pyarrow

    with pyarrow.OSFile(path) as file, pyarrow.ipc.open_stream(file) as reader:
        _check(columns, reader.schema)
        if at and not any(_has_dictionary(field.type) for field in reader.schema):
            file.seek(at)
        while True:
            begin = file.tell()
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                _check_end(path, file.tell())
                return
            if begin >= at:
                yield begin, begin / size, _chosen(batch, columns)


def _check_end(path: str, end: int) -> None:
    """Raise ValueError unless a stream has its end mark: one that was cut between batches has not."""
    with open(path, "rb") as file:
        file.seek(max(0, end - len(_END)))
        if file.read(len(_END)) != _END:
            raise ValueError("the stream has no end mark: the file was cut")


def _chosen(batch: Any, columns: list[str] | None) -> Any:
    batch = batch if columns is None else batch.select(columns)
    batch.validate(full=True)
    return batch


def _check(columns: list[str] | None, schema: Any) -> None:
    for name in schema.names if columns is None else columns:
        if schema.names.count(name) != 1:
            known = ", ".join(schema.names[:20])
            how = "twice" if name in schema.names else "no"
            raise ValueError(f"it has {how} column {name[:80]!r}; its columns are {known}")


def _has_dictionary(kind: Any) -> bool:
    from pyarrow import types

    inside = [kind.field(number).type for number in range(kind.num_fields)]
    return types.is_dictionary(kind) or any(map(_has_dictionary, inside))


def _together(size: int, rows: int, most: int) -> int:
    """So many rows of `rows` with `size` bytes have at most `most` bytes, about; at least 1."""
    return max(1, min(_ROWS, most * max(1, rows) // max(1, size)))


def _plain(value: Any) -> str:
    """What JSON has no type for: bytes that are UTF-8, dates and numbers of decimals as text."""
    return value.decode() if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    main()
