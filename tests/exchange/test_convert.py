"""`shardrt ckpt convert`: there and back bitwise, what is said, going on after a kill, memory, refusals."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models import llama
from models.formats import FORMATS
from shardrt import optim
from shardrt.__main__ import main
from shardrt.checkpoint import CheckpointManager, full_state_dict, read_manifest, verify
from shardrt.checkpoint.manifest import _checksum
from shardrt.comm import init_device_mesh
from shardrt.exchange.checkpoint import PARAMETER
from shardrt.exchange.formats import own, safetensors
from shardrt.exchange.output import Output
from shardrt.nn.extents import Extent
from tests.exchange.made import CONFIG, checkpoint, whole, write

MANY = llama.LlamaConfig(
    n_layer=2, n_head=4, n_kv_head=2, n_embd=512, n_hidden=1024, vocab_size=4096, block_size=16
)


def convert(*words):
    return main(["ckpt", "convert", *map(str, words)])


def values(path):
    """All tensors of a checkpoint of shardrt's."""
    return {key: whole(tensor) for key, tensor in own.read(path).tensors.items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert np.array_equal(one[key], other[key]), key


def test_weights_come_back_from_hugging_face_bitwise(tmp_path, capsys):
    made = checkpoint()
    write(made, tmp_path / "run")
    assert convert(tmp_path / "run", tmp_path / "hub", "--to", "safetensors") == 0
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"wrote \S+/hub: 20 tensors of weights \(\d+ elements\), 0\.\d MB", said[0])
    left = [line.removeprefix("left out: ").partition(":")[0] for line in said[1:]]
    assert left == [
        "exp_avg of 20 parameters",
        "exp_avg_sq of 20 parameters",
        "step 7",
        "the optimizer's settings",
        "config, scaler of the run",
    ]
    assert convert(tmp_path / "hub", tmp_path / "back", "--to", "shardrt", "--ranks", 3) == 0
    assert "optimizer state: there is none" in capsys.readouterr().out
    wanted = {key: whole(tensor) for key, tensor in made.tensors.items() if key[0] == PARAMETER}
    assert_same(values(tmp_path / "back"), wanted)
    verify(tmp_path / "back" / "checkpoints" / "step-00000000")


def test_all_state_comes_back_by_other_names_and_ranks(tmp_path, capsys):
    made = checkpoint()
    write(made, tmp_path / "run")
    titan = ("--to", "shardrt", "--ranks", 5, "--dialect", "torchtitan")
    assert convert(tmp_path / "run", tmp_path / "titan", *titan) == 0
    assert convert(tmp_path / "titan", tmp_path / "back" / "checkpoints", "--to", "shardrt") == 0
    assert "step 7, lr 0.00055" in capsys.readouterr().out
    assert main(["ckpt", "diff", str(tmp_path / "run"), str(tmp_path / "back")]) == 0


def test_a_run_goes_on_from_what_is_converted(tmp_path):
    """CheckpointManager.restore is what `shardrt train --resume auto` calls."""
    made = checkpoint()
    write(made, tmp_path / "run")
    assert convert(tmp_path / "run", tmp_path / "new", "--to", "shardrt", "--ranks", 3) == 0
    mesh = init_device_mesh("cpu")
    model = llama.Llama(CONFIG)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    step, extra = CheckpointManager(tmp_path / "new" / "checkpoints", model, optimizer, mesh).restore()
    assert (step, extra["config"]["architecture"]) == (7, "llama")
    for name, found in full_state_dict(model).items():
        assert np.array_equal(found, whole(made.tensors[PARAMETER, name])), name


