"""Exercise: Lion as a sharded optimizer whose state is saved."""

from functools import cache
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np

from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from shardrt.comm import DeviceMesh, init_device_mesh, thread
from shardrt.fsdp import fully_shard
from shardrt.learn.checking import Hint, function

TITLE = "Write an optimizer"
LEVEL = "hard"
TEACHES = "Lion over flat shards, with its state in checkpoints"
TAKEAWAY = (
    "An elementwise optimizer needs no communication: a shard, its gradient and its state are equally long. "
    "State that the base class makes is sharded, saved and resharded like the weights."
)

START = '''"""Exercise 12: write an optimizer.

Lion (Chen et al., 2023) keeps one array m per parameter, which begins at 0. One update of the weights w by the
gradient g, with the learning rate lr, the weight decay d and two numbers beta1 and beta2:

    direction = sign(beta1 * m + (1 - beta1) * g)
    w = w - lr * (direction + d * w)
    m = beta2 * m + (1 - beta2) * g

An optimizer of shardrt sees flat shards, not parameters. update() gets arrays that are equally long: `shard`
(the weights), `gradient` and the state. It changes `shard` and `m` in place, in some ranges [start, stop).
The base class makes the state: name each array in `state`, as {your name: name in checkpoints}. State that you
keep elsewhere is lost when a run is resumed. PyTorch's name for a mean of gradients is "exp_avg".

numbers() says what a range gets for its group, as a tuple of floats. update() finds them behind start and stop.
Read more: docs/howto/optimizers.md.
"""

import numpy as np

from shardrt.optim import Optimizer


class Lion(Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        settings = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, settings, state={})  # name m here

    def numbers(self, group, steps):
        """What a range needs of its group. steps: which update this is, from 1."""
        return (group["lr"],)  # more is needed

    def update(self, kernels, update):
        shard, gradient = update.arrays["shard"], update.arrays["gradient"]
        for start, stop, lr in update.ranges.tolist():
            part = slice(int(start), int(stop))
            raise NotImplementedError
'''

_LR, _BETA1, _BETA2, _DECAY = 0.01, 0.8, 0.95, 0.3
_SETTINGS = {"lr": _LR, "betas": (_BETA1, _BETA2), "weight_decay": _DECAY}
_BEFORE, _STEPS = 3, 5  # steps before the state is saved, and in all


class _Run(NamedTuple):
    """Of rank 0: the names of the saved state, and the weights after _STEPS steps in one run, and resumed."""

    names: set[str]
    straight: dict[str, np.ndarray]
    resumed: dict[str, np.ndarray]


