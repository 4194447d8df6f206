"""Kinds on the tapes of the models here, cut as plan_of says, and where tensor parallelism has a mistake."""

from dataclasses import replace

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from models.vit import ViT, ViTConfig
from shardrt import functional as F
from shardrt import no_grad
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.functional import collective
from shardrt.nn import add_lora
from shardrt.nn.parameter_placement import PARTIAL, SHARD
from shardrt.parallel import axis, conversion, parallelize_module, styles, tokens
from shardrt.recompute import checkpoint
from tests.parallel.kinds import C, I, KindError, R, V, along, infer, on_tape, recording
from tests.ranks import run_ranks

GPT_SMALL = GPTConfig(n_layer=2, n_head=4, n_embd=8, block_size=8, vocab_size=13, dropout=0.1)
LLAMA_SMALL = LlamaConfig(
    n_layer=2, n_head=4, n_kv_head=2, n_embd=16, n_hidden=8, block_size=8, vocab_size=13
)
VIT_SMALL = ViTConfig(
    n_layer=2, n_head=4, n_embd=8, n_hidden=16, image_size=4, patch_size=2, channels=1, classes=3, dropout=0.1
)
MODELS = {
    "gpt": (GPT, GPT_SMALL),
    "gpt with chunks": (GPT, replace(GPT_SMALL, loss_chunk=3)),
    "gpt by its logits": (GPT, GPT_SMALL),
    "llama": (Llama, LLAMA_SMALL),
    "llama with a head": (Llama, replace(LLAMA_SMALL, tied=False)),
    "gpt with adapters": (GPT, GPT_SMALL),
    "llama with adapters": (Llama, LLAMA_SMALL),
    "vit": (ViT, VIT_SMALL),
    "vit with a mean": (ViT, replace(VIT_SMALL, pool="mean")),
}


def kinds_of(model):
    """By name, as shares say."""
    found = {}
    for name, parameter in model.named_parameters():
        share = parameter.placement
        found[name] = R if share.kind == PARTIAL else I
        if share.kind == SHARD:
            (cut,) = [
                d for d, (whole, own) in enumerate(zip(share.whole, share.shape, strict=True)) if whole != own
            ]
            found[name] = V(cut)
    return found


def loss_of(model, data, by_logits=False):
    if isinstance(model, ViT):
        images = np.random.default_rng(data).standard_normal((3, 1, 4, 4), np.float32)
        return F.cross_entropy(model(images), np.arange(3))
    tokens = np.random.default_rng(data).integers(0, 13, (2, 9))
    if by_logits:
        return F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    return model(tokens[:, :-1], tokens[:, 1:])


def recorded(name, tp, sequence=False, data=1, prepare=lambda model, mesh: None):
    """(coordinate, tape, kinds, gradients by name) of every rank of data x tp."""

    def rank():
        mesh = init_device_mesh("cpu", (data, tp), mesh_dim_names=("dp_shard", "tp"))
        shardrt.manual_seed(1)
        kind, config = (MODELS | MODELS_WITH_EXPERTS)[name]
        model = kind(config)
        if "adapters" in name:
            add_lora(model, 2)
        plan = plan_of(model, sequence_parallel=True) if sequence else plan_of(model)
        parallelize_module(model, mesh["tp"], plan)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):  # they start at 0
                parameter.data = np.full(parameter.shape, 0.3, np.float32)
        prepare(model, mesh)
        with on_tape(along(mesh["tp"])) as tape:
            tape.result = loss_of(model, mesh.rank_of("dp_shard"), "logits" in name)
        tape.result.backward()
        gradients = {n: np.array(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        return mesh.coordinate, tape, kinds_of(model), gradients

    with recording():
        return run_ranks(data * tp, rank)


def inferred(ranks, place=0):
    """The kinds along tp, at one place of the other axis, by op and module."""
    tapes = [tape for (dp, _), tape, _, _ in ranks if dp == place]
    found = infer(tapes, ranks[0][2])
    message = {}
    for call, kind in zip(tapes[0].calls, found, strict=True):
        message.setdefault((call.op, call.module), []).append(kind.letter)
    return message


@pytest.mark.parametrize(
    ("name", "sequence"),
    [(name, sequence) for name in MODELS for sequence in (False, True) if "vit" not in name or not sequence],
)
@pytest.mark.parametrize("tp", [2, 4])
def test_a_model_cut_by_its_plan_is_inferred(name, sequence, tp):
    message = inferred(recorded(name, tp, sequence))
    norms = {op: kinds for (op, module), kinds in message.items() if module == "blocks.0.norm1"}
    assert list(norms.values()) == [["V" if sequence else "I"]], norms
    assert set(message["Linear", "blocks.1.mlp.down"]) == {"P"}
    assert message["Linear", "blocks.1.attention.qkv"][-1] == "V"


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])


def recomputed(model, mesh):
    for block in model.blocks:
        checkpoint(block)


