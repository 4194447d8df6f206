"""Labelled images: scikit-learn's digits or a folder, and batches that are functions of a sample's number.

Sample n of a run is the same image, cropped and flipped in the same way, at every number of ranks and every
batch size. The step number alone determines where a resumed run continues. A thread reads images and makes
batches ahead of training (prefetch.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from math import exp, inf, log, sqrt
from pathlib import Path

import numpy as np

from shardrt import random
from shardrt.kernels.cpu import philox
from shardrt.train.held_out import IGNORED, shares
from shardrt.untrusted import open_regular

__all__ = ["View", "held_out_batches", "load_digits", "load_folder", "samples_batch"]

HELD_OUT = 5  # one image in so many of each class, where the source does not say which to test on
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
# No others, whatever a name says: some formats run programs.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
LARGEST = 1 << 28  # bytes of a file
_DRAWN = 5  # random numbers of a sample


class Corrupt(ValueError):
    """An image can't be read. Names the file."""


@dataclass(frozen=True)
class View:
    """The model's view of an image: size x size pixels, (value / 255 - mean) / std.

    Evaluation is not random: the view is the whole image, or, with "resize", its middle, 7/8 across.

    Attributes:
        crop: "pad", the image at `size` with `pad` pixels of border, moved at random; or "resize", a piece of
            random area (a part in `scale`) and shape (Szegedy et al., Going Deeper with Convolutions, 2015).
        flip: left and right exchanged, for half the samples.

    Raises:
        ValueError: for values that make no sense.
    """

    size: int
    channels: int = 3
    crop: str = "pad"
    pad: int = 0
    scale: tuple[float, float] = (0.08, 1.0)
    flip: bool = False
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        if self.size < 1 or self.channels not in (1, 3) or self.pad < 0:
            raise ValueError(
                f"images: size must be at least 1, channels 1 or 3, pad at least 0; "
                f"got {self.size}, {self.channels}, {self.pad}"
            )
        if self.crop not in ("pad", "resize"):
            raise ValueError(f"images: crop must be 'pad' or 'resize', got {self.crop!r}")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(
                f"images: scale must be two fractions in (0, 1], the smaller first, got {self.scale}"
            )
        if {len(self.mean), len(self.std)} - {1, self.channels} or not min(self.std) > 0:
            raise ValueError(
                f"images: mean and std need one number or {self.channels}, std above 0; "
                f"got {self.mean} and {self.std}"
            )


@dataclass(frozen=True)
class Images:
    """One part of a source: read(i) gives image i as uint8 (height, width, channels), labels[i] its class."""

    source: str
    classes: tuple[str, ...]
    labels: np.ndarray  # int64
    read: Callable[[int], np.ndarray]
    strict: bool = False  # an image that can't be read is an error, and not passed over
    digest: str = ""  # of the pixels, or of the names and sizes of files
    files: tuple[str, ...] = ()  # file of each image, where they are in files
    skipped: set[int] = field(default_factory=set)  # images that this rank passed over

    def __len__(self) -> int:
        return len(self.labels)


