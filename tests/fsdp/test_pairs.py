"""Where two features meet: every pair of them trains as it should, or is refused by an error that says why.

A feature is a few options of `train`. Pairs meet in sets of up to six features, so that there are few
trainings: whoever looks into one that fails leaves features out of its set. Those that only move things
(strategies, offload, recomputation, ...) must not change a bit: a set gives what is left when they are taken
away, on FULL_SHARD and on NO_SHARD, where nothing is cut, and nearly the same losses on one rank with the
whole batch. Tensor and sequence parallelism, on an axis of two more ranks, sum in another order: a set with
one of them gives its own bits whatever moves, and nearly the losses and weights of the set without it. So
does one with a pipeline, of two stages that have a weight in common. Beside "tensor-invariant" tensor
parallelism changes no bit.
"""

import warnings
from contextlib import nullcontext
from functools import cache, partial
from itertools import combinations

import numpy as np
import pytest

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.activation_offload import offload_activations
from shardrt.autograd import Late
from shardrt.checkpoint import full_state_dict, load, save
from shardrt.comm import init_device_mesh, talk, thread
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    no_sync,
    register_forward_method,
    set_world_invariant,
)
from shardrt.nn.utils import clip_grad_norm_, clip_grad_value_
from shardrt.parallel import (
    ColwiseParallel,
    Pipeline,
    RowwiseParallel,
    SequenceParallel,
    VocabParallel,
    parallelize_module,
    set_tensor_invariant,
)
from shardrt.recompute import checkpoint

STRATEGIES = ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP")

MOVES = {
    **{name: {"strategy": name} for name in STRATEGIES},
    "reshard": {"reshard_after_forward": True},
    "keep": {"reshard_after_forward": False},
    "prefetch 0": {"prefetch": 0},
    "prefetch 2": {"prefetch": 2},
    "offload parameters": {"offload": {"gradients": False, "optimizer_state": False}},
    "offload gradients": {"offload": {"parameters": False, "optimizer_state": False}},
    "offload optimizer": {"offload": {"parameters": False, "gradients": False}},
    "offload all": {"offload": {}},
    "step on host": {"offload": {"step": "host"}},
    "files": {"offload": {"directory": "spill"}},
    "recompute": {"recompute": "full"},
    "recompute but matmul": {"recompute": "matmul"},
    "recompute every second": {"recompute": "every second"},
    "offload activations": {"offload_activations": True},
    "in backward": {"in_backward": True},
    "late": {"late": True},
    "unit of two": {"unit_of_two": True},
    "forward method": {"forward_method": True},
    "save and load": {"save_and_load": True},
    "world-invariant": {"invariant": True},
}
NUMBERS = {
    "bf16": {"param_dtype": "bfloat16"},
    "fp16, scaled": {"param_dtype": "float16", "scaler": True},
    "fp32 reduce": {"reduce_dtype": "float32"},
    "bf16 output": {"output_dtype": "bfloat16"},
    "accumulate": {"micro_batches": ("reduce",)},
    "no_sync": {"micro_batches": ("no_sync",)},
    "clip norm": {"clip_norm": 0.1},
    "clip value": {"clip_value": 0.01},
    "SGD": {"sgd": True},
    "frozen": {"frozen": True},
    "ignored": {"ignored": True},
    "unused units": {"unused": True},
    "dropout": {"dropout": 0.3},
    "tensor parallel": {"parallel": "tensor"},
    "sequence parallel": {"parallel": "sequence"},
    "pipeline": {"pipeline": True},
    "tensor-invariant": {"tensor_invariant": True},
}
FEATURES = MOVES | NUMBERS
BY_RANK = {"unused units", "dropout"}  # what happens depends on the rank, so one rank is no reference
MASKS = {"world-invariant", "accumulate", "dropout"}  # together: a micro-batch has its own masks on any rank
LOW = {"bf16", "fp16, scaled", "bf16 output"}
CUT = {"tensor parallel", "sequence parallel"}
PARALLEL = CUT | {"pipeline"}

