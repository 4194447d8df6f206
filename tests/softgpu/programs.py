"""Programs that plain training does not come to; each gives what small_gpt.train gives. For mutations.py."""

import numpy as np

from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict, get_optimizer_state_dict
from shardrt.fsdp import (
    full_gradients,
    full_parameters,
    no_sync,
    reshard,
    set_gradient_divide_factor,
    set_world_invariant,
    unshard,
)
from tests.cuda.small_gpt import CONFIG, STEPS, made


def _loss(model, mesh, number):
    text = np.random.default_rng(number).integers(0, CONFIG.vocab_size, (4, CONFIG.block_size + 1))
    rows = len(text) // mesh.size
    mine = text[mesh.rank * rows : (mesh.rank + 1) * rows]
    return F.cross_entropy(model(mine[:, :-1]), mine[:, 1:])


def _steps(model, mesh, optimizer):
    """Trains; gives the losses, a tuple for each step."""
    seen = []
    for step in range(STEPS):
        loss = _loss(model, mesh, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(),))
    return seen


def tree(name, **settings):
    """Four micro-batches for each step, added by the tree: two or more reductions on each rank."""
    mesh, model = made(name, **settings)
    micro_batches = 4 * mesh.size
    set_world_invariant(model, micro_batches)
    optimizer, seen = optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        total = 0.0
        for number in range(4):
            loss = _loss(model, mesh, 4 * step + number)
            (loss * (1 / micro_batches)).backward()
            total += loss.item()
        seen.append((total, nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return seen, full_state_dict(model)


def whole_for_a_while(name, **settings):
    """Reads whole gradients and state, and writes whole parameters, at once behind what made them."""
    mesh, model = made(name, **settings)
    optimizer, seen = optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        unshard(model.blocks[0])
        loss = _loss(model, mesh, step)
        loss.backward()
        norms = [float((gradient**2).sum()) for _, gradient in full_gradients(model)]
        reshard(model.blocks[0])
        optimizer.step()
        state = get_optimizer_state_dict(model, optimizer) or {"state": {}}
        moments = [float(np.sum(each["exp_avg"] ** 2)) for each in state["state"].values()]
        optimizer.zero_grad()
        with full_parameters(model, writeback=True):
            for parameter in model.parameters():
                parameter.data[...] *= 1.25
        seen.append((loss.item(), sum(norms), sum(moments)))
    return seen, full_state_dict(model)


def differs(name, **settings):
    """All ranks but the first leave the parameters of a unit out."""
    mesh, model = made(name, **settings)
    if mesh.rank > 0:
        model.blocks[1].forward = lambda x, *args, **kwargs: x
    optimizer, seen = optim.AdamW(model.parameters(), lr=1e-2), []
    seen += _steps(model, mesh, optimizer)
    return seen, full_state_dict(model)


def unfrozen(name, **settings):
    """Accumulates with most parameters frozen, and goes on with all of them."""
    mesh, model = made(name, **settings)
    optimizer, seen = optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        for parameter in model.parameters():
            parameter.requires_grad = parameter.ndim == 1
        with no_sync(model):
            _loss(model, mesh, 2 * step).backward()
        for parameter in model.parameters():
            parameter.requires_grad = True
        loss = _loss(model, mesh, 2 * step + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(),))
    return seen, full_state_dict(model)


def raises(name, *, in_backward=False, **settings):
    """The first backward raises half way; training goes on. Gradients of no_sync are thrown away before."""
    mesh, model = made(name, **settings)
    set_gradient_divide_factor(model, 1.0)  # a mean over the ranks would not show that it is made twice
    optimizer, seen = optim.AdamW(model.parameters(), lr=1e-2, in_backward=in_backward), []
    with no_sync(model):
        _loss(model, mesh, STEPS).backward()
    optimizer.zero_grad()
    block = model.blocks[1]
    forward = block.forward

    def failing(*args, **kwargs):
        y = forward(*args, **kwargs)
        y.register_hook(lambda gradient: 1 / 0)
        return y

    block.forward = failing
    try:
        _loss(model, mesh, STEPS).backward()
    except ZeroDivisionError:
        block.forward = forward
    if not in_backward:  # what was reduced until then is there
        left = [float((p.grad**2).sum()) for p in model.blocks[-1].parameters()]
        seen.append((sum(left),))
    optimizer.zero_grad()
    seen += _steps(model, mesh, optimizer)
    return seen, full_state_dict(model)
