"""Text as bytes: batches are functions of (seed, step), equal at every world size, disjoint between ranks."""

import numpy as np
import pytest

from shardrt.train.data import IGNORED, held_out_batches, load_corpus, training_batch

TEXT = (np.arange(5000) % 251).astype(np.uint8)


def batch(step, rank=0, size=1, seed=1):
    return training_batch(TEXT, step, 12, 16, seed=seed, rank=rank, size=size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_global_batch_is_the_same_at_every_world_size(size):
    for step in (0, 7, 40):
        parts = [batch(step, rank, size) for rank in range(size)]
        for which in (0, 1):
            assert np.array_equal(np.concatenate([part[which] for part in parts]), batch(step)[which])


def test_targets_are_the_next_bytes():
    tokens, targets = batch(3)
    assert np.array_equal(tokens[:, 1:], targets[:, :-1])


def test_batches_depend_on_seed_and_step_only():
    assert np.array_equal(batch(3)[0], batch(3)[0])
    assert not np.array_equal(batch(3)[0], batch(4)[0])
    assert not np.array_equal(batch(3)[0], batch(3, seed=2)[0])


def test_held_out_text_counts_every_target_once_at_every_world_size():
    for size in (1, 2, 3):
        targets = [t for rank in range(size) for _, t in held_out_batches(TEXT, 4, 16, rank=rank, size=size)]
        assert sum(int((t != IGNORED).sum()) for t in targets) == (TEXT.size - 1) // 16 * 16
        counts = [len(list(held_out_batches(TEXT, 4, 16, rank=rank, size=size))) for rank in range(size)]
        assert len(set(counts)) == 1


def test_the_held_out_end_is_never_trained_on(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)) * 10)
    corpus = load_corpus([file], block_size=16)
    assert corpus.train.tobytes() + corpus.held_out.tobytes() == file.read_bytes()
    assert corpus.held_out.size == 100


def test_the_library_of_python_is_text_that_every_machine_has():
    corpus = load_corpus(block_size=16)
    assert corpus.train.size > 1_000_000 and b"import" in corpus.train.tobytes()
    assert corpus.sha256 == load_corpus(block_size=16).sha256
