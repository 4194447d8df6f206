"""Models are built, sharded and trained, on the rank that calls."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, device, nn, optim
from shardrt import functional as F
from shardrt.checkpoint import full_state_dict
from shardrt.comm import DeviceMesh, init_device_mesh, thread, world
from shardrt.fsdp import full_gradients, fully_shard, units
from shardrt.nn.overlaps import put
from shardrt.nn.parameter_placement import joined
from shardrt.nn.utils import clip_grad_norm_
from tests.lab.comparing import assert_equal
from tests.lab.counting import Counts
from tests.lab.nets import Block, Net

Batch = tuple[np.ndarray, np.ndarray]  # tokens, targets


def seeded(make: Callable[[], nn.Module] = Net, seed: int = 3) -> nn.Module:
    """A plain model with the weights that `build` gives."""
    shardrt.manual_seed(seed)
    return make()


def mesh_for(strategy: str | None = None, shape: tuple[int, ...] | None = None, **options: Any) -> DeviceMesh:
    """Of all ranks; that of a hybrid has two copies of shards."""
    if shape is None and (strategy or "").startswith("HYBRID"):
        shape = (2, 2)
    return init_device_mesh(options.pop("device", "auto"), shape, **options)


def build(
    make: Callable[[], nn.Module] = Net,
    *,
    attach: Callable[[nn.Module], Any] | None = None,
    kinds: type | tuple[type, ...] = Block,
    seed: int = 3,
    shape: tuple[int, ...] | None = None,
    wrap: Callable | None = None,
    of_mesh: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[nn.Module, DeviceMesh]:
    """(model, mesh): every Block, every stage and the whole are units with `settings` of fully_shard.

    attach: called on each module of these kinds before it is sharded (`checkpoint`, `offload_activations`).
    wrap: as for init_device_mesh, for example Counts(). of_mesh: its other options.
    """
    model = seeded(make, seed)
    for module in list(model.modules()) if attach is not None else ():
        if isinstance(module, kinds):
            attach(module)
    mesh = mesh_for(settings.get("strategy"), shape, wrap=wrap, **(of_mesh or {}))
    return shard(model, mesh, **settings), mesh


def shard(model: nn.Module, mesh: DeviceMesh | None, **settings: Any) -> nn.Module:
    """Make every Block, every stage and the whole a unit."""
    for module in list(model.modules())[::-1]:
        if isinstance(module, Block | nn.Sequential):
            fully_shard(module, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def batches(steps: int, size: int = 12, time: int = 5, vocab: int = 11, seed: int = 0) -> list[Batch]:
    """(tokens, targets) of the whole batch for every step."""
    random = np.random.default_rng(seed)
    return [tuple(random.integers(0, vocab, (2, size, time))) for _ in range(steps)]


def rows(mesh: DeviceMesh | None, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """This rank's rows of arrays that are the same on all; all rows without a mesh."""
    rank, ranks = (mesh.rank, mesh.size) if mesh is not None else (0, 1)
    return tuple(array[rank * len(array) // ranks : (rank + 1) * len(array) // ranks] for array in arrays)


def loss_of(model: nn.Module, tokens: np.ndarray, targets: np.ndarray) -> Tensor:
    """The mean cross entropy."""
    return F.cross_entropy(model(tokens), targets)


def backward(
    model: nn.Module, mesh: DeviceMesh | None = None, batch: Batch | None = None, scale: float = 1.0
) -> float:
    """The loss on this rank's rows of a batch, by default the first of `batches`, after its backward.

    scale: of the gradients, not of the loss that is given back.
    """
    loss = loss_of(model, *rows(mesh, *(batch or batches(1)[0])))
    (loss if scale == 1.0 else loss * scale).backward()
    return float(loss.item())


def gradients(model: nn.Module) -> dict[str, np.ndarray]:
    """Name -> whole gradient on every rank, where there is one: the pieces of p.grad, put together."""
    result = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        storage = parameter.storage
        whole = np.zeros(parameter.size, parameter.dtype)
        put(parameter.extents, whole, parameter.grad.reshape(-1))
        if storage.communicator is not None:
            storage.communicator.all_reduce(whole, op="sum", stream=device.current().current_stream)
        result[name] = whole.reshape(parameter.shape)
    return result


def adamw(parameters: Iterable[nn.Parameter], **options: Any) -> optim.AdamW:
    """The usual optimizer of these tests."""
    return optim.AdamW(parameters, **{"lr": 1e-2, "weight_decay": 0.1, **options})


def update(optimizer: Any) -> None:
    """A step of the optimizer, after which there are no gradients."""
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def backward_raises(module: nn.Module) -> Iterator[None]:
    """What is inside runs a forward, and a backward in which that of `module` raises ZeroDivisionError."""
    forward = module.forward

    def failing(*args: Any, **kwargs: Any) -> Tensor:
        y = forward(*args, **kwargs)
        y.register_hook(lambda gradient: 1 / 0)
        return y

    module.forward = failing
    try:
        with pytest.raises(ZeroDivisionError):
            yield
    finally:
        module.forward = forward


def count_step(
    counts: Counts,
    model: nn.Module,
    step: Callable[[], Any],
    optimizer: Callable[[Iterable[nn.Parameter]], Any] = adamw,
) -> None:
    """Count the second of two steps, each of what `step` runs and an update."""
    made = optimizer(model.parameters())
    for _ in range(2):
        counts.reset()
        step()
        update(made)


def calls_of_a_step(
    make: Callable[[], nn.Module] = Net, *ops: str, ranks: int = 2, **options: Any
) -> tuple[list[int], int]:
    """(calls of `ops`, or gathers and reductions; units) of the second step, the same on each rank."""

    def rank() -> tuple[list[int], int]:
        counts = Counts()
        model, _ = build(make, wrap=counts, **options)
        count_step(counts, model, lambda: backward(model, None, batches(1, size=4)[0]))
        return counts.calls(*ops or ("all_gather", "reduce_scatter")), len(units(model))

    found = thread.run(ranks, rank)
    assert all(each == found[0] for each in found)
    return found[0]


def assert_weights(model: nn.Module, expected: dict[str, np.ndarray], case: object = "") -> None:
    """What full_state_dict gives, on rank 0, which alone has it. Collective."""
    found = full_state_dict(model)
    if world.current().rank == 0:
        assert_equal(found, expected, case)


def whole_gradients(model: nn.Module) -> dict[str, np.ndarray | None]:
    """Name -> whole gradient on rank 0, also of what is cut along "tp"; elsewhere a part. Collective."""
    found, parameters = {}, dict(model.named_parameters())
    for name, gradient in full_gradients(model):
        whole = joined(parameters[name].placement, np.array(gradient))
        found[name] = None if whole is None else whole.copy()
    return found


def momentum(parameters: Iterable[nn.Parameter]) -> optim.SGD:
    """The usual optimizer where rounding must not become whole steps, as AdamW makes of it."""
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


def learn(
    model: nn.Module,
    step: Callable[[int], Any],
    *,
    steps: int = 2,
    optimizer: Callable[[Iterable[nn.Parameter]], Any] = momentum,
    clip: float = 1.0,
    whole: Callable[[nn.Module], dict] | None = whole_gradients,
    after: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """{"initial", "losses", "norms", "gradients" of the first step, "final"}, as this rank has them.

    step(number): the forwards and backwards of a step, which is seeded by its number; gives what "losses" has
    of it. whole: of gradients; None: there is no "gradients". after: called after each update.
    """
    made = optimizer(model.parameters())
    found: dict[str, Any] = {"initial": full_state_dict(model), "losses": [], "norms": []}
    for number in range(steps):
        shardrt.manual_seed(3, step=number)
        found["losses"].append(step(number))
        if whole is not None:
            found.setdefault("gradients", whole(model))
        found["norms"].append(clip_grad_norm_(model.parameters(), clip))
        made.step()
        after()
        made.zero_grad()
    return found | {"final": full_state_dict(model)}


class Trained(NamedTuple):
    """What came out of some steps."""

    losses: list[float]
    gradients: list[dict[str, np.ndarray]]
    weights: dict[str, np.ndarray]


def train(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    steps: int | list[Batch] = 3,
    optimizer: Callable[[Iterable[nn.Parameter]], Any] = adamw,
    after: Callable[[], Any] = lambda: None,
) -> Trained:
    """Train on this rank's rows of `batches(steps)`, or of given batches. After each backward: `after`."""
    made, losses, found = optimizer(model.parameters()), [], []
    for batch in batches(steps) if isinstance(steps, int) else steps:
        losses.append(backward(model, mesh, batch))
        after()
        found.append(gradients(model))
        update(made)
    return Trained(losses, found, full_state_dict(model))


def train_on(ranks: int, make: Callable[[], nn.Module] = Net, **options: Any) -> Trained:
    """`build` and `train` on rank threads; losses are means. 0 ranks: the plain model with the whole batch.

    Without options the result is kept: many tests compare with it.
    """
    return _train_on(ranks, make, **options) if options else _usual(ranks, make)


@cache
def _usual(ranks: int, make: Callable[[], nn.Module]) -> Trained:
    return _train_on(ranks, make)


def _train_on(ranks: int, make: Callable[[], nn.Module], **options: Any) -> Trained:
    of_training = {name: options.pop(name) for name in ("steps", "optimizer") if name in options}
    if ranks == 0:
        return train(seeded(make), **of_training)

    found = thread.run(ranks, _on_rank, make, options, of_training)
    losses = np.mean([each.losses for each in found], axis=0).tolist()
    return found[0]._replace(losses=losses)


def _on_rank(make: Callable[[], nn.Module], options: dict[str, Any], of_training: dict[str, Any]) -> Trained:
    """Not inside _train_on: on hosts (tests/hosts/plugin.py) it is sent to processes."""
    return train(*build(make, **options), **of_training)