def test_pieces_of_columns_are_read_in_their_order(tmp_path):
    """A rank of tensor parallelism saves columns: runs at a stride."""
    path = write(checkpoint(), tmp_path / "run", ranks=1)
    manifest = json.loads((path / "manifest.json").read_text())
    name = "blocks.0.mlp.down.weight"  # (32, 48)
    rows, columns = manifest["parameters"][name][0]
    row = next(row for row in manifest["pieces"] if row[1:3] == ["parameter", name])
    rest = [other for other in manifest["pieces"] if other is not row]
    item, half = 4, columns // 2
    parts = [
        [*row[:3], part * half, rows * half, row[5] + part * rows * half * item, half, columns]
        for part in (0, 1)
    ]
    body = manifest | {"format": 2, "pieces": [*rest, *parts]}
    sign(path, body)
    file = path / manifest["files"][0][0]
    flat = np.frombuffer(file.read_bytes()[row[5] : row[5] + rows * columns * item], np.float32)
    wanted = np.concatenate(flat.reshape(2, rows, half), axis=1)
    tensor = own.read(path).tensors[PARAMETER, name]
    assert np.array_equal(whole(tensor), wanted)
    out = np.empty(100, np.float32)
    tensor.read_into(out, 333)
    assert np.array_equal(out, wanted.reshape(-1)[333:433])
    assert Extent(0, half, columns, rows) in [p.runs for p in read_manifest(path).pieces]


def sign(path, body):
    """Write a manifest with its checksum."""
    body = {name: value for name, value in body.items() if name != "self"}
    (path / "manifest.json").write_text(json.dumps({**body, "self": _checksum(body)}))


@pytest.mark.torch
def test_transformers_reads_what_is_written(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made = checkpoint()
    write(made, tmp_path / "run")
    options = ("--to", "huggingface", "--dtype", "bfloat16")
    assert convert(tmp_path / "run", tmp_path / "hub", *options) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype="auto")
    assert model.dtype == torch.bfloat16
    found = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    wanted = torch.from_numpy(whole(made.tensors[PARAMETER, "blocks.1.mlp.down.weight"]))
    assert torch.equal(found, wanted.to(torch.bfloat16))


def test_a_tokenizer_goes_along_and_large_weights_take_several_files(tmp_path, monkeypatch):
    write(checkpoint(), tmp_path / "run")
    assert convert(tmp_path / "run", tmp_path / "hub", "--to", "safetensors") == 0
    (tmp_path / "hub" / "tokenizer.json").write_text("{}")
    plan = safetensors.files(
        safetensors.read(tmp_path / "hub"), own.Options(tmp_path / "new", file_bytes=20_000)
    )
    weights = [file for file in plan.files if file.name.endswith(".safetensors")]
    assert len(weights) > 3
    assert {"tokenizer.json", "config.json", "model.safetensors.index.json"} < {f.name for f in plan.files}
    Output(tmp_path / "new", {}).write(plan.files)
    one, other = (safetensors.read(tmp_path / name).tensors for name in ("hub", "new"))
    assert_same(*({key: whole(t) for key, t in some.items()} for some in (one, other)))


