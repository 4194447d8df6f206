"""The whole state of an optimizer goes out by names and comes back on any ranks, as PyTorch's does."""

import numpy as np
import pytest

from shardrt import nn, optim
from shardrt.checkpoint import get_optimizer_state_dict, set_optimizer_state_dict
from shardrt.comm import thread
from shardrt.fsdp import CPUOffloadPolicy
from tests import lab
from tests.lab import Frozen, Net

OPTIMIZERS = {
    "AdamW": lambda groups: optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
    "SGD": lambda groups: optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "Lion": lambda groups: optim.Lion(groups, lr=1e-3, weight_decay=0.1),
}


def made(kind="AdamW", net=Net, lr=None, **settings):
    model, mesh = lab.build(net, **settings)
    groups = optim.decay_groups(model, 0.1)
    if lr is not None:
        groups[0]["lr"] = lr
    return model, OPTIMIZERS[kind](groups), mesh


def trained(kind="AdamW", **settings):
    """Rank 0's state after four steps, in one of which a bias is frozen; {} on the others."""
    model, optimizer, mesh = made(kind, lr=0.02, **settings)
    for step, batch in enumerate(lab.batches(4)):
        model.blocks[0].down.bias.requires_grad = step != 2
        lab.backward(model, mesh, batch)
        lab.update(optimizer)
    return get_optimizer_state_dict(model, optimizer)


def again(state, kind="AdamW", everywhere=False, **settings):
    """What comes out after `state` went in: on every rank, or from rank 0 alone."""
    model, optimizer, mesh = made(kind, **settings)
    given = state if everywhere or mesh.rank == 0 else None
    set_optimizer_state_dict(model, optimizer, given, broadcast_from_rank0=not everywhere)
    return get_optimizer_state_dict(model, optimizer)


@pytest.fixture(scope="module")
def states():
    """Kind -> what two ranks leave."""
    return {kind: thread.run(2, trained, kind) for kind in OPTIMIZERS}


def test_rank_0_has_every_array_in_its_shape_and_the_others_nothing(states):
    state, nothing = states["AdamW"]
    assert nothing == {}
    shapes = {name: parameter.shape for name, parameter in Net().named_parameters()}
    assert state["state"].keys() == shapes.keys()
    for name, entry in state["state"].items():
        assert entry["exp_avg"].shape == entry["exp_avg_sq"].shape == shapes[name]
        assert entry["exp_avg"].any(), name
        assert entry["step"] == (3 if name == "blocks.0.down.bias" else 4)
    assert [group["lr"] for group in state["param_groups"]] == [0.02, 1e-2]
    assert {name for group in state["param_groups"] for name in group["params"]} == shapes.keys()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_comes_back_on_any_number_of_ranks_from_rank_0_alone(states, kind, ranks):
    lab.assert_equal(thread.run(ranks, again, states[kind][0], kind)[0], states[kind][0])


