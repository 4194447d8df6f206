"""Text as bytes: where it comes from, how it is cut, and which rank sees what."""

import hashlib
import sysconfig

import numpy as np
import pytest

from shardrt.train.config import Determinism
from shardrt.train.data import (
    HELD_OUT,
    cut_windows,
    held_out_starts,
    load_corpus,
    window_start,
)
from shardrt.train.held_out import IGNORED
from shardrt.train.recipe import Recipe
from shardrt.train.tokens import write as write_tokens
from tests.ranks import python

TEXT = np.arange(1000)  # every "byte" is its own position
BLOCK = 16


def batch(step=0, batch_size=8, text=TEXT, seed=0, rank=0, size=1, **settings):
    """This rank's tokens and targets of a step."""
    parts = Recipe(batch_size=batch_size, **settings).samples(step, rank, size)
    starts = [window_start(text.size, sample, BLOCK, seed) for part in parts for sample in part]
    return cut_windows(text, starts, BLOCK)


def held_out_batches(text, batch_size, block_size, **place):
    for starts, there in held_out_starts(text.size, batch_size, block_size, **place):
        tokens, targets = cut_windows(text, starts, block_size)
        targets[there:] = IGNORED
        yield tokens, targets


def test_a_target_is_the_byte_after_its_token():
    tokens, targets = batch()
    assert tokens.shape == targets.shape == (8, BLOCK)
    assert tokens.dtype == targets.dtype == np.int64
    np.testing.assert_array_equal(targets, tokens + 1)


def test_a_batch_is_a_function_of_seed_and_step():
    first = {(seed, step): batch(step, seed=seed)[0] for seed in (0, 1, 2**64 - 1) for step in (0, 1, 50)}
    for (seed, step), tokens in reversed(first.items()):  # in another order
        np.testing.assert_array_equal(batch(step, seed=seed)[0], tokens)
    assert len({tokens.tobytes() for tokens in first.values()}) == len(first)


def test_an_epoch_takes_every_window_once():
    count = (TEXT.size - BLOCK) // BLOCK
    starts = np.array([window_start(TEXT.size, sample, BLOCK, 0) for sample in range(2 * count)])
    for epoch in (starts[:count], starts[count:]):
        np.testing.assert_array_equal(np.diff(np.sort(epoch)), BLOCK)
        assert 0 <= epoch.min() and epoch.max() + BLOCK + 1 <= TEXT.size
    assert starts[0] % BLOCK != starts[count] % BLOCK, "another epoch cuts elsewhere"


def test_the_order_of_the_samples_is_for_ever():
    assert [window_start(1000, sample, 16, 7) for sample in (0, 1, 2, 61, 1000)] == [532, 580, 116, 445, 454]


def test_the_shortest_text_has_one_window():
    tokens, _ = batch(batch_size=2, text=np.arange(BLOCK + 1))
    np.testing.assert_array_equal(tokens, [np.arange(BLOCK)] * 2)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("invariant", [False, True])
def test_micro_batches_go_round_the_ranks(size, invariant):
    """Those of a round are together one of one rank; world-invariant: each is."""
    kind = Determinism["world-invariant" if invariant else "per-world"]
    how = {"batch_size": 24, "micro_batches": 4 if invariant else 3, "deterministic": kind}
    turns = [Recipe(**how).samples(3, rank, size) for rank in range(size)]
    parts = 4 if invariant else 3 * size
    each = 24 // parts
    assert [part for turn in zip(*turns, strict=True) for part in turn] == [
        range(72 + each * part, 72 + each * (part + 1)) for part in range(parts)
    ]


def test_a_token_file_is_a_corpus(tmp_path):
    text, file = np.arange(2000) % 300, tmp_path / "a.tokens"
    documents = {b"one.": text[:700], b"and another": text[700:]}
    write_tokens(file, documents, documents.__getitem__, vocabulary=300, tokenizer="none")
    corpus = load_corpus([file], block_size=BLOCK, vocabulary=300)
    np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.held_out]), text)
    assert corpus.held_out.size == 2000 // HELD_OUT
    assert (corpus.kind, corpus.bytes_per_token, corpus.gzip_bits_per_byte()) == ("tokens", 15 / 2000, None)
    assert corpus.documents.tolist() == [0, 700]
    with pytest.raises(
        ValueError, match="token 256 at offset 256 is not below the model's vocabulary of 256"
    ):
        load_corpus([file], block_size=BLOCK)
    two = load_corpus([file, file], block_size=BLOCK, vocabulary=300)
    assert two.train.size == 2 * corpus.train.size
    with pytest.raises(ValueError, match="a.tokens has 2000 tokens, too short"):
        load_corpus([file], block_size=200, vocabulary=300)
    with pytest.raises(ValueError, match="none.tokens does not exist"):
        load_corpus([tmp_path / "none.tokens"], block_size=BLOCK)


