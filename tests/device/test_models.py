"""Whole models on the simulated device: they run as they are, and hold as many bytes as on the CPU."""

from collections import Counter

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.regnet import RegNet, RegNetConfig
from models.vit import ViT, ViTConfig
from shardrt import device, nn, optim
from shardrt import functional as F
from shardrt.activation_offload import offload_activations
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import HostRead, Program, Take, Work
from shardrt.device.simulated import SimulatedDevice
from shardrt.recompute import checkpoint_blocks

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 128, (8, 64))
IMAGES, CLASSES = RNG.normal(size=(4, 1, 32, 32)).astype(np.float32), np.arange(4)
LLAMA = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "n_hidden": 128, "block_size": 64}


def gpt(dropout=0.1):
    return GPT(GPTConfig(2, 2, 64, 64, 128, dropout))


def recomputed(policy="full"):
    model = gpt()
    checkpoint_blocks(model.blocks, policy=policy)
    return model


def offloaded():
    model = gpt()
    for block in model.blocks:
        offload_activations(block)
    return model


def language(model):
    return F.cross_entropy(model(TOKENS), TOKENS)


def vision(model):
    return F.cross_entropy(model(shardrt.Tensor(IMAGES)), CLASSES)


MODELS = {
    "gpt": (gpt, language),
    "gpt recomputed": (recomputed, language),
    "gpt recomputed but products": (lambda: recomputed("matmul"), language),
    "gpt offloaded": (offloaded, language),
    "llama": (lambda: Llama(LlamaConfig(**LLAMA, vocab_size=128)), language),
    "loss in chunks": (
        lambda: Llama(LlamaConfig(**LLAMA, vocab_size=128, loss_chunk=100)),
        lambda model: model(TOKENS, TOKENS),
    ),
    "vit": (lambda: ViT(ViTConfig(2, 2, 64, 128, 32, 8, 1, classes=10)), vision),
    "regnet": (lambda: RegNet(RegNetConfig((1, 1), (32, 64), 16, (1, 2), channels=1, classes=10)), vision),
}


def trained(here, make, loss_of, steps=2):
    """Peaks of forward and backward, and the norms of the gradients, of some steps on `here`."""
    found = []
    with device.use(here):
        shardrt.manual_seed(1)
        model = make()
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(steps):
            here.reset_peak()
            loss_of(model).backward()
            peak = here.peak_bytes()
            found.append((peak, nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_step_holds_the_bytes_that_it_holds_on_the_cpu(name):
    measured = [peak for peak, _ in trained(CPUDevice(), *MODELS[name])]
    assert [peak for peak, _ in trained(SimulatedDevice(CPUDevice), *MODELS[name])] == measured


def test_a_mixture_of_experts_runs_on_the_shapes_of_an_equal_load():
    here = SimulatedDevice()
    config = LlamaConfig(**LLAMA, vocab_size=128, experts=4, balance_loss=0.01)
    assert trained(here, lambda: Llama(config), lambda model: model(TOKENS, TOKENS))
    grouped = [item for item in here.program.items if isinstance(item, Work) and "grouped" in item.name]
    assert {item.sizes[0] for item in grouped if item.name == "grouped.forward"} == {TOKENS.size * 2}


@pytest.fixture(scope="module")
def step():
    """The second of two equal steps of a small GPT."""
    here = SimulatedDevice(CUDADevice)
    with device.use(here):
        model = gpt()
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        programs = []
        for _ in range(2):
            here.program = Program()
            loss = language(model)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.item()
            programs.append(here.program)
        here.program = Program()  # for what the end of the model gives back
    return programs


def test_two_equal_steps_issue_equal_work(step):
    first, second = ([i for i in program.items if isinstance(i, Work)] for program in step)
    alike = [(i.stream, i.name, i.flops, i.nbytes, i.launches, i.sizes, i.site) for i in second]
    assert alike == [(i.stream, i.name, i.flops, i.nbytes, i.launches, i.sizes, i.site) for i in first]


def test_products_have_the_flops_of_the_formula(step):
    """2 for each weight of a matrix and token, forward, and twice that backward."""
    products = sum(i.flops for i in step[1].items if isinstance(i, Work) and i.name.startswith("linear"))
    weights = sum(12 * 64 * 64 for _ in range(2)) + 128 * 64
    assert products == pytest.approx(6 * weights * TOKENS.size, rel=0.05)  # and GELUs, and biases


def test_what_is_taken_in_a_step_is_given_back_but_what_the_optimizer_keeps(step):
    kinds = Counter(type(item).__name__ for item in step[1].items)
    assert kinds["Take"] == kinds["Free"]


def test_a_program_says_which_values_the_host_has_read_and_where(step):
    read = [item for item in step[1].items if isinstance(item, HostRead)]
    assert [item.site.rpartition(":")[0] for item in read] == [
        "shardrt/nn/utils.py",
        "tests/device/test_models.py",
    ]
    assert all(item.place == "device" for item in step[1].items if isinstance(item, Take))
