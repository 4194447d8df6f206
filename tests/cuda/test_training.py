"""A GPT trained on the CUDA device, with CuPy and the GPU played by stand-ins, beside the CPU device.

Whatever reads device memory from the host, or mixes the two, is an error here as it would be with CuPy.
"""

from dataclasses import replace

import numpy as np
import pytest

import shardrt
from models.generate import ByteText, generate
from models.gpt import GPT, GPTConfig
from shardrt import device, nn, optim
from shardrt import functional as F
from shardrt.activation_offload import offload_activations
from shardrt.checkpoint import full_state_dict, load, save
from shardrt.comm import init_device_mesh, thread
from shardrt.comm import mesh as comm_mesh
from shardrt.comm.delayed import DelayedCommunicator
from shardrt.device.arena import Arena
from shardrt.device.cuda import CUDADevice
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    full_parameters,
    fully_shard,
    set_find_unused_parameters,
    set_world_invariant,
)
from shardrt.recompute import checkpoint
from shardrt.train.config import SampleConfig
from tests.cuda import fake_cupy

CONFIG = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=29)
STEPS = 2


def train(
    name,
    directory=None,
    *,
    prepare=None,
    dropout=0.0,
    scaled=False,
    parts=1,
    in_backward=False,
    freeze=False,
    communicator="auto",
    layers=1,
    **settings,
):
    """[(loss, norm)] of every step and the parameters at the end."""
    mesh = init_device_mesh(name, communicator=communicator)
    shardrt.manual_seed(0)
    model = GPT(replace(CONFIG, dropout=dropout, n_layer=layers))
    for block in model.blocks:
        if prepare is not None:
            prepare(block)
        fully_shard(block, mesh=mesh, **settings)
    if "mp_policy" in settings:
        settings["mp_policy"] = replace(settings["mp_policy"], output_dtype="float32")  # the logits
    fully_shard(model, mesh=mesh, **settings)
    if freeze:
        set_find_unused_parameters(model)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, in_backward=in_backward)
    scaler = optim.GradScaler(init_scale=8.0, enabled=scaled)
    random, seen = np.random.default_rng(0), []
    for step in range(STEPS):
        shardrt.manual_seed(0, step)
        text = random.integers(0, CONFIG.vocab_size, (4, CONFIG.block_size + 1))
        rows = len(text) // mesh.size
        mine = text[mesh.rank * rows : (mesh.rank + 1) * rows]
        for parameter in model.parameters() if freeze else ():
            parameter.requires_grad = step == 0 or parameter.ndim == 1
        total = 0.0
        for part in np.split(mine, parts):
            loss = F.cross_entropy(model(part[:, :-1]), part[:, 1:])
            scaler.scale(loss).backward()
            total += loss.item()
        norm = 0.0
        if not in_backward:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((total, norm))
    return seen, full_state_dict(model)


def agree(found, expected, tolerance):
    for (losses, weights), (other_losses, other_weights) in zip(found, expected, strict=True):
        np.testing.assert_allclose(losses, other_losses, rtol=tolerance)
        for key, values in (other_weights or {}).items():
            np.testing.assert_allclose(weights[key], values, rtol=0, atol=10 * tolerance, err_msg=key)


VARIANTS = {
    "float32": {},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy("bfloat16", "float32", full_precision=(nn.LayerNorm,))},
    "bfloat16 on the wire": {"mp_policy": MixedPrecisionPolicy("bfloat16", "bfloat16")},
    "float16, scaled": {"mp_policy": MixedPrecisionPolicy("float16", "float32"), "scaled": True},
    "SHARD_OPT": {"strategy": "SHARD_OPT"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "accumulation": {"parts": 2},
    "dropout": {"dropout": 0.2},
    "recomputation": {"prepare": checkpoint, "dropout": 0.2},
    "activations on the host": {"prepare": offload_activations},
    "all on the host": {"offload_policy": CPUOffloadPolicy()},
    "updates on the host": {"offload_policy": CPUOffloadPolicy(step="host")},
    "frozen late": {"freeze": True},
    "frozen late, bfloat16": {"freeze": True, "mp_policy": MixedPrecisionPolicy("bfloat16", "bfloat16")},
    "updates in backward": {"in_backward": True},
    "updates in backward, on the host": {"offload_policy": CPUOffloadPolicy(), "in_backward": True},
}


