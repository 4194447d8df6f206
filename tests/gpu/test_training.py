"""GPTs trained on the GPU: as on the CPU, as PyTorch, on several ranks, and with every copy late."""

from functools import partial

import numpy as np
import pytest

from models.gpt import GPT
from models.sampling import ByteText, generate
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict, load, save
from shardrt.comm import ranks as comm_ranks
from shardrt.comm import thread
from shardrt.comm.delay import CollectiveDelay
from shardrt.device.arena import Arena
from shardrt.device.cuda import CUDADevice
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, full_parameters
from shardrt.train.config import SampleConfig
from tests import lab
from tests.cuda.small_gpt import VARIANTS, made, train
from tests.gpu.sizes import LEARNT, MODEL, STEPS
from tests.gpu.spin import spin

pytestmark = pytest.mark.gpu

BATCH = 8
BFLOAT16 = MixedPrecisionPolicy("bfloat16", "float32")


def batches():
    random = np.random.default_rng(0)
    start = random.integers(0, MODEL.vocab_size, (STEPS, BATCH, 1))
    text = (start + 7 * np.arange(MODEL.block_size + 1)) % MODEL.vocab_size  # something that can be learnt
    noise = random.random(text.shape) < 0.1
    return np.where(noise, random.integers(0, MODEL.vocab_size, text.shape), text)


