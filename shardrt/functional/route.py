"""Tokens to experts: which experts a token goes to, its way there and back, and the losses of balance.

A copy is one choice of one token. Rows are copies in order of (expert, token), so each expert's rows are
contiguous, and a token's choices are in ascending order of experts. The choice of experts has no gradient;
the experts' weights have one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from shardrt import autograd, device, dtypes
from shardrt.autograd import Function, Variable, contiguous
from shardrt.functional._arrays import (
    check_floats,
    chosen,
    compute,
    empty,
    for_product,
    kernels,
    operands,
    tensor,
)
from shardrt.functional._types import Array, Tensor
from shardrt.functional.activation import sigmoid
from shardrt.functional.dropout import key_of_use, part_of_batch
from shardrt.functional.elementwise import add, clamp, div, mul
from shardrt.functional.in_parts import add_neighbours
from shardrt.functional.reduce import logsumexp, mean, sum
from shardrt.functional.shape import stack
from shardrt.functional.softmax import softmax
from shardrt.functional.unary import square

Counts = tuple[tuple[int, ...], ...]  # rows of each expert, of one source or several

SCORES = ("softmax", "sigmoid", "softmax_of_chosen")


@dataclass(frozen=True)
class ExpertOrder:
    """Where each token's copies lie among the rows of the experts: made by `expert_order`.

    Attributes:
        places: int64 (tokens, k), the row of each copy, -1 where it was dropped.
        copies: int64 (rows,), the copy, token * k + choice, in each row, -1 after the last. Both on the
            device.
        counts: int64 (experts,) on the host, how many rows each expert has.
        chosen: how many copies chose it, those that were dropped included.
        capacity: the most rows that an expert takes, where there is a limit.
    """

    places: Array
    copies: Array
    counts: np.ndarray
    chosen: np.ndarray
    capacity: int | None = None

    @property
    def rows(self) -> int:
        """Rows that the experts get, with those after the last that is used, where there is a capacity."""
        return self.copies.shape[0]


class Take(Function):
    """The scores of the chosen experts."""

    def forward(self, scores: Array, experts: Array) -> Array:
        self.saved = (experts, scores.shape)
        y = empty(experts.shape, scores.dtype)
        kernels().route.take(scores, experts, y)
        return y

    def backward(self, dy: Array) -> tuple:
        experts, shape = self.saved
        dscores = empty(shape, dy.dtype)
        kernels().route.put(dy, experts, dscores)
        return dscores, None


class Dispatch(Function):
    """Tokens to rows."""

    def forward(self, x: Array, order: ExpertOrder) -> Array:
        self.saved = (order, x.shape)
        y = empty((order.rows, x.shape[1]), x.dtype)
        kernels().route.spread(x, None, order.copies, order.places.shape[1], y)
        return y

    def backward(self, dy: Array) -> tuple:
        order, shape = self.saved
        dx = empty(shape, dy.dtype)
        if order.places.shape[1] == 1:  # moved, as there is nothing to add up: a pass over memory less
            kernels().route.spread(dy, None, order.places.reshape(-1), 1, dx)
        else:
            kernels().route.collect(dy, None, order.places, dx)
        return dx, None


class Combine(Function):
    """Rows to tokens, each times its weight."""

    def forward(self, x: Array, weights: Array, order: ExpertOrder) -> Array:
        self.saved = (x if self.needs[1] else None, weights, order)
        y = empty((order.places.shape[0], x.shape[1]), x.dtype)
        kernels().route.collect(x, weights, order.places, y)
        return y

    def backward(self, dy: Array) -> tuple:
        x, weights, order = self.saved
        dx = dweights = None
        if self.needs[0]:
            dx = empty((order.rows, dy.shape[1]), dy.dtype)
            kernels().route.spread(dy, weights, order.copies, order.places.shape[1], dx)
        if self.needs[1]:
            dweights = empty(weights.shape, weights.dtype)
            kernels().route.weights_backward(dy, x, order.places, dweights)
        return dx, dweights, None


class GroupedLinear(Function):
    """A matmul for each expert of each source, of its rows with its weight."""

    handles = (1,)
    expensive = True

    def forward(self, x: Array, weight: Variable, counts: Counts) -> Array:
        y = empty((x.shape[0], weight.shape[1]), x.dtype)
        low, matrices = operands(x, weight)
        self.saved = (low if self.needs[1] else None, weight, counts)
        for rows, own in zip(_sources(counts), counts, strict=True):
            kernels().grouped.forward(low[rows], matrices, own, y[rows])
        return y

    def resume(self, kept: tuple, x: Array, weight: Variable, counts: Counts) -> Array:
        self.saved = (operands(x, weight)[0] if self.needs[1] else None, weight, counts)
        return kept[0]

    def backward(self, dy: Array) -> tuple:
        x, weight, counts = self.saved
        dx, factor = None, dy if x is None else for_product(dy, x)
        if self.needs[0]:
            dx = empty((dy.shape[0], weight.shape[2]), dy.dtype)
            factor, matrices = operands(factor, weight)
            for rows, own in zip(_sources(counts), counts, strict=True):
                kernels().grouped.backward_input(factor[rows], matrices, own, dx[rows])
        into = (weight if self.needs[1] else None,)
        return dx, *autograd.call_or_defer(_add_gradients, x, factor, counts, into=into), None


def _sources(counts: Counts) -> list[slice]:
    """The rows of each source; the last one has those that are not used."""
    starts = np.cumsum([0, *map(np.sum, counts[:-1])]).tolist()
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def _add_gradients(x: Array, dy: Array, counts: Counts, weight: Variable) -> tuple:
    dweight, accumulate, token = weight.gradient_target()
    multiply = kernels().grouped.backward_weight
    if len(counts) == 1:
        multiply(x, dy, counts[0], dweight, accumulate)
        return (token,)
    if accumulate:
        raise RuntimeError(
            "grouped_linear: with counts (sources, groups), a weight can be used once in a backward"
        )
    sources = _sources(counts)

    def product(source: int, out: Array) -> None:
        rows = sources[source]
        multiply(x[rows], dy[rows], counts[source], out.reshape(dweight.shape), False)

    add_neighbours(dweight.reshape(-1, dweight.shape[2]), len(counts), product, dweight.dtype)
    return (token,)


def route(
    logits: "Tensor",
    k: int,
    *,
    score: str = "softmax",
    renormalise: bool = True,
    scale: float = 1.0,
    bias: Array | None = None,
) -> "tuple[Tensor, Array, Tensor]":
    """(weights, experts, probabilities) of the k experts that each token goes to.

    logits (tokens, experts), float32 or float64 -> weights (tokens, k), experts, int64 (tokens, k) in
    ascending order, on the device, and probabilities (tokens, experts), which sum to 1, for `balance_loss`.

    The weights are the scores of the k highest, of which the lowest expert goes first where they tie; divided
    by their sum if `renormalise`, times `scale`.

    Args:
        score: an expert's score: "softmax" over all experts (Mixtral, Qwen3-MoE, OLMoE), "sigmoid" of its
            logit (DeepSeek-V3), or "softmax_of_chosen", over the k alone.
        bias: (experts,), is added to the scores where experts are chosen, and to nothing else
            (`nn.update_expert_bias`).

    Raises:
        ValueError: for a k or a bias that does not fit, and for an unknown score.
        TypeError: for other dtypes.
    """
    logits = _matrix("route", "logits", logits)
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"route: k must be in [1, {logits.shape[1]}], got {k}")
    if score not in SCORES:
        raise ValueError(f"route: score must be one of {', '.join(map(repr, SCORES))}, got {score!r}")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(f"route: bias must be ({logits.shape[1]},), got {bias.shape}")
    scores = sigmoid(logits) if score == "sigmoid" else softmax(logits)
    experts = empty((logits.shape[0], k), np.int64)
    ranked = logits.data
    if bias is not None:
        ranked = compute(np.add, scores.data, device.current().asarray(bias, logits.dtype))
    kernels().route.top_k(contiguous(ranked), experts)
    if score == "softmax_of_chosen":
        weights = softmax(Take.apply(logits, experts))
    else:
        weights = Take.apply(scores, experts)
        weights = _shares(weights, score) if renormalise else weights
    probabilities = _shares(scores, score) if score == "sigmoid" else scores
    return weights if scale == 1 else mul(weights, scale), experts, probabilities


def _shares(scores: "Tensor", score: str) -> "Tensor":
    """Of their sum, which sigmoids may make 0."""
    total = sum(scores, -1, keepdims=True)
    return div(scores, add(total, 1e-20) if score == "sigmoid" else total)


def expert_capacity(tokens: int, k: int, experts: int, factor: float) -> int:
    """The most rows that an expert takes: ceil(k tokens / experts * factor)."""
    return ceil(k * tokens / experts * factor)


def expert_order(
    experts: Array, count: int, *, capacity: int | None = None, priority: Any = None
) -> ExpertOrder:
    """The order in which rows go to `count` experts: by expert, then by token.

    The host waits for the device to learn how many rows each expert has.

    Args:
        experts: int64 (tokens, k) in ascending order, as `route` gives them.
        capacity: the most rows that an expert takes (None: all); of more, those of the highest `priority`
            stay, then those of the first tokens.
        priority: (tokens, k), not negative, needed with a capacity: their weights, say.

    Raises:
        ValueError: for a capacity without a priority, or below 0, and for other shapes or types.
    """
    if experts.ndim != 2 or experts.dtype != np.int64:
        raise ValueError(
            f"expert_order: experts must be int64 (tokens, k), got {experts.dtype} {experts.shape}"
        )
    if capacity is not None and priority is None:
        raise ValueError("expert_order: capacity needs priority, of shape (tokens, k)")
    if capacity is not None and capacity < 0:
        raise ValueError(f"expert_order: capacity must be at least 0, got {capacity}")
    by = None if capacity is None else contiguous(tensor(priority).data)
    if by is not None and by.shape != experts.shape:
        raise ValueError(f"expert_order: priority must be {experts.shape}, got {by.shape}")
    rows = experts.size if capacity is None else min(experts.size, count * capacity)
    places, copies = empty(experts.shape, np.int64), empty(rows, np.int64)
    counts = empty((2, count), np.int64)
    kernels().route.order(experts, by, capacity or 0, places, copies, counts)
    even = np.diff(rows * np.arange(count + 1) // count)  # where nothing is computed
    before, after = device.current().read(counts, np.stack([even, even])).copy()
    return ExpertOrder(places, copies, after, before, capacity)


def dispatch(x: "Tensor", order: ExpertOrder) -> "Tensor":
    """The rows of the experts: x (tokens, width) -> (order.rows, width), each token once for each choice.

    Rows after the last that is used are 0. Backward adds a token's rows in ascending order of experts.

    Raises:
        ValueError: for other sizes.
        TypeError: for other than floats.
    """
    x = _matrix("dispatch", "x", x)
    if x.shape[0] != order.places.shape[0]:
        raise ValueError(
            f"dispatch: x must have {order.places.shape[0]} rows, one for each token, got {x.shape[0]}"
        )
    return Dispatch.apply(x, order)


def combine(x: "Tensor", weights: "Tensor", order: ExpertOrder) -> "Tensor":
    """Combine the experts' outputs into the tokens: (order.rows, width) -> (tokens, width).

    Each token gets the sum of its rows times its `weights`, (tokens, k), in ascending order of experts.
    Dropped rows add nothing.

    Args:
        weights: float32, float64 with a float64 x.

    Raises:
        ValueError: for other sizes.
        TypeError: for other dtypes.
    """
    x, weights = _matrix("combine", "x", x), tensor(weights)
    if x.shape[0] != order.rows or weights.shape != order.places.shape:
        raise ValueError(
            f"combine: x must have {order.rows} rows and weights be {order.places.shape}, got {x.shape} and "
            f"{weights.shape}"
        )
    if weights.dtype != dtypes.exact(x.dtype):
        raise TypeError(f"combine: weights must be {dtypes.exact(x.dtype)}, got {weights.dtype}")
    return Combine.apply(x, weights, order)


def grouped_linear(x: "Tensor", weight: "Tensor", counts: Sequence[int] | np.ndarray) -> "Tensor":
    """A linear layer for each group of rows: (rows, inputs) -> (rows, outputs).

    Rows after the last group give 0. On the CPU each group's result is bitwise equal to F.linear; on a GPU
    groups of few rows have one launch together, and in 16 bits cuBLAS has one call for all.

    Args:
        weight: (groups, outputs, inputs).
        counts: (groups,), the rows of each group, or (sources, groups) for several sources whose rows follow
            one another; their gradients of the weight are added as a tree, (0 + 1) + (2 + 3).

    Raises:
        ValueError: for sizes that don't fit.
        TypeError: for other dtypes.
        RuntimeError: in backward, for a weight with several sources that is used twice.
    """
    x, weight = _matrix("grouped_linear", "x", x), tensor(weight)
    given, counts = counts, np.asarray(counts)
    sources = counts.shape[0] if counts.ndim == 2 else 1
    fits = counts.ndim in (1, 2) and counts.shape[-1:] == weight.shape[:1] and not sources & (sources - 1)
    if weight.ndim != 3 or x.shape[1] != weight.shape[2] or not (fits and sources):
        raise ValueError(
            "grouped_linear: x must be (rows, inputs), weight (groups, outputs, inputs), counts (groups,) or "
            f"(sources, groups), sources a power of two; got {x.shape}, {weight.shape} and {counts.shape}"
        )
    if counts.min() < 0 or counts.sum() > x.shape[0]:
        raise ValueError(
            f"grouped_linear: counts must not be negative, and sum to {x.shape[0]} at most, got {given}"
        )
    check_floats("grouped_linear", x=x, weight=weight)
    return GroupedLinear.apply(x, weight, tuple(map(tuple, counts.reshape(sources, -1).tolist())))


def balance_loss(probabilities: "Tensor", counts: Array, k: int) -> "Tensor":
    """E / (k T^2) times the sum over the E experts of counts times their probabilities: 1 in balance.

    probabilities (T, E), from `route`; counts (E,): how many of the T tokens chose each expert. (Megatron's
    form of Fedus et al., Switch Transformers, 2021, a layer at a time.)
    """
    probabilities = tensor(probabilities)
    tokens, experts = probabilities.shape
    chosen = tensor(device.current().asarray(counts, probabilities.dtype))
    return mul(sum(mul(chosen, sum(probabilities, 0))), experts / (k * max(1, tokens) ** 2))


def balance_sums(probabilities: "Tensor", counts: Array) -> "Tensor":
    """(2, E): the counts, and the sum over tokens of each expert's probability. Those of layers add up."""
    probabilities = tensor(probabilities)
    counts = device.current().asarray(counts, probabilities.dtype)
    return stack([tensor(counts), sum(probabilities, 0)])


