"""Recipes of ViT and RegNetY for models.train to classify images, and their task.

`init_from` begins with the weights of a folder of Hugging Face's; with a new head where it has other classes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from hashlib import sha256
from typing import Any, ClassVar

import numpy as np

from shardrt import Tensor, nn
from shardrt import functional as F
from shardrt.checkpoint.tensorfiles import read_json
from shardrt.comm import DeviceMesh
from shardrt.comm.objects import all_gather_object
from shardrt.nn.parameter_placement import whole_size
from shardrt.parallel.styles import Style
from shardrt.train.held_out import IGNORED
from shardrt.train.images import View, held_out_batches, load_digits, load_folder, samples_batch
from shardrt.train.metrics import RunLog

from . import regnet, vit
from .hub import PREPROCESSOR, starts_afresh
from .plans import plan_of
from .pretrained import PretrainedRecipe

Batch = tuple[np.ndarray, np.ndarray]  # float32 (images, channels, height, width); labels, int64 (images,)


@dataclass(frozen=True)
class ImagesConfig:
    """The model's view of an image (shardrt.train.images.View), and how it is trained on it."""

    size: int = 8  # height and width that the model sees
    channels: int = 1  # 1: grey, 3: colours
    crop: str = "pad"  # "pad": moved in a border of `pad`; "resize": a piece of random area and shape
    pad: int = 1
    scale: tuple[float, float] = (0.08, 1.0)  # the pieces' part of the image
    flip: bool = False  # exchange left and right for half the samples
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    smoothing: float = 0.0  # of the labels: so much of each is spread over all classes (Szegedy et al., 2016)
    on_corrupt: str = "skip"  # an image that can't be read: "skip", counted, or "error"
    synchronise: bool = True  # batch norm's statistics are those of all ranks' images

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"images.smoothing must be in [0, 1), got {self.smoothing}")
        self.view()

    def view(self) -> View:
        """What the model sees of an image."""
        return View(self.size, self.channels, self.crop, self.pad, self.scale, self.flip, self.mean, self.std)


@dataclass(frozen=True)
class ImageRecipe(PretrainedRecipe):
    """Train a model to classify images, fully sharded.

    data: a folder of folders of images, named after their classes; scikit-learn's digits if none.
    """

    images: ImagesConfig = ImagesConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.data) > 1:
            raise ValueError(f"data must be one folder of images, got {len(self.data)}")

    def task(self) -> "ImageClassification":
        return ImageClassification(self)

    def network(self, classes: int) -> nn.Module:
        """A new model for so many classes: of the recipe's shape, or that of init_from."""
        raise NotImplementedError


@dataclass(frozen=True)
class ViTRecipe(ImageRecipe):
    """Train a ViT, fully sharded, to classify images. The TOML file takes the same options."""

    model: vit.ViTConfig = vit.SIZES["vit-digits"]

    ARCHITECTURE: ClassVar[str] = "vit"
    NETWORK: ClassVar[type[nn.Module]] = vit.ViT
    SIZES: ClassVar[dict[str, Any]] = vit.SIZES

    def network(self, classes: int) -> nn.Module:
        seen = {"image_size": self.images.size, "channels": self.images.channels}
        shape = replace(self.model, **seen, classes=classes)
        model = self.begun(shape, dropout=shape.dropout, classes=classes)
        own = {name: getattr(model.config, name) for name in seen}
        if own != seen:
            raise ValueError(
                f"init_from: {self.init_from} needs images.size {own['image_size']} and images.channels "
                f"{own['channels']}, got {self.images.size} and {self.images.channels}"
            )
        return model


@dataclass(frozen=True)
class RegNetRecipe(ImageRecipe):
    """Train a RegNetY, fully sharded, to classify images. The TOML file takes the same options."""

    model: regnet.RegNetConfig = regnet.SIZES["regnety-digits"]

    ARCHITECTURE: ClassVar[str] = "regnet"
    NETWORK: ClassVar[type[nn.Module]] = regnet.RegNet
    SIZES: ClassVar[dict[str, Any]] = regnet.SIZES

    def network(self, classes: int) -> nn.Module:
        return self.begun(replace(self.model, channels=self.images.channels, classes=classes))


