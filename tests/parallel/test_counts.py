"""What a step with tensor parallelism moves along its axis, held against formulas; and among whom."""

import re
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from models.gpt import GPT, GPTConfig
from models.plans import plan_of
from shardrt import Tensor, nn
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.functional import collective
from shardrt.parallel import TokenParallel, parallelize_module
from tests.functional.test_collective import OPS
from tests.parallel.nets import moved
from tests.ranks import run_ranks

LAYERS, HEADS, WIDTH, BATCH, TIME = 2, 12, 24, 2, 12
X = 4 * BATCH * TIME * WIDTH  # bytes of the activations between two blocks


def of_a_model(size, sequence):

    def rank():
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        model = GPT(GPTConfig(n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, block_size=TIME, vocab_size=60))
        parallelize_module(model, mesh, plan_of(model, sequence_parallel=sequence))
        tokens = np.zeros((BATCH, TIME), np.int64)
        return moved(mesh.communicator("tensor"), model, tokens, tokens)

    first, *others = run_ranks(size, rank)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("size", [2, 3])
def test_of_modules_that_are_cut(size):
    """A sum behind each attention, MLP and the embedding; backward before each of the two, and the head."""
    f = Fraction(size - 1, size)
    sums = 2 * LAYERS + 1, (4 * LAYERS + 2) * f * X
    losses = 1, 8 * (size - 1) * BATCH * TIME
    assert of_a_model(size, False) == [{"all_reduce": sums, "all_gather": losses}, {"all_reduce": sums}]


@pytest.mark.parametrize("size", [2, 3])
def test_of_the_sequence_as_well(size):
    """As much; what enters blocks' layers once more in backward; and gradients of what all ranks have."""
    f = Fraction(size - 1, size)
    parts = 2 * LAYERS + 1, (2 * LAYERS + 1) * f * X
    losses = 8 * (size - 1) * BATCH * TIME
    forward, backward = of_a_model(size, True)
    assert forward == {"reduce_scatter": parts, "all_gather": (parts[0] + 1, parts[1] + losses)}
    again = 2 * LAYERS, 2 * LAYERS * f * X
    small = 4 * WIDTH * (6 * LAYERS + 2 + TIME)  # norms, biases of rows, and positions
    assert backward == {
        "reduce_scatter": parts,
        "all_gather": (parts[0] + again[0], parts[1] + again[1]),
        "all_reduce": (6 * LAYERS + 3, 2 * f * small),
    }


def of_experts(size):
    """Of one layer of experts whose tokens all ranks have."""

    def rank():
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        router = nn.TopKRouter(WIDTH, 4, 2, balance_loss=0.1)
        layer = nn.ModuleList([nn.MoE(router, nn.Experts(4, WIDTH, 6, activation="gelu"))])
        parallelize_module(layer, mesh, {"0": TokenParallel()})
        x = Tensor(np.ones((BATCH, TIME, WIDTH), np.float32), requires_grad=True)

        def forward():
            y, loss = layer[0](x)
            return y.sum() + loss

        return moved(mesh.communicator("tensor"), forward)

    return run_ranks(size, rank)[0]


@pytest.mark.parametrize("size", [2, 3])
def test_of_experts_whose_tokens_are_cut(size):
    """What becomes of the tokens is gathered, and their gradients; those of parameters are added up."""
    f = Fraction(size - 1, size)
    forward, backward = of_experts(size)
    assert forward == {"all_gather": (2, f * X + 4 * (size - 1))}
    small = 4 * WIDTH * (4 + 2 * 4 * 6)
    assert backward == {"all_gather": (1, f * X), "all_reduce": (3, 2 * f * small)}


AXES = ("dp_replicate", "dp_shard", "tp")


def groups_of_a_step():
    """(role, axes along which its ranks are) of each communicator that a rank of 2 x 2 x 2 has made."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=AXES)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=13))
    parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=True))
    data = mesh["dp_replicate", "dp_shard"]
    for module in (*model.blocks, model):
        fully_shard(module, mesh=data)
    tokens = np.random.default_rng(data.rank).integers(0, 13, (2, 5))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    ranks = np.arange(8).reshape(2, 2, 2)
    axes = {}
    for subset in (s for count in (1, 2, 3) for s in combinations(range(3), count)):
        place = tuple(slice(None) if axis in subset else mesh.coordinate[axis] for axis in range(3))
        axes[tuple(ranks[place].ravel().tolist())] = tuple(AXES[axis] for axis in subset)
    return {(role, axes[tuple(sorted(members))]) for role, members in mesh._state.communicators}


def test_each_role_joins_ranks_along_its_own_axes():
    """What hosts tell one another apart. Gradients of norms are added along two axes at once."""
    for found in run_ranks(8, groups_of_a_step):
        assert {(role, axes) for role, axes in found if role not in ("control", "used")} == {
            ("tensor", ("tp",)),
            ("gather", ("dp_shard",)),
            ("reduce", ("dp_shard",)),
            ("copies", ("dp_replicate",)),
            ("copies", ("dp_replicate", "tp")),
        }


def test_what_each_collective_takes_and_gives_is_said_as_it_is():
    message = re.findall(r"^    (\w+) +(\w) -> (\w) ", collective.__doc__, re.MULTILINE)
    assert {name for name, _, _ in message} == set(collective.__all__)
    assert all(OPS[name][:2] == (takes, gives) for name, takes, gives in message)
