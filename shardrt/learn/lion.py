"""Exercise: Lion as a sharded optimizer whose state is saved."""

from functools import cache
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np

from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
from shardrt.comm import DeviceMesh, init_device_mesh, thread
from shardrt.learn.checking import Hint, function, need, shard

TITLE = "Write an optimizer"
LEVEL = "hard"
TEACHES = "Lion over flat shards, with its state in checkpoints"
TAKEAWAY = (
    "An elementwise optimizer needs no communication: a shard, its gradient and its state are equally long. "
    "State that the base class makes is sharded, saved and resharded like the weights."
)

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
    shard(model, model, mesh)
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
    named = "exp_avg" in found.names
    need(named, f'The state is saved as {sorted(found.names)}. Name it as PyTorch does: {{"m": "exp_avg"}}.')
    for name, values in expected.straight.items():
        same = _close(found.straight[name], values)
        need(same, f"After {_STEPS} steps on 2 ranks, {name} differs from shardrt's Lion: m is not kept.")
        same = _close(found.resumed[name], values)
        need(same, "A resumed run differs: some state is not in the checkpoint. Keep all of it in m.")
    return (
        f"one update of two ranges, {_STEPS} steps on 2 ranks within 1e-6, and a run resumed after {_BEFORE}."
    )


def _check_update(lion: type) -> None:
    optimizer = lion(_model(init_device_mesh("cpu")).parameters(), **_SETTINGS)
    names = optimizer.state_names
    need(names, '`state` names no array, so the base class saves none. Name it: state={"m": "exp_avg"}.')
    numbers = tuple(optimizer.numbers({**_SETTINGS}, 1))
    random = np.random.default_rng(4)
    w, g, m = random.normal(size=(3, 1024)).astype(np.float32)
    arrays = {"shard": w.copy(), "gradient": g.copy(), **{name: m.copy() for name in names}}
    ranges = np.array([(2, 500, *numbers), (510, 1000, *numbers)])
    optimizer.update(None, SimpleNamespace(arrays=arrays, ranges=ranges))
    inside = np.r_[2:500, 510:1000]
    outside = np.setdiff1d(np.arange(1024), inside)
    kept = np.array_equal(arrays["shard"][outside], w[outside])
    need(kept, "update changes elements outside its ranges, which belong to other groups.")
    changed = not np.array_equal(arrays["shard"], w)
    need(changed, "update does not change `shard`. Write in place, as in shard[part] -= ...")
    new_m = next(arrays[name] for name in names)
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
    need(not np.array_equal(found_m, m), "update does not change m. Write in place, as in m[part] = ...")
    need(_close(found_m, kept), "`m` is wrong after one update: m = beta2 * m + (1 - beta2) * g.")


def _close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.allclose(found, expected, rtol=0, atol=1e-6))
