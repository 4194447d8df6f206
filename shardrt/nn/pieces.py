"""Piece: a part of a model's forward, for a pipeline (parallel/stage.py).

A model gives its pieces in order by a method `pieces()`. Called in order, each with the output of the piece
before it, they are the model's forward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardrt.nn.public import Module, Parameter

Uses = tuple[Module | Parameter, ...]


@dataclass(frozen=True, eq=False)
class Piece:
    """`run(x, batch)` -> x, with the modules and parameters that it uses.

    x: the value between two pieces, a tensor, or tuples, lists, dicts of them; None for the first. batch: the
    arguments of the model's forward by name, the same for all pieces. A piece must not use modules that it
    does not name: they may be absent.

    Attributes:
        uses: modules that no other piece uses.
        tied: modules that an earlier piece uses too, such as an embedding that is also the head.
    """

    name: str
    run: Callable[[Any, Mapping[str, Any]], Any]
    uses: Uses = ()
    tied: Uses = ()

    def modules(self) -> list[Module]:
        """The modules named, without those in them."""
        return [item for item in (*self.uses, *self.tied) if isinstance(item, Module)]

    def parameters(self) -> list[Parameter]:
        """All parameters that it uses, each once."""
        return _parameters((*self.uses, *self.tied))

    def tied_parameters(self) -> list[Parameter]:
        """Modules that an earlier piece uses too."""
        return _parameters(self.tied)


def _parameters(items: Uses) -> list[Parameter]:
    """All parameters there, each once."""
    found = (p for item in items for p in (item.parameters() if isinstance(item, Module) else [item]))
    return list({id(parameter): parameter for parameter in found}.values())