def load_digits() -> tuple[Images, Images]:
    """(to train on, held out): the 1,797 digits of 8 x 8 pixels that come with scikit-learn.

    Every fifth is held out.

    Raises:
        ValueError: if scikit-learn is not there.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise ValueError("images: the digits come with scikit-learn: pip install scikit-learn") from None
    found = datasets.load_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)[..., None]  # 16 levels of grey
    held_out = np.arange(len(images)) % HELD_OUT == HELD_OUT - 1
    names = tuple(map(str, found.target_names))

    def part(chosen: np.ndarray) -> Images:
        kept = images[chosen]
        labels, digest = found.target[chosen].astype(np.int64), sha256(kept.tobytes()).hexdigest()
        return Images("scikit-learn's digits", names, labels, kept.__getitem__, digest=digest)

    return part(~held_out), part(held_out)


def load_folder(path: str | Path, *, channels: int = 3, on_corrupt: str = "skip") -> tuple[Images, Images]:
    """(to train on, held out): images in folders named after their classes, in ImageFolder's layout.

    PATH/train/CLASS/... and PATH/val/CLASS/..., or PATH/CLASS/..., of which every fifth image of a class, by
    name, is held out.

    Args:
        channels: 3 for colours, 1 for grey, whatever the files have.
        on_corrupt: "skip" passes over an unreadable image in its turn and counts it in `skipped`, "error"
            raises Corrupt.

    Raises:
        ValueError: naming the folder, if it is not there, has no images, or fewer than two classes, and if a
            class is in one part only; also if Pillow is not there.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ValueError("images: files are read with Pillow: pip install Pillow") from None
    if on_corrupt not in ("skip", "error"):
        raise ValueError(f"images: on_corrupt must be 'skip' or 'error', got {on_corrupt!r}")
    root = Path(path)
    if not root.is_dir():
        raise ValueError(f"images: {root} " + ("is not a folder" if root.exists() else "does not exist"))
    parts = root / "train", root / "val"
    if all(part.is_dir() for part in parts):
        train, held_out = map(_classes, parts)
        if train.keys() != held_out.keys():
            odd = sorted(train.keys() ^ held_out.keys())
            raise ValueError(
                f"images: {root} has classes in one of train and val only: {', '.join(odd[:10])}"
            )
    else:
        everything = _classes(root)
        held_out = {name: files[HELD_OUT - 1 :: HELD_OUT] for name, files in everything.items()}
        train = {
            name: [f for f in files if f not in set(held_out[name])] for name, files in everything.items()
        }
        if not any(held_out.values()):
            raise ValueError(
                f"images: {root} has too few images to hold any out; a class needs at least {HELD_OUT}"
            )
    return tuple(_of_files(root, part, channels, on_corrupt == "error") for part in (train, held_out))


def _classes(root: Path) -> dict[str, list[Path]]:
    """Class -> its images, both sorted by name."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = {
        folder.name: sorted(
            path
            for path in folder.rglob("*")
            if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
        )
        for folder in folders
    }
    if not any(found.values()):
        raise ValueError(
            f"images: {root} has no images in folders of classes ({', '.join(sorted(SUFFIXES))})"
        )
    empty = [name for name, files in found.items() if not files]
    if empty:
        raise ValueError(f"images: {root} has classes without images: {', '.join(empty[:10])}")
    if len(found) < 2:
        raise ValueError(f"images: {root} must have at least two classes, got one, {folders[0].name!r}")
    return found


def _of_files(root: Path, classes: dict[str, list[Path]], channels: int, strict: bool) -> Images:
    files = [path for paths in classes.values() for path in paths]
    labels = np.repeat(np.arange(len(classes)), [len(paths) for paths in classes.values()])
    listing = "".join(f"{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0" for path in files)
    digest = sha256(listing.encode(errors="surrogateescape")).hexdigest()
    return Images(
        str(root),
        tuple(classes),
        labels,
        lambda i: _decoded(files[i], channels),
        strict,
        digest=digest,
        files=tuple(map(str, files)),
    )


def _decoded(path: Path, channels: int) -> np.ndarray:
    import PIL.Image

    try:
        with open_regular(path, LARGEST) as file, PIL.Image.open(file, formats=_FORMATS) as image:
            # Pillow warns of so many, and refuses twice as many; nothing is decoded yet.
            if image.width * image.height > (PIL.Image.MAX_IMAGE_PIXELS or inf):
                raise Corrupt(f"an image of {image.width} x {image.height} pixels is too large")
            array = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except MemoryError:
        raise
    except Exception as error:  # its plug-ins raise whatever comes of damaged files
        raise Corrupt(f"images: {path} can't be read: {error}") from None
    return array.reshape(*array.shape[:2], channels)


def samples_batch(images: Images, view: View, samples: range, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of a run by their numbers: float32 (samples, channels, height, width), and labels int64.

    Each epoch takes all images once, in another order. In the place of an image that can't be read comes the
    next one in that order.

    Raises:
        ValueError: if no image can be read.
    """
    drawn = np.empty(len(samples) * _DRAWN, np.float32)
    philox.uniform(drawn, seed, random.name_key("shardrt.train.images"), samples.start * _DRAWN)
    pairs = [_sample(images, sample, seed) for sample in samples]
    x = np.stack(
        [_seen(pixels, view, d) for (pixels, _), d in zip(pairs, drawn.reshape(len(pairs), -1), strict=True)]
    )
    return x, np.array([label for _, label in pairs], np.int64)


