"""shardrt/train/images.py: order and augmentation as functions of a sample's number; folders; refusals."""

import os
import struct
import warnings
import zlib

import numpy as np
import pytest

from shardrt.train.held_out import IGNORED
from shardrt.train.images import (
    Corrupt,
    Images,
    View,
    held_out_batches,
    load_digits,
    load_folder,
    samples_batch,
)
from shardrt.train.prefetch import Prefetched

PLAIN = View(4, 1, mean=(0.0,), std=(1 / 255,))  # numbers as they are
MOVED = View(4, 1, pad=2, flip=True, mean=(0.0,), std=(1 / 255,))


def training_batch(images, view, step, batch_size, *, seed, rank=0, size=1):
    """The part of a rank of a step's batch."""
    share = batch_size // size
    first = step * batch_size + rank * share
    return samples_batch(images, view, range(first, first + share), seed=seed)


def numbered(count, broken=(), strict=False):
    """Images of 4 x 4 pixels that are their own number, labelled with it."""

    def read(i):
        if i in broken:
            raise Corrupt(f"images: number {i} can't be read")
        return np.full((4, 4, 1), i, np.uint8)

    return Images("numbers", ("a", "b"), np.arange(count), read, strict)


def graded(count):
    """Images whose pixels all differ."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 4, 4, 1), np.uint8)
    return Images("random", ("a", "b"), np.arange(count), pixels.__getitem__)


def test_an_epoch_takes_every_image_once_in_an_order_of_its_own():
    orders = [
        np.concatenate([training_batch(numbered(12), PLAIN, e * 3 + s, 4, seed=5)[1] for s in range(3)])
        for e in range(3)
    ]
    for order in orders:
        assert sorted(order) == list(range(12))
    assert (orders[0] != orders[1]).any() and (orders[1] != orders[2]).any()
    other = training_batch(numbered(12), PLAIN, 0, 12, seed=6)[1]
    assert (other != orders[0]).any()


@pytest.mark.parametrize(
    "view", [PLAIN, MOVED, View(3, 1, "resize", flip=True)], ids=["plain", "pad", "resize"]
)
def test_a_sample_is_the_same_at_every_number_of_ranks_and_batch_size(view):
    images = graded(10)
    x, labels = training_batch(images, view, 0, 24, seed=3)
    for size, batch_size in ((1, 6), (2, 12), (4, 8), (3, 24)):
        parts = [
            training_batch(images, view, step, batch_size, seed=3, rank=rank, size=size)
            for step in range(24 // batch_size)
            for rank in range(size)
        ]
        np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), x)
        np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), labels)


def test_a_crop_is_a_shift_of_the_image_and_a_flip_its_mirror():
    images = graded(1)
    padded = np.pad(images.read(0)[..., 0], 2, mode="edge").astype(np.float32)
    shifts = {(i, j): padded[i : i + 4, j : j + 4] for i in range(5) for j in range(5)}
    x, _ = training_batch(images, MOVED, 0, 400, seed=1)
    seen = {True: set(), False: set()}
    for sample in x[:, 0]:
        found = [
            (flipped, place)
            for place, piece in shifts.items()
            for flipped in (True, False)
            if np.allclose(sample, piece[:, ::-1] if flipped else piece, atol=1e-3)
        ]
        assert len(found) == 1
        seen[found[0][0]].add(found[0][1])
    assert len(seen[True]) == len(seen[False]) == 25  # all shifts, both ways round


def test_pieces_are_resized_and_normalised():
    ramp = np.repeat(np.arange(0, 200, 10, dtype=np.uint8)[None, :, None], 20, 0)  # grey grows to the right
    images = Images("ramp", ("a", "b"), np.zeros(1, np.int64), lambda i: ramp)
    view = View(8, 1, "resize", scale=(0.1, 0.5), mean=(0.2,), std=(0.5,))
    x, _ = training_batch(images, view, 0, 64, seed=0)
    grey = (x * 0.5 + 0.2) * 255
    assert x.shape == (64, 1, 8, 8) and x.dtype == np.float32
    assert grey.min() >= 0 and grey.max() <= 190
    spread = grey[:, 0, 0, -1] - grey[:, 0, 0, 0]
    assert (spread > 0).all() and spread.max() > 1.5 * spread.min()  # pieces of several widths
    assert np.ptp(grey[:, 0, 0, 0]) > 50  # in several places
    ((middle, _),) = held_out_batches(images, view, 1)
    assert (middle * 0.5 + 0.2).mean() * 255 == pytest.approx(95, abs=1)


def test_held_out_images_are_seen_once_by_all_ranks_together():
    batches = [list(held_out_batches(numbered(11), MOVED, 2, rank=rank, size=3)) for rank in range(3)]
    assert {len(own) for own in batches} == {2}
    labels = np.concatenate([label for own in batches for _, label in own])
    assert sorted(labels[labels != IGNORED]) == list(range(11)) and len(labels) == 12
    for own in batches:
        for x, label in own:
            np.testing.assert_allclose(x[:, 0, 0, 0], np.where(label == IGNORED, 0, label), atol=1e-4)


def test_images_that_cannot_be_read_are_passed_over_and_counted():
    images = numbered(6, broken=(2, 4))
    labels = training_batch(images, PLAIN, 0, 12, seed=1)[1]
    assert set(labels) == {0, 1, 3, 5} and images.skipped == {2, 4}
    whole = training_batch(numbered(6), PLAIN, 0, 12, seed=1)[1]
    kept = (whole != 2) & (whole != 4)
    np.testing.assert_array_equal(labels[kept], whole[kept])
    ((_, held_out),) = held_out_batches(images, PLAIN, 6)
    assert list(held_out) == [0, 1, IGNORED, 3, IGNORED, 5]
    with pytest.raises(Corrupt, match="number 2 can't be read"):
        training_batch(numbered(6, broken=(2,), strict=True), PLAIN, 0, 6, seed=1)
    with pytest.raises(ValueError, match="none of the 3 images of numbers can be read"):
        training_batch(numbered(3, broken=(0, 1, 2)), PLAIN, 0, 3, seed=1)


def test_digits_are_there_whole():
    pytest.importorskip("sklearn")
    train, held_out = load_digits()
    assert (len(train), len(held_out)) == (1438, 359)
    assert train.classes == tuple("0123456789")
    assert train.read(0).shape == (8, 8, 1) and train.read(0).max() == 239  # 15 of 16 levels
    assert np.bincount(held_out.labels).min() > 20


def test_a_digest_tells_of_other_pixels_files_and_sizes(tmp_path, monkeypatch):
    datasets = pytest.importorskip("sklearn.datasets")
    found, before = datasets.load_digits(), load_digits()
    found.images[4, 3, 3] = 15 - found.images[4, 3, 3]  # the first that is held out
    monkeypatch.setattr(datasets, "load_digits", lambda: found)
    assert [one.digest == other.digest for one, other in zip(before, load_digits(), strict=True)] == [
        True,
        False,
    ]
    for i in range(5):
        write(tmp_path / "a" / f"{i}.png", (0, 0, 0))
        write(tmp_path / "b" / f"{i}.png", (0, 0, 0))
    seen = {load_folder(tmp_path)[0].digest}
    assert load_folder(tmp_path)[0].digest in seen
    write(tmp_path / "a" / "0.png", (0, 0, 0), size=(60, 50))
    seen.add(load_folder(tmp_path)[0].digest)
    (tmp_path / "b" / "1.png").rename(tmp_path / "b" / "1.jpg")
    seen.add(load_folder(tmp_path)[0].digest)
    assert len(seen) == 3


def write(path, colour, size=(6, 5)):
    PIL = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.new("RGB", size, colour).save(path)


def test_a_folder_of_classes(tmp_path):
    for i in range(10):
        write(tmp_path / "red" / f"{i}.png", (255, 0, 0))
        write(tmp_path / "blue" / "deeper" / f"{i}.JPG", (0, 0, 255))
    (tmp_path / "red" / "notes.txt").write_text("no image")
    write(tmp_path / "red" / ".hidden.png", (0, 255, 0))
    train, held_out = load_folder(tmp_path)
    assert train.classes == held_out.classes == ("blue", "red")
    assert list(np.bincount(train.labels)) == [8, 8] and list(np.bincount(held_out.labels)) == [2, 2]
    x, labels = training_batch(train, View(4), 0, 16, seed=0)
    assert x.shape == (16, 3, 4, 4)
    blue = labels == 0
    assert (x[blue, 2] > 0.9).all() and (x[blue, 0] < -0.9).all() and (x[~blue, 0] > 0.9).all()
    grey, _ = load_folder(tmp_path, channels=1)
    assert grey.read(0).shape == (5, 6, 1)


def test_a_folder_with_train_and_val(tmp_path):
    for part, count in (("train", 3), ("val", 1)):
        for name in ("a", "b"):
            for i in range(count):
                write(tmp_path / part / name / f"{i}.png", (i, i, i))
    train, held_out = load_folder(tmp_path)
    assert (len(train), len(held_out)) == (6, 2)
    (tmp_path / "train" / "b" / "1.png").write_bytes(b"\x89PNG no more")
    ok = load_folder(tmp_path)[0]
    assert 1 not in ok.skipped and training_batch(ok, View(4), 0, 6, seed=0)[1].shape == (6,)
    assert ok.skipped == {4}
    with pytest.raises(Corrupt, match=r"train/b/1.png can't be read"):
        training_batch(load_folder(tmp_path, on_corrupt="error")[0], View(4), 0, 6, seed=0)
    write(tmp_path / "val" / "c" / "0.png", (0, 0, 0))
    with pytest.raises(ValueError, match="in one of train and val only: c"):
        load_folder(tmp_path)


def test_folders_that_will_not_do_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no images in folders of classes"):
        load_folder(tmp_path)
    write(tmp_path / "a" / "0.png", (0, 0, 0))
    with pytest.raises(ValueError, match="got one, 'a'"):
        load_folder(tmp_path)
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="classes without images: b"):
        load_folder(tmp_path)
    write(tmp_path / "b" / "0.png", (0, 0, 0))
    with pytest.raises(ValueError, match="too few images to hold any out"):
        load_folder(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        load_folder(tmp_path / "a" / "0.png")
    with pytest.raises(ValueError, match="on_corrupt"):
        load_folder(tmp_path, on_corrupt="ignore")


def test_views_that_make_no_sense_are_an_error():
    for options in [
        {"crop": "none"},
        {"scale": (0.5, 0.1)},
        {"std": (0.0,)},
        {"mean": (0.1, 0.2)},
        {"pad": -1},
    ]:
        with pytest.raises(ValueError, match="images: "):
            View(4, **options)


def test_batches_are_made_ahead_in_order_and_end():
    made = []
    batches = Prefetched(lambda step: made.append(step) or step, 3, 9, depth=2)
    assert next(batches) == 3
    assert list(batches) == [4, 5, 6, 7, 8] == made[1:]
    with pytest.raises(StopIteration):
        next(batches)


def test_an_error_is_raised_at_its_step_and_closing_ends_the_thread():
    def make(step):
        if step == 2:
            raise Corrupt("number 2")
        return step

    batches = Prefetched(make, 0, 9, depth=4)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(Corrupt, match="number 2"):
        next(batches)
    endless = Prefetched(lambda step: step, 0, 10**9)
    assert next(endless) == 0
    endless.close()
    assert not endless._thread.is_alive()


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def test_bombs_pipes_and_formats_that_run_programs_are_images_that_cannot_be_read(tmp_path, monkeypatch):
    PIL = pytest.importorskip("PIL.Image")
    for place in range(5):
        write(tmp_path / "a" / f"{place}.png", (place, 0, 0))
        write(tmp_path / "b" / f"{place}.png", (0, place, 0))
    head = struct.pack(">IIBBBBB", 30_000, 3_100, 8, 2, 0, 0, 0)  # 93 million pixels: Pillow only warns
    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )
    (tmp_path / "a" / "0.png").write_bytes(bomb)
    (tmp_path / "a" / "1.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    )
    (tmp_path / "b" / "0.png").unlink()
    os.mkfifo(tmp_path / "b" / "0.png")
    (tmp_path / "b" / "1.png").unlink()
    os.symlink("/dev/zero", tmp_path / "b" / "1.png")
    train, _ = load_folder(tmp_path, on_corrupt="error")
    message = (
        "30000 x 3100 pixels is too large",
        "cannot identify image file",
        "regular file",
        "regular file",
    )
    monkeypatch.setattr(PIL.Image, "convert", lambda *_: pytest.fail("it was decoded"), raising=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, why in zip((0, 1, 4, 5), message, strict=True):
            with pytest.raises(Corrupt, match=why):
                train.read(index)