class ImageClassification:
    """A Task (shardrt.train.tasks): the class of an image."""

    unit, per_sample = "image", 1

    def __init__(self, recipe: ImageRecipe) -> None:
        self.recipe, self.view = recipe, recipe.images.view()
        if recipe.data:
            how = {"channels": recipe.images.channels, "on_corrupt": recipe.images.on_corrupt}
            self.train, self.others = load_folder(recipe.data[0], **how)
        else:
            self.train, self.others = load_digits()
        new = self._network()
        known = recipe.pretrained and (recipe.init_from / PREPROCESSOR).exists()
        self._processor = read_json(recipe.init_from / PREPROCESSOR) if known else {}
        self.new_head = recipe.pretrained and starts_afresh(new)
        if self.new_head and recipe.lora.rank and not any(fnmatch("head", t) for t in recipe.lora.targets):
            raise ValueError(
                "lora.targets: the head starts from random values and would not be trained; add 'head'"
            )

    def _network(self) -> nn.Module:
        return self.recipe.network(len(self.train.classes))

    def facts(self) -> dict[str, Any]:
        """As Task: where the images are from, which they are, and how they are labelled."""
        labels = np.concatenate([self.train.labels, self.others.labels]).tobytes()
        described = repr((self.train.classes, self.train.digest, self.others.digest))
        return {
            "data": self.train.source,
            "classes": len(self.train.classes),
            "train_images": len(self.train),
            "held_out_images": len(self.others),
            "digest": "sha256 " + sha256(labels + described.encode()).hexdigest(),
        }

    def introduction(self) -> list[str]:
        """As Task."""
        recipe, seen, classes = self.recipe, self.view, len(self.train.classes)
        kind = f"from {recipe.init_from}" if recipe.pretrained else recipe.size or "of its own size"
        head = f"the head starts afresh for {classes} classes: {recipe.init_from} has none of so many"
        return [
            f"{recipe.ARCHITECTURE} {kind} on {seen.size} x {seen.size} pixels",
            f"data: {self.train.source}, {len(self.train)} images to train on and {len(self.others)} held "
            f"out, {classes} classes",
            *([head] if self.new_head else []),
            *recipe.warnings(),
        ]

    def model(self, mesh: DeviceMesh) -> nn.Module:
        """As Task."""
        self._mesh, made = mesh, self._network()
        return nn.synchronise_batch_norm(made, mesh) if self.recipe.images.synchronise else made

    def plan(self, model: nn.Module, *, sequence: bool) -> Mapping[str, Style]:
        """As Task."""
        if not isinstance(model, vit.ViT):
            raise ValueError(f"parallel.tp: no plan to split a {type(model).__name__} exists")
        return plan_of(model, sequence_parallel=sequence)

    def units(self, model: nn.Module) -> list[nn.Module]:
        """As Task: the blocks."""
        return list(model.blocks)

    def ends(self, model: nn.Module) -> list[list[nn.Module]]:
        """As Task: they are short."""
        return []

    def flops(self, model: nn.Module) -> float:
        """As Task: six for each weight and patch, and attention's. Of a RegNet: not known."""
        if not isinstance(model, vit.ViT):
            return 0.0
        shape, seen = model.config, model.config.tokens
        layers = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
        block = sum(whole_size(layer.weight) for layer in layers)
        attention = 2 * shape.n_layer * shape.n_embd * seen
        patches, head = whole_size(model.patches.weight), whole_size(model.head.weight)
        return 6.0 * (seen * (block + attention + patches) + head)

    def batch(self, samples: range) -> Batch:
        """As Task."""
        return samples_batch(self.train, self.view, samples, seed=self.recipe.seed)

    def count(self, samples: range) -> int:
        """As Task."""
        return len(samples)

    def inputs(self, batch: Batch) -> dict[str, np.ndarray]:
        """As Task."""
        return {"images": batch[0]}

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """As Task: the cross-entropy, of labels that are smoothed if the recipe says so."""
        labels, smoothing = batch[1], self.recipe.images.smoothing
        loss = F.cross_entropy(logits, labels, reduction="sum")
        if smoothing:
            spread = F.log_softmax(logits).sum() * (smoothing / logits.shape[1])
            loss = loss * (1 - smoothing) - spread
        return loss

    def held_out(self, count: int, limit: int | None, rank: int, size: int) -> Iterator[Batch]:
        """As Task."""
        yield from held_out_batches(self.others, self.view, count, limit=limit, rank=rank, size=size)

    def held_out_samples(self, limit: int | None) -> int:
        """As Task."""
        return len(self.others) if limit is None else min(limit, len(self.others))

    def measure(self, logits: Tensor, batch: Batch) -> dict[str, tuple[float, float]]:
        """As Task: the loss and the accuracy."""
        _, labels = batch
        count = float((labels != IGNORED).sum())
        loss = float(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
        right = float((np.asarray(logits).argmax(1) == labels).sum())
        return {"held_out_loss": (loss, count), "held_out_accuracy": (right, count)}

    def evaluation(self, figures: dict[str, float]) -> dict[str, float]:
        """As Task."""
        self._last = figures
        return figures

    def preprocessor(self) -> bytes:
        """The view of an image as transformers has it, over what init_from says of it."""
        seen = self.view
        size = {"height": seen.size, "width": seen.size}
        mean, std = ([*each] * (seen.channels // len(each)) for each in (seen.mean, seen.std))
        view = {
            "image_processor_type": "ViTImageProcessor",
            **self._processor,
            **{"do_resize": True, "size": size, "resample": 2, "do_center_crop": False},  # bilinear
            **{"do_rescale": True, "rescale_factor": 1 / 255},
            **{"do_normalize": True, "image_mean": mean, "image_std": std},
        }
        if seen.crop == "resize":  # the middle, 7/8 of the shorter side
            view |= {"size": {"shortest_edge": round(seen.size * 8 / 7)}, "do_center_crop": True}
            view |= {"crop_size": size}
        return json.dumps(view, indent=2).encode()

    def preview(self, model: nn.Module, run: RunLog) -> None:
        """As Task: the evaluation's line is enough."""

    def close(self, model: nn.Module, run: RunLog) -> dict[str, Any]:
        """As Task: says how many are right, and which images could not be read, as far as ranks met them."""
        own = [part.files[i] for part in (self.train, self.others) for i in part.skipped]
        skipped = sorted(
            {file for files in all_gather_object(self._mesh.communicator("control"), own) for file in files}
        )
        message = f"held-out images: {100 * self._last['held_out_accuracy']:.2f} % right"
        if skipped:
            named = ", ".join(map(repr, skipped[:5])) + (", ..." if len(skipped) > 5 else "")
            message += f"; {len(skipped)} images could not be read: {named}"
        run.say(message)
        labels = dict(enumerate(self.train.classes))
        names = {"id2label": labels, "label2id": {name: i for i, name in labels.items()}}
        self.recipe.leave(model, run, {PREPROCESSOR: self.preprocessor()} if run.directory else {}, **names)
        return {"skipped": len(skipped), "skipped_files": skipped[:100], **self._last}