APPLIED = "the optimizer has in_backward=True and has applied these gradients already"
REFUSED = {
    # These gradients are used up, unit by unit, before all of them are there.
    ("in backward", "clip norm"): (RuntimeError, f"clip_grad_norm_: {APPLIED}"),
    ("in backward", "clip value"): (RuntimeError, f"clip_grad_value_: {APPLIED}"),
    ("in backward", "fp16, scaled"): (RuntimeError, f"GradScaler.unscale_: {APPLIED}"),
    ("in backward", "accumulate"): (RuntimeError, "a second backward .* accumulate with no_sync"),
    # These contradict each other.
    ("NO_SHARD", "reshard"): (ValueError, "reshard_after_forward=True does not fit NO_SHARD"),
    ("SHARD_OPT", "reshard"): (ValueError, "reshard_after_forward=True does not fit SHARD_OPT"),
    ("prefetch 0", "prefetch 2"): (ValueError, "unit .* has prefetch=., the outermost one ."),
    # Gradients of ignored parameters are each rank's own.
    ("clip norm", "ignored"): (ValueError, "clip_grad_norm_: parameter .* is not sharded"),
    ("world-invariant", "ignored"): (ValueError, "set_world_invariant: parameter 'norm.weight' is ignored"),
    # Each micro-batch has its place in a tree of sums on the device.
    ("world-invariant", "no_sync"): (RuntimeError, "no_sync: with set_world_invariant each backward reduces"),
    **{
        (name, "world-invariant"): (ValueError, "set_world_invariant: unit .* has its gradients on the host")
        for name in ("offload gradients", "offload all", "step on host", "files")
    },
    ("late", "world-invariant"): (RuntimeError, "with set_world_invariant the gradient of each micro-batch"),
    # Gradients of norms are summed over the parts of the time, which the tree does not know.
    ("world-invariant", "sequence parallel"): (ValueError, "unit .* are summed over another axis as well"),
    # The head is tied to the embedding, and what two stages use is added up when both have all of it.
    ("world-invariant", "pipeline"): (ValueError, "set_world_invariant: 'embed.weight' is on two stages"),
    ("in backward", "pipeline"): (RuntimeError, f"sum_tied: {APPLIED}"),
    # A pipeline calls forward.
    ("forward method", "pipeline"): (ValueError, "register_forward_method: Net has stages"),
}


class Block(nn.Module):
    """Linear, GELU, linear, dropout; few ranks divide their sizes."""

    def __init__(self, dropout):
        super().__init__()
        self.up = nn.Linear(7, 14)
        self.down = nn.Linear(14, 7)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    """Embedding, blocks of which some may be left out, norm, and a head tied to the embedding."""

    def __init__(self, dropout):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.norm = nn.LayerNorm(7)
        self.left_out = None

    def forward(self, tokens):
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x) if index != self.left_out else x
        return self.headed(x)

    def headed(self, x):
        # On a GPU units may give out 16 bits that others do not compute in (bf16 output), as in PyTorch.
        x = self.norm(F.cast(x, self.norm.weight.data.dtype.name))
        head = self.embed.weight
        x, words = F.cast(x, head.data.dtype.name), head.words
        return F.linear(x, head) if words is None else words.logits(x, head)

    def score(self, tokens):
        return self.forward(tokens)

    def pieces(self):
        def block(number, x, batch):
            return self.blocks[number](x) if number != self.left_out else x

        blocks = (nn.Piece(b.name, partial(block, number), (b,)) for number, b in enumerate(self.blocks))
        return [
            nn.Piece("embed", lambda x, batch: self.embed(batch["tokens"]), (self.embed,)),
            *blocks,
            nn.Piece("head", lambda x, batch: self.headed(x), (self.norm,), tied=(self.embed,)),
        ]


def plan_for(options):
    """How the modules are cut over the ranks of an axis."""
    plan = {
        "embed": VocabParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    if "sequence" in options.get("parallel", []):
        plan |= {"norm": SequenceParallel(), "blocks.*.dropout": SequenceParallel()}
    return plan


def options_of(names):
    """Option -> its values, one for each of the features that have it."""
    options = {}
    for name in names:
        for key, value in FEATURES[name].items():
            options.setdefault(key, []).append(value)
    return options


def of_unit(options, index, directory):
    """Arguments of fully_shard. Of two values of an option, every other unit has one, the rest the other."""

    def value(key, default=None):
        values = options.get(key, [default])
        return values[index % len(values)]

    offload = value("offload")
    if offload is not None and "directory" in offload:
        offload = {"directory": directory}
    return {
        "strategy": value("strategy", "FULL_SHARD"),
        "reshard_after_forward": value("reshard_after_forward"),
        "prefetch": value("prefetch", 1),
        "offload_policy": None if offload is None else CPUOffloadPolicy(**offload),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=value("param_dtype"),
            reduce_dtype=value("reduce_dtype"),
            output_dtype=value("output_dtype"),
        ),
    }


