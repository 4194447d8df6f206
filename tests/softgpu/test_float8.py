"""Linear layers in float8 on the GPU emulator: training, captures, launches, and where it is refused."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from models.plans import plan_of
from shardrt import device, nn
from shardrt.comm import init_device_mesh, thread
from shardrt.device.cuda import CUDADevice
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp import MixedPrecisionPolicy, explain, fully_shard, memory_plan
from shardrt.kernels.cuda import float8
from shardrt.parallel import parallelize_module
from shardrt.recompute import checkpoint
from shardrt.tensor import Tensor
from tests.gpu import test_captured_step as capturing
from tests.gpu.test_float8 import BFLOAT16, FLOAT8, alone, low
from tests.softgpu import cuda as software_gpu

pytest.importorskip("cupy")


CONFIG = GPTConfig(n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=64)


def made(name="cuda", *, float8=True, recompute=None, strategy=None, tp=False):
    """(mesh of the data, a GPT whose middle block is in float8). tp: all ranks are along tp."""
    shardrt.manual_seed(3)
    shape, names = ((1, 2), ("dp_shard", "tp")) if tp else (None, None)
    mesh = init_device_mesh(name, shape, names, communicator="nccl")
    model = GPT(CONFIG)
    if tp:
        parallelize_module(model, mesh["tp"], plan_of(model))
        mesh = mesh["dp_shard"]
    for number, block in enumerate(model.blocks):
        if recompute:
            checkpoint(block, recompute)
        inside = 0 < number < len(model.blocks) - 1
        fully_shard(block, mesh=mesh, strategy=strategy, mp_policy=FLOAT8 if float8 and inside else BFLOAT16)
    return mesh, fully_shard(
        model, mesh=mesh, strategy=strategy, mp_policy=replace(BFLOAT16, output_dtype="float32")
    )


def trained(ranks=1, captured=False, **how):
    """(losses and norms, parameters, updates) of some steps of that GPT on each rank."""
    return thread.run(ranks, capturing.train, captured, make=made, **how)


RANKS = {"one": {}, "two": {"ranks": 2, "strategy": "FULL_SHARD"}, "two along tp": {"ranks": 2, "tp": True}}


@pytest.mark.parametrize("ranks", RANKS)
def test_a_gpt_trains_about_as_in_bfloat16_to_the_same_bits_however_late_streams_are(software, ranks):
    how, first = RANKS[ranks], None
    plain = trained(float8=False, **how)
    for mode in ("late", "compute first"):
        software.choose(mode, seed=1)
        found = trained(**how)
        first = first or found
        capturing.assert_same(found, first)
    losses, others = ([loss for loss, _ in each[0][0]] for each in (first, plain))
    assert losses != others, "not in float8"
    np.testing.assert_allclose(losses, others, rtol=0.02)


@pytest.mark.parametrize("how", [{"captured": True}, {"late": True}, {"recompute": "full"}], ids=str)
def test_replays_gradients_that_are_put_off_and_recomputation_change_no_bit(software, how):
    expected = trained()
    for mode in ("late", "compute first"):
        software.choose(mode, seed=1)
        capturing.assert_same(trained(**how), expected)


def layers(policy=None, bias=True, precision=FLOAT8):
    """Gradients of two; where nothing is recomputed, of the first without that of its input."""
    shardrt.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 48, bias=bias), nn.ReLU(), nn.Linear(48, 32, bias=bias))
    if policy is not None:
        checkpoint(model, policy)
    alone(model, precision)
    random = np.random.default_rng(0)
    here = device.current()
    x, dy = (low(random.normal(size=(2, 8, 32)).astype(np.float32)) for _ in range(2))
    model(Tensor(here.asarray(x), requires_grad=policy is not None)).backward(here.asarray(dy))
    return [here.to_numpy(parameter.grad) for parameter in model.parameters()]


def test_results_of_matmuls_that_were_kept_change_no_bit(software):
    for found, expected in zip(*(thread.run(1, layers, how)[0] for how in ("matmul", "full")), strict=True):
        np.testing.assert_array_equal(found, expected)


def counted(log):
    names = [detail if what == "launch" else what for what, _, detail in log if what in ("launch", "product")]
    of_float8 = ("abs_max", "cast_e4m3", "cast_e5m2", "product")
    return {name: names.count(name) for name in of_float8}


def test_launches_of_two_layers(software):
    """Forward casts x and the weight, with an amax each; backward dy, and the weight by the amax it has."""
    thread.run(1, layers)  # algorithms are chosen
    software.log.clear()
    thread.run(1, layers)
    one = {"abs_max": 3, "cast_e4m3": 3, "cast_e5m2": 1, "product": 3}
    without_input = {"abs_max": 3, "cast_e4m3": 2, "cast_e5m2": 1, "product": 2}
    assert counted(software.log) == {name: one[name] + without_input[name] for name in one}
    software.log.clear()
    thread.run(1, layers, precision=BFLOAT16)
    assert counted(software.log)["cast_e4m3"] == 0


def test_only_sums_of_forward_are_fast(software, monkeypatch):
    fast, matmul = [], float8.matmul

    def spy(*args, **how):
        fast.append(how.get("fast", False))
        matmul(*args, **how)

    monkeypatch.setattr(float8, "matmul", spy)
    thread.run(1, layers)
    assert fast == [True, True, False, False, False]


def test_a_weight_that_is_used_twice_has_the_sum_of_its_gradients(software):
    class Times(nn.Module):
        def __init__(self, times):
            super().__init__()
            self.times, self.layer = times, nn.Linear(32, 32)

        def forward(self, x):
            return sum(self.layer(x) for _ in range(self.times))

    def rank(times):
        shardrt.manual_seed(1)
        model, here = alone(Times(times)), device.current()
        x, dy = (here.asarray(low(np.random.default_rng(i).normal(size=(16, 32)))) for i in range(2))
        model(Tensor(x)).backward(dy)
        return here.to_numpy(model.layer.weight.grad)

    once, twice = (thread.run(1, rank, times)[0] for times in (1, 2))
    np.testing.assert_array_equal(twice, 2 * once)
    assert once.any()


def test_what_it_takes_is_planned(software):
    """A dry run of the same ops; a byte for each element of x is saved, where bfloat16 saves two."""

    def rank(float8):
        _, model = made(float8=float8)
        tokens = np.zeros((8, 16), np.int64)
        return memory_plan(model, step=lambda: model(tokens, tokens).backward()).device["activations"]

    plans = [thread.run(1, rank, float8)[0] for float8 in (False, True)]
    assert plans[1] != plans[0] and plans[1] > 0


def test_the_table_of_units_says_so(software):
    (message,) = thread.run(1, lambda: explain(made()[1]).splitlines())
    assert [line.split()[0] for line in message if "float8 of bfloat16" in line] == ["blocks.1"]


# -- where it can't be


def test_the_cpu_has_none():
    with pytest.raises(
        ValueError, match="float8=True, but device 'cpu' has no matmul in float8; NVIDIA GPUs"
    ):
        fully_shard(nn.Linear(16, 16), mesh=init_device_mesh("cpu"), mp_policy=FLOAT8)


def test_the_simulator_has_none(software):
    assert SimulatedDevice(CUDADevice).lacks_float8() == "the simulator has no speeds of matmuls in float8"
    assert not SimulatedDevice(device.get("cuda")).lacks_float8()  # the dry run of this one


def test_an_older_gpu_has_none(software, monkeypatch):
    def rank():
        with pytest.raises(ValueError, match="GPU 0 has compute capability 8.0; float8 needs 9.0"):
            alone(nn.Linear(16, 16))

    monkeypatch.setitem(software_gpu._ATTRIBUTES, 75, 8)
    thread.run(1, rank)


def test_it_needs_bfloat16():
    for param in (None, "float16", "float32"):
        with pytest.raises(ValueError, match="float8 needs param_dtype='bfloat16'"):
            MixedPrecisionPolicy(param, float8=True)


def test_layers_of_other_sizes_are_told_once_and_stay_in_bfloat16(software):
    def rank():
        model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 32))
        with pytest.warns(UserWarning, match=r"stay in bfloat16: 0.weight \(24, 32\), 1.weight \(32, 24\)"):
            alone(model)
        return [layer.weight.float8 for layer in model]

    assert thread.run(1, rank) == [[False, False, True]]


def test_rows_that_are_no_multiple_are_told_in_training_alone(software):
    def rank():
        alone(layer := nn.Linear(32, 32))
        x = Tensor(device.current().asarray(low(np.ones((2, 5, 32), np.float32))))
        with warnings.catch_warnings(), shardrt.no_grad():
            warnings.simplefilter("error")
            layer(x)
        software.log.clear()
        with pytest.warns(UserWarning, match="rows that are not a multiple of 16"):
            layer(x).sum().backward()
        assert not counted(software.log)["cast_e4m3"]

    thread.run(1, rank)


def test_only_weights_of_the_unit_that_are_gathered_in_bfloat16_are_in_float8(software):
    def rank():
        mesh = init_device_mesh("cuda")
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
        fully_shard(model[0], mesh=mesh, mp_policy=BFLOAT16)
        fully_shard(model, mesh=mesh, mp_policy=FLOAT8, ignored=[model[2]])
        return [layer.weight.float8 for layer in model]

    assert thread.run(1, rank) == [[False, True, False]]
