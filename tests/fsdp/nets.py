"""Small models with the shapes of trouble, and one function that trains any of them on some ranks."""

from functools import cache

import numpy as np

import shardrt
from shardrt import device, nn, optim
from shardrt import functional as F
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard, units
from shardrt.nn.runs import put


class Block(nn.Module):
    """Linear, GELU, linear, with odd widths so that nothing divides evenly."""

    def __init__(self, width=7, hidden=13):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Embedding, blocks, norm, and a head tied to the embedding: parameters of the outermost unit."""

    def __init__(self, blocks=3, width=7, vocab=11):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def run_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens):
        x = self.run_blocks(self.embed(tokens))
        return F.linear(self.norm(x), self.embed.weight)


class CalledTwice(Net):
    """Its second block is called at two places."""

    def run_blocks(self, x):
        first, second, third = self.blocks
        return third(second(first(second(x))))


class NeverCalled(Net):
    """Its second block is not called at all."""

    def run_blocks(self, x):
        return self.blocks[2](self.blocks[0](x))


class PartlyUsed(Net):
    """One block is called, but half of its parameters are not used."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks[1].spare = nn.Linear(7, 5)


class TiedInside(Net):
    """Within each block, both linear layers have one weight."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for block in self.blocks:
            block.up = nn.Linear(7, 7)
            block.down = nn.Linear(7, 7)
            block.down.weight = block.up.weight


class Nested(nn.Module):
    """Units inside units: stages of blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.stages = nn.ModuleList(nn.Sequential(Block(), nn.Linear(7, 7), Block()) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for stage in self.stages:
            x = stage(x)
        return F.linear(x, self.embed.weight)


class Frozen(Net):
    """The second block is not trained, and neither is a bias of the first."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        for parameter in self.blocks[1].parameters():
            parameter.requires_grad = False
        self.blocks[0].up.bias.requires_grad = False


def shard(model, mesh, **settings):
    """Make every Block, every stage and the whole a unit."""
    for module in list(model.modules())[::-1]:
        if isinstance(module, Block | nn.Sequential):
            fully_shard(module, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def batches(steps, size=12, time=5, vocab=11, seed=0):
    """(tokens, targets) of the whole batch for every step."""
    random = np.random.default_rng(seed)

    def draw():
        return random.integers(0, vocab, (size, time))

    return [(draw(), draw()) for _ in range(steps)]


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens), targets)


def gradients(model):
    """Name -> whole gradient on every rank: the pieces of p.grad, put together."""
    result = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        storage = parameter.storage
        whole = np.zeros(parameter.size, parameter.dtype)
        put(parameter.part, whole, parameter.grad.reshape(-1))
        if storage.communicator is not None:
            storage.communicator.all_reduce(whole, op="sum", stream=device.current().current_stream)
        result[name] = whole.reshape(parameter.shape)
    return result


def bytes_held(model):
    """Bytes of what the units have allocated, on a rank that shares no memory."""
    groups = [group for unit in units(model) for group in unit.groups]
    arrays = [
        array
        for group in groups
        for array in (*group.sharded_gradient.arrays, group.sharded_gradient.uses)
        if array is not None
    ]
    arrays += [group._shard for group in groups if not group.shard_in_slot]
    arenas = {arena for group in groups for arena in group.arenas.values()}
    return sum(array.nbytes for array in [*arrays, *(s.array for arena in arenas for s in arena.slots)])


def train(make, steps=3, sharded=True, make_optimizer=None, mesh_options=None, **settings):
    """Train `make()` on this rank's part of the batches; gives a list of (loss, gradients) and the weights.

    sharded = False: the plain model, on the whole batch.
    """
    make_optimizer = make_optimizer or (lambda parameters: optim.AdamW(parameters, lr=1e-2, weight_decay=0.1))
    shardrt.manual_seed(3)
    model = make()
    rank, ranks = 0, 1
    if sharded:
        mesh = init_device_mesh(**{"device": "auto", **(mesh_options or {})})
        rank, ranks = mesh.rank, mesh.size
        shard(model, mesh, **settings)
    optimizer = make_optimizer(model.parameters())
    history = []
    for tokens, targets in batches(steps):
        mine = slice(rank * len(tokens) // ranks, (rank + 1) * len(tokens) // ranks)
        loss = loss_of(model, tokens[mine], targets[mine])
        loss.backward()
        history.append((float(loss.item()), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return history, full_state_dict(model)


def train_on(ranks, make, **kwargs):
    """As `train`, on rank threads; losses are the mean over ranks. ranks = 0: without sharding."""
    if ranks == 0:
        return train(make, sharded=False, **kwargs)
    results = thread.run(ranks, train, make, **kwargs)
    steps = len(results[0][0])
    history = [(np.mean([r[0][s][0] for r in results]), results[0][0][s][1]) for s in range(steps)]
    return history, results[0][1]


@cache
def plain(ranks, make=Net):
    """`train_on` with nothing else, once for all that is compared with it."""
    return train_on(ranks, make)


def outcome(ranks, make=Net, **settings):
    """(losses, weights) of `train_on`."""
    history, weights = train_on(ranks, make, **settings) if settings else plain(ranks, make)
    return [loss for loss, _ in history], weights


def assert_same_bits(found, expected, case=""):
    """Of two outcomes."""
    assert found[0] == expected[0], case
    for name, values in expected[1].items():
        assert np.array_equal(found[1][name], values), f"{case}: {name}"


class ViewedBlock(Block):
    """Uses its parameters through views and arithmetic, not as handles of a layer."""

    def forward(self, x):
        hidden = F.gelu(F.linear(x, self.down.weight.T, self.up.bias))
        square = F.matmul(self.down.weight, self.up.weight)
        return x * self.up.weight[0] + (hidden @ self.up.weight + self.down.bias) @ square


class Viewed(Net):
    """Ops that take arrays may save them: they must not be slots that others get next."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = nn.ModuleList(ViewedBlock() for _ in range(6))