def mesh_for(options, device):
    """Of all ranks: an axis for the data, or two of a hybrid, and others for what is cut in other ways."""
    two_axes = any(name.startswith("HYBRID") for name in options.get("strategy", []))
    others = {name: 2 for name, option in (("pp", "pipeline"), ("tp", "parallel")) if option in options}
    if not others:
        return init_device_mesh(device, (2, 2) if two_axes else None)
    shards = 2 if two_axes else init_device_mesh(device).size // 2 ** len(others)
    sizes = {"pp": 0, "dp_replicate": 2 * two_axes, "dp_shard": shards, "tp": 0} | others
    sizes = {name: size for name, size in sizes.items() if size}
    return init_device_mesh(device, tuple(sizes.values()), tuple(sizes))


def data_of(mesh):
    """Its axes of the data: ranks of "pp" and "tp" have the same rows."""
    names = mesh.mesh_dim_names
    return mesh if names is None else mesh[tuple(name for name in names if name.startswith("dp"))]


def build(options, mesh, directory):
    """(model, its Pipeline or None)."""
    shardrt.manual_seed(3)
    model, pipeline = Net(*options.get("dropout", [0.0])), None
    if "parallel" in options:
        parallelize_module(model, mesh["tp"], plan_for(options))
    if "tensor_invariant" in options:
        set_tensor_invariant(model, 2, plan=None if "parallel" in options else plan_for(options))
    if "frozen" in options:
        for parameter in (*model.blocks[1].parameters(), model.blocks[0].up.bias):
            parameter.requires_grad = False
    recompute(model.blocks, options.get("recompute", []))
    for block in model.blocks if "offload_activations" in options else ():
        offload_activations(block)
    if "pipeline" in options:
        # One micro-batch where each has masks of its own: then they are those of the whole batch.
        count = 1 if "dropout" in options else 2
        schedule = "ZB-H1" if "late" in options else "1F1B"
        pipeline = Pipeline(model, mesh["pp"], schedule=schedule, micro_batches=count)
    shard(options, model, pipeline.stages if pipeline else [model], data_of(mesh), directory)
    if "forward_method" in options:
        register_forward_method(model, "score")
    if "invariant" in options:
        set_world_invariant(model, data_of(mesh).size * len(turns(options)))
    return model, pipeline


def shard(options, model, wholes, data, directory):
    """Units of the blocks, and of what is around them, that this rank has."""
    parts = [[block] for block in model.blocks]
    if "unit_of_two" in options:
        parts[:2] = [parts[0] + parts[1]]
    for index, part in enumerate(parts):
        if not any(parameter.absent for block in part for parameter in block.parameters()):
            fully_shard(part, mesh=data, **of_unit(options, index, directory))
    ignored = [model.norm] if "ignored" in options else []
    for whole in wholes:
        fully_shard(whole, mesh=data, ignored=ignored, **of_unit(options, len(parts), directory))


def recompute(blocks, policies):
    """One policy for all blocks, or two in turns; "every second" leaves its others to the other policy."""
    turns = sorted(policies)  # "every second" first
    if turns and turns[0] == "every second":
        turns = ["full", *(turns[1:] or [None])]
    for index, block in enumerate(blocks):
        if turns and turns[index % len(turns)]:
            checkpoint(block, turns[index % len(turns)])


def train(names, directory=None, strategy=None, device="cpu"):
    """(losses of three steps, weights on rank 0) of a model with the features `names`, on this rank."""
    options = options_of(names) | ({"strategy": [strategy]} if strategy else {})
    mesh = mesh_for(options, device)
    data = data_of(mesh)
    model, pipeline = build(options, mesh, directory)
    run = backward if pipeline is None else partial(by_stages, pipeline)
    kind = optim.SGD if "sgd" in options else optim.AdamW
    settings = {"momentum": 0.9, "lr": 0.1} if "sgd" in options else {"lr": 1e-2}
    optimizer = kind(model.parameters(), in_backward="in_backward" in options, **settings)
    scaler = optim.GradScaler(init_scale=2.0**10, enabled="scaler" in options)
    losses = []
    for step, (tokens, targets) in enumerate(batches(data)):
        if "unused" in options:  # at first all are used; then one rank leaves one out, then all do
            model.left_out = {1: 1 if data.rank % 2 else None, 2: 2}.get(step)
        losses.append(run(model, options, scaler, tokens, targets))
        average_ignored(model, data, options)
        scaler.unscale_(optimizer)
        for norm in options.get("clip_norm", ()):
            clip_grad_norm_(model.parameters(), norm)
        for value in options.get("clip_value", ()):
            clip_grad_value_(model.parameters(), value)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 1 and "save_and_load" in options:
            save_and_load(model, mesh, directory)
    return losses, full_state_dict(model)


