"""Small GPTs and Llamas, some with experts, and one function that trains them on any axes."""

from functools import cache

import numpy as np

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from shardrt import functional as F
from shardrt import nn
from shardrt.comm import CollectiveCounter, init_device_mesh, objects
from shardrt.fsdp import fully_shard, set_gradient_divide_factor
from shardrt.parallel import ContextParallel, expert_plan, parallelize_module, shard_sequence
from tests import lab
from tests.ranks import run_ranks

VOCAB, BATCH, TIME = 37, 4, 16  # no number of ranks divides the vocabulary
AXES = ("dp_replicate", "dp_shard", "cp", "tp")
PLAN = {"blocks.*.attention": ContextParallel()}
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": TIME, "vocab_size": VOCAB, "init_std": 0.1}
EXPERTS = {"n_embd": 16, "n_hidden": 12, "init_std": 0.2}
EXPERTS |= {"experts": 8, "experts_per_token": 2, "balance_loss": 0.3}


def make(kind, **changes):
    """Four heads, "llama 1" with one of keys and values, "llama" and "experts" with two."""
    shardrt.manual_seed(3)
    if kind == "gpt":
        return GPT(GPTConfig(**{**SIZES, "dropout": 0.1, **changes}))
    own = {"n_kv_head": int(kind.split()[1]) if " " in kind else 2, "n_hidden": 48}
    return Llama(LlamaConfig(**SIZES | own | (EXPERTS if kind == "experts" else {}) | changes))


def mesh_of(copies=1, shards=1, cp=1, tp=1, **how):
    return init_device_mesh("cpu", (copies, shards, cp, tp), AXES, **how)


def data_of(mesh):
    """The ranks over which gradients are summed."""
    copies = mesh.size_of("dp_replicate") > 1
    if mesh.size_of("cp") == 1:
        return mesh["dp_replicate", "dp_shard"] if copies else mesh["dp_shard"]
    if not copies:
        return mesh.flat("dp_shard", "cp")
    each = mesh.size_of("dp_shard") * mesh.size_of("cp")
    return mesh.fold("shards", each, over=AXES[:3], rest="dp_replicate")


def build(
    kind,
    mesh,
    sequence=False,
    ep=1,
    over=AXES[1:],
    first="tp",
    balanced=True,
    before=None,
    changes=None,
    sharded=True,
    mean=False,
):
    """The model, cut along tp and cp and its experts along ep, and sharded over what is left.

    first: the axis along which it is cut first. balanced: experts, over the data as well. before: of each
    block. mean: gradients are divided by the number of ranks with losses of their own.
    """
    model = make(kind, **(changes or {}))
    plans = {"tp": (mesh["tp"], plan_of(model, sequence_parallel=sequence)), "cp": (mesh["cp"], PLAN)}
    if kind == "experts":
        fold = mesh.fold("ep", ep, over=over)
        plans["ep"] = fold["ep"], expert_plan(model)
    for name in sorted(plans, key=lambda name: name != first):
        parallelize_module(model, *plans[name])
    if kind == "experts" and balanced:
        nn.balance_over(model, data_of(mesh))
    for block in model.blocks if before is not None else ():
        before(block)
    if not sharded:
        return model
    for block in model.blocks:
        if kind == "experts":
            fully_shard(block.mlp.experts, mesh=fold["efsdp"])
        fully_shard(block, mesh=data_of(mesh))
    fully_shard(model, mesh=data_of(mesh))
    if not mean:
        set_gradient_divide_factor(model, 1.0)
    return model


def batch_of(step, mesh=None):
    """(tokens, targets) of a step: all of them, or the rows of this rank."""
    rows = np.random.default_rng(step).integers(0, VOCAB, (BATCH, TIME + 1))
    rows = rows if mesh is None else lab.rows(mesh["dp_replicate", "dp_shard"], rows)[0]
    return rows[:, :-1], rows[:, 1:]


def part_of(step, mesh, documents):
    """This rank's part of a step's sequences, as arguments of the model."""
    numbers = np.sort(np.random.default_rng([step, 1]).integers(0, 3, (BATCH, TIME)), axis=1)
    (numbers,) = lab.rows(mesh["dp_replicate", "dp_shard"], numbers)
    starts = F.document_starts(numbers) if documents else None
    part = shard_sequence(*batch_of(step, mesh), mesh=mesh["cp"], starts=starts)
    return {**part._asdict(), "reduction": "sum"}


def train(kind, axes, documents=False, steps=2, mean=False, ignoring=False, **how):
    """What lab.learn gives on this rank, with the losses of all. ignoring: some targets."""
    mesh = mesh_of(**axes)
    model = build(kind, mesh, mean=mean, **how)
    scale = (data_of(mesh).size if mean else 1) / (BATCH * TIME)

    def step(number):
        part = part_of(number, mesh, documents)
        if ignoring:
            part["targets"][part["targets"] < 15] = -100
        loss = model(**part) * scale
        loss.backward()
        return loss.item() / scale / (BATCH * TIME)

    def after():
        if kind == "experts":
            nn.update_expert_bias(model, rate=0.01)

    found = lab.learn(model, step, steps=steps, after=after)
    everyone = objects.all_gather_object(mesh.communicator("control"), found["losses"])
    return found | {"losses": np.sum(everyone, 0) / mesh.size_of("tp")}


def trained(kind, axes, *args, **how):
    """What rank 0 has of `train` on all ranks, whose norms are the same."""
    ranks = run_ranks(int(np.prod([*axes.values()])), train, kind, axes, *args, **how)
    assert all(rank["norms"] == ranks[0]["norms"] for rank in ranks)
    return ranks[0]


@cache
def alone(kind, documents=False, steps=2, ignoring=False, **changes):
    """On one rank, with whole sequences."""
    return trained(kind, {}, documents, steps, ignoring=ignoring, changes=changes)


def same_to_1e5(found, expected):
    for what in ("losses", "norms", "gradients", "final"):
        lab.assert_close(found[what], expected[what], what, atol=1e-5)


def same_bits(found, expected):
    for what in ("losses", "norms", "gradients", "final"):
        lab.assert_equal(found[what], expected[what], what)


def moved(communicator, forward, *args):
    """{call: (how often, bytes that this rank receives)} of forward(*args), a loss, and of its backward."""
    counted, found, loss = CollectiveCounter(communicator), [], None
    for backward in (False, True):
        counted.reset()
        loss = loss.backward() if backward else forward(*args)
        found.append({call: (counted.calls[call], counted.bytes[call]) for call in counted.calls})
    return found
