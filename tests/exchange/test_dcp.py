"""PyTorch's distributed checkpoints: from any mesh, for any ranks, training goes on both ways."""

import json
import re
import signal
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import numpy as np
import pytest

from models import llama
from shardrt.__main__ import main
from shardrt.exchange.checkpoint import (
    FIRST_MOMENT,
    PARAMETER,
    SECOND_MOMENT,
    BadCheckpoint,
    Checkpoint,
    Training,
)
from shardrt.exchange.formats import Options, dcp, own
from shardrt.exchange.output import Output
from tests.exchange.made import RECIPE, Held, checkpoint, whole, write

HERE = Path(__file__).parent
FIXTURE = HERE / "fixtures" / "dcp"  # by dcp_run.py; its a, b and c are cut along two dimensions on 4 ranks
SHAPES = {"a.weight": (7, 5), "b.weight": (4, 6, 3), "c.weight": (1,), "d.weight": (9,)}
HUB = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32,
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
RANKS = (1, 2, 5)  # that write
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


@pytest.mark.parametrize(("dialect", "ranks"), [("huggingface", 1), ("torchtitan", 3)])
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


def small():
    """A checkpoint in memory of a few tensors, on which a reader is soon done."""
    shapes, random = {"a.weight": (6, 5), "b.bias": ()}, np.random.default_rng(0)
    tensors = {
        (kind, name): Held(random.normal(size=shape).astype(np.float32))
        for name, shape in shapes.items()
        for kind in (PARAMETER, FIRST_MOMENT, SECOND_MOMENT)
    }
    groups = [{"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "params": list(shapes)}]
    return Checkpoint(Path("memory"), tensors, Training(7, dict.fromkeys(shapes, 7), groups))


@pytest.mark.parametrize("first", [0, pytest.param(500, marks=pytest.mark.rest)])
def test_500_mutants_are_refused_in_one_line(first, tmp_path):
    plan = dcp.files(small(), Options(tmp_path / "dcp", 2))
    Output(tmp_path / "dcp", {}).write(plan.files)
    (tmp_path / "scratch").mkdir()
    words = [str(tmp_path / "dcp"), str(tmp_path / "scratch"), str(first), "500", "safetensors", "dcp"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.exchange.hostile", *words], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 250 < int(re.search(r"(\d+) of 500 refused", done.stdout)[1]) < 500


# A command of shardrt that says how much memory it took at most, and is killed after so many bytes if asked.
COMMAND = """
import os, signal, sys
from shardrt.__main__ import main
from shardrt.exchange import output
left, output._SYNCED, write = int(sys.argv[1]), int(sys.argv[2]), os.pwrite
def counted(descriptor, data, position):
    global left
    left -= len(data)
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(descriptor, data, position)
os.pwrite = counted
code = main(sys.argv[3:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024)
sys.exit(code)
"""
NEVER = 1 << 60


def command(*words, dies_after=NEVER, synced=1 << 30):
    """Convert in a process of its own; gives the most bytes of memory it had, or None if it was killed."""
    given = [str(dies_after), str(synced), "ckpt", "convert", *map(str, words)]
    done = subprocess.run([sys.executable, "-c", COMMAND, *given], capture_output=True, text=True)
    if dies_after != NEVER:
        assert done.returncode == -signal.SIGKILL, done.stderr
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def test_a_killed_conversion_goes_on_to_the_same_bytes(tmp_path):
    """64 MB, killed twice in the middle of files: the journal is followed, and all bytes are right."""
    random = np.random.default_rng(0)
    tensors = {
        (kind, "a.weight"): Held(random.random((1400, 4096), np.float32))
        for kind in (PARAMETER, FIRST_MOMENT, SECOND_MOMENT)
    }
    made = Checkpoint(Path("memory"), tensors, Training(2, {"a.weight": 2}))
    Output(tmp_path / "dcp", {}).write(dcp.files(made, Options(tmp_path / "dcp", 3)).files)
    words = (tmp_path / "dcp", tmp_path / "new", "--to", "shardrt", "--ranks", 2)
    unfinished = tmp_path / "new" / "checkpoints" / ".tmp-step-00000002"
    held = []
    for _ in range(2):
        command(*words, dies_after=20 << 20, synced=4 << 20)
        journal = json.loads((unfinished / ".journal").read_text())
        held.append(sum(file["bytes"] for file in journal["files"].values()))
    assert 0 < held[0] < held[1] < 40 << 20
    assert convert(*words) == 0
    assert not unfinished.exists()
    assert_same(all_of(tmp_path / "new", own), {key: whole(tensor) for key, tensor in tensors.items()})


class Sparse:
    """Numbers, of which a part at the beginning is not zero."""

    def __init__(self, shape, filled):
        self.dtype, self.shape, self.filled = np.dtype(np.float32), shape, filled

    def read_into(self, out, start):
        out[...] = 0
        filled = max(min(self.filled - start, out.size), 0)
        out[:filled] = np.arange(start, start + filled) % 8191 + 1


def sparse(shapes, share, target, ranks):
    """Write a checkpoint of PyTorch's with AdamW state, of whose elements a share is not zero; gives it."""
    tensors = {
        (kind, name): Sparse(shape, int(prod(shape) * share))
        for name, shape in shapes.items()
        for kind in (PARAMETER, FIRST_MOMENT, SECOND_MOMENT)
    }
    made = Checkpoint(target, tensors, Training(2, dict.fromkeys(shapes, 2)))
    Output(target, {}).write(dcp.files(made, Options(target, ranks)).files)
    return made


@pytest.mark.slow
def test_four_gigabytes_convert_in_less_than_one_and_after_a_kill(tmp_path):
    shapes = {f"layers.{number}.weight": (8192, 4096) for number in range(10)}
    made = sparse(shapes, 0.02, tmp_path / "dcp", 2)
    size = sum(path.stat().st_size for path in (tmp_path / "dcp").iterdir())
    assert size > 4e9
    words = (tmp_path / "dcp", tmp_path / "new", "--to", "shardrt")
    command(*words, dies_after=50 << 20)
    assert (tmp_path / "new" / "checkpoints" / ".tmp-step-00000002" / ".journal").exists()
    assert command(*words) < 1 << 30
    found = own.read(tmp_path / "new").tensors
    assert found.keys() == made.tensors.keys()
    size = 1 << 22
    out, expected = np.empty(size, np.float32), np.empty(size, np.float32)
    for key, tensor in found.items():
        for start in range(0, prod(tensor.shape), size):
            tensor.read_into(out, start)
            made.tensors[key].read_into(expected, start)
            assert np.array_equal(out, expected), (key, start)
    (file,) = (tmp_path / "new").rglob("*.safetensors")
    if (tmp_path / "dcp" / "__0_0.distcp").stat().st_blocks * 512 < 1 << 30:  # this file system has holes
        assert file.stat().st_blocks * 512 < 1 << 30


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
def test_96_gigabytes_of_llama_8b_convert(tmp_path, capsys):
    sparse(llama_3_8b(), 0.002, tmp_path / "dcp", 8)
    size = sum(path.stat().st_size for path in (tmp_path / "dcp").iterdir())
    assert size > 96e9
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
             "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(HUB | sizes))
    begin = time.monotonic()
    words = (tmp_path / "dcp", tmp_path / "new", "--to", "shardrt", "--ranks", 8)
    peak = command(*words, "--config", tmp_path / "config.json")
    seconds = time.monotonic() - begin
    assert peak < 1 << 30
    begin = time.monotonic()
    subprocess.run(["cp", "-r", tmp_path / "dcp", tmp_path / "copy"], check=True)
    subprocess.run(["sync", "-f", tmp_path / "copy"], check=True)
    copied = time.monotonic() - begin
    with capsys.disabled():
        print(f"{size / 1e9:.1f} GB, {peak / 1e6:.0f} MB: {seconds:.0f} s, cp {copied:.0f} s")


@pytest.fixture(scope="module")
def torch_ran(tmp_path_factory):
    """A folder of what dcp_run.py has made: its jobs in one process, since PyTorch is slow to import."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("torch")
    (folder / "config.json").write_text(json.dumps(HUB))
    write(checkpoint(UNTIED), folder / "made")
    saved = {"save": str(folder / "dcp"), "layout": "flat", "truth": str(folder / "saved.npz")}
    into = [str(folder / "dcp"), str(folder / "run"), "--to", "shardrt"]
    back = [str(folder / "run"), str(folder / "back"), "--to", "dcp", "--layout", "nested", "--ranks", "3"]
    back += ["--dialect", "torchtitan"]
    loaded = {"load": str(folder / "back"), "layout": "nested", "truth": str(folder / "loaded.npz")}
    config = ["--config", str(folder / "config.json")]
    jobs = [
        {"train": saved},
        {"shardrt": ["ckpt", "convert", *into, *config]},
        {"shardrt": ["ckpt", "convert", *back, *config]},
        {"train": loaded},
    ]
    for ranks in RANKS:
        there = folder / f"of-{ranks}"
        assert convert(folder / "made", there, "--to", "dcp", "--ranks", ranks, "--dialect", "shardrt") == 0
        jobs.append({"read": {"load": str(there), "truth": f"{there}.npz"}})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    words = [sys.executable, "-m", "tests.exchange.dcp_run", str(folder / "jobs.json")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.torch
@pytest.mark.parametrize("ranks", RANKS)
def test_torch_reads_each_value_that_is_written(ranks, torch_ran):
    """By its own loader: all tensors bitwise, the counts, and the group of each parameter."""
    made, found = own.read(torch_ran / "made"), dict(np.load(torch_ran / f"of-{ranks}.npz"))
    names = {name for _, name in made.tensors}
    assert found.pop("step") == 7
    assert [found.pop(f"step/{name}") for name in names] == [7] * len(names)
    decays = {name: group["weight_decay"] for group in made.training.groups for name in group["params"]}
    assert {name: found.pop(f"decay/{name}").item() for name in names} == decays
    assert_same(found, {"/".join(key): whole(tensor) for key, tensor in made.tensors.items()})


@pytest.mark.torch
def test_fsdp2_with_tensor_parallelism_comes_here_and_goes_back(torch_ran):
    """On a mesh of 2 by 2: here, and back in tables of another layout, all values bitwise in PyTorch."""
    truth = dict(np.load(torch_ran / "saved.npz"))
    tensors = {tuple(key.split("/")): value for key, value in truth.items() if "/" in key}
    read = all_of(torch_ran / "dcp")
    assert_same(read, {key: value for key, value in tensors.items() if key[0] != "step"})
    assert set(own.read(torch_ran / "run").training.steps.values()) == {2}
    assert_same(dict(np.load(torch_ran / "loaded.npz")), truth)
