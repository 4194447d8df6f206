"""Files, names and texts of others: one line, a documented code, nothing raw on a terminal."""

import io
import json
import os
import random
import sys
import warnings

import numpy as np
import pytest

from shardrt import _kernel_cache
from shardrt.__main__ import main
from shardrt.train.screen import Screen
from shardrt.untrusted import Refused, open_regular, printable, private, read_regular, say, strict_json
from tests import test_watching as watching
from tests.damage import ESCAPE, damaged_bytes, damaged_json

ABOUT = watching.ABOUT | {
    "shardrt": "0.1",
    "memory_mb_before": 90.5,
    "host_bytes": {"offloaded": 12},
    "began": 1.7e9,
    "environment": {"numpy": "2.0", "MPI": "MPICH 4.2"},
}
STEPS = [watching.step(number, mfu=0.3, expert_load=2.5, empty_experts=0.125) for number in (1, 2, 3)]
EVALUATION = {"kind": "evaluation", "step": 3, "held_out_loss": 5.0, "held_out_bits_per_byte": 2.0}
EVALUATION |= {"held_out_accuracy": 0.5}
RECORDS = [ABOUT, *STEPS, EVALUATION, {"kind": "end", "seconds": 12.5, "sample": "text"}]


def span(name, stream, start, length, rank=0):
    times = {"ts": start, "dur": length}
    return {"name": name, "cat": stream, "ph": "X", "pid": rank, "tid": 1, "args": {}, **times}


EVENTS = [
    {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "rank 0 on host"}},
    *(span("step 3", "compute", 10.0, 90.0, rank) for rank in (0, 1)),
    *(span("forward blocks.0", "compute", 12.0, 20.0, rank) for rank in (0, 1)),
    span("backward blocks.0", "compute", 40.0, 30.0),
    span("wait", "compute", 41.0, 3.0),
    span("all_gather blocks.0", "gather", 11.0, 15.0),
    {"name": "slots", "ph": "C", "pid": 0, "tid": 0, "ts": 12.0, "args": {"slots": 1}},
    {"name": "after all_gather", "cat": "event", "id": "0.1.0", "pid": 0, "tid": 2, "ph": "s", "ts": 13.0},
]


def tried(capsys, *command):
    """The exit code; what was printed is checked: one line for an error, and nothing that moves a cursor."""
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as warned:
        code = main([*map(str, command)])
    out, error = capsys.readouterr()
    for line in (out + error).split("\n"):
        assert printable(line) == line, (command, line)
    assert not any(printable(str(w.message)) != str(w.message) for w in warned)
    if code == 65 and error:
        assert error.startswith("error: ") and error.count("\n") == 1 and len(error) < 5000, error
    return code


@pytest.mark.parametrize("seed", range(2))
def test_damaged_runs_are_reported_or_refused_in_a_line(tmp_path, capsys, seed):
    chosen = random.Random(seed)
    codes = set()
    for number in range(40):
        run = tmp_path / f"run{number}"
        run.mkdir()
        lines = [json.dumps(record).encode() for record in RECORDS]
        events = sound = json.dumps({"traceEvents": EVENTS}).encode()
        if number % 2:
            place = chosen.randrange(len(lines))
            lines[place] = damaged_json(RECORDS[place], chosen)
        else:
            events = damaged_json({"traceEvents": EVENTS}, chosen)
        text = b"\n".join(lines) + b"\n"
        if number % 5 == 0:
            text, events = damaged_bytes(text, chosen), damaged_bytes(events, chosen)
        (run / "metrics.jsonl").write_bytes(text)
        (run / "trace.json").write_bytes(events)
        (run / "config.toml").write_bytes(damaged_bytes(b"name = 'x'\n", chosen))
        drawn = [("report", run)] if number % 8 < 2 else []  # charts take most of the time, so only where
        drawn += [("trace", run)] if events != sound or number < 2 else []  # something is damaged
        for command in (("watch", "--once", run), ("doctor", run), *drawn):
            code = tried(capsys, *command)
            assert code in (0, 1, 65), (command, code)
            codes.add((command[0], code))
        if (run / "report.html").exists():
            page = (run / "report.html").read_text(encoding="utf-8")
            assert printable(page, lines=True) == page
    assert {("report", 0), ("trace", 0), ("trace", 65), ("watch", 0), ("watch", 65)} <= codes


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").write_bytes(bytes(101))
    (tmp_path / "link").symlink_to("/dev/zero")
    for name, report in (
        ("pipe", "regular file"),
        ("link", "regular file"),
        ("long", "the file has 101 bytes; the limit is"),
    ):
        with pytest.raises(Refused, match=report) as error:
            read_regular(tmp_path / name, 100)
        assert str(tmp_path / name) in str(error.value)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(Refused, match="more than 10 bytes"):  # of no size, as the system says
        read_regular("/proc/self/status", 10)
    assert read_regular(tmp_path / "long", 101) == bytes(101)


def test_json_that_no_program_of_ours_writes_is_refused():
    assert strict_json(b'{"a": [1, -2.5, true, null, "\\ud800"]}') == {"a": [1, -2.5, True, None, "\ud800"]}
    assert strict_json("[" * 100 + "]" * 100)
    for text in ("NaN", "-Infinity", "1e999", "[1e300]", "1" + "0" * 400, "9" * 5000, "{]", b"\xff"):
        with pytest.raises(ValueError):
            strict_json(text)
    for depth in (101, 900, 100_000):
        for opening, closing in ("[]", ('{"a":', "}")):
            with pytest.raises(ValueError, match="deep|Expecting value"):
                strict_json(opening * depth + closing * depth)
    with pytest.raises(ValueError, match="duplicate key 'a'"):
        strict_json('{"a": 1, "b": 2, "a": 3}')
    assert strict_json("[1e999, -Infinity]", any_number=True) == [np.inf, -np.inf]
    with pytest.raises(ValueError, match="NaN"):
        strict_json("[NaN]", any_number=True)


