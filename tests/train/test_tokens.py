"""Token files: what is written is read, by other readers too; what is damaged or does not fit is one line."""

import json
import os
import random
import struct

import numpy as np
import pytest

from models.sampling import TokenisedText
from shardrt.__main__ import main
from shardrt.train import prepare
from shardrt.train.data import cut_windows
from shardrt.train.tokens import BadTokens, open_tokens, verify, write
from shardrt.untrusted import printable
from tests.damage import damaged_bytes, damaged_json
from tests.lab.jobs import save_tokenizer, tool_refuses
from tests.ranks import python


def made(path, documents, vocabulary=256):
    numbers = {str(number).encode(): np.asarray(document) for number, document in enumerate(documents)}
    return write(path, numbers, numbers.__getitem__, vocabulary=vocabulary, tokenizer="none")


@pytest.mark.parametrize(
    ("vocabulary", "kind"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
@pytest.mark.parametrize("lengths", [(1,), (3, 0, 5), (8, 8), (1000, 1, 7)])
def test_what_is_written_is_read(tmp_path, vocabulary, kind, lengths):
    random = np.random.default_rng(0)
    documents = [random.integers(0, vocabulary, length) for length in lengths]
    file = made(tmp_path / "a.tokens", documents, vocabulary)
    assert file.tokens.dtype == kind
    np.testing.assert_array_equal(file.tokens, np.concatenate(documents))
    lengths = [length for length in lengths if length]  # what has no token is no document
    np.testing.assert_array_equal(file.documents, np.cumsum([0, *lengths[:-1]]))
    assert file.largest == max(map(np.max, filter(len, documents)))
    verify(file)


@pytest.mark.parametrize("wrong", [-1, 256, 300, 2**32 + 7, 2**63 - 1])
def test_a_token_that_is_not_in_the_vocabulary_is_refused_and_not_made_another(tmp_path, wrong):
    with pytest.raises(BadTokens, match=f"token {wrong} is not in the vocabulary of 256"):
        made(tmp_path / "a.tokens", [[1, 2], [3, wrong]])
    assert list(tmp_path.iterdir()) == []


def test_the_library_reads_it_too(tmp_path):
    from safetensors.numpy import load_file

    made(tmp_path / "a.tokens", [[1, 2, 300], [4]], 301)
    tensors = load_file(tmp_path / "a.tokens")
    assert tensors["tokens"].tolist() == [1, 2, 300, 4]
    assert tensors["documents"].tolist() == [0, 3]


def test_nothing_is_left_of_a_file_that_could_not_be_made(tmp_path):
    def broken():
        yield b"0"
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        write(tmp_path / "a.tokens", broken(), lambda d: np.ones(3, int), vocabulary=9, tokenizer="none")
    with pytest.raises(BadTokens, match="no token"):
        made(tmp_path / "a.tokens", [[]])
    assert list(tmp_path.iterdir()) == []
    made(tmp_path / "a.tokens", [[1]])
    with pytest.raises(FileExistsError):
        made(tmp_path / "a.tokens", [[1]])


def test_a_token_beyond_a_vocabulary_is_named_with_its_place(tmp_path):
    file = made(tmp_path / "a.tokens", [[1, 2], [7, 3]], 300)
    file.check_vocabulary(8)
    with pytest.raises(BadTokens, match=r"a\.tokens: token 7 at offset 2 is not below the model's .* of 7"):
        file.check_vocabulary(7)


def test_every_flipped_byte_of_the_content_is_found(tmp_path):
    path = tmp_path / "a.tokens"
    made(path, [[1, 2, 3], [4, 5]], 300)
    whole = path.read_bytes()
    content = [
        place for place in range(4096, len(whole)) if not 4106 <= place < 4112
    ]  # padding means nothing
    for place in content:
        damaged = bytearray(whole)
        damaged[place] ^= 16
        path.write_bytes(damaged)
        with pytest.raises(BadTokens):
            verify(open_tokens(path))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda whole: b"", "not a token file"),
        (lambda whole: b"some text that is no header at all", "not a token file"),
        (lambda whole: whole[:-1], "not a token file"),
        (lambda whole: whole + b"x", "not a token file"),
        (lambda whole: whole.replace(b"shardrt tokens 1", b"shardrt tokens 2"), "not a token file of format"),
        (
            lambda whole: whole.replace(b'"vocabulary"', b'"vocabularx"'),
            "missing or invalid header entry 'vocabulary'",
        ),
        (lambda whole: whole.replace(b'"bytes":"3"', b'"bytes":"x"'), "missing or invalid header entry"),
        (lambda whole: whole[:-8] + bytes([255] * 7) + b"\x7f", "documents begin outside"),
        (lambda whole: whole[:-24] + whole[-8:] + whole[-16:-8] + whole[-24:-16], "documents begin outside"),
        (lambda whole: whole[:-16] + whole[-8:] + whole[-16:-8], "documents are not in ascending order"),
    ],
)
def test_what_is_no_token_file_is_one_line(tmp_path, damage, text, capsys):
    path = tmp_path / "a.tokens"
    made(path, [[1, 2, 3], [4, 5], [6]], 300)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadTokens, match=text):
        open_tokens(path)
    assert str(path) in tool_refuses(capsys, "data", "check", path)


