"""What no pair of features does: steps with something between them, recorded."""

from contextlib import suppress

import numpy as np
import pytest

from models.gpt import GPT, GPTConfig
from shardrt import functional as F
from shardrt import no_grad, optim
from shardrt.activation_offload import offload_activations
from shardrt.comm import init_device_mesh
from shardrt.device.cpu import CPUDevice
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingStrategy,
    full_parameters,
    fully_shard,
    no_sync,
    set_find_unused_parameters,
    set_gradient_divide_factor,
    unshard,
)
from shardrt.kernels import onednn
from shardrt.parallel import DiLoCo, Pipeline
from shardrt.simulate.script import record_of

TOKENS = np.zeros((2, 16), np.int64)


def loss_of(model, tokens=TOKENS):
    return F.cross_entropy(model(tokens), tokens)


def small(vocabulary=16, **settings):
    """(model, optimizer): three blocks and the whole are units."""
    mesh, model = init_device_mesh("auto"), GPT(GPTConfig(3, 2, 16, 16, vocabulary))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **settings)
    return model, optim.AdamW(model.parameters(), lr=1e-3)


def trained(
    change=None, between=None, offloaded=False, find=False, alone=False, in_backward=False, **settings
):
    """Three blocks and what is around them: a step, `change`, another; `between` backwards and updates."""
    mesh, model = init_device_mesh("auto"), GPT(GPTConfig(3, 2, 16, 16, 16))
    for block in model.blocks:
        fully_shard(offload_activations(block) if offloaded else block, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)
    if find:
        set_find_unused_parameters(model)
    if alone:
        set_gradient_divide_factor(model, 1)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, in_backward=in_backward)
    for step in range(3):
        loss_of(model).backward()
        if between is not None:
            between(model)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and change is not None:
            change(model)


def accumulated_later():
    """Backwards reduce at first; then some do not, and each unit has a slot of its own for them."""
    model, optimizer = small()
    for step in range(3):
        if step:
            with no_sync(model):
                loss_of(model).backward()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def kept_loss(**settings):
    """A backward after the update of another loss: it gathers shards that the update has written."""
    model, optimizer = small(**settings)
    for _ in range(3):
        first, second = loss_of(model), loss_of(model)
        second.backward()
        optimizer.step()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()


def held():
    """Parameters that the user holds are read between a backward and the update, while ranks share memory."""
    model, optimizer = small()
    unshard(model)
    for _ in range(3):
        loss_of(model).backward()
        with no_grad():
            F.sum(model.wpe.weight * 2)
        optimizer.step()
        optimizer.zero_grad()


def freeze(model):
    model.blocks[1].requires_grad_(False)


def freeze_and_back(model):
    freeze(model)
    loss_of(model).backward()
    model.zero_grad()
    model.requires_grad_(True)


def give_up(model):
    """A forward that no backward comes to, and one that raises when the next unit is gathered already."""

    def fail(*args):
        raise KeyError

    model(TOKENS)
    hook = model.blocks[1].register_forward_pre_hook(fail)
    with suppress(KeyError):
        model(TOKENS)
    hook.remove()


def evaluate(model):
    with no_grad():
        loss_of(model)


def write(model):
    with full_parameters(model, writeback=True):
        model.blocks[0].requires_grad_(True)


def averaged():
    """Hosts exchange two fragments in 4 bits while they compute; one is left out; all take the first's."""
    mesh = init_device_mesh("auto", (2, 2), mesh_dim_names=("diloco", "dp_shard"))
    model = GPT(GPTConfig(2, 2, 16, 16, 16))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp_shard"])
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    how = {"sync_every": 4, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
    outer = DiLoCo(
        optimizer, mesh["diloco"], [[block] for block in model.blocks], should_quantize=True, **how
    )
    for step in range(1, 6):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step(step, present=step != 3)
    outer.catch_up()


def piped(schedule="GPipe", count=6):
    model = GPT(GPTConfig(4, 2, 16, 16, 16))
    pipeline = Pipeline(model, init_device_mesh("auto"), schedule=schedule, micro_batches=count)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        pipeline.step(F.cross_entropy, [TOKENS] * count, inputs=lambda batch: (batch,))
        optimizer.step()
        optimizer.zero_grad()


def in_pieces():
    """The outer unit's long gradient goes in pieces, on the CPU, whose loss never sees all logits."""
    model, optimizer = small(vocabulary=8192)
    for _ in range(3):
        model(TOKENS, TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()


def pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardrt.fsdp.options.chunks.IN_CHUNKS", 0)
        patch.setattr("shardrt.fsdp.options.chunks.SHORTEST", 0)
        return record_of(in_pieces, 2, like=CPUDevice)


def shared(function, **options):
    each = {rank: [rank] for rank in range(2)}
    return record_of(
        lambda: function(**options), 2, stands_for=each, like=CPUDevice, local_size=2, shared=True
    )


def in_bits():
    """Two ranks have slots of bits together, whether or not this machine has products of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onednn, "computes_bf16", lambda: True)
        return shared(trained, between=evaluate, mp_policy=MixedPrecisionPolicy("bfloat16"))


HALF = CPUOffloadPolicy(parameters=False, optimizer_state=False)
SCRIPTS = {
    "given up": lambda: record_of(lambda: trained(give_up, offloaded=True), 2),
    "frozen later": lambda: record_of(lambda: trained(freeze), 2),
    "frozen and back": lambda: shared(trained, change=freeze_and_back),
    "unused found": lambda: record_of(lambda: trained(find=True), 2),
    "unused found, on the host": lambda: record_of(lambda: trained(find=True, offload_policy=HALF), 2),
    "evaluated before the update": lambda: shared(trained, between=evaluate),
    "evaluated, in bits": in_bits,
    "written": lambda: shared(trained, change=write),
    "alone": lambda: record_of(
        lambda: trained(alone=True, strategy=ShardingStrategy.NO_SHARD, in_backward=True), 1
    ),
    "accumulated later": lambda: record_of(accumulated_later, 2),
    "in pieces": pieces,
    "a loss kept over an update": lambda: record_of(kept_loss, 2),
    "a loss kept over an update, shared": lambda: shared(kept_loss),
    "a loss kept over an update, in place": lambda: shared(kept_loss, strategy=ShardingStrategy.SHARD_OPT),
    "held, and read before the update": lambda: shared(held),
    "averaged": lambda: record_of(averaged, 4),
    "piped": lambda: record_of(piped, 2, stands_for={0: [0], 1: [1]}),
}