def _model(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    random = np.random.default_rng(2)
    model.load_state_dict(
        {name: random.normal(size=p.shape).astype(np.float32) for name, p in model.named_parameters()}
    )
    return model


def _train(model: nn.Module, optimizer: optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        x = np.random.default_rng((step, rank)).normal(size=(8, 4)).astype(np.float32)
        (model(x) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _on_rank(lion: type) -> _Run:
    mesh = init_device_mesh("cpu")
    model, other = _model(mesh), _model(mesh)
    optimizer, resumed = (lion(each.parameters(), **_SETTINGS) for each in (model, other))
    _train(model, optimizer, mesh.rank, range(_BEFORE))
    state = get_optimizer_state_dict(model, optimizer)
    names = {name for each in state.get("state", {}).values() for name in each}
    other.load_state_dict(full_state_dict(model), broadcast_from_rank0=True)
    set_optimizer_state_dict(other, resumed, state, broadcast_from_rank0=True)
    for each, its_optimizer in ((model, optimizer), (other, resumed)):
        _train(each, its_optimizer, mesh.rank, range(_BEFORE, _STEPS))
    return _Run(names, full_state_dict(model), full_state_dict(other))


@cache
def prepare() -> _Run:
    """The run of shardrt's own Lion."""
    return thread.run(2, _on_rank, optim.Lion)[0]


def check(answer: ModuleType) -> str:
    """One update of a few elements, then a sharded run that is saved and resumed."""
    lion = function(answer, "Lion")
    thread.run(1, _check_update, lion)
    expected, found = prepare(), thread.run(2, _on_rank, lion)[0]
    if "exp_avg" not in found.names:
        raise Hint(
            f'The state is saved as {sorted(found.names)}. Name it as PyTorch does: {{"m": "exp_avg"}}.'
        )
    for name, values in expected.straight.items():
        if np.abs(found.straight[name] - values).max() > 1e-6:
            raise Hint(
                f"After {_STEPS} steps on 2 ranks, {name} differs from shardrt's Lion, as if m were not kept."
            )
        if np.abs(found.resumed[name] - values).max() > 1e-6:
            raise Hint(
                "A resumed run goes another way: some state is not in the checkpoint. Keep all of it in m."
            )
    return f"one update in two ranges, {_STEPS} steps on 2 ranks within 1e-6, and a run that is resumed after {_BEFORE}."


def _check_update(lion: type) -> None:
    optimizer = lion(_model(init_device_mesh("cpu")).parameters(), **_SETTINGS)
    if not optimizer.state_names:
        raise Hint(
            '`state` names no array, so the base class saves none. Name yours: state={"m": "exp_avg"}.'
        )
    numbers = tuple(optimizer.numbers({**_SETTINGS}, 1))
    random = np.random.default_rng(4)
    w, g, m = random.normal(size=(3, 1024)).astype(np.float32)
    arrays = {"shard": w.copy(), "gradient": g.copy(), **{name: m.copy() for name in optimizer.state_names}}
    ranges = np.array([(2, 500, *numbers), (510, 1000, *numbers)])
    optimizer.update(None, SimpleNamespace(arrays=arrays, ranges=ranges))
    inside = np.r_[2:500, 510:1000]
    outside = np.setdiff1d(np.arange(1024), inside)
    if not np.array_equal(arrays["shard"][outside], w[outside]):
        raise Hint(
            "update changes elements outside its ranges. They belong to other groups: write to a part alone."
        )
    if np.array_equal(arrays["shard"], w):
        raise Hint("update does not change `shard`. Write in place, as in shard[part] -= ...")
    new_m = next(arrays[name] for name in optimizer.state_names)
    _diagnose(arrays["shard"][inside], new_m[inside], w[inside], g[inside], m[inside])


def _diagnose(found_w: np.ndarray, found_m: np.ndarray, w: np.ndarray, g: np.ndarray, m: np.ndarray) -> None:
    mixed, kept = _BETA1 * m + (1 - _BETA1) * g, _BETA2 * m + (1 - _BETA2) * g
    late = np.sign(_BETA1 * kept + (1 - _BETA1) * g)
    swapped = np.sign(_BETA2 * m + (1 - _BETA2) * g)
    coupled = np.sign(_BETA1 * m + (1 - _BETA1) * (g + _DECAY * w))
    step, decay = np.sign(mixed), _DECAY * w
    if not _close(found_w, w - _LR * (step + decay)):
        for wrong, hint in (
            (
                w - _LR * (late + decay),
                "m changes before the direction is taken. The direction uses the old m.",
            ),
            (w - _LR * (swapped + decay), "The direction mixes with beta2. It uses beta1, and m uses beta2."),
            (w - _LR * (coupled + decay), "The decay is in the gradient, too. It acts on the weights alone."),
            (w - _LR * coupled, "The decay is in the gradient. Lion takes it off the weights: lr * d * w."),
            (w - _LR * step, "The weight decay is missing: w loses lr * d * w in each update."),
            (w - _LR * step - decay, "The weight decay lacks the learning rate: w loses lr * d * w."),
            (
                w - _LR * (mixed + decay),
                "The sign is missing: each weight moves by lr, however large its gradient.",
            ),
            (w + _LR * (step - decay), "The weights climb. A step goes against the direction."),
        ):
            if _close(found_w, wrong):
                raise Hint(hint)
        raise Hint(
            "`shard` is wrong after one update. Check the direction first, then lr and the weight decay."
        )
    if not _close(found_m, kept):
        if np.array_equal(found_m, m):
            raise Hint("update does not change m. Write in place, as in m[part] = ...")
        raise Hint(
            "`m` is wrong after one update: m = beta2 * m + (1 - beta2) * g, after the direction was taken."
        )


def _close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.allclose(found, expected, rtol=0, atol=1e-6))
