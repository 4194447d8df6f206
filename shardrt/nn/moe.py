"""Mixture of experts: a router sends each token to few of many MLPs, whose results are put together.

(Shazeer et al., Outrageously Large Neural Networks, 2017; Lepikhin et al., GShard, 2020.)
docs/explanation/experts.md has
the formulas. Between `F.dispatch` and `F.combine` there is one call, of `Experts`: a wrapper for experts on
other ranks wraps that call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardrt import autograd, device, random
from shardrt import functional as F
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.mesh_layout import overlap
from shardrt.functional.route import SCORES, ExpertOrder
from shardrt.nn import init as initial
from shardrt.nn.init import Initialiser
from shardrt.nn.layers import check_sizes
from shardrt.nn.public import Module, Parameter
from shardrt.nn.ranks import ranks_of
from shardrt.tensor import Tensor


class Routing(NamedTuple):
    """A router's decision.

    Attributes:
        weights: (tokens, k), float32.
        loss: a number, 0 where it has none, or sums.
    """

    weights: Tensor
    order: ExpertOrder
    loss: Tensor


class Router(Module):
    """Base of routers: logits in float32, and a count of the tokens that chose each expert.

    load: int64 (experts,), on the host: choices since the last `update_expert_bias`, or since the beginning.
    """

    full_precision = True  # whatever mixed precision the unit has

    def __init__(self, width: int, n_experts: int, init: Initialiser | None, dtype: Any) -> None:
        super().__init__()
        check_sizes(type(self).__name__, width=width, n_experts=n_experts)
        bound = width**-0.5
        self.n_experts = n_experts
        self.weight = Parameter((n_experts, width), init or initial.Uniform(-bound, bound), dtype=dtype)
        self.load = np.zeros(n_experts, np.int64)
        self.balance_mesh: DeviceMesh | None = None  # over whose tokens the balance loss is

    def logits(self, x: Tensor) -> Tensor:
        """(tokens, width) -> (tokens, experts), in float32 whatever x has been cast to."""
        return F.linear(F.cast(x, self.weight.dtype), self.weight)

    def count(self, order: ExpertOrder) -> None:
        """Add to `load`, in training; not where a forward is run again, or in a dry run."""
        if self.training and not random.rewound() and autograd.running() is None:
            self.load += order.chosen

    def balance_along(self, mesh: DeviceMesh) -> None:
        """Let the balance loss count the tokens of all ranks of `mesh`, and of earlier calls' meshes.

        Collective over the root of `mesh`.

        Raises:
            ValueError: where its ranks have other stages.
        """
        place = self.weight.pipeline
        if place is not None and place.mesh.root is mesh.root and overlap(place.axes, mesh.axes):
            raise ValueError(
                f"balance_over: {self.name!r} is on one pipeline stage, but {mesh!r} has ranks of other "
                "stages"
            )
        if mesh.size > 1:
            self.balance_mesh = mesh if self.balance_mesh is None else self.balance_mesh.union(mesh.axes)
            self.balance_mesh.communicator("control")

    def of_all(self, chosen: np.ndarray) -> np.ndarray:
        """How many tokens chose each expert, for the balance loss: over several ranks the mean of theirs.

        So that it is of as many tokens as this rank has. The sums are of integers.
        """
        if self.balance_mesh is None:
            return chosen
        total = _summed(self.balance_mesh, chosen.copy(), "balance loss")
        return total * (chosen.sum() / max(1, total.sum()))


class TopKRouter(Router):
    """(tokens, width) -> Routing: the `per_token` experts of the highest score, ties to the lowest.

    Args:
        score, renormalise, scale: see F.route. Mixtral: as they are; Qwen3-MoE: renormalise as its
            norm_topk_prob; OLMoE: renormalise=False; DeepSeek-V3: score="sigmoid", expert_bias=True.
        capacity_factor: None drops nothing. Else an expert takes F.expert_capacity rows, those of the highest
            weights, then of the first tokens; the rest adds nothing to the output.
        expert_bias: a buffer that is added to scores where experts are chosen: see update_expert_bias.
        balance_loss, z_loss: how much F.balance_loss and F.router_z_loss count in the loss.
        pooled: the loss is F.balance_sums instead, to add up over layers for F.pooled_balance_loss.
    """

    def __init__(
        self,
        width: int,
        n_experts: int,
        per_token: int,
        *,
        score: str = "softmax",
        renormalise: bool = True,
        scale: float = 1.0,
        capacity_factor: float | None = None,
        expert_bias: bool = False,
        balance_loss: float = 1.0,
        z_loss: float = 0.0,
        pooled: bool = False,
        init: Initialiser | None = None,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__(width, n_experts, init, dtype)
        check_sizes("TopKRouter", per_token=per_token)
        if per_token > n_experts:
            raise ValueError(f"TopKRouter: per_token must be at most {n_experts}, got {per_token}")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"TopKRouter: capacity_factor must be positive, got {capacity_factor}")
        if score not in SCORES:
            raise ValueError(f"TopKRouter: score must be one of {SCORES}, got {score!r}")
        self.per_token, self.score, self.renormalise, self.scale = per_token, score, renormalise, scale
        self.capacity_factor = capacity_factor
        self.balance_loss, self.z_loss, self.pooled = balance_loss, z_loss, pooled
        self.expert_bias = None
        if expert_bias:
            self.register_buffer("expert_bias", (n_experts,), 0.0, dtype=dtype)

    def forward(self, x: Tensor) -> Routing:
        logits = self.logits(x)
        how = {"score": self.score, "renormalise": self.renormalise, "scale": self.scale}
        weights, experts, probabilities = F.route(logits, self.per_token, bias=self.expert_bias, **how)
        capacity = None
        if self.capacity_factor is not None:
            sizes = logits.shape[0], self.per_token, self.n_experts
            capacity = F.expert_capacity(*sizes, self.capacity_factor)
        order = F.expert_order(experts, self.n_experts, capacity=capacity, priority=weights)
        self.count(order)
        return Routing(weights, order, self._loss(logits, probabilities, order))

    def _loss(self, logits: Tensor, probabilities: Tensor, order: ExpertOrder) -> Tensor:
        if self.pooled:
            return F.balance_sums(probabilities, self.of_all(order.chosen))
        loss = None
        if self.balance_loss:
            chosen = self.of_all(order.chosen)
            loss = F.balance_loss(probabilities, chosen, self.per_token) * self.balance_loss
        if self.z_loss:
            z_loss = F.router_z_loss(logits) * self.z_loss
            loss = z_loss if loss is None else loss + z_loss
        return Tensor(device.current().zeros((), logits.dtype)) if loss is None else loss


class Top2Gate(Router):
    """(tokens, width) -> Routing, as FairScale's gate of this name (fairscale/nn/moe/top2gate.py).

    The first expert has the highest logit, the second the highest of the others with Gumbel
    noise added, in training; so it is drawn with the probability that the softmax gives it. An expert takes
    2 tokens / n_experts rows: first choices before second ones, then the first tokens. A token's weights are
    the softmax of the choices that were taken, over their sum. The loss is the mean over experts of
    (mean probability) * (share of first choices), times balance_loss: 1 / n_experts^2 in balance.
    """

    def __init__(
        self,
        width: int,
        n_experts: int,
        *,
        balance_loss: float = 1.0,
        init: Initialiser | None = None,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__(width, n_experts, init, dtype)
        if n_experts < 2:
            raise ValueError(f"Top2Gate: n_experts must be at least 2, got {n_experts}")
        self.balance_loss = balance_loss

    def forward(self, x: Tensor) -> Routing:
        of_all = None if self.balance_mesh is None else self.of_all
        weights, order, loss = F.top2_gate(self.logits(x), self.training, of_all)
        self.count(order)
        return Routing(weights, order, loss * self.balance_loss)


ACTIVATIONS: dict[str, Callable] = {
    "swiglu": F.swiglu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, "tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class Experts(Module):
    """MLPs side by side: (rows, width), counts -> (rows, width), the rows of an expert one after the other.

    counts: int (experts,) on the host, how many rows each expert has. capacity: the most that one can have;
    this module does not need it, but a wrapper for experts on other ranks does. Parameters: `up` (experts,
    hidden, width), of a SwiGLU (experts, 2 hidden, width) with the gate before the gated rows; `down`
    (experts, width, hidden).

    Args:
        activation: "swiglu", "gelu", "gelu_tanh", "relu" or "silu". No biases.
        init, down_init: initial values; left out, evenly from +-1 / sqrt(inputs), as nn.Linear.
    """

    def __init__(
        self,
        n_experts: int,
        width: int,
        hidden: int,
        *,
        activation: str = "swiglu",
        init: Initialiser | None = None,
        down_init: Initialiser | None = None,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        check_sizes("Experts", n_experts=n_experts, width=width, hidden=hidden)
        if activation not in ACTIVATIONS:
            raise ValueError(f"Experts: activation must be one of {tuple(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        wide = 2 * hidden if activation == "swiglu" else hidden
        even = [initial.Uniform(-(inputs**-0.5), inputs**-0.5) for inputs in (width, hidden)]
        self.up = Parameter((n_experts, wide, width), init or even[0], dtype=dtype)
        self.down = Parameter((n_experts, width, hidden), down_init or init or even[1], dtype=dtype)

    @property
    def n_experts(self) -> int:
        """How many this rank has."""
        return self.up.shape[0]

    def forward(self, rows: Tensor, counts: np.ndarray, capacity: int | None = None) -> Tensor:
        hidden = ACTIVATIONS[self.activation](F.grouped_linear(rows, self.up, counts))
        return F.grouped_linear(hidden, self.down, counts)


class MoE(Module):
    """(..., width) -> ((..., width), loss): each token through the experts that its router chooses.

    The loss is the router's. Blocks pass the sum of their losses on as a second value, and the model adds it
    to its own loss.

    Args:
        router: a TopKRouter, a Top2Gate, or a module from (tokens, width) to Routing.
        experts: Experts, or a module of (rows, counts), and of the capacity behind them where the router has
            one.
        shared: a module that every token goes through as well, whose result is added.
    """

    def __init__(self, router: Module, experts: Module, shared: Module | None = None) -> None:
        super().__init__()
        counts = [getattr(module, "n_experts", None) for module in (router, experts)]
        if None not in counts and counts[0] != counts[1]:
            raise ValueError(
                f"MoE: the router and experts must have one number of experts, got {counts[0]} and "
                f"{counts[1]}"
            )
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        weights, order, loss = self.router(tokens)
        limit = () if order.capacity is None else (order.capacity,)
        rows = self.experts(F.dispatch(tokens, order), order.counts, *limit)
        y = F.combine(rows, weights, order).reshape(x.shape)
        return (y if self.shared is None else y + self.shared(x)), loss


def balance_over(model: Module, mesh: DeviceMesh) -> None:
    """Let each balance loss count the tokens of all ranks of `mesh`, which have parts of the batch.

    Each rank then has all ranks' choices and the probabilities of its own tokens: where the ranks
    have equally many, the mean over ranks is the balance loss of one rank with all tokens, and so is its
    gradient. (Without it, it is the mean of the ranks' own balance losses, which depends on how the batch is
    split.) An all-reduce of an integer per expert, in each forward of each router. Ranks with parts of the
    same samples, by TokenParallel or ContextParallel, are counted too. Call it on every rank.

    Raises:
        ValueError: if `model` has no router of this package, TopKRouter or Top2Gate, and for a `mesh` along
            which ranks have other stages.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        raise ValueError(f"balance_over: no TopKRouter or Top2Gate found in {type(model).__name__}")
    for router in routers:
        router.balance_along(mesh)


