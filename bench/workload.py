"""What is measured: the shape of a model and its batches, the same for every contestant; how options say it.

Knows neither shardrt nor PyTorch.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

SIDE = 1536  # of the matrices of the product that a step is compared with
LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1


class Job:
    """A model's shape and a batch per rank; subclasses are dataclasses of integers.

    Of a rank's step, `count` tokens or images, and `flops`, the operations of its matrix products alone:
    forward once, backward twice, a multiply-add is two, of causal attention the half that is needed.
    """

    MODEL: ClassVar[str]
    UNIT: ClassVar[str] = "tokens"
    SIZE: ClassVar[str]  # one of SIZES that has the same options
    batch: int

    @property
    def count(self) -> int:
        raise NotImplementedError

    @property
    def stream(self) -> int:
        """Rows of the residual stream in a rank's batch."""
        return self.count

    @property
    def flops(self) -> float:
        raise NotImplementedError

    def batch_of(self, step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of a rank at a step: a function of the two alone."""
        raise NotImplementedError

    def batch_of_all(self, step: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """Those of so many ranks together, where all of them train on all of it."""
        inputs, targets = zip(*(self.batch_of(step, rank) for rank in range(ranks)), strict=True)
        return np.concatenate(inputs), np.concatenate(targets)

    def arguments(self) -> list[str]:
        """The command-line arguments that `workload_of` reads this workload from."""
        shape = [word for name, value in asdict(self).items() for word in (f"--{name}", str(value))]
        return ["--size", self.SIZE, *shape]

    def facts(self) -> dict[str, int | str]:
        """For a result."""
        return {"model": self.MODEL, **asdict(self)}


@dataclass(frozen=True)
class Workload(Job):
    """A GPT on tokens drawn at random."""

    layers: int = 6
    dim: int = 384
    heads: int = 6
    seq: int = 256
    batch: int = 8
    vocab: int = 256

    MODEL: ClassVar[str] = "GPT"
    SIZE: ClassVar[str] = "small"

    @property
    def count(self) -> int:
        return self.batch * self.seq

    @property
    def flops(self) -> float:
        weights = self.layers * self._block_weights() + self.dim * self.vocab
        return 6.0 * self.count * (weights + self.layers * self.dim * self.seq)

    def _block_weights(self) -> int:
        return 12 * self.dim**2

    def batch_of(self, step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets, (batch, seq) each."""
        generator = np.random.default_rng((step, rank))
        text = generator.integers(0, self.vocab, (self.batch, self.seq + 1))
        return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])

    def __str__(self) -> str:
        shape = f"{self.MODEL} {self.layers} x {self.dim}, T {self.seq}"
        return f"{shape}, batch {self.batch} per rank, vocab {self.vocab}"


@dataclass(frozen=True)
class LlamaWorkload(Workload):
    """A Llama: heads of queries share those of keys and values; `hidden` wide inside; the head is tied."""

    layers: int = 12
    dim: int = 768
    heads: int = 12
    batch: int = 2
    vocab: int = 32000
    kv_heads: int = 4
    hidden: int = 2048

    MODEL: ClassVar[str] = "Llama"
    SIZE: ClassVar[str] = "llama-100m"

    def _block_weights(self) -> int:
        packed = self.dim + 2 * self.kv_heads * (self.dim // self.heads)
        return self.dim * (packed + self.dim + 3 * self.hidden)


@dataclass(frozen=True)
class ViTWorkload(Job):
    """A ViT with a class token, on images of normal noise."""

    layers: int = 12
    dim: int = 384
    heads: int = 6
    hidden: int = 1536
    image: int = 224
    patch: int = 16
    batch: int = 4
    classes: int = 1000

    MODEL: ClassVar[str] = "ViT"
    UNIT: ClassVar[str] = "images"
    SIZE: ClassVar[str] = "vit-s16"

    @property
    def count(self) -> int:
        return self.batch

    @property
    def stream(self) -> int:
        return self.batch * ((self.image // self.patch) ** 2 + 1)

    @property
    def flops(self) -> float:
        patches = (self.image // self.patch) ** 2
        block = 4 * self.dim**2 + 2 * self.dim * self.hidden + 2 * self.dim * (patches + 1)
        outside = patches * 3 * self.patch**2 * self.dim + self.dim * self.classes
        return 6.0 * self.count * (self.layers * block * (patches + 1) + outside)

    def batch_of(self, step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Images (batch, 3, image, image), float32, and labels (batch,)."""
        generator = np.random.default_rng((step, rank))
        images = generator.standard_normal((self.batch, 3, self.image, self.image), np.float32)
        return images, generator.integers(0, self.classes, self.batch)

    def __str__(self) -> str:
        shape = f"{self.MODEL} {self.layers} x {self.dim}, {self.image} px in patches of {self.patch}"
        return f"{shape}, batch {self.batch} per rank, {self.classes} classes"


SIZES: dict[str, Job] = {
    "small": Workload(),
    "gpt2": Workload(layers=12, dim=768, heads=12, seq=256, batch=2, vocab=50304),
    "llama-100m": LlamaWorkload(),
    "vit-s16": ViTWorkload(),
}
SHAPE = tuple(dict.fromkeys(field.name for size in SIZES.values() for field in fields(size)))


def product_gflops(product: Callable[[], object], side: int) -> float:
    """10^9 operations per second of a product of square matrices; the best of several."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return 2e-9 * side**3 / min(times)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that all contestants share: the workload, how often, and from which weights."""
    add_shape(parser)
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="timed steps (20)")
    parser.add_argument("--warmup", type=natural, default=2, metavar="N", help="steps before those (2)")
    parser.add_argument("--clip", type=float, metavar="NORM", help="clip the global gradient norm to this")
    add_micro_batches(parser)
    parser.add_argument("--weights", metavar="DIR", help="start from DIR/model.safetensors")
    parser.add_argument("--json", action="store_true", help="print only the last line, one JSON object")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the JSON object there, too")


def add_micro_batches(parser: argparse.ArgumentParser) -> None:
    """Add --micro-batches."""
    parser.add_argument(
        "--micro-batches", type=positive, default=8, metavar="M", help="of a pipeline's step, all ranks' (8)"
    )


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add --size, and an option for each number of a shape, which then differs from the size's."""
    parser.add_argument("--size", choices=list(SIZES), default="small", help="(small)")
    for name in SHAPE:
        names = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        parser.add_argument(*names, type=positive, metavar="N", help="as in the size")


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """An argparse type: an integer of at least 0."""
    return _at_least(0, text)


def cpu(text: str) -> str:
    """An argparse type: the one device that these benchmarks are for."""
    if text != "cpu":
        raise argparse.ArgumentTypeError(f"{text!r} is not cpu; a GPU is measured by python -m bench.gpu")
    return text


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def workload_of(options: argparse.Namespace) -> Job:
    """The workload that the options describe. Raises ValueError for a number that its model does not have."""
    size = SIZES[options.size]
    own = {field.name for field in fields(size)}
    given = {name: value for name in SHAPE if (value := getattr(options, name)) is not None}
    for name in given.keys() - own:
        raise ValueError(f"--{name}: {options.size} is a {size.MODEL} and has none")
    return replace(size, **given)