KILLED = """
import os, signal, sys
from shardrt.exchange import output
output.CHUNK, output._SYNCED = 1 << 18, 1 << 20
left, write = [int(sys.argv[1])], os.pwrite
def pwrite(descriptor, data, position):
    left[0] -= 1
    if not left[0]:
        write(descriptor, data[:len(data) // 2], position)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(descriptor, data, position)
os.pwrite = pwrite
from shardrt.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("to", ["shardrt", "safetensors"])
def test_the_same_command_goes_on_after_kills_to_the_same_bytes(tmp_path, to):
    write(checkpoint(MANY), tmp_path / "run")
    words = [str(tmp_path / "run"), "B", "--to", to, "--config", "config.json"]
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(settings | FORMATS["llama"].describe(MANY)))
    words[-1] = str(tmp_path / "config.json")
    kills = 0
    for writes in (3, 20, 30, 10**9):
        words[1] = str(tmp_path / "cut")
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(writes), "ckpt", "convert", *words],
            capture_output=True,
            text=True,
        )
        kills += done.returncode == -signal.SIGKILL
        if not done.returncode:
            break
        assert not (tmp_path / "cut" / "config.json").exists()
    assert kills >= 2 and done.returncode == 0, done.stderr
    words[1] = str(tmp_path / "whole")
    assert convert(*words) == 0
    cut, uncut = ({p.relative_to(top): p.read_bytes() for p in top.rglob("*") if p.is_file()}
                  for top in (tmp_path / "cut", tmp_path / "whole"))  # fmt: skip
    assert cut == uncut


def test_a_full_disk_is_one_line_and_the_command_goes_on(tmp_path, monkeypatch, capsys):
    write(checkpoint(), tmp_path / "run")
    pwrite = os.pwrite

    def full(descriptor, data, position):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert convert(tmp_path / "run", tmp_path / "hub", "--to", "safetensors") == 65
    assert re.fullmatch(r"error: \S+: No space left on device\n", capsys.readouterr().err)
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert convert(tmp_path / "run", tmp_path / "hub", "--to", "safetensors") == 0


def test_another_conversion_needs_restart(tmp_path, monkeypatch, capsys):
    write(checkpoint(), tmp_path / "run")
    hub = (tmp_path / "run", tmp_path / "hub", "--to", "safetensors")
    fsync = os.fsync
    calls = []

    def fails(descriptor):
        calls.append(1)
        if len(calls) > 3:
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    assert convert(*hub) == 65
    monkeypatch.setattr(os, "fsync", fsync)
    capsys.readouterr()
    assert convert(*hub, "--dtype", "bfloat16") == 65
    assert "--restart" in capsys.readouterr().err
    assert convert(*hub, "--dtype", "bfloat16", "--restart") == 0


BOUNDED = """
import sys
from shardrt.__main__ import main
code = main(sys.argv[1:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024)
sys.exit(code)
"""


def test_a_gigabyte_converts_in_a_fraction_of_it(tmp_path):
    """A sparse source, whose zeros become a hole."""
    hub = tmp_path / "hub"
    hub.mkdir()
    rows = 1 << 18
    entries = {"weight": {"dtype": "F32", "shape": [rows, 1024], "data_offsets": [0, rows * 4096]}}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with open(hub / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + rows * 4096)
    words = ["ckpt", "convert", str(hub), str(tmp_path / "new"), "--to", "shardrt", "--ranks", "2"]
    done = subprocess.run([sys.executable, "-c", BOUNDED, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 500 << 20
    assert "names: they are not those of a known family" in done.stdout
    path = tmp_path / "new" / "checkpoints" / "step-00000000"
    written = sum(os.stat(file).st_blocks * 512 for file in path.iterdir())
    assert sum(file.stat().st_size for file in path.iterdir()) > rows * 4096
    assert written < 100 << 20


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["absent", "new", "--to", "safetensors"], "absent: No such checkpoint"),
        (["empty", "new", "--to", "safetensors"], "no checkpoint of a known format"),
        (["run", "full", "--to", "safetensors"], "full: File exists"),
        (["run", "/proc", "--to", "safetensors"], "/proc: a file system is mounted here"),
        (["run/checkpoints/step-00000007", "run/checkpoints/step-00000007/new", "--to", "dcp"], "is inside"),
        (["run", "new", "--to", "shardrt", "--dtype", "bfloat16"], "--dtype bfloat16"),
        (["run", "new", "--to", "safetensors", "--config", "absent"], "absent: No such file"),
        (["run", "new", "--to", "safetensors", "--from", "safetensors"], "has neither model.safetensors"),
    ],
)
def test_what_can_not_be_done_is_one_line(words, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(checkpoint(), tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    assert convert(*words) == 65
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and line in error
    assert not Path("new").exists()


def test_a_link_is_followed_to_the_folder_that_is_written(tmp_path):
    run = write(checkpoint(), tmp_path / "run")
    (tmp_path / "disk").mkdir()
    for name, leads in (("empty", "disk"), ("dangling", "absent")):
        (tmp_path / name).symlink_to(leads)
        assert convert(run, tmp_path / name, "--to", "safetensors") == 0
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / leads / "model.safetensors").is_file()
    assert not list(tmp_path.glob(".tmp-*"))