def test_held_out_text_is_the_end_and_nothing_of_it_is_trained_on(tmp_path):
    text = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8)
    (tmp_path / "a").write_bytes(text[:3000].tobytes())
    (tmp_path / "b").write_bytes(text[3000:].tobytes())
    corpus = load_corpus([tmp_path / "a", tmp_path / "b"], block_size=BLOCK)
    assert corpus.held_out.size == 10_000 // HELD_OUT
    np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.held_out]), text)
    assert corpus.digest == f"sha256 {hashlib.sha256(text).hexdigest()}"
    assert corpus.source == f"{tmp_path / 'a'}, {tmp_path / 'b'}"
    assert corpus.gzip_bits_per_byte() == pytest.approx(8, rel=0.1), "noise cannot be compressed"


def test_the_standard_library_is_the_same_text_in_another_process(tmp_path):
    program = "from shardrt.train.data import load_corpus; print(load_corpus(block_size=1).digest)"
    corpus = load_corpus(block_size=1)
    assert python("-c", program, cwd=tmp_path).stdout.strip() == corpus.digest
    assert corpus.train.size > 1_000_000 and b"import" in corpus.train.tobytes()


def test_what_is_installed_beside_the_standard_library_does_not_change_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    write(tmp_path / "json" / "decoder.py", "x = 1\n" * 100)
    write(tmp_path / "abc.py", "y = 2\n" * 100)
    before = load_corpus(block_size=4)
    assert before.train.tobytes().startswith(b"y = 2\n"), "sorted by name"
    for name in ("site-packages/numpy.py", "test/x.py", "json/tests/x.py", "abc.txt", "__pycache__/abc.pyc"):
        write(tmp_path / name, "z")
    write(tmp_path / "_sysconfigdata_linux.py", "z")
    assert load_corpus(block_size=4).digest == before.digest


def test_a_python_without_sources_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="pass text files with --data FILE"):
        load_corpus(block_size=4)


@pytest.mark.parametrize(
    ("bytes_", "enough"), [(HELD_OUT * (BLOCK + 1) - 1, False), (HELD_OUT * (BLOCK + 1), True)]
)
def test_the_error_for_a_short_text_says_how_much_is_needed(tmp_path, bytes_, enough):
    file = tmp_path / "text"
    file.write_bytes(b"a" * bytes_)
    if enough:
        assert load_corpus([file], block_size=BLOCK).held_out.size == BLOCK + 1
    else:
        with pytest.raises(ValueError, match=rf"text has {bytes_} bytes, too short.*need {bytes_ + 1}"):
            load_corpus([file], block_size=BLOCK)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("windows", [None, 1, 7, 1000])
def test_held_out_windows_are_each_on_one_rank_once(size, windows):
    count = (TEXT.size - 1) // BLOCK
    expected = count if windows is None else min(windows, count)
    place = [
        list(held_out_batches(TEXT, 3, BLOCK, windows=windows, rank=rank, size=size)) for rank in range(size)
    ]
    assert len({len(batches) for batches in place}) == 1, "every rank takes part in every forward"
    assert all(tokens.shape == (3, BLOCK) for batches in place for tokens, _ in batches)
    targets = np.concatenate([targets.ravel() for batches in place for _, targets in batches])
    taken = np.sort(targets[targets != IGNORED])
    assert taken.size == np.unique(taken).size == expected * BLOCK
    if windows is None:
        np.testing.assert_array_equal(taken, np.arange(1, count * BLOCK + 1))


def test_a_part_of_the_held_out_text_is_spread_over_it():
    ((tokens, _),) = held_out_batches(TEXT, 4, BLOCK, windows=4)
    np.testing.assert_array_equal(tokens[:, 0], np.arange(4) * 62 // 4 * BLOCK)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
