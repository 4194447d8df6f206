"""Linear layers in float8 over the GPU in software: training, captures, launches, and where it is refused."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from models.plans import plan_of
from shardrt import device, nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.deferred_gradients import DeferredGradients
from shardrt.device.cuda import CUDADevice
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp import MixedPrecisionPolicy, explain, fully_shard, memory_plan
from shardrt.kernels.cuda import float8
from shardrt.parallel import parallelize_module
from shardrt.recompute import checkpoint
from shardrt.tensor import Tensor
from tests.gpu.test_float8 import BFLOAT16, FLOAT8, alone, low
from tests.softgpu import cuda as software_gpu

pytest.importorskip("cupy")


CONFIG = GPTConfig(n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=64)


def made(float8, *, recompute=None, strategy=None, tp=False):
    """A GPT whose middle block is in float8. tp: all ranks are along tp."""
    shardrt.manual_seed(3)
    shape, names = ((1, 2), ("dp_shard", "tp")) if tp else (None, None)
    mesh = init_device_mesh("cuda", shape, names, communicator="nccl")
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


def train(float8, steps=4, captured=False, late=False, **how):
    """[(loss, norm)] of each step, and the parameters at the end. captured: steps from the second on.

    late: gradients of weights are put off.
    """
    mesh, model = made(float8, **how)
    here, optimizer = device.current(), optim.AdamW(model.parameters(), lr=3e-3)
    tokens, targets = (here.zeros((2, 16), np.int64) for _ in range(2))
    pattern = np.arange(17 * steps * 4).reshape(steps * 2, 2, 17) % 7 * 5 % 64

    def step():
        loss, halves = model(tokens, targets), DeferredGradients() if late else None
        loss.backward(deferred=halves)
        if late:
            halves.flush()
        single = mesh.world.size == 1
        norm = nn.utils.clip_grad_norm_on_device_(model.parameters(), 1.0) if single else loss
        optimizer.step()
        optimizer.zero_grad()
        return loss.data, norm.data

    graph, seen = None, []
    for number in range(steps):
        text = pattern[number * mesh.size + mesh.rank]
        here.copy(tokens, np.ascontiguousarray(text[:, :-1]))
        here.copy(targets, np.ascontiguousarray(text[:, 1:]))
        if captured and number:
            graph = graph or here.capture(step)
            graph.replay()
        seen.append([float(x) for x in (graph.result if graph else step())])
    return seen, full_state_dict(model)


def same(found, expected):
    for (seen, weights), (other, others) in zip(found, expected, strict=True):
        assert seen == other
        for name, values in (weights or {}).items():
            np.testing.assert_array_equal(values, others[name], err_msg=name)


@pytest.mark.parametrize("ranks, strategy", [(1, None), (2, "FULL_SHARD")])
def test_a_gpt_trains_about_as_in_bfloat16_to_the_same_bits_however_late_streams_are(
    software, ranks, strategy
):
    plain, first = thread.run(ranks, train, False, steps=6, strategy=strategy), None
    for mode in ("late", "compute first"):
        software.choose(mode, seed=1)
        found = thread.run(ranks, train, True, steps=6, strategy=strategy)
        first = first or found
        same(found, first)
    losses, others = ([loss for loss, _ in seen] for seen, _ in (first[0], plain[0]))
    assert losses != others, "not in float8"
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, others, rtol=0.02)


def test_replays_of_a_captured_step_have_the_same_bits(software):
    expected = thread.run(1, train, True)
    for mode in ("late", "compute first"):
        software.choose(mode, seed=1)
        same(thread.run(1, train, True, captured=True), expected)


def test_gradients_that_are_put_off_change_no_bit(software):
    same(thread.run(1, train, True, steps=3, late=True), thread.run(1, train, True, steps=3))


def test_weights_cut_along_tp_are_in_float8_too(software):
    found, plain = ([loss for loss, _ in thread.run(2, train, f, tp=True)[0][0]] for f in (True, False))
    assert found != plain
    np.testing.assert_allclose(found, plain, rtol=0.02)


def test_recomputation_changes_no_bit(software):
    expected = thread.run(1, train, True, steps=3)
    same(thread.run(1, train, True, steps=3, recompute="full"), expected)


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
        _, model = made(float8)
        tokens = np.zeros((8, 16), np.int64)
        return memory_plan(model, step=lambda: model(tokens, tokens).backward()).device["activations"]

    plans = [thread.run(1, rank, float8)[0] for float8 in (False, True)]
    assert plans[1] != plans[0] and plans[1] > 0


def test_the_table_of_units_says_so(software):
    (message,) = thread.run(1, lambda: explain(made(True)[1]).splitlines())
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


@pytest.mark.parametrize("param", [None, "float16", "float32"])
def test_it_needs_bfloat16(param):
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
