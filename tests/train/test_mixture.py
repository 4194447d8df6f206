"""Mixtures: shares are exact in every prefix, samples are functions of their numbers, runs resume bitwise."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from models import train
from shardrt.train.data import cut_windows, load_corpus
from shardrt.train.mixture import PERIOD, Joined, schedule, sources
from shardrt.train.prepare import Preparation, prepared
from shardrt.train.tokens import BadTokens, open_tokens, write
from tests.lab import jobs
from tests.lab.jobs import curves, remove_after
from tests.train.dataset.make import HERE

BLOCK = 8


@pytest.mark.parametrize(
    "weights",
    [
        [Fraction(7, 10), Fraction(3, 10)],
        [1],
        [1, 1],
        [5, 3, 1, 1],
        [Fraction(1, 3), Fraction(1, 3), Fraction(334, 1000)],
        list(range(1, 40)),
        [1000003, 7, 99999],
    ],
)
def test_every_prefix_has_each_share_to_less_than_one_sample(weights):
    table = schedule(weights)
    shares = np.array([float(Fraction(weight) / sum(weights)) for weight in weights])
    numbers = np.arange(1, 2 * table.size + 1)
    if table.size == PERIOD:  # such weights are rounded
        assert np.abs(np.bincount(table) / PERIOD - shares).max() < 1 / PERIOD
        shares = np.bincount(table) / PERIOD
    else:
        np.testing.assert_array_equal(np.bincount(table), np.rint(shares * table.size))
    for source, share in enumerate(shares):
        given = np.cumsum(np.tile(table, 2) == source)
        assert np.abs(given - numbers * share).max() < 1


def filed(path: Path, first: int, count: int, documents: int = 1) -> Path:
    """A token file of the numbers from `first` on."""
    texts = {str(each).encode(): each for each in np.split(np.arange(first, first + count), documents)}
    write(path, texts, texts.__getitem__, vocabulary=60_000, tokenizer="a x")
    return path


@pytest.fixture
def mixture(tmp_path):
    filed(tmp_path / "a.tokens", 0, 2000, 4)
    filed(tmp_path / "b.tokens", 10_000, 600, 3)
    files = [Path(f"{tmp_path}/a.tokens:0.75"), Path(f"{tmp_path}/b.tokens:.25")]
    return load_corpus(files, block_size=BLOCK, vocabulary=60_000)


def test_each_source_goes_through_its_own_epochs(mixture):
    rows, _ = cut_windows(mixture.train, mixture.starts(range(1000), BLOCK, 3), BLOCK)
    second = rows[:, 0] >= 10_000
    assert second.sum() == mixture.taken(1000)[1] == 250
    assert ((rows[:, -1] >= 10_000) == second).all(), "no window has two sources"
    for part, own in zip(mixture.parts, (rows[~second], rows[second]), strict=True):
        alone, _ = cut_windows(part.train, part.starts(range(len(own)), BLOCK, 3), BLOCK)
        np.testing.assert_array_equal(own, alone)
    assert rows.max() < 10_570, "the end of each is held out"
    assert np.asarray(mixture.held_out).tolist() == [*range(1900, 2000), *range(10_570, 10_600)]
    assert mixture.described(1000, BLOCK)[1].endswith("25 % of the samples, 250, 3.57 epochs")


def test_samples_do_not_depend_on_which_are_asked_together(mixture):
    whole = mixture.starts(range(97), BLOCK, 0)
    for ranks in (1, 2, 4):
        parts = [mixture.starts(range(n, n + 1), BLOCK, 0) for r in range(ranks) for n in range(r, 97, ranks)]
        order = [n for r in range(ranks) for n in range(r, 97, ranks)]
        assert [whole[n] for n in order] == [start for part in parts for start in part]


def test_documents_begin_where_the_files_say(mixture):
    text = np.concatenate([mixture.train, mixture.held_out])
    found = text[mixture.documents].tolist()
    assert found == [0, 500, 1000, 1500, 10_000, 10_200, 10_400, 1900, 10_570]


def test_joined_arrays_are_read_as_one():
    arrays = [np.arange(3), np.arange(0), np.arange(3, 4), np.arange(4, 9)]
    joined = Joined(arrays)
    for start in range(10):
        for stop in range(10):
            np.testing.assert_array_equal(joined[start:stop], np.arange(9)[start:stop])
    assert joined[-1] == 8 and len(joined[2:5][1:]) == 2


def test_without_weights_sources_give_as_their_sizes(tmp_path):
    files = [filed(tmp_path / "a.tokens", 0, 2000), filed(tmp_path / "b.tokens", 0, 1000)]
    corpus = load_corpus(files, block_size=BLOCK, vocabulary=60_000)
    assert corpus.shares == [2 / 3, 1 / 3]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["a:0.5", "b"], "b has no weight, and others have"),
        (["a:0", "b:1"], "a:0: the weight must be above 0"),
        (["a:0.00000000000000000000001", "b:1"], "at most 18 digits"),
    ],
)
def test_weights_that_mean_nothing_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        sources(list(map(Path, data)))


def test_sources_of_different_tokenizers_are_refused(tmp_path):
    (tmp_path / "b.txt").write_text("to be or not to be " * 100)
    with pytest.raises(ValueError, match="sources of a run must agree"):
        files = [filed(tmp_path / "a.tokens", 0, 200), tmp_path / "b.txt"]
        load_corpus(files, block_size=BLOCK, vocabulary=60_000)


def test_records_are_tokenised_once_and_again_when_they_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "one"}\n{"text": "two!"}\n')
    first = prepared(Path("a.jsonl"), Preparation())
    assert open_tokens(first).tokens.tolist() == list(b"onetwo!")
    monkeypatch.setattr("shardrt.train.prepare.make_tokens", None)
    assert prepared(Path("a.jsonl"), Preparation()) == first
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "three"}\n')
    assert open_tokens(prepared(Path("a.jsonl"), Preparation())).tokens.tolist() == list(b"three")
    with pytest.raises(BadTokens, match="--end needs --tokenizer"):
        prepared(Path("a.jsonl"), Preparation(end="<end>"))
    assert sorted(path.suffix for path in Path("runs/.tokens").iterdir()).count(".tokens") == 2


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs.furnish(tmp_path)
    with open("a.jsonl", "w") as file:
        file.writelines(json.dumps({"text": f"Speech {n}: {'la ' * (n % 9)}"}) + "\n" for n in range(300))
    return tmp_path


MIXED = ("--data", "a.jsonl:0.7", "text.txt:0.3", "--steps", "6", "--checkpoint.every", "2")


def test_a_run_on_a_mixture_of_records_resumes_bitwise(folder):
    jobs.run(2, "whole", *MIXED)
    jobs.run(2, "cut", *MIXED)
    remove_after(folder / "runs" / "cut", 2)
    jobs.run(2, "cut", *MIXED, "--resume", "auto")
    assert curves(folder, "cut") == curves(folder, "whole")


def test_a_mixture_has_the_same_batches_on_1_2_and_4_ranks(folder):
    found = {}
    for ranks in (1, 2, 4):
        jobs.run(ranks, f"on-{ranks}", *MIXED, *jobs.INVARIANT)
        found[ranks] = curves(folder, f"on-{ranks}")
    assert found[1] == found[2] == found[4]
    facts = jobs.records(folder, "on-4", "run")[0]
    assert facts["mixture"] == ["a.jsonl: 7/10", "text.txt: 3/10"]


def test_a_vocabulary_that_is_too_small_is_found_before_tokenising(folder, capfd):
    jobs.save_tokenizer(folder / "tokenizer.json", {"[UNK]": 0, "la": 900})
    arguments = ["--data", "a.jsonl", "--text.tokenizer", "tokenizer.json", "--model.vocab-size", "900"]
    refused = jobs.refused(capfd, 65, train.main, arguments)
    assert "its largest token is 900, which is not below model.vocab_size, 900" in refused
    assert not list((folder / "runs" / ".tokens").glob("*.tokens"))
    refused = jobs.refused(capfd, 2, train.main, ["--data", "text.txt", "--text.end", "la"])
    assert "text.end is put behind records alone" in refused


def test_a_folder_of_parquet_files_is_trained_on(folder):
    pytest.importorskip("pyarrow")
    jobs.run(1, "saved", "--data", str(HERE / "saved"), "--steps", "2")
    assert jobs.records(folder, "saved", "run")[0]["data"] == str(HERE / "saved")