def test_commands_make_and_check_bytes(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n\n{"text": "two!"}\n')
    out = tmp_path / "out.tokens"
    assert main(["data", "make", str(out), str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]) == 0
    assert bytes(open_tokens(out).tokens) == b"helloonetwo!"
    assert open_tokens(out).documents.tolist() == [0, 5, 8]
    assert main(["data", "check", str(out), "--vocabulary", "256"]) == 0
    assert "12 tokens of uint8 in 3 documents, 12 bytes of text (1.00 a token)" in capsys.readouterr().out
    assert "token 104 at offset 0" in tool_refuses(capsys, "data", "check", out, "--vocabulary", 100)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["out.tokens", "missing.txt"], "missing.txt: No such file"),
        (["out.txt", "a.txt"], "must end in .tokens"),
        (["none/out.tokens", "a.txt"], "error: none: No such file"),
        (["out.tokens", "empty.jsonl", "empty.txt"], "empty.jsonl, empty.txt: there is no text"),
        (["out.tokens", "a.gz"], "a.gz: not a text, but compressed; uncompress it, or call JSON lines NAME"),
        (["out.tokens", "a.zst"], "a.zst: not a text, but compressed; uncompress it"),
        (["out.tokens", "a.pqt"], "a.pqt: not a text, but Parquet, whose name must end in .parquet"),
        (["out.tokens", "utf16.jsonl"], "utf16.jsonl, line 1: "),
        (["out.tokens", "null.jsonl"], "null.jsonl, line 2: column 'text' must have strings, got NoneType"),
        (["out.tokens", "half.jsonl"], "half.jsonl, line 1: column 'text' has text that is not Unicode"),
        (["out.tokens", "cut.jsonl"], "cut.jsonl, line 2: Unterminated string"),
        (
            ["out.tokens", "long.txt", "--tokenizer", "t.json"],
            "long.txt: the file has 41 bytes; the limit is 40",
        ),
        (["out.tokens", "a.txt", "--end", "x"], "--end needs --tokenizer"),
        (["out.tokens", "bad.jsonl"], "bad.jsonl, line 2: it has no column 'text'; its columns are tex"),
        (["out.tokens", "a.txt", "--tokenizer", "bad.jsonl"], "bad.jsonl: not a tokenizer.json"),
        (["there.tokens", "a.txt"], "there.tokens: exists already"),
    ],
)
def test_what_cannot_be_made_is_one_line(tmp_path, monkeypatch, capsys, arguments, text):
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "there.tokens").write_text("")
    (tmp_path / "long.txt").write_text("a" * 41)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "utf16.jsonl").write_bytes('{"text": "a"}\n'.encode("utf-16"))
    (tmp_path / "null.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "a\\ud800"}\n')
    (tmp_path / "cut.jsonl").write_text('{"text": "a"}\n{"text": "b')
    for name, head in {"a.gz": b"\x1f\x8b", "a.zst": b"\x28\xb5\x2f\xfd", "a.pqt": b"PAR1"}.items():
        (tmp_path / name).write_bytes(head + b"a" * 900)
    save_tokenizer(tmp_path / "t.json", {"[UNK]": 0, "a": 1})
    monkeypatch.setattr(prepare, "TEXT", 40)
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"tex": 1}\n')
    assert text in tool_refuses(capsys, "data", "make", *arguments)
    assert not (tmp_path / "out.tokens").exists()