LAYOUTS = {
    "on every rank": {"everywhere": True},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "a hybrid": {"shape": (2, 2), "strategy": "HYBRID_SHARD"},
    "on the host": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_goes_into_other_layouts_and_out_of_them(states, layout):
    state = states["AdamW"][0]
    found = thread.run(4 if "shape" in LAYOUTS[layout] else 2, again, state, **LAYOUTS[layout])
    lab.assert_equal(found[0], state)
    assert all(other == {} for other in found[1:])


def test_parameters_that_were_never_updated_have_no_state_and_stay_so():
    state = thread.run(2, trained, net=Frozen)[0]
    frozen = [name for name, parameter in Frozen().named_parameters() if not parameter.requires_grad]
    assert frozen and not state["state"].keys() & set(frozen)
    lab.assert_equal(thread.run(3, again, state, net=Frozen)[0], state)


def damage(state, change):
    state = {"state": dict(state["state"]), "param_groups": [dict(group) for group in state["param_groups"]]}
    state["state"]["norm.bias"] = dict(state["state"]["norm.bias"])
    change(state)
    return state


WRONG = {
    "missing .*'norm.bias'": lambda s: s["param_groups"][1]["params"].remove("norm.bias"),
    r"'norm.bias' has state \['exp_avg'\], expected \['exp_avg', 'exp_avg_sq'\]": (
        lambda s: s["state"]["norm.bias"].pop("exp_avg_sq")
    ),
    r"exp_avg of 'norm.bias' must have shape \(7,\), got \(3,\)": (
        lambda s: s["state"]["norm.bias"].update(exp_avg=np.zeros(3))
    ),
    "the step of 'norm.bias' must be an integer of at least 0, got 1.5": lambda s: s["state"][
        "norm.bias"
    ].update(step=1.5),
    "betas must be two numbers": lambda s: s["param_groups"][0].update(betas=(2.0, 2.0)),
    "this is no optimizer's state": lambda s: s.pop("state"),
}


def refused(state, text):
    model, optimizer, mesh = made()
    with pytest.raises(ValueError, match=text):
        given = state if mesh.rank == 0 else None
        set_optimizer_state_dict(model, optimizer, given, broadcast_from_rank0=True)
    assert not any(piece.steps.any() for piece in optimizer.slices)


@pytest.mark.parametrize("text", WRONG)
def test_a_state_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(states, text):
    state = states["AdamW"][0]
    copied = {**state, "param_groups": [{**g, "params": list(g["params"])} for g in state["param_groups"]]}
    thread.run(2, refused, damage(copied, WRONG[text]), text)


def test_a_state_of_another_momentum_is_refused():
    parameters = [nn.Linear(3, 2), nn.Linear(3, 2)]
    one, other = (optim.SGD(m.parameters(), momentum=v) for m, v in zip(parameters, (0.9, 0.5), strict=True))
    with pytest.raises(ValueError, match="the state has momentum 0.9, but this optimizer has 0.5"):
        set_optimizer_state_dict(parameters[1], other, get_optimizer_state_dict(parameters[0], one))


def twins(torch, kind):
    """(model, optimizer) of ours and of PyTorch, with equal weights and two groups."""
    ours = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    theirs = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    theirs.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in ours.state_dict().items()})

    def groups(model):
        return [{"params": model[1].parameters(), "lr": 0.03}, {"params": model[0].parameters()}]

    how = {"AdamW": {"betas": (0.8, 0.9)}, "SGD": {"momentum": 0.9, "nesterov": True}}[kind]
    made_by = [
        getattr(library, kind)(groups(m), lr=0.01, **how)
        for library, m in ((optim, ours), (torch.optim, theirs))
    ]
    return (ours, made_by[0]), (theirs, made_by[1])


def step(torch, pairs, seed):
    """One step of both with equal gradients; of the last bias in odd steps only."""
    (ours, our_optimizer), (theirs, their_optimizer) = pairs
    random = np.random.default_rng(seed)
    for (name, our), their in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        gradient = random.normal(size=our.shape).astype(np.float32)
        if name != "1.bias" or seed % 2:
            our.accumulate_gradient(gradient)
            their.grad = torch.from_numpy(gradient)
    for optimizer in (our_optimizer, their_optimizer):
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(pairs):
    for our, their in zip(pairs[0][0].parameters(), pairs[1][0].parameters(), strict=True):
        np.testing.assert_allclose(our.data, their.detach().numpy(), rtol=0, atol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("by_name", [True, False])
def test_training_goes_on_from_the_state_of_torch(kind, by_name):
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torchs

    first, second = twins(torch, kind), twins(torch, kind)
    for seed in range(3):
        step(torch, first, seed)
    state = torchs(*first[1]) if by_name else first[1][1].state_dict()
    set_optimizer_state_dict(*second[0], state)
    second[0][0].load_state_dict({name: t.numpy() for name, t in first[1][0].state_dict().items()})
    pairs = second[0], first[1]
    for seed in range(3, 6):
        step(torch, pairs, seed)
    assert_equal(pairs)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_torch_goes_on_from_ours(kind):
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as torchs

    first, second = twins(torch, kind), twins(torch, kind)
    for seed in range(3):
        step(torch, first, seed)
    state = get_optimizer_state_dict(*first[0])
    for entry in state["state"].values():
        entry.update({key: torch.as_tensor(value, dtype=torch.float32) for key, value in entry.items()})
    torchs(*second[1], state)
    second[1][0].load_state_dict({n: torch.from_numpy(a.copy()) for n, a in first[0][0].state_dict().items()})
    pairs = first[0], second[1]
    for seed in range(3, 6):
        step(torch, pairs, seed)
    assert_equal(pairs)
