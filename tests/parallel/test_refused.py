"""What can't be cut is refused when it is asked for, by one line that names it."""

import copy

import numpy as np

import shardrt
from models.plans import plan_of
from models.regnet import RegNet
from models.vit import SIZES, ViT
from shardrt import Tensor, nn, optim
from shardrt.checkpoint import CheckpointManager
from shardrt.fsdp import fully_shard, set_world_invariant, units
from shardrt.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    VocabParallel,
    parallelize_module,
)
from tests import lab
from tests.parallel.nets import build, make, mesh_of


def plans(*rows, tp=2):
    """(plan of a GPT, exception, words)."""
    return lab.refusals(
        *(
            (lambda plan=plan: parallelize_module(make("gpt"), mesh_of(tp=tp)["tp"], plan), *message)
            for plan, *message in rows
        ),
        ranks=tp,
        everywhere=True,
        literal=True,
    )


TWICE = {"blocks.*.mlp.up": ColwiseParallel(), "blocks.0.mlp.*": ColwiseParallel()}
test_plans_that_do_not_fit_three_ranks = plans(
    ({"blocks.*.attention.qkv": ColwiseParallel((4, 4, 4))}, "must divide the 4 heads"),
    ({"blocks.*.mlp.down": RowwiseParallel()}, "must divide the 128 inputs"),
    tp=3,
)
test_plans_that_do_not_fit_the_model = plans(
    ({"blocks.*.mlp.up": ColwiseParallel(3)}, "parts 3 must add up"),
    ({"blocks.*.attention.qkv": ColwiseParallel(32)}, "the 3 outputs of"),
    ({"blocks.*.mlp.upp": ColwiseParallel()}, "names no module of GPT"),
    (TWICE, "'blocks.*.mlp.up' and 'blocks.0.mlp.*' both match 'blocks.0.mlp.up'"),
    ({"norm": ColwiseParallel()}, TypeError, "'norm' is a LayerNorm"),
    ({"blocks.0": SequenceParallel()}, TypeError, "'blocks.0' is a Block"),
    ({"norm": VocabParallel()}, TypeError, "VocabParallel is for Embedding, Linear"),
    ({"norm": "sequence"}, TypeError, "'norm' must map to a style"),
    ({"blocks.*.mlp.up": RowwiseParallel()}, "'blocks.0.mlp.up' has a fused GELU"),
    ({"blocks.0.mlp.down": VocabParallel()}, "has a bias"),
)


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = Own(4, 4)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight


def cut(model, mesh, **how):
    return parallelize_module(model, mesh["tp"], plan_of(model, **how))


def two_layers(mesh):
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})


def a_second_plan(model, mesh):
    """What one says of time, modules of the other would not know."""
    norms = {"blocks.*.norm1": SequenceParallel()}
    rest = {path: style for path, style in plan_of(model).items() if path not in norms}
    parallelize_module(model, mesh["tp"], norms)
    parallelize_module(model, mesh["tp"], rest)


def other_seeds(model, mesh):
    shardrt.manual_seed(mesh.rank)
    two_layers(mesh)


def put_together_afterwards(model, mesh):
    """Its dropout, outside of what the plan is for, would draw another mask on each rank."""
    nn.Sequential(two_layers(mesh), nn.Dropout(0.5))(Tensor(np.ones((2, 8), np.float32)))


def sharded_already(model, mesh):
    fully_shard(model, mesh=mesh["dp_shard"])
    cut(model, mesh)


def has_values(model, mesh):
    model(np.zeros((1, 4), int))
    cut(model, mesh)


def adapters_with_dropout_of_a_part(model, mesh):
    nn.add_lora(model, 2, dropout=0.1)
    cut(model, mesh)


def world_invariant_with_the_time_cut(model, mesh):
    model = build("gpt", mesh, sequence=True)
    set_world_invariant(model, 2)
    units(model)


def other_weights(model, mesh):
    cut(model, mesh)
    model.norm.weight.data += mesh.rank_of("tp")
    fully_shard(model, mesh=mesh["dp_shard"])
    optim.AdamW(model.parameters(), lr=1e-3)


def in_no_unit(model, mesh):
    cut(model, mesh)
    fully_shard(model.blocks[0], mesh=mesh["dp_shard"])
    optim.AdamW(model.parameters(), lr=1e-3)


