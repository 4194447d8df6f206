"""What can't be cut is refused when it is asked for, by one line that names it."""

import copy
import re

import numpy as np
import pytest

import shardrt
from models.plans import plan_of
from models.regnet import RegNet
from models.vit import SIZES, ViT
from shardrt import Tensor, nn, optim
from shardrt.checkpoint import CheckpointManager
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard, set_world_invariant, units
from shardrt.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    VocabParallel,
    parallelize_module,
)
from tests.parallel.nets import build, make, mesh_of
from tests.ranks import run_ranks


def message_of(kind, attempt, tp=2):
    """What `attempt(model, mesh)` is refused with on every rank: one line."""

    def refused():
        mesh = mesh_of(1, 1, tp)
        with pytest.raises(kind) as raised:
            attempt(make("gpt"), mesh)
        return str(raised.value)

    told = run_ranks(tp, refused)
    assert len({re.sub("rank .", "", line) for line in told}) == 1 and "\n" not in told[0]
    return told[0]


PLANS = {
    "heads": (
        ValueError,
        {"blocks.*.attention.qkv": ColwiseParallel((4, 4, 4))},
        "do not divide the 4 heads",
        3,
    ),
    "outputs": (ValueError, {"blocks.*.mlp.up": ColwiseParallel(3)}, "parts 3 do not fit", 2),
    "a part": (ValueError, {"blocks.*.attention.qkv": ColwiseParallel(32)}, "the 3 outputs of", 2),
    "inputs": (ValueError, {"blocks.*.mlp.down": RowwiseParallel()}, "do not divide the 128 inputs", 3),
    "nothing": (ValueError, {"blocks.*.mlp.upp": ColwiseParallel()}, "names no module of GPT", 2),
    "twice": (
        ValueError,
        {"blocks.*.mlp.up": ColwiseParallel(), "blocks.0.mlp.*": ColwiseParallel()},
        "'blocks.0.mlp.up' is named by 'blocks.*.mlp.up' and",
        2,
    ),
    "a norm by columns": (TypeError, {"norm": ColwiseParallel()}, "'norm' is a LayerNorm", 2),
    "a block by sequence": (TypeError, {"blocks.0": SequenceParallel()}, "'blocks.0' is a Block", 2),
    "a norm by words": (TypeError, {"norm": VocabParallel()}, "VocabParallel is for Embedding, Linear", 2),
    "no style": (TypeError, {"norm": "sequence"}, "'norm' needs a style", 2),
    "GELU of a part": (ValueError, {"blocks.*.mlp.up": RowwiseParallel()}, "GELU of 'blocks.0.mlp.up'", 2),
    "words with a bias": (ValueError, {"blocks.0.mlp.down": VocabParallel()}, "has a bias", 2),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_do_not_fit_the_model(name):
    kind, plan, told, tp = PLANS[name]
    assert told in message_of(kind, lambda model, mesh: parallelize_module(model, mesh["tp"], plan), tp)


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = Own(4, 4)


def test_a_layer_with_a_forward_of_its_own():
    def attempt(model, mesh):
        parallelize_module(Holder(), mesh["tp"], {"own": RowwiseParallel()})

    assert "'own' is a Own" in message_of(TypeError, attempt)


def test_a_second_plan():
    """What one says of time, modules of the other would not know."""

    def attempt(model, mesh):
        norms = {"blocks.*.norm1": SequenceParallel()}
        rest = {path: style for path, style in plan_of(model).items() if path not in norms}
        parallelize_module(model, mesh["tp"], norms)
        parallelize_module(model, mesh["tp"], rest)

    assert "give one plan for the whole model" in message_of(ValueError, attempt)


def test_ranks_with_other_seeds():
    def attempt(model, mesh):
        shardrt.manual_seed(mesh.rank)
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})

    assert "have another model, seed or plan than rank 0" in message_of(ValueError, attempt)


def test_a_whole_that_was_put_together_afterwards():
    """Its dropout, outside of what the plan is for, would draw another mask on each rank."""

    def attempt(model, mesh):
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        nn.Sequential(layers, nn.Dropout(0.5))(Tensor(np.ones((2, 8), np.float32)))

    assert "'0' of another module" in message_of(RuntimeError, attempt)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight


def test_a_parameter_that_is_tied_to_a_module_which_is_not_cut():
    def attempt(model, mesh):
        parallelize_module(Tied(), mesh["tp"], {"words": VocabParallel()})

    assert "'words.weight' is cut, and tied to 'head'" in message_of(ValueError, attempt)


def test_a_model_that_is_sharded_already():
    def attempt(model, mesh):
        fully_shard(model, mesh=mesh["dp_shard"])
        parallelize_module(model, mesh["tp"], plan_of(model))

    assert "call parallelize_module before fully_shard" in message_of(RuntimeError, attempt)


def test_a_model_that_has_values():
    def attempt(model, mesh):
        model(np.zeros((1, 4), int))
        parallelize_module(model, mesh["tp"], plan_of(model))

    assert "has values already" in message_of(RuntimeError, attempt)


