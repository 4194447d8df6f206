"""Preparation goes on after a kill at any place, and its file is the same."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from shardrt.__main__ import main
from shardrt.train import chat, chat_file, prepare, unfinished
from shardrt.train.chat import ChatFolder
from shardrt.train.prepare import Preparation, make_tokens, once
from shardrt.train.tokens import BadTokens, TokenWriter
from shardrt.train.unfinished import Unfinished
from shardrt.train.workers import in_order
from shardrt.untrusted import Refused
from tests.lab import talks
from tests.lab.jobs import save_tokenizer
from tests.ranks import ROOT


@pytest.fixture(autouse=True)
def everything_is_kept(monkeypatch):
    """Small batches, each of which is kept."""
    monkeypatch.setattr(unfinished, "PERIOD", 0.0)
    monkeypatch.setattr(prepare, "_BATCH", 200)
    monkeypatch.setattr(chat, "_BATCH", 100)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Lines, a text and compressed lines: 81 documents."""
    import gzip

    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"document {number} {'é' * (number % 7)}"}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("one document of its own")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    return [tmp_path / "a.jsonl", tmp_path / "b.txt", tmp_path / "c.jsonl.gz"]


def killed_in(make, owner, name, calls):
    """Run `make` in a child that kills itself at a call of owner.name."""
    child = os.fork()
    if not child:
        whole, seen = getattr(owner, name), []

        def dies(*given, **more):
            seen.append(1)
            if len(seen) == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*given, **more)

        setattr(owner, name, dies)
        make()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def left(folder):
    """The names of what is unfinished."""
    return [path.name for path in folder.glob(".*.part")]


@pytest.mark.parametrize(
    ("owner", "name", "calls", "kept"),
    [
        (TokenWriter, "add", 2, 0),
        (Unfinished, "keep", 1, 0),
        (Unfinished, "keep", 3, 28),
        (TokenWriter, "add", 38, 28),
        (TokenWriter, "add", 44, 42),
        (os, "replace", 4, 42),
        (Unfinished, "_header", 1, 81),
        (os, "rename", 1, 81),
    ],
)
def test_bytes_go_on_where_a_process_was_killed(sources, tmp_path, capsys, owner, name, calls, kept):
    make_tokens(tmp_path / "whole.tokens", sources, Preparation())
    out = tmp_path / "out.tokens"
    killed_in(lambda: make_tokens(out, sources, Preparation()), owner, name, calls)
    assert not out.exists() and len(left(tmp_path)) == 1
    capsys.readouterr()
    make_tokens(out, sources, Preparation())
    assert out.read_bytes() == (tmp_path / "whole.tokens").read_bytes()
    said = re.search(r"a.jsonl and 2 more: goes on after (\d+) documents", capsys.readouterr().out)
    assert kept == int(said[1] if said else 0)
    assert left(tmp_path) == []


def test_a_command_that_is_killed_goes_on(sources, tmp_path, capsys):
    vocabulary = {"[UNK]": 0, "<end>": 1, "document": 2} | {str(number): 3 + number for number in range(40)}
    save_tokenizer(tmp_path / "tokenizer.json", vocabulary)
    command = ["data", "make", "out.tokens", *map(str, sources), "--tokenizer", "tokenizer.json"]
    command += ["--end", "<end>"]
    program = (
        "import sys, time; from shardrt.__main__ import main; from shardrt.train import prepare, unfinished\n"
        "prepare._BATCH, unfinished.PERIOD = 100, 0\n"
        "keep = unfinished.Unfinished.keep\n"
        "unfinished.Unfinished.keep = lambda *given: (keep(*given), time.sleep(0.2))\n"
        "main(sys.argv[1:])"
    )
    run = subprocess.Popen([sys.executable, "-c", program, *command], env={**os.environ, "PYTHONPATH": ROOT})
    kept = tmp_path / f".out.tokens.{os.uname().nodename}.part" / "kept.json"
    while not kept.exists() and run.poll() is None:
        time.sleep(0.01)
    run.kill()
    run.wait()
    assert kept.exists() and not (tmp_path / "out.tokens").exists()
    assert main(command) == 0 and "goes on after" in capsys.readouterr().out
    command[2] = "whole.tokens"
    assert main(command) == 0 and "goes on" not in capsys.readouterr().out
    assert (tmp_path / "out.tokens").read_bytes() == (tmp_path / "whole.tokens").read_bytes()


def test_conversations_go_on_too(tmp_path, capsys):
    pytest.importorskip("jinja2")
    folder = ChatFolder(talks.furnish(tmp_path / "model", "chatml"))
    lines = talks.write(tmp_path / "talks.jsonl", [*talks.CONVERSATIONS * 3, talks.said("hi", "you")])
    chat_file.make(tmp_path / "whole.chat", [lines], folder)
    out = tmp_path / "out.chat"
    killed_in(lambda: chat_file.make(out, [lines], folder), Unfinished, "keep", 3)
    chat_file.make(out, [lines], folder)
    assert "talks.jsonl: goes on after 4 documents, which are tokenised" in capsys.readouterr().out
    assert out.read_bytes() == (tmp_path / "whole.chat").read_bytes()
    assert left(tmp_path) == []