def checkpoint(mesh):
    """On a mesh without the axis."""
    model = build("gpt", mesh)
    return CheckpointManager("nowhere", model, optim.AdamW(model.parameters(), lr=1e-3), mesh["dp_shard"])


def narrow_input(model, mesh):
    layers = parallelize_module(nn.Sequential(nn.Linear(6, 4)), mesh["tp"], {"0": ColwiseParallel()})
    layers(Tensor(np.zeros((2, 5), np.float32)))


ON = "'wte.weight' is on DeviceMesh"
CALLS = [  # of a GPT and a mesh with two ranks of "tp"
    (
        lambda _, mesh: parallelize_module(Holder(), mesh["tp"], {"own": RowwiseParallel()}),
        TypeError,
        "is a Own",
    ),
    (a_second_plan, "give one plan for the whole model"),
    (other_seeds, "have another model, seed or plan than rank 0"),
    (put_together_afterwards, RuntimeError, "called on '0' before that became part of another module"),
    (
        lambda _, mesh: parallelize_module(Tied(), mesh["tp"], {"words": VocabParallel()}),
        "'words.weight' is split and tied to 'head'",
    ),
    (sharded_already, RuntimeError, "call parallelize_module before fully_shard"),
    (has_values, RuntimeError, "has values already"),
    (
        lambda model, mesh: parallelize_module(model.blocks[0], mesh["tp"], {"mlp.up": ColwiseParallel()}),
        "call it on the outermost module, not on 'blocks.0'",
    ),
    (lambda model, mesh: parallelize_module(model, mesh["pp"], {}), "'pp'"),
    (lambda model, mesh: parallelize_module(model, mesh["dp_shard", "tp"], {}), "must have one axis"),
    (
        lambda model, mesh: parallelize_module(model, "tp", {}),
        TypeError,
        "mesh must be a DeviceMesh, got str",
    ),
    (
        lambda model, mesh: fully_shard(cut(model, mesh), mesh=mesh.flat("dp_shard", "tp")),
        f'{ON}.*as mesh."dp_shard".',
    ),
    (lambda model, mesh: fully_shard(cut(model, mesh)), f'{ON}.*as mesh."dp_shard".'),
    (
        lambda model, mesh: fully_shard(model, mesh=mesh["dp_shard", "tp"]),
        "along 'tp' of DeviceMesh.*take mesh.\"dp_shard\".",
    ),
    (
        lambda model, mesh: cut(model, mesh, sequence_parallel=True)(np.zeros((1, 5), int)),
        "5 positions must be divisible by the 2 ranks",
    ),
    (lambda model, mesh: cut(model, mesh).state_dict(), RuntimeError, "full_state_dict"),
    (lambda model, mesh: copy.deepcopy(cut(model, mesh)), TypeError, "can't be copied"),
    (lambda model, mesh: nn.add_lora(cut(model, mesh), 2), "call add_lora before parallelize_module"),
    (adapters_with_dropout_of_a_part, "the LoRA adapter of 'blocks.0.attention.output' must have dropout=0"),
    (world_invariant_with_the_time_cut, "with SequenceParallel call set_tensor_invariant"),
    (other_weights, "'norm.weight' has other values on rank 1"),
    (in_no_unit, "is in no unit"),
    (lambda _, mesh: checkpoint(mesh).save(1), "2 ranks train the model, the mesh has 1"),
    (lambda _, mesh: checkpoint(mesh).restore(), "2 ranks train the model, the mesh has 1"),
    (narrow_input, r"x must be \(\.\.\., 6\)"),
]
test_calls_that_are_refused = lab.refusals(
    *((lambda call=call: call(make("gpt"), mesh_of(tp=2)), *message) for call, *message in CALLS),
    ranks=2,
    everywhere=True,
)
test_plans_for_what_there_is_none = lab.refusals(
    (lambda: plan_of(nn.Linear(2, 2)), TypeError, "GPT, Llama or ViT"),
    (lambda: plan_of(RegNet.__new__(RegNet)), TypeError, "got RegNet"),
    (
        lambda: plan_of(ViT(SIZES["vit-digits"]), sequence_parallel=True),
        "sequence_parallel is not supported for a ViT",
    ),
    (lambda: SequenceParallel("all"), "output must be 'part' or 'whole'"),
)