def test_a_part_of_a_model():
    def attempt(model, mesh):
        parallelize_module(model.blocks[0], mesh["tp"], {"mlp.up": ColwiseParallel()})

    assert "call it on the outermost module, not on 'blocks.0'" in message_of(ValueError, attempt)


def test_meshes():
    def axis_missing(model, mesh):
        parallelize_module(model, mesh["cp"], {})

    def two_axes(model, mesh):
        parallelize_module(model, mesh["dp_shard", "tp"], {})

    def none(model, mesh):
        parallelize_module(model, "tp", {})

    assert "'cp'" in message_of(ValueError, axis_missing)
    assert "must have one axis" in message_of(ValueError, two_axes)
    assert "mesh must be a DeviceMesh, got str" in message_of(TypeError, none)


def test_sharding_along_the_axis_that_is_taken():
    def all_axes(model, mesh):
        parallelize_module(model, mesh["tp"], plan_of(model))
        fully_shard(model, mesh=mesh.flat("dp_shard", "tp"))

    def by_name(model, mesh):
        fully_shard(model, mesh=mesh["dp_shard", "tp"])

    def another_mesh(model, mesh):
        parallelize_module(model, mesh["tp"], plan_of(model))
        fully_shard(model)

    for attempt in (all_axes, another_mesh):
        told = message_of(ValueError, attempt)
        assert "'wte.weight' is on DeviceMesh" in told and 'as mesh["dp_shard"]' in told
    told = message_of(ValueError, by_name)
    assert "along 'tp' of DeviceMesh" in told and 'take mesh["dp_shard"]' in told


def test_plans_for_what_there_is_none():
    with pytest.raises(TypeError, match="GPT, Llama and ViT"):
        plan_of(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got RegNet"):
        plan_of(RegNet.__new__(RegNet))
    with pytest.raises(ValueError, match="no sequence_parallel for a ViT"):
        plan_of(ViT(SIZES["vit-digits"]), sequence_parallel=True)
    with pytest.raises(ValueError, match="output must be 'part' or 'whole'"):
        SequenceParallel("all")


def test_a_time_that_ranks_do_not_divide():
    def attempt(model, mesh):
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=True))
        model(np.zeros((1, 5), int))

    assert "5 positions can't be cut into 2 equal parts" in message_of(ValueError, attempt)


def test_whole_arrays_of_what_is_cut():
    def state(model, mesh):
        parallelize_module(model, mesh["tp"], plan_of(model))
        model.state_dict()

    def copied(model, mesh):
        parallelize_module(model, mesh["tp"], plan_of(model))
        copy.deepcopy(model)

    assert "full_state_dict" in message_of(RuntimeError, state)
    assert "can't be copied" in message_of(TypeError, copied)


def test_adapters_after_the_cut_and_with_dropout_of_a_part():
    def after(model, mesh):
        parallelize_module(model, mesh["tp"], plan_of(model))
        nn.add_lora(model, 2)

    def dropout(model, mesh):
        nn.add_lora(model, 2, dropout=0.1)
        parallelize_module(model, mesh["tp"], plan_of(model))

    assert "call add_lora before parallelize_module" in message_of(ValueError, after)
    assert "the adapter of 'blocks.0.attention.output' has dropout" in message_of(ValueError, dropout)


def test_world_invariant_sums_with_sequence_parallelism():
    def attempt(model, mesh):
        model = build("gpt", mesh, sequence=True)
        set_world_invariant(model, 2)
        units(model)

    assert "with SequenceParallel call set_tensor_invariant" in message_of(ValueError, attempt)


def test_weights_that_differ_between_ranks_of_the_axis():
    def attempt(model, mesh):
        parallelize_module(model, mesh["tp"], plan_of(model))
        model.norm.weight.data += mesh.rank_of("tp")
        fully_shard(model, mesh=mesh["dp_shard"])
        optim.AdamW(model.parameters(), lr=1e-3)

    assert "'norm.weight' has other values on rank 1" in message_of(ValueError, attempt)


def test_a_parameter_in_no_unit_beside_sharded_ones():
    def attempt(model, mesh):
        parallelize_module(model, mesh["tp"], plan_of(model))
        fully_shard(model.blocks[0], mesh=mesh["dp_shard"])
        optim.AdamW(model.parameters(), lr=1e-3)

    assert "is in no unit" in message_of(ValueError, attempt)


def test_checkpoints_on_a_mesh_without_the_axis(tmp_path):
    def attempt(model, mesh):
        model = build("gpt", mesh)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        CheckpointManager(tmp_path, model, optimizer, mesh["dp_shard"]).save(1)

    def restored(model, mesh):
        model = build("gpt", mesh)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        CheckpointManager(tmp_path, model, optimizer, mesh["dp_shard"]).restore()

    for each in (attempt, restored):
        assert "2 ranks train the model, the mesh has 1" in message_of(ValueError, each)


def test_an_input_that_is_not_what_columns_take():
    def attempt(model, mesh):
        shardrt.manual_seed(1)
        layers = nn.Sequential(nn.Linear(6, 4))
        parallelize_module(layers, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
        layers(Tensor(np.zeros((2, 5), np.float32)))

    assert "x must be (..., 6)" in message_of(ValueError, attempt)
