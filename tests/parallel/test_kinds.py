"""Kinds of tensors on the tape: right models are inferred, and each mistake is told by the op that makes it.

That a mistake is one is shown by gradients, beside those of one rank.
"""

import inspect
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from shardrt import Tensor, nn
from shardrt import functional as F
from shardrt.autograd import Function
from shardrt.comm import create, init_device_mesh
from shardrt.functional import collective, vocabulary
from tests.gradcheck import normal
from tests.parallel.kinds import (
    COLLECTIVES,
    I,
    Kind,
    KindError,
    R,
    V,
    along,
    infer,
    on_tape,
    recording,
    walk,
)
from tests.ranks import run_ranks

RANKS = 2
TOKENS, WIDTH, INNER, WORDS = 4, 6, 8, 10


def same(x, comm):
    return x


@dataclass(frozen=True)
class Ways:
    """How a piece of a transformer is cut: what is called around its layers, and the kinds of parameters."""

    begin: object = same  # behind the embedding
    enter: object = collective.copy_to  # before a layer cut in its outputs
    leave: object = collective.reduce_from  # behind one cut in its inputs
    end: object = same  # before the head
    into_head: object = collective.copy_to
    logits: object = lambda x, comm: collective.gather_same(x, comm, 1)
    bias_first: bool = False  # the bias of the layer cut in its inputs
    between: object = same  # the layers
    norm: object = I
    row_bias: object = I


PLAIN = Ways()
SEQUENCE = Ways(
    begin=collective.scatter_to,
    enter=collective.gather,
    leave=collective.reduce_scatter_to,
    end=collective.gather_same,
    norm=R,
    row_bias=R,
)


