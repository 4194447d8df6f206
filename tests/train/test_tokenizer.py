"""The library of tokenizers in a process of its own: what files make it do is one line here."""

import base64
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from models.sampling import TokenisedText
from shardrt.__main__ import main
from shardrt.train import tokenizer_process
from shardrt.train.tokenizer import Tokenizer
from shardrt.train.tokens import BadTokens, open_tokens
from tests.lab.jobs import save_tokenizer, tool_refuses

tokenizers = pytest.importorskip("tokenizers")


def write(path, **parts):
    """A tokenizer.json of words, other `parts` of it as they are given."""
    save_tokenizer(path, {"a": 0, "b": 300})
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tokenizer.json"


def of_regex(text):
    return {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}


PANICS = {
    "a map that points out of itself": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(b"\4\0\0\0" + b"\xff" * 4).decode(),
        }
    },
    "pieces of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "an expression that tries for ever": {"pre_tokenizer": of_regex("(a+)+$")},
    "no token for unknown words": {},
}


def test_it_is_the_library(path):
    given = json.loads(write(path).read_text())
    path.write_text(json.dumps(given))
    tokenizer, own = Tokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    texts = ["a b a", "", "b", "a" + " b" * 1000]
    assert [ids.tolist() for ids in tokenizer.encode(texts)] == [own.encode(text).ids for text in texts]
    assert tokenizer.encode([]) == [] and tokenizer.vocabulary == 301
    assert tokenizer.decode([0, 300]) == own.decode([0, 300]) == "a b"
    assert (tokenizer.token_to_id("b"), tokenizer.token_to_id("no")) == (300, None)
    child = tokenizer._process._child
    tokenizer.close()
    assert child.returncode is not None and tokenizer.decode([0]) == "a", "another is started"


@pytest.mark.parametrize("case", PANICS)
def test_panics_of_the_library_are_one_line(path, tmp_path, capfd, case):
    write(path, **PANICS[case])
    (tmp_path / "a.txt").write_text("a" * 40 + "c\n")
    command = ("data", "make", tmp_path / "a.tokens", tmp_path / "a.txt", "--tokenizer", path)
    assert tool_refuses(capfd, *command).startswith(f"error: {path}: the library tokenizers ")
    assert not list(tmp_path.glob("*.tokens*"))
    with pytest.raises(BadTokens, match="the library tokenizers"):
        TokenisedText(path).encode("a" * 40 + "c")


def test_a_library_without_end_or_that_ends_the_process_is_one_line(path, tmp_path, monkeypatch):
    write(path)
    for does, message in (
        ("print('why', file=sys.stderr); os.abort()", "SIGABRT: why"),
        ("while True: pass", "it took more than 60 s"),
        ("x = bytearray(1 << 34)", "not a tokenizer.json .MemoryError"),
        ("[print('x' * 99999, file=sys.stderr) for _ in range(99)]; sys.exit(3)", r"SIGXFSZ|File too large"),
        ("os._exit(3)", "exit code 3"),
    ):
        package = tmp_path / "package" / "tokenizers"
        package.mkdir(parents=True, exist_ok=True)
        code = "import os, sys\nclass Tokenizer:\n    @staticmethod\n    def from_str(text):\n        "
        code += f"{does}\n"
        (package / "__init__.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        quick = tmp_path / "process.py"
        source = open(tokenizer_process.__file__).read()
        quick.write_text(source.replace("ITIMER_PROF, seconds(", "ITIMER_PROF, 1.0 + 0 * seconds("))
        monkeypatch.setattr(tokenizer_process, "__file__", str(quick))
        with pytest.raises(BadTokens, match=message) as error:
            Tokenizer(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        monkeypatch.undo()


def test_the_process_ends_with_the_one_that_asks(path, tmp_path):
    write(path)
    tokenizer = Tokenizer(path)
    child = tokenizer._process._child
    del tokenizer
    assert child.returncode is not None
    script = "import os, sys; from pathlib import Path; from shardrt.train.tokenizer import Tokenizer\n"
    script += f"t = Tokenizer(Path({str(path)!r})); print(t._process._child.pid, flush=True)\n"
    script += "os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 200
    while os.path.exists(f"/proc/{int(done.stdout)}/cmdline") and time.monotonic() < deadline:
        if not open(f"/proc/{int(done.stdout)}/cmdline").read():
            break  # a zombie, whose parent does not look
        time.sleep(0.05)
    else:
        assert not os.path.exists(f"/proc/{int(done.stdout)}"), "it is still there"


def test_a_tokenizer_that_is_no_file_or_too_long_is_one_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "pipe.json")
    os.symlink("/dev/zero", tmp_path / "zero.json")
    (tmp_path / "raw.json").write_bytes(b"\xff\xfe")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    for name in ("pipe", "zero", "raw", "deep"):
        made = ("data", "make", tmp_path / "a.tokens", tmp_path / "a.txt")
        line = tool_refuses(capsys, *made, "--tokenizer", tmp_path / f"{name}.json")
        assert f"{name}.json" in line


def test_many_documents_go_through_one_process(path, tmp_path):
    write(path)
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n' * 3000)
    made = [str(tmp_path / name) for name in ("a.tokens", "a.jsonl")]
    assert main(["data", "make", *made, "--tokenizer", str(path)]) == 0
    assert open_tokens(tmp_path / "a.tokens").tokens.tolist() == [0, 300] * 3000