def test_marks_of_byte_order_and_ends_of_lines_of_other_systems_are_no_text(tmp_path):
    lines, out = tmp_path / "a.jsonl", tmp_path / "a.tokens"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}')
    assert main(["data", "make", str(out), str(lines)]) == 0
    assert bytes(open_tokens(out).tokens) == b"onetwo"


def test_a_tokenizer_of_a_file(tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json", {"<end>": 0, "[UNK]": 1, "a": 2, "b": 3})
    (tmp_path / "texts.jsonl").write_text('{"t": "a b c"}\n{"t": "b"}\n')
    command = ["-m", "shardrt", "data", "make", "out.tokens", "texts.jsonl", "--field", "t"]
    done = python(*command, "--tokenizer", "tokenizer.json", "--end", "<end>", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file = open_tokens(tmp_path / "out.tokens")
    assert np.asarray(file.tokens).tolist() == [2, 3, 1, 0, 3, 0]
    assert file.documents.tolist() == [0, 4]
    assert (file.vocabulary, file.bytes) == (4, 6)
    assert file.tokenizer.startswith("tokenizer.json sha256 ")
    assert file.end == 0


@pytest.mark.parametrize(("highest", "kind"), [(255, "uint8"), (300, "uint16"), (70_000, "uint32")])
def test_ids_with_holes_are_stored_as_they_are(tmp_path, monkeypatch, highest, kind):
    monkeypatch.chdir(tmp_path)
    vocabulary = {"[UNK]": 0, "a": 7, "b": highest}
    save_tokenizer(tmp_path / "tokenizer.json", vocabulary, add_tokens={"tokens": ["<added>"]})
    (tmp_path / "a.txt").write_text("a b <added> c")
    assert main(["data", "make", "a.tokens", "a.txt", "--tokenizer", "tokenizer.json", "--end", "b"]) == 0
    file = open_tokens(tmp_path / "a.tokens")
    assert file.tokens.tolist() == [7, highest, 3, 0, highest], "an added token is numbered by the count"
    assert (file.tokens.dtype, file.vocabulary, file.largest) == (kind, highest + 1, highest)
    assert TokenisedText(tmp_path / "tokenizer.json").size == highest + 1, "no model may have fewer"


def test_what_a_tokenizer_says_of_its_own_batches_does_not_cut_or_fill_documents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vocabulary = {"[UNK]": 0, "a": 1, "b": 2}
    batches = {"enable_truncation": {"max_length": 2}, "enable_padding": {"length": 9}}
    save_tokenizer(tmp_path / "tokenizer.json", vocabulary, **batches)
    documents = ["a b " * 3, "a"] * 50
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    monkeypatch.setattr(prepare, "_BATCH", 40)  # several batches
    assert main(["data", "make", "a.tokens", "a.jsonl", "--tokenizer", "tokenizer.json"]) == 0
    assert open_tokens(tmp_path / "a.tokens").tokens.tolist() == [1, 2, 1, 2, 1, 2, 1] * 50
    assert open_tokens(tmp_path / "a.tokens").documents.tolist() == [
        s for i in range(50) for s in (7 * i, 7 * i + 6)
    ]


def test_a_file_that_is_cut_short_while_it_is_in_use_is_an_error_and_no_signal(tmp_path):
    file = made(tmp_path / "a.tokens", [np.arange(5000)], 5000)
    part = file.tokens[100:4000][50:]
    np.testing.assert_array_equal(part[:10], np.arange(150, 160))
    assert (part.size, int(part[-1]), part.dtype) == (3850, 3999, np.uint16)
    os.truncate(file.path, 4096 + 2 * 1000)
    np.testing.assert_array_equal(part[:800], np.arange(150, 950))
    with pytest.raises(OSError, match="the file was truncated while in use: 200 bytes are missing") as caught:
        cut_windows(file.tokens, [0, 3900], 99)
    assert caught.value.filename == str(file.path)


def header_of(path, **facts):
    """The same file with other facts in its header."""
    whole = path.read_bytes()
    header = json.loads(whole[8:4096])
    header["__metadata__"] |= facts
    path.write_bytes(whole[:8] + json.dumps(header).encode().ljust(4088) + whole[4096:])


@pytest.mark.parametrize(
    ("name", "number"),
    [("bytes", text) for text in ("0x10", "-1", "1_0", " 5", "٣", "1" + "0" * 400, "9" * 3000, "nan", "")]
    + [("vocabulary", "-1"), ("largest", "-1"), ("end", "-1")],
)
def test_numbers_of_a_header_that_are_none_or_too_large_are_one_line(tmp_path, capsys, name, number):
    path = tmp_path / "a.tokens"
    made(path, [[1, 2, 3], [4, 5]], 300)
    header_of(path, **{name: number})
    assert f"missing or invalid header entry '{name}'" in tool_refuses(capsys, "data", "check", path)


def test_tokens_that_are_no_bytes_of_text_and_types_that_are_no_tokens_are_one_line(tmp_path, capsys):
    path = tmp_path / "a.tokens"
    made(path, [[1, 2, 3, 9], [4, 5, 6, 7]], 300)
    header_of(path, bytes="0")
    assert "tokens have 0 bytes of text" in tool_refuses(capsys, "data", "check", path)
    header_of(path, bytes="8")
    path.write_bytes(path.read_bytes().replace(b'"U16"', b'"F16"'))
    assert tool_refuses(capsys, "data", "check", path)


@pytest.mark.parametrize("seed", range(2))
def test_damaged_token_files_and_lines_are_read_or_refused_in_a_line(tmp_path, capsys, seed):
    chosen, path, lines = random.Random(seed), tmp_path / "a.tokens", tmp_path / "a.jsonl"
    made(path, [[1, 2, 3], [4, 5]], 300)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header, codes = json.loads(whole[8 : 8 + length]), set()
    for number in range(60):
        text = damaged_json(header, chosen).ljust(length)
        data = struct.pack("<Q", len(text)) + text + whole[8 + length :]
        path.write_bytes(damaged_bytes(whole[:300] + whole[300:], chosen) if number % 3 == 0 else data)
        lines.write_bytes(b'{"text": "one"}\n' + damaged_json({"text": "two", "n": [1, {}]}, chosen) + b"\n")
        out = tmp_path / f"{number}.tokens"
        for command in (["check", path], ["make", out, lines]):
            code = main(["data", *map(str, command)])
            message = "".join(capsys.readouterr())
            assert code in (0, 65) and message.count("\n") == 1 and printable(message[:-1]) == message[:-1], (
                message
            )
            codes.add((command[0], code))
    assert codes == {("check", 0), ("check", 65), ("make", 0), ("make", 65)}


def test_lines_that_are_deep_and_texts_that_are_pipes_are_one_line(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    os.mkfifo(tmp_path / "pipe.txt")
    os.symlink("/dev/zero", tmp_path / "zero.jsonl")
    os.symlink("/dev/zero", tmp_path / "zero.tokens")
    for name, message in (
        ("a.jsonl", "a.jsonl, line 2: nested more than 100 levels deep"),
        ("pipe.txt", "is not a regular file"),
        ("zero.jsonl", "is not a regular file"),
    ):
        assert message in tool_refuses(capsys, "data", "make", tmp_path / "b.tokens", tmp_path / name)
    zero = tool_refuses(capsys, "data", "check", tmp_path / "zero.tokens")
    assert "is not a regular file" in zero