class Piece(nn.Module):
    """A norm, a layer cut in its outputs, and one in its inputs."""

    def __init__(self, ways, comm, ranks):
        super().__init__()
        self.ways, self.comm = ways, comm
        self.norm = nn.LayerNorm(WIDTH, dtype=np.float64)
        self.up = nn.Linear(WIDTH, INNER // ranks, dtype=np.float64)
        self.down = nn.Linear(INNER // ranks, WIDTH, dtype=np.float64)

    def forward(self, x):
        inner = F.silu(self.up(self.ways.enter(self.norm(x), self.comm)))
        return x + self.narrow(self.ways.between(inner, self.comm))

    def narrow(self, inner):
        weight, bias = self.down.weight, self.down.bias
        if self.ways.bias_first:
            return self.ways.leave(F.linear(inner, weight, bias), self.comm)
        return self.ways.leave(F.linear(inner, weight), self.comm) + bias


class Model(nn.Module):
    """An embedding, two pieces, and a head that is cut in its outputs."""

    def __init__(self, ways, comm, ranks):
        super().__init__()
        self.ways, self.comm = ways, comm
        self.embed = nn.Linear(3, WIDTH, dtype=np.float64)
        self.blocks = nn.ModuleList(Piece(ways, comm, ranks) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS // ranks, bias=False, dtype=np.float64)

    def forward(self, x, targets):
        ways, comm = self.ways, self.comm
        x = ways.begin(self.embed(x), comm)
        for block in self.blocks:
            x = block(x)
        x = ways.into_head(ways.end(x, comm), comm)
        return F.cross_entropy(ways.logits(self.head(x), comm), targets)


CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "head.weight": 0}


def kinds_of(model, ways):
    """By name, as a plan says them."""
    message = {"norm.weight": ways.norm, "norm.bias": ways.norm, "down.bias": ways.row_bias}
    message |= {name: V(cut) for name, cut in CUTS.items()}
    ends = {name: ".".join(name.split(".")[-2:]) for name, _ in model.named_parameters()}
    return {name: message.get(end, I) for name, end in ends.items()}


def own(array, kind, comm):
    return array if kind.cut is None else np.split(array, comm.size, kind.cut)[comm.rank]


def trained(ways, size=RANKS):
    """The tapes of all ranks; the kinds; and the whole gradients by name, put together as kinds say."""

    def body():
        comm = create()
        whole, model = Model(PLAIN, None, 1), Model(ways, comm, size)
        kinds = kinds_of(model, ways)
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            value = normal(*whole.get_parameter(name).shape, seed=seed)
            parameter.data = own(value, kinds[name], comm)
        targets = np.arange(TOKENS) % WORDS
        with on_tape(lambda other: "all" if other is comm else "") as tape:
            tape.result = model(Tensor(normal(TOKENS, 3)), targets)
        tape.result.backward()
        return tape, kinds, {name: np.array(p.grad) for name, p in model.named_parameters()}

    with recording():
        tapes, kinds, gradients = zip(*run_ranks(size, body), strict=True)
    return list(tapes), kinds[0], {name: put_together(name, gradients, kinds[0]) for name in kinds[0]}


def put_together(name, gradients, kinds):
    parts = [each[name] for each in gradients]
    if kinds[name] == I:
        return parts[0]
    return sum(parts) if kinds[name] == R else np.concatenate(parts, kinds[name].cut)


@pytest.fixture(scope="module")
def alone():
    """The gradients of one rank."""
    return trained(PLAIN, 1)[2]


def wrong(gradients, expected):
    """Names of the parameters whose gradients are not those of one rank."""
    return [n for n in expected if not np.allclose(gradients[n], expected[n], rtol=1e-9, atol=1e-12)]


@pytest.mark.parametrize("ways", [PLAIN, SEQUENCE], ids=["tp", "tp and sp"])
def test_a_model_cut_rightly_is_inferred_and_has_the_gradients_of_one_rank(ways, alone):
    tapes, kinds, gradients = trained(ways)
    assert wrong(gradients, alone) == []
    found = infer(tapes, kinds)
    assert len(found) == len(tapes[0].calls) > 20
    stream = "I" if ways is PLAIN else "V"
    norms = [r for r, call in zip(found, tapes[0].calls, strict=True) if call.op == "LayerNorm"]
    assert [str(kind) for kind in norms] == [stream] * 2


def cut_by_index(x, comm):
    """This rank's rows, by an op whose backward knows nothing of other ranks."""
    rows = x.shape[0] // comm.size
    return x[comm.rank * rows : (comm.rank + 1) * rows]


def twice(op):
    return lambda x, comm: op(op(x, comm), comm)


def gathered_logits(x, comm):
    return collective.gather(x, comm, 1)


MISTAKES = {
    "copy_to forgotten": (
        replace(PLAIN, enter=same),
        r"^Linear of blocks.0.up: x is I, weight is V\(0\) \(blocks.0.up.weight\).*x must be R",
    ),
    "copy_to forgotten before the head": (replace(PLAIN, into_head=same), "^Linear of head: x is I"),
    "copy_to twice": (
        replace(PLAIN, enter=twice(collective.copy_to)),
        "^CopyTo of blocks.0: x is R; x must be I",
    ),
    "reduce_from forgotten": (
        replace(PLAIN, leave=same),
        r"^Add of blocks.0: x is P, y is I \(blocks.0.down.bias\); what is not P is added on every",
    ),
    "reduced twice": (
        replace(PLAIN, leave=twice(collective.reduce_from)),
        "^ReduceFrom of blocks.0: x is I; x must be P",
    ),
    "reduced before it is a sum": (
        replace(PLAIN, between=collective.reduce_from),
        "^ReduceFrom of blocks.0: x is V; x must be P",
    ),
    "bias before the reduction": (
        replace(PLAIN, bias_first=True),
        r"^Linear of blocks.0: .*bias is I \(blocks.0.down.bias\); what is not P is added",
    ),
    "bias before the reduction, with sp": (
        replace(SEQUENCE, bias_first=True),
        "^Linear of blocks.0: .*not P is",
    ),
    "gather for gather_same": (replace(PLAIN, logits=gathered_logits), "^the loss is R, but must be I"),
    "gather for gather_same, with sp": (
        replace(SEQUENCE, end=collective.gather),
        "^CopyTo of Model: x is R; x must be I",
    ),
    "gather_same for gather": (
        replace(SEQUENCE, enter=collective.gather_same),
        "^Linear of blocks.0.up: x is I, weight is V",
    ),
    "all-reduced and cut": (
        replace(SEQUENCE, leave=lambda x, c: cut_by_index(collective.reduce_from(x, c), c)),
        "^GetItem of blocks.0: x is I, index is V; I meets R or V",
    ),
    "own rows by an index": (replace(SEQUENCE, begin=cut_by_index), "^GetItem of Model: x is I, index is V"),
    "own rows of summands": (
        replace(SEQUENCE, leave=collective.scatter_to),
        "^ScatterTo of blocks.0: x is P; x must be I",
    ),
    "a norm under sp that is not partial": (
        replace(SEQUENCE, norm=I),
        r"^LayerNorm of blocks.0.norm: x is V, weight is I \(blocks.0.norm.weight\).*I meets R or V",
    ),
    "a bias under sp that is not partial": (
        replace(SEQUENCE, row_bias=I),
        "^Add of blocks.0: x is V, y is I",
    ),
    "a norm that is summed without need": (
        replace(PLAIN, norm=R),
        r"^LayerNorm of blocks.0.norm: x is I, weight is R .*I meets R or V",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_by_the_op_and_is_one(mistake, alone):
    ways, message = MISTAKES[mistake]
    tapes, kinds, gradients = trained(ways)
    with pytest.raises(KindError, match=message):
        infer(tapes, kinds)
    assert wrong(gradients, alone)


def on_mesh(body, size=4):
    """The kinds along "tp" of what `body(x, mesh)` does with a parameter x that all ranks have."""

    def rank():
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp_shard", "tp"))
        model = nn.Linear(2, 4, bias=False, dtype=np.float64)
        with on_tape(along(mesh["tp"])) as tape:
            tape.result = body(model.weight, mesh)
        return mesh.coordinate, tape

    with recording():
        found = run_ranks(size, rank)
    return walk([tape for (dp, _), tape in found if dp == 0], {"weight": I})


def test_along_another_axis_collectives_are_linear_and_no_more():
    def body(x, mesh):
        tp, dp = mesh["tp"].communicator("tensor"), mesh["dp_shard"].communicator("tensor")
        own = collective.scatter_to(collective.reduce_from(x, dp), tp)
        there = collective.gather(collective.gather_same(own, dp), tp)
        return collective.reduce_from(there * mesh.rank, dp)

    assert on_mesh(body) == [I, V(), V(), R, V(), V()]


def test_among_some_ranks_of_the_axis_own_stays_own():
    def body(x, mesh):
        tp = mesh["tp"]
        own = collective.scatter_to(x, tp.communicator("tensor"))
        pair = tp.fold("head", 2, over="tp", rest="heads")["head"].communicator("tensor")
        return getattr(collective, op)(own, pair)

    def rows(x, mesh):
        tp = mesh["tp"]
        own = collective.scatter_to(x, tp.communicator("tensor"))
        pair = tp.fold("head", 2, over="tp", rest="heads")["head"].communicator("tensor")
        to_the_other = ((0, 1), (1, 0))[pair.rank]
        return collective.all_to_all_rows(own, pair, to_the_other, to_the_other)

    op = "gather"
    assert on_mesh(body, 8) == [V(), V()]
    assert on_mesh(rows, 8) == [V(), V()]
    op = "gather_same"
    with pytest.raises(KindError, match="^GatherSame: x is V; it is among some ranks of the axis"):
        on_mesh(body, 8)


def test_a_collective_whose_kinds_nobody_has_said_is_refused():
    class Mean(Function):
        def forward(self, x, communicator):
            return collective.summed(x, communicator) / communicator.size

    with pytest.raises(KindError, match="^Mean: x is I .weight.; it has a collective along this axis inside"):
        on_mesh(lambda x, mesh: Mean.apply(x, mesh["tp"].communicator("tensor")))
    assert on_mesh(lambda x, mesh: Mean.apply(x, mesh["dp_shard"].communicator("tensor"))) == [I]


def test_what_is_the_same_has_equal_bits_on_all_ranks():
    def body(x, mesh):
        x.data = x.data + mesh.rank_of("tp") * 1e-15
        return x + 1

    with pytest.raises(KindError, match="^Add: x is I .weight.; what it gives is I, but ranks"):
        on_mesh(body)
    with pytest.raises(KindError, match="^Mul: x is I .weight., y is V; I meets R or V"):
        on_mesh(lambda x, mesh: x * np.float64(mesh.rank_of("tp")))
    with pytest.raises(KindError, match="ranks have run different ops"):
        on_mesh(lambda x, mesh: x + 1 if mesh.rank_of("tp") else x * 1)


def test_kinds_are_known_of_every_collective_and_those_that_it_says():
    message = re.findall(r"^    (\w+) +(\w) -> (\w) ", collective.__doc__, re.MULTILINE)
    assert {name for name, _, _ in message} == set(collective.__all__)
    for name, takes, gives in message:
        op = name.title().replace("_", "")
        assert COLLECTIVES[op] == ({"x": takes}, Kind(gives)), name
    inside = {op for op, taken in arguments_of(collective) if "communicator" in taken}
    inside |= {op for op, taken in arguments_of(vocabulary) if "part" in taken}
    assert inside == COLLECTIVES.keys()


def arguments_of(module):
    ops = [op for _, op in inspect.getmembers(module, inspect.isclass) if issubclass(op, Function)]
    return [(op.__name__, inspect.signature(op.forward).parameters) for op in ops if op is not Function]
