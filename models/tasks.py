"""Tasks for training loops (shardrt.train.tasks.Task): image classification with ViT or RegNetY."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from typing import Any

import numpy as np

from shardrt import Tensor, no_grad
from shardrt import functional as F
from shardrt.comm import DeviceMesh
from shardrt.nn import Module, synchronise_batch_norm
from shardrt.train.images import (
    IGNORED,
    Prefetched,
    View,
    held_out_batches,
    load_digits,
    load_folder,
    training_batch,
)

from . import regnet, vit

Batch = tuple[
    np.ndarray, np.ndarray
]  # images, float32 (batch, channels, height, width); labels, int64 (batch,)


@dataclass(frozen=True)
class ImagesConfig:
    """What is learnt from which images. Raises ValueError for a model that has no such name."""

    data: str = "digits"  # "digits", scikit-learn's, or a folder of folders of images
    model: str = "vit-digits"  # a name in models.vit.SIZES or models.regnet.SIZES
    size: int = 8  # height and width that the model sees
    channels: int = 1
    crop: str = "pad"
    pad: int = 1
    scale: tuple[float, float] = (0.08, 1.0)
    flip: bool = False
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    smoothing: float = 0.0  # of the labels: so much of each is spread over all classes (Szegedy et al., 2016)
    dropout: float = 0.0  # ViT's
    on_corrupt: str = "skip"  # an image that can't be read: "skip", counted, or "error"
    prefetch: int = 2  # batches made ahead

    def __post_init__(self) -> None:
        if self.model not in (*vit.SIZES, *regnet.SIZES):
            raise ValueError(
                f"model must be one of {', '.join((*vit.SIZES, *regnet.SIZES))}, got {self.model!r}"
            )
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must be in [0, 1), got {self.smoothing}")
        self.view()

    def view(self) -> View:
        """What the model sees of an image."""
        return View(self.size, self.channels, self.crop, self.pad, self.scale, self.flip, self.mean, self.std)


class ImageClassification:
    """A Task: the class of an image. Batch norm takes its statistics from the batches of all ranks."""

    def __init__(self, config: ImagesConfig, mesh: DeviceMesh, *, batch_size: int, seed: int) -> None:
        self.config, self.mesh, self.batch_size, self.seed = config, mesh, batch_size, seed
        self.view = config.view()
        if config.data == "digits":
            self.train, self.held_out = load_digits()
        else:
            how = {"channels": config.channels, "on_corrupt": config.on_corrupt}
            self.train, self.held_out = load_folder(config.data, **how)

    def facts(self) -> dict[str, Any]:
        """As Task: where the images are from, and how they are labelled."""
        labels = np.concatenate([self.train.labels, self.held_out.labels]).tobytes()
        return {
            "data": self.train.source,
            "classes": len(self.train.classes),
            "train_images": len(self.train),
            "held_out_images": len(self.held_out),
            "sha256_of_labels": sha256(labels + repr(self.train.classes).encode()).hexdigest(),
        }

    def model(self) -> Module:
        """As Task."""
        shape = {"channels": self.config.channels, "classes": len(self.train.classes)}
        if self.config.model in regnet.SIZES:
            return synchronise_batch_norm(
                regnet.RegNet(replace(regnet.SIZES[self.config.model], **shape)), self.mesh
            )
        chosen = replace(
            vit.SIZES[self.config.model], image_size=self.config.size, dropout=self.config.dropout, **shape
        )
        return vit.ViT(chosen)

    def units(self, model: Module) -> list[Module]:
        """As Task: the blocks."""
        return list(model.blocks)

    def batches(self, first: int, stop: int) -> Iterator[Batch]:
        """As Task."""
        where = {"seed": self.seed, "rank": self.mesh.rank, "size": self.mesh.size}

        def make(step: int) -> Batch:
            return training_batch(self.train, self.view, step, self.batch_size, **where)

        return Prefetched(make, first, stop, self.config.prefetch)

    def parts(self, batch: Batch, count: int) -> list[Batch]:
        """As Task."""
        return list(zip(*(np.split(array, count) for array in batch), strict=True))

    def loss(self, model: Module, batch: Batch) -> Tensor:
        """As Task: the cross-entropy, over the images of the whole step."""
        images, labels = batch
        logits, smoothing = model(images), self.config.smoothing
        loss = F.cross_entropy(logits, labels, reduction="sum") * (1 - smoothing)
        if smoothing:
            loss = loss - F.log_softmax(logits).sum() * (smoothing / logits.shape[1])
        return loss * (1 / self.batch_size)

    def evaluate(self, model: Module, limit: int | None = None) -> dict[str, tuple[float, float]]:
        """As Task: "held_out_loss" and "held_out_accuracy"."""
        loss = right = count = 0.0
        share = self.batch_size // self.mesh.size
        batches = held_out_batches(self.held_out, self.view, share, rank=self.mesh.rank, size=self.mesh.size)
        model.eval()
        with no_grad():
            for images, labels in islice(batches, limit):
                logits = model(images)
                loss += float(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
                right += float((np.asarray(logits).argmax(1) == labels).sum())
                count += float((labels != IGNORED).sum())
        model.train()
        return {"held_out_loss": (loss, count), "held_out_accuracy": (right, count)}

    def skipped(self) -> int:
        """Images that could not be read on this rank so far."""
        return len(self.train.skipped) + len(self.held_out.skipped)