def batches(mesh):
    """This rank's rows of the whole batch of every step."""
    random = np.random.default_rng(0)
    rows = slice(24 * mesh.rank // mesh.size, 24 * (mesh.rank + 1) // mesh.size)
    return [(random.integers(0, 11, (24, 2))[rows], random.integers(0, 11, (24, 2))[rows]) for _ in range(3)]


def backward(model, options, scaler, tokens, targets):
    """The loss of all micro-batches. The last of them reduces, whatever those before it do.

    Late: gradients of weights wait, if nobody reduces them, until the next micro-batch's are waiting too.
    """
    ways = turns(options)
    added = shardrt.fsdp.units(model)[0].settings.mesh.size if "invariant" in options else 1
    total, waiting = 0.0, []
    parts = zip(np.array_split(tokens, len(ways)), np.array_split(targets, len(ways)), strict=True)
    for way, (tokens, targets) in zip(ways, parts, strict=True):
        with no_sync(model) if way == "no_sync" else nullcontext():
            logits = model.score(tokens) if "forward_method" in options else model(tokens)
            loss = F.cross_entropy(logits, targets) * (1 / len(ways))
            late = Late() if "late" in options else None
            scaler.scale(loss * (1 / added)).backward(late=late)
            for earlier in waiting:
                with no_sync(model):
                    earlier.run()
            waiting = [] if late is None else [late]
            if waiting and way == "reduce":
                waiting.pop().run()
        total += float(loss.item())
    return total


def by_stages(pipeline, model, options, scaler, tokens, targets):
    """The same by steps of a pipeline, each of some micro-batches."""
    ways, count, told = turns(options), pipeline.table.micro_batches, []

    def loss_of(model, batch):
        tokens, targets, weight = batch
        loss = F.cross_entropy(model(tokens), targets) * weight
        told.append(float(loss.item()))
        return scaler.scale(loss)

    rows = list(zip(np.array_split(tokens, len(ways)), np.array_split(targets, len(ways)), strict=True))
    for way, (own, wanted) in zip(ways, rows, strict=True):
        parts = zip(np.array_split(own, count), np.array_split(wanted, count), strict=True)
        with no_sync(model) if way == "no_sync" else nullcontext():
            pipeline.step(loss_of, [(x, y, len(x) / (len(own) * len(ways))) for x, y in parts])
    return sum(sum(talk.from_all(pipeline.mesh.communicator("control"), told), []))


def turns(options):
    """What becomes of the gradients of each micro-batch."""
    return [way for values in options.get("micro_batches", ()) for way in values] + ["reduce"]


def average_ignored(model, mesh, options):
    """Nobody reduces the gradients of what is ignored, so whoever trains it must."""
    for parameter in model.norm.parameters() if "ignored" in options else ():
        if parameter.absent:
            continue
        gradient = parameter.grad
        mesh.communicator("control").all_reduce(gradient, stream=mesh.device.current_stream)
        gradient /= mesh.size


def save_and_load(model, mesh, directory):
    """Write a checkpoint, spoil the model, read it back."""
    save(directory / "checkpoint", model)
    for parameter in model.parameters():
        with parameter.writing() as shard:
            shard.fill(7.0)
    mesh.communicator("control").barrier(stream=mesh.device.current_stream)
    load(directory / "checkpoint", model)


def train_on(ranks, names, *args, **kwargs):
    """(losses by rank, weights)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fully_shard: expected")  # unused units do
        results = thread.run(ranks, train, names, *args, **kwargs)
    return [losses for losses, _ in results], results[0][1]


@cache
def reference(ranks, names, strategy="FULL_SHARD"):
    """Without anything that only moves things."""
    return train_on(ranks, names, None, strategy)


def same_bits(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        assert np.array_equal(found[1][name], values), name


def nearly_the_same(cut, uncut, names):
    """Ranks with the same rows have the same losses, nearly those of one that has the modules whole."""
    of_losses, of_weights = (3e-2, 1e-3) if LOW & set(names) else (1e-5, 1e-5)
    others = [2 if kinds & set(names) else 1 for kinds in ({"pipeline"}, CUT)]
    losses = np.reshape(cut[0], (others[0], -1, others[1], len(cut[0][0])))
    assert np.array_equal(losses, np.broadcast_to(losses[:1, :, :1], losses.shape))
    assert np.allclose(losses[0, :, 0], uncut[0], rtol=0, atol=of_losses)
    assert cut[1].keys() == uncut[1].keys()
    for name, values in uncut[1].items():
        np.testing.assert_allclose(cut[1][name], values, rtol=0, atol=of_weights, err_msg=name)


def readable(names):
    return " + ".join(names)


def share_an_option(names):
    first, second = names
    return bool(FEATURES[first].keys() & FEATURES[second].keys())


def sets_of(pairs, most=6):
    """Sets of features, all of whose pairs are among `pairs`, in which each of these is; greedy."""
    sets, allowed, missing = [], set(pairs), dict.fromkeys(pairs)
    while missing:
        found = list(next(iter(missing)))
        while len(found) < most:
            new = {
                name: sum(pair in missing for pair in with_each(name, found))
                for name in FEATURES
                if name not in found and allowed.issuperset(with_each(name, found))
            }
            if not any(new.values()):
                break
            found.append(max(new, key=new.get))
        sets.append(tuple(name for name in FEATURES if name in found))
        for pair in combinations(sets[-1], 2):
            missing.pop(pair, None)
    return sets


def with_each(name, others):
    """Pairs, in the order of FEATURES."""
    return [tuple(sorted((name, other), key=list(FEATURES).index)) for other in others]


def ranks_for(names, data=2):
    """`data` ranks, or four of hybrids; twice as many where modules, or the model, are cut in two."""
    data = 4 if any(name.startswith("HYBRID") for name in names) else data
    return data * (2 if CUT & set(names) else 1) * (2 if "pipeline" in names else 1)


PAIRS = list(combinations(FEATURES, 2))
TRAINED = [pair for pair in PAIRS if pair not in REFUSED]
ALONE = [pair for pair in TRAINED if share_an_option(pair)]  # units have one value or the other, in turns
TOGETHER = sets_of([pair for pair in TRAINED if pair not in ALONE])


def test_every_pair_is_among_the_sets():
    met = {pair for names in [*TOGETHER, *ALONE, *REFUSED] for pair in combinations(names, 2)}
    assert met == set(PAIRS)


@pytest.mark.parametrize("names", REFUSED, ids=readable)
def test_what_does_not_go_together_is_refused(names, tmp_path):
    kind, told = REFUSED[names]
    with pytest.raises(kind, match=told):
        train_on(ranks_for(names), names, tmp_path)


@pytest.mark.parametrize("names", [*ALONE, *TOGETHER], ids=readable)
def test_all_of_these_go_together(names, tmp_path):
    ranks = ranks_for(names)
    found = train_on(ranks, names, tmp_path)
    change = tuple(name for name in names if name in NUMBERS or MASKS.issubset(names) and name in MASKS)
    same_bits(found, reference(ranks, change))
    same_bits(found, reference(ranks, change, "NO_SHARD"))
    uncut = tuple(name for name in change if name not in PARALLEL)
    tolerance = 3e-2 if LOW & set(names) else 1e-4
    if not BY_RANK & set(names):
        whole = reference(1, uncut)[0][0]
        assert np.allclose(np.mean(found[0], axis=0), whole, rtol=0, atol=tolerance)
    if uncut != change:
        data = ranks // ranks_for(PARALLEL & set(names), 1)
        nearly_the_same(found, reference(data, uncut), names)
        if PARALLEL & set(names) == {"tensor parallel"} and "tensor-invariant" in names:
            np.testing.assert_equal(found[1], reference(data, uncut)[1])


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_said_to_change_numbers_does(name):
    # Reducing in fp32, or by hand, is nothing new where all is fp32.
    among = ("bf16",) if name in ("fp32 reduce", "ignored") else ()
    _, plain = reference(2, among)
    _, changed = reference(2, (*among, name))
    assert any(not np.array_equal(plain[key], changed[key]) for key in plain)