def make_late(monkeypatch, spin):
    """Delay each copy and collective of CUDA devices by spin(milliseconds), poison slots at their release."""
    copy, made = CUDADevice.copy, comm_mesh.for_device

    def late(self, target, source):
        spin(0.3)
        copy(self, target, source)

    monkeypatch.setattr(CUDADevice, "copy", late)
    monkeypatch.setattr(comm_mesh, "for_device", lambda *how: DelayedCommunicator(made(*how), 0.3, spin))
    monkeypatch.setattr(
        Arena, "poison", property(lambda arena: True, lambda arena, value: None), raising=False
    )


def same_bits(found, expected):
    for (steps, weights), (other_steps, other_weights) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(steps, other_steps)
        for key, values in (weights or {}).items():
            np.testing.assert_array_equal(values, other_weights[key], err_msg=key)


@pytest.mark.parametrize("variant", ["float32", "bfloat16", "all on the host", "recomputation"])
def test_slots_that_are_poisoned_when_they_are_released_change_no_bit(fake_cuda, monkeypatch, variant):
    """What is late here is the stand-in's own affair; tests/gpu has copies and collectives late as well."""
    spun = []
    prompt = thread.run(2, train, "cuda", **VARIANTS[variant])
    make_late(monkeypatch, spun.append)
    same_bits(thread.run(2, train, "cuda", **VARIANTS[variant]), prompt)
    assert len(spun) > 20


def train_invariant(name):
    """Weights after a step of four micro-batches, and its norm."""
    mesh = init_device_mesh(name)
    shardrt.manual_seed(0)
    model = GPT(replace(CONFIG, dropout=0.2))
    fully_shard(model, mesh=mesh)
    set_world_invariant(model, 4)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(mesh.rank, 4, mesh.size):
        text = np.random.default_rng(number).integers(0, CONFIG.vocab_size, (2, CONFIG.block_size + 1))
        (F.cross_entropy(model(text[:, :-1]), text[:, 1:]) * 0.25).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm, full_state_dict(model)


def test_one_rank_and_two_train_to_the_same_bits(fake_cuda):
    (norm, weights), (norm_of_two, weights_of_two) = (
        thread.run(ranks, train_invariant, "cuda")[0] for ranks in (1, 2)
    )
    assert norm == norm_of_two > 0.1
    for key, values in weights.items():
        np.testing.assert_array_equal(weights_of_two[key], values, err_msg=key)
    assert norm == pytest.approx(thread.run(1, train_invariant, "cpu")[0][0], rel=1e-5)


def saved_and_loaded(name, directory):
    mesh = init_device_mesh(name)
    shardrt.manual_seed(1)
    model = GPT(CONFIG)
    fully_shard(model, mesh=mesh)
    with full_parameters(model, writeback=True):
        for parameter in model.parameters():
            parameter.data *= 2
    save(directory, model)
    load(directory, model)
    return generate(
        model, SampleConfig("\x05", 5, 0.8, 5), ByteText(), block_size=4, seed=0
    ), full_state_dict(model)


def test_weights_are_changed_saved_loaded_and_used_to_generate(fake_cuda, tmp_path):
    on_cpu, on_cuda = (thread.run(1, saved_and_loaded, name, tmp_path / name) for name in ("cpu", "cuda"))
    assert on_cpu[0][0] == on_cuda[0][0]
    for key, values in on_cpu[0][1].items():
        np.testing.assert_array_equal(on_cuda[0][1][key], values, err_msg=key)


def test_the_norm_of_all_gradients_is_read_in_one_copy(fake_cuda, monkeypatch):
    """The host waits once, however many pieces there are."""
    device.set_current(fake_cuda)
    layers = [nn.LayerNorm(5) for _ in range(3)]
    x = shardrt.Tensor(fake_cuda.asarray(np.arange(10, dtype=np.float32).reshape(2, 5)))
    for layer in layers:
        x = layer(x)
    x.backward(fake_cuda.asarray(np.ones((2, 5), np.float32)))
    read = []
    monkeypatch.setattr(fake_cupy, "not_captured", lambda way="D2H": read.append(way))
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    assert nn.utils.clip_grad_norm_(parameters, 1.0) > 1
    assert len(parameters) == 6 and read == ["D2H"]