def held_out_batches(
    images: Images,
    view: View,
    batch_size: int,
    *,
    limit: int | None = None,
    rank: int = 0,
    size: int = 1,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This rank's (images, labels), batch_size of them, until all ranks together have seen every image once.

    Args:
        limit: or that many, spread evenly. Every rank gets equally many batches: the forward of a sharded
            model is collective; what is beyond the last image, or can't be read, has the label IGNORED.
    """
    for mine in shares(len(images), batch_size, limit=limit, rank=rank, size=size):
        x = np.zeros((batch_size, view.channels, view.size, view.size), np.float32)
        labels = np.full(batch_size, IGNORED, np.int64)
        for row, index in enumerate(mine.tolist()):
            pixels = _read(images, index)
            if pixels is not None:
                x[row], labels[row] = _seen(pixels, view, None), images.labels[index]
        yield x, labels


def sample_order(count: int, sample: int, seed: int) -> tuple[np.ndarray, int]:
    """(this sample's epoch as an order of all images, the sample's place in it)."""
    epoch, place = divmod(sample, count)
    return _epoch(seed, epoch, count), place


@lru_cache(4)
def _epoch(seed: int, epoch: int, count: int) -> np.ndarray:
    """From raw Philox words: the same in every version of NumPy."""
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable")


def _sample(images: Images, sample: int, seed: int) -> tuple[np.ndarray, int]:
    order, place = sample_order(len(images), sample, seed)
    for i in range(len(order)):
        index = int(order[(place + i) % len(order)])
        pixels = _read(images, index)
        if pixels is not None:
            return pixels, int(images.labels[index])
    raise ValueError(f"images: none of the {len(images)} images of {images.source} can be read")


def _read(images: Images, index: int) -> np.ndarray | None:
    """An image, or None if it can't be read, which is counted."""
    if index in images.skipped:
        return None
    try:
        return images.read(index)
    except Corrupt:
        if images.strict:
            raise
        images.skipped.add(index)
        return None


def _seen(pixels: np.ndarray, view: View, drawn: Sequence[float] | None) -> np.ndarray:
    """The view of an image (height, width, channels): float32 (channels, size, size)."""
    if view.crop == "resize":
        piece = _resized(pixels, view.size, _box(*pixels.shape[:2], view.scale, drawn))
    else:
        height, width = pixels.shape[:2]
        piece = _resized(pixels, view.size, (0, 0, width, height))
    x = piece.astype(np.float32).transpose(2, 0, 1) / np.float32(255)
    mean, std = (np.array(v, np.float32)[:, None, None] for v in (view.mean, view.std))
    x = (x - mean) / std
    if drawn is not None and view.crop == "pad" and view.pad:
        padded = np.pad(x, ((0, 0), (view.pad, view.pad), (view.pad, view.pad)), mode="edge")
        top, left = (int(number * (2 * view.pad + 1)) for number in drawn[:2])
        x = padded[:, top : top + view.size, left : left + view.size]
    return x[:, :, ::-1] if drawn is not None and view.flip and drawn[4] < 0.5 else x


def _box(height: int, width: int, scale: tuple[float, float], drawn: Sequence[float] | None) -> tuple:
    """(left, top, right, bottom) of a piece: drawn, or the middle."""
    if drawn is None:
        side = min(height, width) * 7 / 8
        return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2
    area = height * width * (scale[0] + (scale[1] - scale[0]) * float(drawn[2]))
    shape = exp((2 * float(drawn[3]) - 1) * log(4 / 3))  # from 3 : 4 to 4 : 3
    wide, tall = min(width, sqrt(area * shape)), min(height, sqrt(area / shape))
    top, left = float(drawn[0]) * (height - tall), float(drawn[1]) * (width - wide)
    return left, top, left + wide, top + tall


def _resized(pixels: np.ndarray, size: int, box: tuple) -> np.ndarray:
    if box == (0, 0, size, size) == (0, 0, pixels.shape[1], pixels.shape[0]):
        return pixels
    import PIL.Image

    image = PIL.Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[..., 0])
    seen = np.asarray(image.resize((size, size), PIL.Image.Resampling.BILINEAR, box=box))
    return seen.reshape(size, size, pixels.shape[2])