def balance_targets(model: Module, counted: int, tokens: int) -> float:
    """How many targets the balance losses of `model` count for in a sum of losses over this rank's tokens.

    Collective over them: an all-reduce of two numbers.

    Args:
        counted: its targets that count, of all its tokens. Where balance losses are of the tokens of several
            ranks, these may have other numbers: then it is this rank's part, by its tokens, of the targets of
            all, so that the sum is that of one rank with all tokens.
    """
    routers = (module for module in model.modules() if isinstance(module, Router))
    mesh = next((router.balance_mesh for router in routers), None)
    if mesh is None:
        return float(counted)
    both = _summed(mesh, np.array([counted, tokens], np.int64), "targets of balance")
    return tokens * float(both[0] / max(1, both[1]))


def _summed(mesh: DeviceMesh, numbers: np.ndarray, tag: str) -> np.ndarray:
    """`numbers` over all ranks of `mesh`, in place, when they are there. Collective."""
    here = device.current()
    mesh.communicator("control").all_reduce(numbers, stream=here.current_stream, tag=tag)
    here.wait_here()
    return numbers


def expert_load(model: Module) -> dict[str, np.ndarray]:
    """Name of each router of `model` -> how many tokens chose each expert, int64, a copy: see Router.load.

    This rank's tokens, since the last `update_expert_bias`.
    """
    return {name: module.load.copy() for name, module in model.named_modules() if isinstance(module, Router)}


def update_expert_bias(model: Module, rate: float = 1e-3) -> None:
    """Once per step, after the optimizer's: balance without a loss, where routers have an expert_bias.

    Moves it up by `rate` where an expert was chosen less often than the mean, down where more often, counted
    over all ranks that train the model, and restarts the count (Wang et al., Auxiliary-Loss-Free Load
    Balancing, 2024). Collective where a router has one.

    Args:
        model: the whole, also where it has stages.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    biased = [router for router in routers if getattr(router, "expert_bias", None) is not None]
    if biased:
        loads = _over_all_ranks(model, np.stack([router.load for router in biased]))
        for router, load in zip(biased, loads, strict=True):
            step = np.sign(load.sum() - load * load.size) * rate
            router.expert_bias += device.of(router.expert_bias).asarray(step, router.expert_bias.dtype)
    for router in routers:
        router.load[:] = 0


def _over_all_ranks(model: Module, loads: np.ndarray) -> np.ndarray:
    """Where ranks have the same tokens, all are counted as often, which moves no bias."""
    ranks = ranks_of(model)
    if ranks is not None and ranks.size > 1:
        ranks.all_reduce(loads.reshape(-1), stream=device.current().current_stream, tag="expert load")
        device.current().wait_here()
    return loads
