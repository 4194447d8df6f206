"""Convolution in bfloat16 by oneDNN: what goes into products are bits; results and sums are float32.

As in conv2d.py, images are turned to (height, width, channels), some at a time, which stay in the second
cache; not where windows do not overlap, since then those of a channel are read as they lie. Primitives are
made once for each convolution of a thread.
"""

import ctypes
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from shardrt.kernels import onednn
from shardrt.kernels.cost import Array
from shardrt.kernels.cpu._threads import threads
from shardrt.kernels.onednn import BF16, BIAS, DIFF_DST, DIFF_SRC, DIFF_WEIGHTS, DST, F32, SRC, WEIGHTS

Pair = tuple[int, int]

_CHUNK = 1 << 20  # bytes of turned images of a thread, about, that are worked on at once
_TRAINING, _AUTO = 64, 3  # dnnl_forward_training, dnnl_convolution_auto
_CHOSEN_WEIGHTS, _CHOSEN_DIFF_WEIGHTS = 131, 132  # dnnl_query_weights_md, dnnl_query_diff_weights_md
_LINE = 64  # bytes


class Convolution(NamedTuple):
    """What decides which primitives compute: shapes of x, weight and y with the images at a time."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    y: tuple[int, ...]
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @property
    def turns(self) -> bool:
        """Whether images are computed with as (height, width, channels)."""
        return any(window > step for window, step in zip(self.weight[2:], self.stride, strict=True))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the weight, as oneDNN has them."""
        outputs, inputs, *window = self.weight
        own = (self.groups, outputs // self.groups) if self.groups > 1 else (outputs,)
        return (*own, inputs, *window)

    def images(self, shape: tuple[int, ...], kind: int, turned: bool) -> Any:
        """The descriptor of images of this shape."""
        batch, channels, height, width = shape
        image = channels * height * width
        along = (1, width * channels, channels) if turned else (height * width, width, 1)
        return onednn.library().laid_out((batch, channels, height, width), (image, *along), kind)

    def weights(self, kind: int, plain: bool) -> Any:
        strides = [prod(self.sizes[at + 1 :]) for at in range(len(self.sizes))]
        return onednn.library().laid_out(self.sizes, strides if plain else None, kind)

    def geometry(self) -> list[Any]:
        """strides, dilates, padding on both sides, as oneDNN takes them."""
        pairs = self.stride, tuple(d - 1 for d in self.dilation), self.padding, self.padding
        return [(ctypes.c_int64 * 2)(*pair) for pair in pairs]


def forward(x: Array, weight: Array, bias: Array | None, y: Array, *geometry: Any) -> None:
    """As conv2d.forward; x and weight are bits, y and bias float32."""
    _over_chunks("forward", x, weight, y, Convolution(x.shape, weight.shape, y.shape, *geometry), bias)


def backward_input(dy: Array, weight: Array, dx: Array, *geometry: Any) -> None:
    """As conv2d.backward_input; dy and weight are bits, dx float32."""
    _over_chunks("input", dy, weight, dx, Convolution(dx.shape, weight.shape, dy.shape, *geometry), None)


def backward_weight(x: Array, dy: Array, dweight: Array, accumulate: bool, *geometry: Any) -> None:
    """As conv2d.backward_weight; x and dy are bits, dweight float32."""
    what = Convolution(x.shape, dweight.shape, dy.shape, *geometry)
    onednn.library().with_threads(threads(), _backward_weight, what, x, dy, dweight, accumulate)


def has(what: Convolution) -> bool:
    """Whether oneDNN has more than its slow reference for all three."""
    known = onednn.kept(("has", what))
    if known is None:
        here = onednn.library()
        names = []
        for make in (_forward, _input, _weight):
            made, operands, *_ = make(what, False)
            names.append(here.implementation(made))
            here.call("dnnl_primitive_desc_destroy", made)
            for each in operands.values():
                here.call("dnnl_memory_desc_destroy", each)
        known = onednn.keep(("has", what), (not any(name.startswith("ref") for name in names),))
    return known[0]


def _over_chunks(kind: str, x: Array, weight: Array, y: Array, what: Convolution, bias: Array | None) -> None:
    """forward, or backward_input from dy as x to dx as y."""
    image = 2 * x[0].size + 4 * y[0].size
    most = max(1, threads() * _CHUNK // image)
    count = len(x) if not what.turns else next(n for n in range(min(most, len(x)), 0, -1) if len(x) % n == 0)
    some = what._replace(x=(count, *what.x[1:]), y=(count, *what.y[1:]))
    onednn.library().with_threads(threads(), _convolve, kind, some, x, weight, y, bias)


def _convolve(kind: str, what: Convolution, x: Array, weight: Array, y: Array, bias: Array | None) -> None:
    ready = _ready(kind, what, bias is not None)
    count = what.x[0]
    weights = _memory(ready.bytes)
    ready.pack(_at(weight), _at(weights))
    shift = () if bias is None else (_at(bias),)
    if not what.turns:
        ready.run(_at(x), _at(weights), _at(y), *shift)
        return
    source, target = _memory(2 * x[:count].size), _memory(4 * y[:count].size)
    for first in range(0, len(x), count):
        ready.turn(_at(x[first:]), _at(source))
        ready.run(_at(source), _at(weights), _at(target), *shift)
        ready.turn_back(_at(target), _at(y[first:]))


def _backward_weight(what: Convolution, x: Array, dy: Array, dweight: Array, accumulate: bool) -> None:
    ready = _ready("weight", what, accumulate)
    sums = _memory(ready.bytes)
    if what.turns:
        source, upper = _memory(2 * x.size), _memory(2 * dy.size)
        ready.turn(_at(x), _at(source))
        ready.turn_back(_at(dy), _at(upper))
        x, dy = source, upper
    ready.run(_at(x), _at(sums), _at(dy))
    ready.pack(_at(sums), _at(dweight))


class _Ready(NamedTuple):
    """run: the convolution, of its first image operand, the weight or its gradient, and the second.

    pack: the weight to the order in memory that oneDNN has chosen, or its gradient back; bytes: in that
    order. turn, turn_back: of the first and the second image operand, where images are turned.
    """

    run: Callable[..., None]
    pack: Callable[[int, int], None]
    bytes: int
    turn: Callable[[int, int], None] | None
    turn_back: Callable[[int, int], None] | None


def _ready(kind: str, what: Convolution, more: bool) -> _Ready:
    """more: with a bias; for the weight's gradient, whether it is added."""
    name = (kind, what, more, threads())
    return onednn.kept(name) or onednn.keep(name, _made(kind, what, more))


def _made(kind: str, what: Convolution, more: bool) -> _Ready:
    here, stream = onednn.library(), onednn.stream()
    make = {"forward": _forward, "input": _input, "weight": _weight}[kind]
    made, operands, number, (first, second) = make(what, more)
    chosen, size = here.chosen(made, number)
    if kind == "weight":
        pack = _reorder(chosen, what.weights(F32, True), more)
        turns = (what.x, BF16, True), (what.y, BF16, True)
    else:
        pack = _reorder(what.weights(BF16, True), chosen)
        turns = (first, BF16, True), (second, F32, False)
    turn = turn_back = None
    if what.turns:
        turn, turn_back = (
            _reorder(what.images(shape, form, not there), what.images(shape, form, there))
            for shape, form, there in turns
        )
    clone = here.chosen(made, number)[0]
    for argument in (WEIGHTS, DIFF_WEIGHTS):
        if argument in operands:
            here.call("dnnl_memory_desc_destroy", operands[argument])
            operands[argument] = clone
    return _Ready(onednn.Primitive(here, stream, made, operands), pack, size, turn, turn_back)


def _forward(what: Convolution, bias: bool) -> tuple:
    """(the primitive's descriptor, operands, the query of the weight, shapes of what is read and written)."""
    here = onednn.library()
    x, y = what.images(what.x, BF16, what.turns), what.images(what.y, F32, what.turns)
    weight = what.weights(BF16, False)
    operands = {SRC: x, WEIGHTS: weight, DST: y}
    if bias:
        operands[BIAS] = here.laid_out((what.y[1],), (1,), F32)
    name = "dnnl_convolution_forward_primitive_desc_create"
    how = (x, weight, operands.get(BIAS), y, *what.geometry(), None)
    made = here.made(name, here.engine, _TRAINING, _AUTO, *how)
    return made, operands, _CHOSEN_WEIGHTS, (what.x, what.y)


def _input(what: Convolution, _: bool) -> tuple:
    here = onednn.library()
    dx, dy = what.images(what.x, F32, what.turns), what.images(what.y, BF16, what.turns)
    weight = what.weights(BF16, False)
    name = "dnnl_convolution_backward_data_primitive_desc_create"
    with _Hint(what) as hint:
        made = here.made(name, here.engine, _AUTO, dx, weight, dy, *what.geometry(), hint, None)
    return made, {DIFF_DST: dy, WEIGHTS: weight, DIFF_SRC: dx}, _CHOSEN_WEIGHTS, (what.y, what.x)


def _weight(what: Convolution, _: bool) -> tuple:
    here = onednn.library()
    x, dy = what.images(what.x, BF16, what.turns), what.images(what.y, BF16, what.turns)
    dweight = what.weights(F32, False)
    name = "dnnl_convolution_backward_weights_primitive_desc_create"
    with _Hint(what) as hint:
        made = here.made(name, here.engine, _AUTO, x, dweight, None, dy, *what.geometry(), hint, None)
    return made, {SRC: x, DIFF_WEIGHTS: dweight, DIFF_DST: dy}, _CHOSEN_DIFF_WEIGHTS, (what.x, what.y)


class _Hint:
    """The forward that a backward belongs to, while that is described."""

    def __init__(self, what: Convolution) -> None:
        self._made, self._operands, *_ = _forward(what, False)

    def __enter__(self) -> Any:
        return self._made

    def __exit__(self, *_: Any) -> None:
        here = onednn.library()
        here.call("dnnl_primitive_desc_destroy", self._made)
        for each in self._operands.values():
            here.call("dnnl_memory_desc_destroy", each)


def _reorder(source: Any, target: Any, accumulate: bool = False) -> Callable[[int, int], None]:
    """Copies from one order in memory to another. Takes both descriptors."""
    here = onednn.library()
    with here.adding(accumulate) as how:
        made = here.made("dnnl_reorder_primitive_desc_create", source, here.engine, target, here.engine, how)
    return onednn.Primitive(here, onednn.stream(), made, {SRC: source, DST: target})


def _memory(size: int) -> Array:
    """So many bytes, from the beginning of a line of the cache."""
    data = np.empty(size + _LINE, np.uint8)
    return data[-data.ctypes.data % _LINE :][:size]


def _at(x: Array) -> int:
    return x.__array_interface__["data"][0]
