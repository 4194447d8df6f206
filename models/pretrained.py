"""Shared by the recipes of all architectures: start from a folder of Hugging Face's, and write one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, ClassVar

from shardrt import nn
from shardrt.nn.lora import adapted_layers
from shardrt.train.metrics import RunLog
from shardrt.train.recipe import Recipe

from .adapters import LANGUAGE, load_adapter, save_adapter
from .formats import FORMATS
from .hub import described, kind_in, load_pretrained, save_pretrained


@dataclass(frozen=True)
class PretrainedRecipe(Recipe):
    """A recipe of one of the models here. Raises ValueError for `init_from` or `export` without a format.

    init_from brings the model's shape: with `size` as well it is an error, and [model] is not read.
    """

    init_from: Path | None = None  # a folder of Hugging Face's whose shape and weights it begins with
    export: bool = False  # write such a folder at the end: runs/NAME/pretrained

    NETWORK: ClassVar[type[nn.Module]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pretrained and self.size:
            raise ValueError(f"size is {self.size!r}, but init_from sets the shape: leave one of them out")
        kinds = [form.model for form in FORMATS.values()]
        if (self.pretrained or self.export) and self.NETWORK not in kinds:
            raise ValueError(
                f"init_from and export: {self.ARCHITECTURE} has no Hugging Face format here; these have: "
                f"{', '.join(kind.__name__ for kind in kinds)}"
            )
        if self.lora.adapter is not None and not self.pretrained:
            raise ValueError("lora.adapter: init_from must name the model that it adapts")

    @property
    def pretrained(self) -> bool:
        """Whether shape and weights come from files."""
        return self.init_from is not None

    def check_origin(self) -> None:
        """Raise ValueError unless init_from, if it is given, is a folder of this kind of model."""
        if self.pretrained and not (config_file := self.init_from / "config.json").exists():
            raise ValueError(
                f"init_from: {config_file} is not there. It must be a local folder; to have one: "
                f"hf download {self.init_from} --local-dir FOLDER"
            )
        if self.pretrained and (kind := kind_in(self.init_from)) is not self.NETWORK:
            raise ValueError(
                f"init_from: {self.init_from} holds a {kind.__name__}; architecture is {self.ARCHITECTURE!r}"
            )

    def begun(self, config: Any, **changes: Any) -> nn.Module:
        """A new model: of `config`, or that of init_from with `changes` to its own.

        Raises ValueError for files of another kind, and for a model that `export` could not keep.
        """
        self.check_origin()
        model = load_pretrained(self.init_from, **changes) if self.pretrained else self.NETWORK(config)
        if self.lora.adapter is not None:
            load_adapter(model, self.lora.adapter)
        if self.export:
            described(model)
        return model

    def leave(self, model: nn.Module, run: RunLog, files: Mapping[str, bytes], **settings: Any) -> None:
        """Export the trained model if the recipe says so. Collective.

        files: more to put there, on rank 0. settings: more of config.json. LoRA adapters are merged there,
        and the folder "adapter" has them as PEFT's. What the run left before it was resumed is removed.
        """
        if not self.export:
            return
        folder = _emptied(run, "pretrained")
        save_pretrained(model, folder or "", settings=settings, files=files)
        run.say(f"exported {folder}")
        if adapted_layers(model) and isinstance(model, LANGUAGE):
            folder = _emptied(run, "adapter")
            save_adapter(model, folder or "")
            run.say(f"exported {folder}")


def _emptied(run: RunLog, name: str) -> Path | None:
    """A folder of a run that is not there any more; None on ranks that write nothing."""
    folder = run.directory / name if run.directory else None
    if folder and folder.exists():
        rmtree(folder)
    return folder