def pooled_balance_loss(sums: "Tensor", tokens: int) -> "Tensor":
    """E / tokens^2 times the sum over experts of counts times probabilities, of all layers together.

    Args:
        sums: those of `balance_sums`, added up.
        tokens: of all layers that gave them. k times as large as `balance_loss`: this is
            load_balancing_loss_func of transformers.
    """
    return mul(sum(mul(sums[0], sums[1])), sums.shape[1] / max(1, tokens) ** 2)


def router_z_loss(logits: "Tensor") -> "Tensor":
    """The mean over tokens of logsumexp(logits)^2 (Zoph et al., ST-MoE, 2022)."""
    return mean(square(logsumexp(logits, -1)))


def top2_gate(
    logits: "Tensor", noisy: bool, of_all: Callable[[np.ndarray], np.ndarray] | None = None
) -> "tuple[Tensor, ExpertOrder, Tensor]":
    """(weights (tokens, 2), order, loss) of FairScale's top2gating: see nn.Top2Gate.

    Args:
        logits: (tokens, experts).
        noisy: Gumbel noise of this step's random numbers where the second expert is chosen.
        of_all: gives how many first choices of each expert the loss counts, of as many tokens, from those of
            these tokens, int64 (experts,) on the host, which waits for them; None: these.

    Raises:
        ValueError: where the tokens are no multiple of the experts.
        TypeError: for other than floats.
    """
    logits = _matrix("top2_gate", "logits", logits)
    tokens, count = logits.shape
    if tokens % count:
        raise ValueError(f"top2_gate: the tokens must be a multiple of {count} experts, got {tokens}")
    gates = softmax(logits)
    first, second = empty((tokens, 1), np.int64), empty((tokens, 1), np.int64)
    kernels().route.top_k(contiguous(logits.data), first)
    is_first = empty(logits.shape, logits.dtype)
    kernels().route.put(_filled(first.shape, 1, logits.dtype), first, is_first)
    ranked = compute(np.add, logits.data, gumbel(logits.shape, logits.dtype)) if noisy else logits.data
    kernels().route.top_k(chosen(is_first > 0, -np.inf, ranked, logits.shape, logits.dtype), second)
    experts = empty((tokens, 2), np.int64)
    np.minimum(first, second, out=experts[:, :1])
    np.maximum(first, second, out=experts[:, 1:])
    priority = (experts == first).astype(logits.dtype)
    order = expert_order(experts, count, capacity=2 * tokens // count, priority=priority)
    taken = mul(Take.apply(gates, experts), tensor((order.places >= 0).astype(logits.dtype)))
    weights = div(taken, clamp(sum(taken, -1, keepdims=True), np.finfo(logits.dtype).eps))
    share = mean(tensor(is_first), 0)
    if of_all is not None:
        even = np.full(count, tokens // count)
        firsts = np.rint(device.current().read(share.data, even / tokens) * tokens).astype(np.int64)
        share = tensor(device.current().asarray(of_all(firsts) / tokens, logits.dtype))
    return weights, order, mean(mul(mean(gates, 0), share))


def gumbel(shape: tuple[int, int], dtype: Any) -> Array:
    """-log(-log(u)) of uniform numbers above 0."""
    u = empty(shape, dtype)
    seed, call, _ = key_of_use()
    part = part_of_batch(shape)
    for first, run in zip(part, u.reshape(len(part), u.size // max(1, len(part))), strict=True):
        kernels().philox.uniform(run, seed, call, first)
    np.maximum(u, 2.0**-25, out=u)
    for _ in range(2):
        np.negative(np.log(u, out=u), out=u)
    return u


def _filled(shape: tuple[int, ...], value: float, dtype: Any) -> Array:
    array = empty(shape, dtype)
    array.fill(value)
    return array


def _matrix(op: str, name: str, x: "Tensor") -> "Tensor":
    x = tensor(x)
    if x.ndim != 2:
        raise ValueError(f"{op}: {name} must have two axes, got {x.shape}")
    check_floats(op, **{name: x})
    return x