@pytest.mark.parametrize("prepare", [sharded, recomputed])
def test_units_and_recomputation_pass_kinds_on(prepare):
    ranks = recorded("gpt", 2, True, data=2 if prepare is sharded else 1, prepare=prepare)
    for place in range(ranks[-1][0][0] + 1):
        assert len(inferred(ranks, place)) == len(inferred(recorded("gpt", 2, True)))


# Changes of shardrt.parallel, each a mistake that somebody could make


def bias_on_every_rank(self, module, forward, /, x):
    return self.axis.leave(forward(x))


MISTAKES = {
    "copy_to forgotten": (
        ("gpt", 2, False),
        (axis.Axis, "enter", lambda self, x: x),
        r"^Linear of blocks.0.attention.qkv: x is I, weight is V\(0\) .*x must be R",
    ),
    "gather_same for gather": (
        ("llama", 2, True),
        (axis.Axis, "enter", lambda self, x: collective.gather_same(x, self.communicator, axis.TIME)),
        "^Linear of blocks.0.attention.qkv: x is I",
    ),
    "reduced, and cut by nobody": (
        ("llama", 2, False),
        (axis.Axis, "leave", lambda self, x: collective.copy_to(x, self.communicator)),
        "^CopyTo of embedding: x is P; x must be I",
    ),
    "bias on every rank": (
        ("gpt", 2, False),
        (conversion.Row, "run", bias_on_every_rank),
        r"^Linear of blocks.0.attention.output: .*bias is I .*; what is not P is added on every rank",
    ),
    "norms and biases with sp that are not summed": (
        ("gpt", 2, True),
        (styles, "partial", lambda parameter, axis: None),
        r"^Embedding of wpe: .*weight is I \(wpe.weight\); I meets R or V",
    ),
    "other masks of dropout where activations are the same": (
        ("gpt", 2, False),
        (axis.Batch, "part", property(lambda self: self.root.rank)),
        "^Dropout of dropout: x is I, part is V; I meets R or V",
    ),
    "gather_same among ranks that share a head": (
        ("llama", 4, False),
        (conversion, "gather", collective.gather_same),
        "^GatherSame of blocks.0.attention.qkv: x is V; it is among some ranks",
    ),
}


EXPERTS = "llama with experts"
MODELS_WITH_EXPERTS = {EXPERTS: (Llama, replace(LLAMA_SMALL, experts=4, balance_loss=0.1, qk_norm="head"))}
MISTAKES |= {
    "routers whose gradient is not summed": (
        (EXPERTS, 2, False),
        (tokens, "partial", lambda parameter, axis: None),
        r"^Linear of blocks.0.mlp.router: .*weight is I \(blocks.0.mlp.router.weight\); I meets R or V",
    ),
    "a loss of each rank's own tokens": (
        (EXPERTS, 2, True),
        (tokens.OwnTokens, "_of_all", lambda self, loss: loss),
        "I meets R or V|the loss is V",
    ),
    "tokens that all ranks route": (
        (EXPERTS, 2, False),
        (tokens.OwnTokens, "run", lambda self, module, forward, /, x: forward(x)),
        "^Linear of blocks.0.mlp.router: x is I, weight is R",
    ),
}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_model_with_experts_and_norms_of_heads_is_inferred(sequence, tp):
    message = inferred(recorded(EXPERTS, tp, sequence))
    for op, module in (("Linear", "router"), ("Dispatch", ""), ("GroupedLinear", "experts"), ("Combine", "")):
        assert message[op, f"blocks.1.mlp.{module}".rstrip(".")] == ["V"] * (1 + (op == "GroupedLinear"))
    assert message["Add", "blocks.1"] == ["V" if sequence else "I"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_by_the_op_and_is_one(mistake, monkeypatch):
    model, change, message = MISTAKES[mistake]
    right = recorded(*model)
    inferred(right)
    monkeypatch.setattr(*change)
    wrong = recorded(*model)
    with pytest.raises(KindError, match=message):
        inferred(wrong)
    pairs = [(a[name], b[name]) for (*_, a), (*_, b) in zip(right, wrong, strict=True) for name in a]
    assert any(np.abs(a - b).max() > 0.01 * np.abs(a).max() for a, b in pairs)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_without_gradients_logits_are_the_same_on_all_ranks_too(name):
    """With sequence parallelism, of a prompt that can't be cut into equal parts of the time."""

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        kind, config = MODELS[name]
        model = kind(config)
        parallelize_module(model, mesh, plan_of(model, sequence_parallel=True))
        model.eval()
        with no_grad(), on_tape(along(mesh)) as tape:
            tape.result = model(np.arange(7)[None])
        kinds = kinds_of(model)
        return (0, mesh.rank), tape, kinds | {name: C for name in kinds if kinds[name] in (I, R)}, {}

    with recording():
        message = inferred(run_ranks(2, rank))
    assert next(kinds for (op, _), kinds in message.items() if op == "GatherLogits") == ["I"]
