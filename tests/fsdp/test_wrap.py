"""wrap picks units by class, size or predicate, and the result is what wrapping by hand gives."""

import numpy as np
import pytest

from models.gpt import GPT, GPTConfig
from shardrt import functional as F
from shardrt import nn
from shardrt.comm import init_device_mesh
from shardrt.fsdp import by_class, by_predicate, by_size, fully_shard, units, wrap
from tests import lab
from tests.lab import Block, Nested, Net

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


def trained(ranks, make, attach):
    def rank():
        model, mesh = lab.seeded(make), init_device_mesh("auto")
        return lab.train(attach(model, mesh), mesh)

    return lab.first(ranks, rank).weights


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_way_gives_the_bits_and_names_of_wrapping_by_hand(way, ranks):
    found = trained(ranks, Net, lambda model, mesh: wrap(model, WAYS[way], mesh=mesh))
    lab.assert_equal(found, lab.train_on(ranks).weights)
    assert list(found) == [name for name, _ in Net().named_parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 60, 100])
def test_weights_tied_across_units_are_left_to_the_unit_around_both(ranks, size):
    expected = trained(1, TiedAcross, lambda model, mesh: fully_shard(model, mesh=mesh))
    found = trained(ranks, TiedAcross, lambda model, mesh: wrap(model, by_size(size), mesh=mesh))
    lab.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_gpt_with_its_tied_head_needs_no_care():
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=11))
    wrap(model, by_size(100))
    tokens = np.zeros((2, 8), np.int64)
    F.cross_entropy(model(tokens), tokens).backward()
    assert labels(model)[0] == "(root)" and len(labels(model)) > 2


def test_a_class_inside_another_makes_units_in_units():
    stages = [f"stages.{stage}{block}" for stage in (0, 1) for block in ("", ".0", ".2")]
    assert labels(wrap(Nested(), by_class(nn.Sequential, Block))) == ["(root)", *stages]


def test_units_by_size_have_at_least_that_many_parameters():
    counts = {}
    for least in (1, 50, 100, 150):
        model = wrap(Net(), by_size(least))
        sizes = [sum(p.size for p in unit.parameters) for unit in units(model)[1:]]
        assert min(sizes) >= least
        counts[least] = len(sizes)
    assert counts[1] > counts[50] > counts[100] == counts[150]  # larger units, fewer of them


def test_what_is_a_unit_and_what_is_none():
    assert "embed" not in labels(wrap(Net(), by_size(50)))
    assert "embed" in labels(wrap(Net(), by_size(50, leave=())))
    # A list of modules has no forward.
    assert labels(wrap(Net(), by_predicate(lambda path, _: path in ("blocks", "blocks.1")))) == [
        "(root)",
        "blocks.1",
    ]
    model = Net()
    wrap(model, by_class(Block), ignored=[model.blocks[1], model.norm.weight])
    assert labels(model) == ["(root)", "blocks.0", "blocks.2"]
    held = {parameter.name for unit in units(model) for parameter in unit.parameters}
    assert "norm.bias" in held and "norm.weight" not in held and "blocks.1.up.weight" not in held


def test_a_policy_may_choose_settings():
    def policy(path, module):
        return {"strategy": "SHARD_GRAD_OP"} if path == "blocks.0" else isinstance(module, Block)

    model = wrap(Net(), by_predicate(policy), strategy="SHARD_OPT")
    found = [unit.settings.strategy.name for unit in units(model)]
    assert found == ["SHARD_OPT", "SHARD_GRAD_OP", "SHARD_OPT", "SHARD_OPT"]
    model = wrap(Net(), by_class(Block, reshard_after_forward=False))
    assert [unit.reshard_after_forward for unit in units(model)] == [False] * 4
    model = wrap(Net(), by_class(Block))
    assert [unit.reshard_after_forward for unit in units(model)] == [False, True, True, True]


test_what_is_wrong_is_named = lab.refusals(
    (lambda: wrap(Net(), by_size(10**9)), ValueError, "wrap: the policy picks no module of Net"),
    (lambda: by_class(Block, 3), TypeError, "by_class: expected classes"),
    (lambda: by_class(), ValueError, "by_class: name at least one class"),
    (lambda: by_size(0), ValueError, "min_parameters must be at least 1, got 0"),
    (lambda: wrap(Net(), by_class(Block), strategy="HALF"), ValueError, "unknown strategy"),
)
