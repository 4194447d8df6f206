"""Styles: how a module's parameters are split on an axis of the mesh, and its wrapper.

(Shoeybi et al., Megatron-LM, 2019, for columns and rows; Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models, 2022, for the sequence.)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from shardrt.comm.protocol import Communicator
from shardrt.functional.in_parts import InParts
from shardrt.functional.in_time import InTime
from shardrt.nn.extents import Extent, Extents, contiguous
from shardrt.nn.layers import Dropout, Embedding, LayerNorm, Linear, RMSNorm
from shardrt.nn.lora import is_adapted
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.parameter_placement import PARTIAL, REPLICATE, ParameterPlacement, set_placement
from shardrt.parallel.axis import Alone, Axis
from shardrt.parallel.conversion import Column, OwnTime, Row, WholeTime

__all__ = ["Style"]


class Style:
    """Names a module's style; `apply` converts the module."""

    modules: tuple[type[Module], ...] = (Linear,)

    @property
    def wanted(self) -> str:
        """The modules it is for, in words."""
        return ", ".join(kind.__name__ for kind in self.modules)

    def fits(self, module: Module) -> bool:
        """Whether it is for such a module: one of `modules`, or a subclass without a forward of its own."""
        known = isinstance(module, self.modules)
        return known and any(type(module).forward is kind.forward for kind in self.modules)

    def apply(self, module: Module, axis: Axis) -> None:
        """Split the parameters of `module`, and wrap it to convert activations. Raises ValueError."""
        raise NotImplementedError

    def put_in_parts(self, module: Module, axis: Axis | Alone, parts: int) -> None:
        """Have its weight multiplied in so many parts, of all ranks together.

        After `apply`.

        Args:
            parts: a multiple of the number of ranks.

        Raises:
            ValueError: if they do not divide the split size.
        """
        raise ValueError(
            f"set_tensor_invariant: the style {type(self).__name__} of {module.name!r} does not support it"
        )


def check_alone(kind: type[Style], chosen: Iterable[tuple[Module, Style]], where: str) -> None:
    """Raise ValueError where a plan has other styles next to one that needs a separate plan."""
    other = next((style for _, style in chosen if not isinstance(style, kind)), None)
    if other is not None:
        raise ValueError(
            f"parallelize_module: {kind.__name__} needs a plan of its own, without {type(other).__name__}, "
            f"{where}"
        )