def losses_of(name, *, sharded=True, weights=None, **settings):
    """The loss of each of STEPS steps on the device `name`."""
    mesh, model = made(name, config=MODEL, sharded=sharded, **settings)
    if weights is not None:
        weights.update({key: np.array(values) for key, values in full_state_dict(model).items()})
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for text in batches():
        mine = np.split(text, mesh.size)[mesh.rank]
        loss = F.cross_entropy(model(mine[:, :-1]), mine[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return np.array(losses)


@pytest.fixture(scope="module")
def on_the_cpu():
    return thread.run(1, losses_of, "cpu")[0]


@pytest.mark.parametrize("sharded", [True, False])
def test_losses_of_many_steps_are_those_of_the_cpu(gpu, on_the_cpu, sharded):
    (losses,) = thread.run(1, losses_of, "cuda", sharded=sharded)
    assert losses[-1] < LEARNT * losses[0], "nothing was learnt: the test shows little"
    np.testing.assert_allclose(losses, on_the_cpu, rtol=0, atol=1e-4)


def test_fsdp_on_one_gpu_has_the_bits_of_no_fsdp(gpu, deterministic):
    plain, sharded = (thread.run(1, losses_of, "cuda", sharded=s)[0] for s in (False, True))
    np.testing.assert_array_equal(sharded, plain)


def test_bfloat16_is_as_near_to_float32_as_that_of_pytorch(gpu):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("a PyTorch without CUDA")
    weights = {}
    (exact,) = thread.run(1, losses_of, "cuda", weights=weights)
    (rounded,) = thread.run(1, losses_of, "cuda", mp_policy=BFLOAT16)
    theirs = torch_losses(torch, weights, torch.float32)
    np.testing.assert_allclose(exact, theirs, rtol=0, atol=1e-3)
    allowed = 2 * np.abs(torch_losses(torch, weights, torch.bfloat16) - theirs).max()
    assert np.abs(rounded - exact).max() < allowed


def torch_losses(torch, weights, dtype):
    """The same by PyTorch; if a type is given, computed in it with float32 parameters, as FSDP2 does it."""
    from bench.peers.torch_models import GPT as Peer

    state = {key: torch.from_numpy(values) for key, values in weights.items()}
    sizes = {"layers": MODEL.n_layer, "heads": MODEL.n_head, "width": MODEL.n_embd}
    masters, model = (Peer(**sizes, time=MODEL.block_size, vocab=MODEL.vocab_size).cuda() for _ in range(2))
    masters.load_state_dict(state)
    model.to(dtype)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for text in batches():
        text = torch.from_numpy(text).cuda()
        model.load_state_dict(masters.state_dict())
        logits = model(text[:, :-1]).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, text[:, 1:].flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(masters.parameters(), gradients, strict=True):
            parameter.grad = gradient.float()
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_feature_trains_as_on_the_cpu(gpu, variant, ranks):
    """Ranks are threads that share the GPU; what they send goes through pinned memory."""
    settings = VARIANTS[variant]
    if ranks == 4 and settings.get("parts", 1) > 1:
        pytest.skip("a row for each rank, and no more")
    expected = thread.run(ranks, train, "cpu", **settings)
    found = thread.run(ranks, train, "cuda", **settings)
    near(found, expected, 3e-2 if "16" in variant else 1e-4)


def near(found, expected, limit):
    for (steps, weights), (other_steps, other_weights) in zip(found, expected, strict=True):
        np.testing.assert_allclose(steps, other_steps, rtol=limit)
        for key, values in (other_weights or {}).items():
            change = np.linalg.norm(weights[key] - values)
            assert change <= limit * max(1.0, np.linalg.norm(values)), key


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_mean_loss_of_one(gpu, on_the_cpu, ranks):
    losses = np.mean(thread.run(ranks, losses_of, "cuda"), axis=0)
    np.testing.assert_allclose(losses, on_the_cpu, rtol=0, atol=1e-4)


def make_late(monkeypatch, poison):
    """Delay each copy and collective; poison: fill slots with NaN when they are released."""
    copy, made = CUDADevice.copy, comm_ranks.for_device

    def late(self, target, source):
        spin(0.3)
        copy(self, target, source)

    def delayed(*how):
        communicator = made(*how)
        CollectiveDelay(communicator, 0.3, spin)
        return communicator

    monkeypatch.setattr(CUDADevice, "copy", late)
    monkeypatch.setattr(comm_ranks, "for_device", delayed)
    monkeypatch.setattr(
        Arena, "poison", property(lambda arena: poison, lambda arena, value: None), raising=False
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_late_copies_and_calls_and_poisoned_slots_change_no_bit(gpu, deterministic, monkeypatch, variant):
    """A wait that is missing would let somebody read what has not arrived, or what is there no more."""
    prompt = thread.run(2, train, "cuda", **VARIANTS[variant])
    make_late(monkeypatch, poison=variant != "NO_SHARD")  # whose slots are the parameters themselves
    lab.assert_equal(thread.run(2, train, "cuda", **VARIANTS[variant]), prompt)


def test_offload_changes_no_bit(gpu, deterministic):
    policies = ({}, {"offload_policy": CPUOffloadPolicy()})
    kept, moved = (thread.run(1, losses_of, "cuda", **policy)[0] for policy in policies)
    np.testing.assert_array_equal(moved, kept)


def test_a_step_holds_no_more_than_the_one_before(gpu):
    """Nothing is kept from step to step, and the pool's peak is counted."""
    model, text, found = GPT(MODEL), batches()[0], []
    for _ in range(4):
        gpu.reset_peak()
        F.cross_entropy(model(text[:, :-1]), text[:, 1:]).backward()
        model.zero_grad()
        found.append(gpu.peak_bytes())
    assert found[1] == found[2] == found[3] > 1 << 16


def saved_and_loaded(name, directory):
    _, model = made(name)
    with full_parameters(model, writeback=True):
        for parameter in model.parameters():
            parameter.data *= 2
    save(directory, model)
    load(directory, model)
    return generate(
        model, SampleConfig("\x05", 5, 0.8, 5), ByteText(), block_size=4, seed=0
    ), full_state_dict(model)


def test_weights_are_changed_saved_loaded_and_used_to_generate(gpu, tmp_path):
    pytest.importorskip("safetensors")
    run = partial(thread.run, 1, saved_and_loaded)
    (on_cpu,), (on_cuda,) = (run(name, tmp_path / name) for name in ("cpu", "cuda"))
    assert on_cpu[0] == on_cuda[0]
