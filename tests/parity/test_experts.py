"""Mixtures of experts beside transformers: 10 steps of AdamW with the balance loss, on 2 ranks and on one."""

import numpy as np
import pytest

from models.hub import load_pretrained
from models.llama import Block
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import by_class, wrap
from tests import lab
from tests.models.test_transformers import EXPERTS, made
from tests.parity.features import OPTIMIZERS, STEPS
from tests.parity.job import piece

pytestmark = pytest.mark.torch("transformers")

RANKS, BALANCE = 2, 0.05
TOKENS = np.random.default_rng(3).integers(0, 61, (STEPS, 4, 21))


def balance_of(router_logits, k):
    """Megatron's formula, of each layer, summed over them."""
    import torch

    total = 0.0
    for logits in router_logits:
        probabilities = torch.softmax(logits, -1)
        tokens, count = probabilities.shape
        chosen = torch.bincount(probabilities.topk(k).indices.flatten(), minlength=count)
        total = total + count / (k * tokens**2) * (chosen * probabilities.sum(0)).sum()
    return total


def theirs(kind, folder):
    """Losses, and the weights at the end: of the ranks' parts one after the other, as micro-batches."""
    import torch

    model = made(kind).train()
    model.save_pretrained(folder / "before")
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZERS["adamw"])
    losses = []
    for tokens in TOKENS:
        message = 0.0
        for rank in range(RANKS):
            part = torch.from_numpy(piece(tokens, rank, RANKS))
            found = model(part[:, :-1], output_router_logits=True)
            loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), part[:, 1:].flatten())
            loss = loss + BALANCE * balance_of(found.router_logits, model.num_experts_per_tok)
            (loss / RANKS).backward()
            message += loss.item() / RANKS
        losses.append(message)
        lab.update(optimizer)
    model.save_pretrained(folder / "after")
    return losses


def ours(folder):
    """The same of a rank, experts being units of their own."""
    mesh = init_device_mesh("auto")
    model = load_pretrained(folder / "before", balance_loss=BALANCE)
    wrap(model, by_class(Block, nn.Experts), mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), **OPTIMIZERS["adamw"])
    losses = []
    for tokens in TOKENS:
        part = piece(tokens, mesh.rank, mesh.size)
        loss = model(part[:, :-1], part[:, 1:])
        losses.append(loss.item())
        loss.backward()
        lab.update(optimizer)
    return losses, full_state_dict(model)


@pytest.mark.parametrize("kind", EXPERTS)
def test_they_train_as_in_transformers(tmp_path, kind):
    expected = theirs(kind, tmp_path)
    found = thread.run(RANKS, ours, tmp_path)
    np.testing.assert_allclose(np.mean([losses for losses, _ in found], axis=0), expected, rtol=1e-5)
    after, before = (load_pretrained(tmp_path / name).state_dict() for name in ("after", "before"))
    weights = found[0][1]
    lab.assert_near(weights, after, rtol=1e-5)
    moved, expected = ({name: w[name] - before[name] for name in before} for w in (weights, after))
    lab.assert_near(moved, expected, rtol=1e-3)
