"""wrap picks units by class, size or predicate, and the result is what wrapping by hand gives."""

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import by_class, by_predicate, by_size, fully_shard, units, wrap
from tests.fsdp.nets import Block, Nested, Net, batches, loss_of, shard

WAYS = {
    "class": by_class(Block),
    "size": by_size(100),
    "predicate": by_predicate(lambda path, module: path.startswith("blocks.") and path.count(".") == 1),
}


class TiedAcross(Net):
    """The last block's second layer and the first block's have one weight."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks[2].down.weight = self.blocks[0].down.weight


def labels(model):
    return [unit.label for unit in units(model)]


def trained(make, attach):
    shardrt.manual_seed(3)
    model = make()
    mesh = init_device_mesh("auto")
    attach(model, mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for tokens, targets in batches(3):
        rows = len(tokens) // mesh.size
        mine = slice(mesh.rank * rows, (mesh.rank + 1) * rows)
        loss_of(model, tokens[mine], targets[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state_dict(model)


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_way_gives_the_bits_and_names_of_wrapping_by_hand(way, ranks):
    by_hand = thread.run(ranks, trained, Net, lambda model, mesh: shard(model, mesh))[0]
    found = thread.run(ranks, trained, Net, lambda model, mesh: wrap(model, WAYS[way], mesh=mesh))[0]
    same(found, by_hand)
    assert list(found) == [name for name, _ in Net().named_parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 60, 100])
def test_weights_tied_across_units_are_left_to_the_unit_around_both(ranks, size):
    expected = thread.run(1, trained, TiedAcross, lambda model, mesh: fully_shard(model, mesh=mesh))[0]
    found = thread.run(ranks, trained, TiedAcross, lambda model, mesh: wrap(model, by_size(size), mesh=mesh))[
        0
    ]
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_gpt_with_its_tied_head_needs_no_care():
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11))
    wrap(model, by_size(100))
    tokens = np.zeros((2, 8), np.int64)
    F.cross_entropy(model(tokens), tokens).backward()
    assert labels(model)[0] == "(root)" and len(labels(model)) > 2


def test_a_class_inside_another_makes_units_in_units():
    model = wrap(Nested(), by_class(nn.Sequential, Block))
    assert labels(model) == [
        "(root)",
        "stages.0",
        "stages.0.0",
        "stages.0.2",
        "stages.1",
        "stages.1.0",
        "stages.1.2",
    ]


def test_units_by_size_have_at_least_that_many_parameters():
    counts = {}
    for least in (1, 50, 100, 150):
        model = wrap(Net(), by_size(least))
        sizes = [sum(p.size for p in unit.parameters) for unit in units(model)[1:]]
        assert min(sizes) >= least
        counts[least] = len(sizes)
    assert counts[1] > counts[50] > counts[100] == counts[150]  # larger units, fewer of them


def test_embeddings_are_units_by_size_if_told():
    assert "embed" not in labels(wrap(Net(), by_size(50)))
    assert "embed" in labels(wrap(Net(), by_size(50, leave=())))


def test_a_list_of_modules_has_no_forward_and_is_no_unit():
    model = wrap(Net(), by_predicate(lambda path, module: path == "blocks" or path == "blocks.1"))
    assert labels(model) == ["(root)", "blocks.1"]


def test_a_policy_may_choose_settings():
    policy = by_predicate(
        lambda path, module: (
            {"strategy": "SHARD_GRAD_OP"} if path == "blocks.0" else isinstance(module, Block)
        )
    )
    model = wrap(Net(), policy, strategy="SHARD_OPT")
    assert [unit.settings.strategy.name for unit in units(model)] == [
        "SHARD_OPT",
        "SHARD_GRAD_OP",
        "SHARD_OPT",
        "SHARD_OPT",
    ]
    model = wrap(Net(), by_class(Block, reshard_after_forward=False))
    assert [unit.reshard_after_forward for unit in units(model)] == [False] * 4
    model = wrap(Net(), by_class(Block))
    assert [unit.reshard_after_forward for unit in units(model)] == [False, True, True, True]


def test_what_is_ignored_is_in_no_unit():
    model = Net()
    wrap(model, by_class(Block), ignored=[model.blocks[1], model.norm.weight])
    assert labels(model) == ["(root)", "blocks.0", "blocks.2"]
    held = {parameter.name for unit in units(model) for parameter in unit.parameters}
    assert "norm.bias" in held and "norm.weight" not in held and "blocks.1.up.weight" not in held


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="wrap: the policy picks no module of Net"):
        wrap(Net(), by_size(10**9))
    with pytest.raises(TypeError, match="by_class: expected classes"):
        by_class(Block, 3)
    with pytest.raises(ValueError, match="by_class: name at least one class"):
        by_class()
    with pytest.raises(ValueError, match="min_parameters must be at least 1, got 0"):
        by_size(0)
    with pytest.raises(ValueError, match="unknown strategy"):
        wrap(Net(), by_class(Block), strategy="HALF")