def test_what_a_terminal_obeys_is_written_out():
    assert printable("step 1  é 日本 \xa0 😀") == "step 1  é 日本 \xa0 😀"
    assert printable("a\x1b[2J\x07\x9b1m\u202e\udcff\r\nb") == r"a\x1b[2J\x07\x9b1m\u202e\udcff\r\nb"
    assert printable("a\tb\n\rc\x1b", lines=True) == "a\tb\n\\rc\\x1b"
    assert all(printable(chr(c), lines=True).isprintable() for c in range(0x200) if chr(c) not in "\n\t\xa0")


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_training_and_sampled_text_reach_a_terminal_of_any_encoding_with_nothing_raw(
    monkeypatch, encoding, terminal
):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "dumb")  # no colours, which are escape sequences of our own
    Screen().say(f"--- sample ---\nimport é{ESCAPE}1")
    say(f"é{ESCAPE}", lines=True)
    report = out.buffer.getvalue().decode(encoding)
    assert "\x1b" not in report and "\x07" not in report and "\\x1b[2J" in report and "\\ud800" in report
    assert ("\\xe9" in report) == (encoding == "ascii") and "--- sample ---\nimport" in report


HOSTILE = f"a{ESCAPE}b".replace("\ud800", "\udcff")  # as a name of a file can be


def test_names_and_texts_of_others_are_printed_by_no_tool_as_they_are(tmp_path, capsys):
    run = tmp_path / HOSTILE
    (run / "flight").mkdir(parents=True)
    about = ABOUT | {"architecture": ESCAPE, "data": ESCAPE, "environment": {ESCAPE: ESCAPE}}
    records = [about, *STEPS, EVALUATION, {"kind": ESCAPE, "x": ESCAPE}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "trace.json").write_text(json.dumps({"traceEvents": [*EVENTS, span(ESCAPE, ESCAPE, 20.0, 1.0)]}))
    (run / "flight" / "hang.txt").write_text(ESCAPE.replace("\ud800", ""))
    (run / "flight" / f"rank-{HOSTILE.replace('/', '')}.bin").write_bytes(b"x")
    (run / f"{HOSTILE}.tokens").write_bytes(b"x")
    for command in (("watch", "--once", run), ("report", run), ("trace", run), ("doctor", run)):
        assert tried(capsys, *command) in (0, 1, 65)
    assert printable((run / "report.html").read_text(), lines=True) == (run / "report.html").read_text()
    for command in (
        ("ckpt", "ls", run),
        ("data", "check", run / f"{HOSTILE}.tokens"),
        ("report", run / "no"),
    ):
        assert tried(capsys, *command) == 65
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / "checkpoints" / "step-00000001" / "manifest.json").write_text("{" + json.dumps(ESCAPE))
    assert tried(capsys, "ckpt", "ls", run) == 0 and tried(capsys, "ckpt", "verify", run) == 65
    with pytest.raises(SystemExit):
        main(["report", str(run), HOSTILE])
    assert "\x1b" not in capsys.readouterr().err


def test_a_folder_that_others_can_write_is_reported(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    assert private(folder) == "" == private(folder / "not" / "there")
    folder.chmod(0o1777)  # sticky: what is there stays, and anybody can add what is not
    (folder / "own").mkdir(mode=0o700)
    assert private(folder / "own") == "" and "can be written by other users" in private(folder / "new")
    folder.chmod(0o777)
    for place in (folder, folder / "own", folder / "own" / "new"):
        assert private(place) == f"{folder} can be written by other users"
    (tmp_path / "link").symlink_to(folder)
    assert "cache can be written" in private(tmp_path / "link")
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    folder.chmod(0o755)
    if folder.stat().st_uid:  # root's folders are everybody's
        assert "belongs to another user" in private(folder)
        assert private(folder, folder.stat().st_uid) == ""


def test_kernels_are_not_kept_where_others_can_put_code(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "modules", {name: m for name, m in sys.modules.items() if name != "numba"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(open_to_all))
    own = str(tmp_path / "home" / "shardrt" / "numba")
    with pytest.warns(UserWarning, match="can be written by other users, who could put code there") as report:
        _kernel_cache.choose(tmp_path)
    assert os.environ["NUMBA_CACHE_DIR"] == own and own in str(report[0].message)
    assert os.stat(own).st_mode & 0o777 == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _kernel_cache.choose(tmp_path)  # which is safe
        assert os.environ["NUMBA_CACHE_DIR"] == own
        monkeypatch.delenv("NUMBA_CACHE_DIR")
        _kernel_cache.choose(tmp_path)
        assert "NUMBA_CACHE_DIR" not in os.environ
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__").chmod(0o777)
    (tmp_path / "home" / "shardrt").chmod(0o777)  # nor there: then nobody can know where
    with pytest.warns(UserWarning, match="__pycache__ can be written"):
        _kernel_cache.choose(tmp_path)
    assert "shardrt-numba-" in os.environ["NUMBA_CACHE_DIR"]
    assert private(os.environ["NUMBA_CACHE_DIR"]) == ""
