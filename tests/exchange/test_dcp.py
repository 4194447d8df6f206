"""PyTorch's distributed checkpoints: from any mesh, for any ranks, training goes on both ways."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import pytest

from models import llama
from shardrt import optim
from shardrt.__main__ import main
from shardrt.checkpoint import CheckpointManager, full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.exchange.checkpoint import FIRST_MOMENT, PARAMETER, SECOND_MOMENT, BadCheckpoint
from shardrt.exchange.formats import dcp, own
from tests.exchange.made import RECIPE, checkpoint, whole, write

HERE = Path(__file__).parent
FIXTURE = HERE / "fixtures" / "dcp"  # by dcp_run.py; its a, b and c are cut along two dimensions on 4 ranks
SHAPES = {"a.weight": (7, 5), "b.weight": (4, 6, 3), "c.weight": (1,), "d.weight": (9,)}
HUB = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32,
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
UNTIED = llama.LlamaConfig(
    n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_hidden=48, vocab_size=64, block_size=16, tied=False
)


def convert(*words):
    return main(["ckpt", "convert", *map(str, words)])


def all_of(path, reader=dcp):
    return {key: whole(tensor) for key, tensor in reader.read(path).tensors.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert np.array_equal(one[key], other[key]), key


def test_chunks_of_two_dimensions_are_read_in_any_range():
    read = dcp.read(FIXTURE)
    assert read.training.step == 3
    assert {name: tensor.shape for (_, name), tensor in read.tensors.items()} == SHAPES
    for (_, name), tensor in read.tensors.items():
        size = prod(tensor.shape)
        expected = np.arange(size, dtype=np.float32) + 100 * ord(name[0])
        for start in range(size):
            for stop in {start + 1, (start + size + 1) // 2, size} - {start}:
                out = np.empty(stop - start, np.float32)
                tensor.read_into(out, start)
                assert np.array_equal(out, expected[start:stop]), (name, start, stop)


def test_chunks_must_cover_a_tensor_once():
    def covers(shape, *chunks):
        dcp._check_cover("it", shape, chunks)

    covers((4, 6), ((0, 0), (2, 6)), ((2, 0), (2, 5)), ((2, 5), (2, 1)))
    covers((), ((), ()))
    covers((0, 3))
    for chunks in (
        [((0, 0), (2, 6))],
        [((0, 0), (2, 6)), ((0, 0), (2, 6))],
        [((0, 0), (4, 4)), ((1, 3), (4, 2))],
        [((0, 0), (3, 6)), ((2, 0), (1, 6))],
        [((0, 0, 0), (4, 6, 1))],
    ):
        with pytest.raises(BadCheckpoint, match="chunk"):
            covers((4, 6), *chunks)


@pytest.mark.parametrize("dialect", ["huggingface", "torchtitan"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_state_comes_back_bitwise(dialect, ranks, tmp_path, capsys):
    made = checkpoint(UNTIED)
    made.training.extra["config"] = RECIPE | {"model": RECIPE["model"] | {"tied": False}}
    run = write(made, tmp_path / "run")
    there = tmp_path / "dcp"
    assert convert(run, there, "--to", "dcp", "--dialect", dialect, "--ranks", ranks) == 0
    assert sorted(path.name for path in there.glob("*.distcp")) == [
        f"__{rank}_0.distcp" for rank in range(ranks)
    ]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HUB))
    assert convert(there, tmp_path / "back", "--to", "shardrt", "--config", config) == 0
    read, found = own.read(tmp_path / "back"), all_of(tmp_path / "back", own)
    assert_same(found, all_of(run, own))
    assert read.training.step == 7 and set(read.training.steps.values()) == {7}
    groups = [{**group, "params": None} for group in dcp.read(there).training.groups]
    for group, expected in zip(groups, own.read(run).training.groups, strict=True):
        assert group == group | expected | {"params": None}
    lines = capsys.readouterr().out
    assert "not known" not in lines
    assert ("dataloader" in lines) == (dialect == "torchtitan")


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutants_are_refused_in_one_line(count, tmp_path):
    valid = tmp_path / "dcp"
    assert convert(write(checkpoint(), tmp_path / "run"), valid, "--to", "dcp", "--ranks", 2) == 0
    (tmp_path / "scratch").mkdir()
    words = [str(valid), str(tmp_path / "scratch"), "0", str(count), "safetensors", "dcp"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.exchange.hostile", *words], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert count // 2 < int(re.search(r"(\d+) of \d+ refused", done.stdout)[1]) < count


BOUNDED = """
import sys
from shardrt.__main__ import main
code = main(sys.argv[1:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024)
sys.exit(code)
"""


class Sparse:
    """Numbers, of which a part at the beginning is not zero."""

    def __init__(self, shape, filled):
        self.dtype, self.shape, self.filled = np.dtype(np.float32), shape, filled

    def read_into(self, out, start):
        out[...] = 0
        filled = max(min(self.filled - start, out.size), 0)
        out[:filled] = np.arange(start, start + filled) % 8191 + 1


def sparse(shapes, share, target, ranks):
    """A checkpoint of PyTorch's with AdamW state, of whose elements a share is not zero."""
    from shardrt.exchange.checkpoint import Checkpoint, Training
    from shardrt.exchange.formats import Options
    from shardrt.exchange.output import Output

    tensors = {
        (kind, name): Sparse(shape, int(prod(shape) * share))
        for name, shape in shapes.items()
        for kind in (PARAMETER, FIRST_MOMENT, SECOND_MOMENT)
    }
    made = Checkpoint(target, tensors, Training(2, dict.fromkeys(shapes, 2)))
    Output(target, {}).write(dcp.files(made, Options(target, ranks)).files)


@pytest.mark.slow
@pytest.mark.serial
def test_four_gigabytes_convert_in_less_than_one_and_after_a_kill(tmp_path):
    shapes = {f"layers.{number}.weight": (8192, 4096) for number in range(10)}
    sparse(shapes, 0.13, tmp_path / "dcp", 2)
    held = sum(os.stat(path).st_blocks * 512 for path in (tmp_path / "dcp").iterdir())
    assert held > 500 << 20
    words = ["ckpt", "convert", str(tmp_path / "dcp"), str(tmp_path / "new"), "--to", "shardrt"]
    begun = subprocess.Popen([sys.executable, "-m", "shardrt", *words])
    folder = tmp_path / "new" / "checkpoints" / ".tmp-step-00000002"
    while begun.poll() is None and not (folder / ".journal").exists():
        pass
    begun.send_signal(signal.SIGKILL)
    assert begun.wait() == -signal.SIGKILL
    done = subprocess.run([sys.executable, "-c", BOUNDED, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 1 << 30
    read = own.read(tmp_path / "new")
    for name in ("layers.0.weight", "layers.9.weight"):
        tensor, out = read.tensors[SECOND_MOMENT, name], np.empty(1 << 20, np.float32)
        for start in (0, int(prod(shapes[name]) * 0.13) - 1000, prod(shapes[name]) - out.size):
            tensor.read_into(out, start)
            expected = np.empty_like(out)
            Sparse(shapes[name], int(prod(shapes[name]) * 0.13)).read_into(expected, start)
            assert np.array_equal(out, expected)


def llama_3_8b():
    """Shapes of Llama-3.1-8B, with torchtitan's names."""
    shapes = {
        "tok_embeddings.weight": (128256, 4096),
        "lm_head.weight": (128256, 4096),
        "norm.weight": (4096,),
    }
    for number in range(32):
        for name, shape in {
            "attention.qkv_linear.wq": (4096, 4096), "attention.qkv_linear.wk": (1024, 4096),
            "attention.qkv_linear.wv": (1024, 4096), "attention.wo": (4096, 4096),
            "feed_forward.w1": (14336, 4096), "feed_forward.w2": (4096, 14336),
            "feed_forward.w3": (14336, 4096), "attention_norm": (4096,), "ffn_norm": (4096,),
        }.items():  # fmt: skip
            shapes[f"layers.{number}.{name}.weight"] = shape
    return shapes


@pytest.mark.rest
@pytest.mark.serial
def test_96_gigabytes_of_llama_8b_convert(tmp_path, capsys):
    sparse(llama_3_8b(), 0.002, tmp_path / "dcp", 8)
    size = sum(path.stat().st_size for path in (tmp_path / "dcp").iterdir())
    assert size > 96e9
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
             "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(HUB | sizes))
    for turn in range(2):
        words = ["ckpt", "convert", *map(str, (tmp_path / "dcp", tmp_path / f"new-{turn}"))]
        words += ["--to", "shardrt", "--ranks", "8", "--config", str(tmp_path / "config.json")]
        begin = time.monotonic()
        done = subprocess.run([sys.executable, "-c", BOUNDED, *words], capture_output=True, text=True)
        seconds = time.monotonic() - begin
        assert done.returncode == 0, done.stderr
        peak = int(done.stdout.splitlines()[-1])
        assert peak < 1 << 30
        copy = tmp_path / f"copy-{turn}"
        begin = time.monotonic()
        subprocess.run(["cp", "-r", "--sparse=always", tmp_path / "dcp", copy], check=True)
        subprocess.run(["sync", "-f", copy], check=True)
        copied = time.monotonic() - begin
        with capsys.disabled():
            print(f"{size / 1e9:.1f} GB, {peak / 1e6:.0f} MB: {seconds:.0f} s, cp {copied:.0f} s")


def torch_runs(jobs, folder):
    """Run dcp_run.py."""
    file = folder / f"jobs-{len(list(folder.iterdir()))}.json"
    file.write_text(json.dumps(jobs))
    done = subprocess.run([sys.executable, str(HERE / "dcp_run.py"), file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Gives, by kind, the folder of a run of FSDP2 that saves after three steps and goes ten on."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    folder = tmp_path_factory.mktemp("torch")

    @cache
    def run(kind):
        job = {
            "world": 2,
            "kind": kind,
            "layout": {"hub": "app", "titan": "flat"}[kind],
            "first": 3,
            "steps": 10,
        }
        torch_runs([job | {"save": str(folder / kind), "truth": str(folder / f"{kind}.npz")}], folder)
        (folder / kind / "config.json").write_text(json.dumps(HUB))
        return folder

    return run


def ten_steps(folder, first):
    """Go on in shardrt, as a run does; gives losses and the model, and saves."""
    from tests.exchange.tokens import tokens

    model = llama.Llama(UNTIED)
    optimizer = optim.AdamW(optim.decay_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    manager = CheckpointManager(folder / "checkpoints", model, optimizer, init_device_mesh("cpu"))
    step, _ = manager.restore()
    assert step == first
    losses = []
    for number in range(first, first + 10):
        rows = tokens(number)
        loss = model(rows[:, :-1], rows[:, 1:])
        losses.append(float(loss.data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    chosen = RECIPE["optimizer"] | {"min_lr": 1e-3, "warmup_steps": 0}
    model_ = RECIPE["model"] | {"tied": False}
    manager.save(first + 10, {"config": RECIPE | {"steps": 99, "optimizer": chosen, "model": model_}})
    return losses, full_state_dict(model)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "dialect"),
    [
        ("titan", "torchtitan"),
        pytest.param("hub", "huggingface", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_in_shardrt_and_back_in_torch(kind, dialect, saved, tmp_path):
    saved = saved(kind)
    truth = np.load(saved / f"{kind}.npz")
    # From PyTorch to shardrt: all values, and ten steps.
    read = all_of(saved / kind)
    expected = {
        tuple(key.split("/")): truth[key]
        for key in truth
        if key.split("/")[0] in (PARAMETER, FIRST_MOMENT, SECOND_MOMENT)
    }
    assert_same(read, expected)
    assert convert(saved / kind, tmp_path / "run", "--to", "shardrt", "--ranks", 3) == 0
    assert own.read(tmp_path / "run").training.steps and own.read(tmp_path / "run").training.step == 3
    losses, _ = ten_steps(tmp_path / "run", 3)
    assert np.allclose(losses, truth["losses"], rtol=0, atol=1e-5)
    config = ("--config", saved / kind / "config.json", "--dialect", dialect)
    # The way back: bitwise in PyTorch on one rank and two, and ten steps more there.
    assert convert(tmp_path / "run", tmp_path / "dcp", "--to", "dcp", "--ranks", 2, *config) == 0
    after = all_of(tmp_path / "dcp")
    for key in (key for key in truth if key.startswith("after/")):
        assert np.allclose(after[PARAMETER, key[6:]], truth[key], rtol=0, atol=1e-5), key
    layout = "flat" if kind == "titan" else "nested"
    jobs = [
        {"world": world, "kind": kind, "layout": layout, "first": 13, "load": str(tmp_path / "dcp"),
         "steps": 10, "truth": str(tmp_path / f"{world}.npz")}
        for world in (1, 2)
    ]  # fmt: skip
    torch_runs(jobs, tmp_path)
    own_losses, own_weights = ten_steps(tmp_path / "run", 13)
    convert(tmp_path / "run", tmp_path / "own-dcp", "--to", "dcp", *config)
    weights = all_of(tmp_path / "own-dcp")
    assert own_weights
    for world in (1, 2):
        found = np.load(tmp_path / f"{world}.npz")
        for key in (key for key in found if "/" in key and not key.startswith("after/")):
            if key.startswith("step/"):
                assert found[key] == 13
            else:
                assert np.array_equal(found[key], after[tuple(key.split("/"))]), key
        assert np.allclose(found["losses"], own_losses, rtol=0, atol=1e-5)
        for key in (key for key in found if key.startswith("after/")):
            assert np.allclose(found[key], weights[PARAMETER, key[6:]], rtol=0, atol=1e-5), key


@pytest.mark.torch
@pytest.mark.slow
def test_weights_go_to_safetensors_and_back_to_torch(saved, tmp_path):
    saved = saved("hub")
    from shardrt.exchange.formats import safetensors

    assert convert(saved / "hub", tmp_path / "hub", "--to", "safetensors") == 0
    truth = np.load(saved / "hub.npz")
    for (_, name), found in all_of(tmp_path / "hub", safetensors).items():
        assert np.array_equal(found, truth[f"{PARAMETER}/{name}"]), name
    assert convert(tmp_path / "hub", tmp_path / "dcp", "--to", "dcp", "--ranks", 2) == 0
    assert_same(
        all_of(tmp_path / "dcp"), {k: v for k, v in all_of(saved / "hub").items() if k[0] == PARAMETER}
    )