@dataclass(frozen=True)
class ColwiseParallel(Style):
    """A Linear of which each rank computes some outputs: rows of its weight, and of its bias.

    Attributes:
        parts: how many layers side by side it is, each of them split: 3 for q, k, v. A tuple gives their
            widths in heads, which stay whole: (heads, kv_heads, kv_heads). Where there are more ranks than
            heads of a part, neighbours compute a head together, and each gets all of it.
    """

    parts: int | tuple[int, ...] = 1

    def apply(self, module: Module, axis: Axis) -> None:
        weight = module.weight
        sizes = self._sizes(module, axis.size)
        _cut_rows(weight, axis, sizes)
        if module.bias is not None:
            _cut_rows(module.bias, axis, sizes)
        if is_adapted(module):
            partial(module.lora_a, axis)
            _cut_rows(module.lora_b, axis, sizes)
        module.wrap_forward(Column(axis, self._shared(axis, sizes)))

    def put_in_parts(self, module: Module, axis: Axis | Alone, parts: int) -> None:
        alike = isinstance(self.parts, int)
        sizes, here = self._sizes(module, 1), parts // axis.size
        for count in sizes if alike else self.parts:
            _check_divided(module, parts, count, "outputs" if alike else "heads")
        found: list[list[slice]] = [[] for _ in range(here)]
        start = 0
        for size in sizes:
            for part in found:
                start, first = start + size // parts, start
                part.append(slice(first, start))
        module.weight.in_parts = InParts(0, tuple(map(tuple, found)), goes_on=axis.size > 1)

    def _sizes(self, module: Module, n: int) -> list[int]:
        """Rows of each part, of all `n` ranks. Raises ValueError for sizes that can't be split."""
        rows = module.weight.whole_shape[0]
        heads = (1,) * self.parts if isinstance(self.parts, int) else self.parts
        if not heads or min(heads) < 1 or rows % sum(heads):
            raise ValueError(
                f"ColwiseParallel: parts {self.parts} must add up to the {rows} outputs of {module.name!r}"
            )
        each = rows // sum(heads)
        if isinstance(self.parts, int):
            if each % n:
                raise ValueError(
                    f"ColwiseParallel: {n} ranks must divide the {each} outputs of {module.name!r}"
                )
            return [each] * len(heads)
        for place, count in enumerate(heads):
            together = place > 0 and n % count == 0 and each % (n // count) == 0
            if count % n and not together:
                raise ValueError(
                    f"ColwiseParallel: {n} ranks must divide the {count} heads of {module.name!r}"
                )
        return [each * count for count in heads]

    def _shared(self, axis: Axis, sizes: list[int]) -> list[tuple[int, Communicator | None]]:
        """For each part: its elements here, and the group of ranks that compute a head of it together."""
        shared = []
        for place, size in enumerate(sizes):
            heads = axis.size if isinstance(self.parts, int) else self.parts[place]
            others = None
            if heads < axis.size:
                fold = axis.mesh.fold("head", axis.size // heads, rest="heads")
                others = fold["head"].communicator("tensor")
            shared.append((size // axis.size, others))
        return shared


@dataclass(frozen=True)
class RowwiseParallel(Style):
    """A Linear of which each rank has some inputs: columns of its weight. The results are summed.

    Each rank's input is the output of a ColwiseParallel layer. The bias is whole, and added once.
    """

    def apply(self, module: Module, axis: Axis) -> None:
        if module.gelu:
            raise ValueError(
                f"RowwiseParallel: {module.name!r} has a fused GELU, which needs the whole sum; use a "
                "Linear without it"
            )
        _cut_columns(module.weight, axis)
        if is_adapted(module):
            if module.adapter.dropout:
                raise ValueError(f"RowwiseParallel: the LoRA adapter of {module.name!r} must have dropout=0")
            _cut_columns(module.lora_a, axis)
            partial(module.lora_b, axis)
        if module.bias is not None and axis.sequence:
            partial(module.bias, axis)
        module.wrap_forward(Row(axis))

    def put_in_parts(self, module: Module, axis: Axis | Alone, parts: int) -> None:
        inputs = module.weight.whole_shape[1]
        _check_divided(module, parts, inputs, "inputs")
        each = inputs // parts
        places = tuple((slice(i * each, (i + 1) * each),) for i in range(parts // axis.size))
        module.weight.in_parts = InParts(1, places, goes_on=axis.size > 1)
        if module.bias is not None and axis.sequence:
            _sum_in_time(module.bias, axis, parts)


@dataclass(frozen=True)
class SequenceParallel(Style):
    """A module that acts on each position separately, on this rank's slice of the time.

    Attributes:
        output: "part", or "whole": the output is gathered, for all ranks to go on with alike. Where a plan
            has this style, inputs of ColwiseParallel and outputs of RowwiseParallel and VocabParallel are
            such slices; each is gathered, again in backward, and summed into slices.
    """

    output: str = "part"
    modules = (LayerNorm, RMSNorm, Dropout, Embedding)

    def __post_init__(self) -> None:
        if self.output not in ("part", "whole"):
            raise ValueError(f"SequenceParallel: output must be 'part' or 'whole', got {self.output!r}")

    def apply(self, module: Module, axis: Axis) -> None:
        for parameter in module._parameters.values():
            partial(parameter, axis)
        module.set_batch_block(axis.block)
        if isinstance(module, Embedding):
            module.wrap_forward(OwnTime(axis))
        if self.output == "whole":
            module.wrap_forward(WholeTime(axis))

    def put_in_parts(self, module: Module, axis: Axis | Alone, parts: int) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                _sum_in_time(parameter, axis, parts)


@dataclass(frozen=True)
class HeadParallel(Style):
    """A norm of each head by itself, of queries or keys: each rank has it, for the heads that it computes."""

    modules = (LayerNorm, RMSNorm)

    def apply(self, module: Module, axis: Axis) -> None:
        for parameter in module._parameters.values():
            partial(parameter, axis)


def _check_divided(module: Module, parts: int, count: int, what: str) -> None:
    if count % parts:
        raise ValueError(
            f"set_tensor_invariant: {parts} parts must divide the {count} {what} of {module.name!r}"
        )


def _sum_in_time(parameter: Parameter, axis: Axis | Alone, parts: int) -> None:
    """Each op sums its gradient over the ranks, so all ranks have the same gradient."""
    if axis.size > 1:
        set_placement(parameter, ParameterPlacement.of_all(REPLICATE, axis.mesh, parameter.shape))
    parameter.in_parts = InTime(parts // axis.size, axis.communicator)


def _cut_rows(parameter: Parameter, axis: Axis, sizes: list[int]) -> None:
    """Each rank has an equal part of the rows of every part."""
    whole, n = parameter.shape, axis.size
    width = prod(whole[1:])
    parts: list[Extents] = []
    for rank in range(n):
        part: Extents = ()
        first = 0
        for size in sizes:
            each = size // n
            part += contiguous((first + rank * each) * width, each * width)
            first += size
        parts.append(part)
    set_placement(parameter, axis.cut(whole, (whole[0] // n, *whole[1:]), tuple(parts)))


def _cut_columns(weight: Parameter, axis: Axis) -> None:
    """Each rank has an equal part of every row."""
    rows, columns = weight.shape
    each, rest = divmod(columns, axis.size)
    if rest:
        raise ValueError(
            f"RowwiseParallel: {axis.size} ranks must divide the {columns} inputs of {weight.name!r}"
        )
    parts = tuple((Extent(rank * each, each, columns, rows),) for rank in range(axis.size))
    set_placement(weight, axis.cut((rows, columns), (rows, each), parts))


def partial(parameter: Parameter, axis: Axis) -> None:
    """All ranks have it, and the ranks' gradients are summed."""
    set_placement(parameter, ParameterPlacement.of_all(PARTIAL, axis.mesh, parameter.shape))