def test_parquet_goes_on_too(tmp_path, capsys):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a").mkdir()
    for number in range(3):
        table = pa.table({"text": [f"{number} and {row}" for row in range(100)]})
        parquet.write_table(table, tmp_path / "a" / f"{number}.parquet", row_group_size=30)
    make_tokens(tmp_path / "whole.tokens", [tmp_path / "a"], Preparation())
    out = tmp_path / "out.tokens"
    killed_in(lambda: make_tokens(out, [tmp_path / "a"], Preparation()), TokenWriter, "add", 250)
    make_tokens(out, [tmp_path / "a"], Preparation())
    assert "goes on after 2" in capsys.readouterr().out
    assert out.read_bytes() == (tmp_path / "whole.tokens").read_bytes()


@pytest.mark.parametrize("change", ["source", "setting", "bytes", "kept"])
def test_work_that_is_no_longer_the_same_is_done_again(sources, tmp_path, capsys, change):
    out = tmp_path / "out.tokens"
    killed_in(lambda: make_tokens(out, sources, Preparation()), Unfinished, "keep", 4)
    (part,) = tmp_path.glob(".*.part")
    how = Preparation(split="test") if change == "setting" else Preparation()
    if change == "source":
        os.utime(sources[0], (1, 1))
    elif change == "bytes":
        with open(part / "tokens", "r+b") as file:
            file.seek(unfinished.HEADER)
            file.write(b"?")
    elif change == "kept":
        (part / "kept.json").write_text('{"made_from": 1, "facts": []}')
    make_tokens(out, sources, how)
    expected = "goes on" if change == "setting" else ""
    assert expected in capsys.readouterr().out
    make_tokens(tmp_path / "whole.tokens", sources, how)
    assert out.read_bytes() == (tmp_path / "whole.tokens").read_bytes()


def test_two_processes_do_not_make_one_file(sources, tmp_path):
    out = tmp_path / "out.tokens"
    first = Unfinished(out, "a", {"tokens": np.uint8, "documents": np.int64})
    with pytest.raises(Refused, match="out.tokens: another process is making it"):
        make_tokens(out, sources, Preparation())
    first.close()
    assert left(tmp_path) == []
    make_tokens(out, sources, Preparation())


def test_what_is_wrong_with_a_record_leaves_nothing_and_what_the_system_does_leaves_the_work(
    sources, tmp_path, monkeypatch
):
    out = tmp_path / "out.tokens"
    whole, full = TokenWriter.add, [30]

    def no_room(*given):
        full[0] -= 1
        if not full[0]:
            raise OSError(28, "No space left on device")
        whole(*given)

    monkeypatch.setattr(TokenWriter, "add", no_room)
    with pytest.raises(OSError, match="No space"):
        make_tokens(out, sources, Preparation())
    assert len(left(tmp_path)) == 1
    sources[0].write_text('{"text": 1}\n')
    with pytest.raises(BadTokens, match="must have strings, got int"):
        make_tokens(out, sources, Preparation())
    assert left(tmp_path) == []


def test_the_work_of_a_host_that_is_gone_is_taken_over(sources, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.tokens"
    killed_in(lambda: make_tokens(out, sources, Preparation()), Unfinished, "keep", 4)
    (part,) = tmp_path.glob(".*.part")
    other = part.rename(tmp_path / ".out.tokens.elsewhere.part")
    os.utime(other / "kept.json", (1, 1))
    make_tokens(out, sources, Preparation())
    assert "goes on after" in capsys.readouterr().out and left(tmp_path) == []


def test_what_is_unfinished_for_a_week_is_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / ".tokens"
    old, new = folder / ".a[1].chat.host.part", folder / ".b.chat.host.part"
    for each in (old, new):
        each.mkdir(parents=True)
    os.utime(old, (0, 0))
    once("a[1].chat", lambda out: out.touch())
    assert {path.name for path in folder.iterdir()} == {"a[1].chat", "a[1].lock", new.name}


def test_results_are_in_the_order_of_the_things_and_workers_are_made_when_needed():
    made = []

    def work(worker, thing):
        time.sleep(0.002 * (thing % 3))
        if thing == 90:
            raise KeyError(thing)
        return thing * thing

    given = (work, range(30), "first", lambda: made.append(1), 4)
    assert list(in_order(*given)) == [n * n for n in range(30)]
    assert 1 <= len(made) <= 3
    assert list(in_order(work, [5], "first", lambda: made.append(9), 4)) == [25] and 9 not in made
    with pytest.raises(KeyError):
        list(in_order(work, range(100), "first", str, 4))
